"""kvtamp bench and kvtamp errors on a real model: what they say must agree with kvtamp eval and with what is
known of the formats."""

import json
import xml.etree.ElementTree

import pytest

import host


def run(programs, *args, code=0):
    result = host.run([programs.command, *args], env=host.environment(programs.plugin, host.HOST, {}), limit=600)
    assert result.code == code, result.out + result.err
    return result


def model(programs):
    return ["-m", programs.model, "-f", host.GPL, "-t", host.THREADS, "-q"]


@pytest.fixture(scope="module")
def table(programs, tmp_path_factory):
    svg = tmp_path_factory.mktemp("bench") / "quality.svg"
    out = run(programs, "bench", "quality", *model(programs), "-c", 512, "--chunks", 1, "--size-at", 2048, "--caches",
              "k8v8,k4v4,k2v2,k2v2@residual_length=0@n_sink=0", "--host-types", "q8_0,q4_0", "--needle-depths", 30, "-o", "json", "--svg",
              svg).out
    return json.loads(out), svg


def test_smaller_costs_more(table):
    report, _ = table
    rows = {row["name"] + row["settings"]: row for row in report["rows"]}
    assert set(rows) == {"f16", "k8v8", "k4v4", "k2v2", "k2v2residual_length=0 n_sink=0", "q8_0", "q4_0"}
    assert [row["kv_bpw_long"] for row in report["rows"]] == sorted(
        (row["kv_bpw_long"] for row in report["rows"]), reverse=True)
    assert rows["f16"]["kld_mean"] == report["kld_floor"] < 0.01
    assert rows["k8v8"]["kld_mean"] < rows["k4v4"]["kld_mean"] < rows["k2v2"]["kld_mean"]
    bare = rows["k2v2residual_length=0 n_sink=0"]
    assert bare["kv_bpw_long"] < rows["k2v2"]["kv_bpw_long"] - 0.3
    assert bare["kld_mean"] > rows["k2v2"]["kld_mean"]
    assert rows["k4v4"]["kld_mean"] < rows["q4_0"]["kld_mean"]
    assert rows["k4v4"]["format_k"] == "int4_pc+qw"
    assert rows["q8_0"]["device"] == "host" and rows["q8_0"]["kv_bpw"] == pytest.approx(8.5)
    assert report["needles"] == report["needles_found_base"] == 1
    assert rows["f16"]["needles_found"] == rows["k8v8"]["needles_found"] == rows["k4v4"]["needles_found"] == 1
    assert not rows["q4_0"]["pareto"] and rows["k4v4"]["pareto"]


def test_the_same_as_eval(programs, table):
    report, _ = table
    alone = json.loads(run(programs, "eval", *model(programs), "-c", 512, "-ub", 64, "--chunks", 1, "--cache", "k4v4",
                           "-o", "json").out)
    row, = [row for row in report["rows"] if row["name"] == "k4v4"]
    for name in ("kld_mean", "ppl", "ppl_base", "same_top_p", "kv_bpw"):
        # Pages of several caches are found apart by the allocator, no more than that.
        assert row[name] == pytest.approx(alone[name], rel=1e-3 if name == "kv_bpw" else 1e-9), name


def test_the_plot_is_xml(table):
    report, svg = table
    root = xml.etree.ElementTree.parse(svg).getroot()
    titles = [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(report["rows"]) and any(t.startswith("host q4_0: 4.50 bits") for t in titles)


@pytest.mark.parametrize("args, says", [
    (["--caches", "k4v9"], "k4v9"),
    (["--caches", "k4v4@n_sinks=0"], "did you mean n_sink?"),
    (["--caches", "k4v4@n_sink"], "SETTING=VALUE"),
    (["--host-types", "q4"], "q4_0"),
    (["-c", "512", "--scored", "512"], "--scored"),
])
def test_mistakes_are_said_at_once(programs, args, says):
    err = run(programs, "bench", "quality", *model(programs), *args, code=2).err
    assert says in err and len(err.splitlines()) == 1, err


def test_speed_of_all_in_turns(programs):
    def speed(output):
        return run(programs, "bench", "speed", "-m", programs.model, "-t", host.THREADS, "-q", "-d", "0,300", "-p", 64, "-n", 4,
                   "-r", 2, "--caches", "k4v4,k2v2@n_sink=0", "-o", output).out

    rows = json.loads(speed("json"))
    assert [(row["cache_type"], row["n_depth"], row["n_prompt"], row["n_gen"]) for row in rows] == [
        (cache, depth, *test) for depth in (0, 300) for test in ((64, 0), (0, 4)) for cache in ("f16", "k4v4", "k2v2")]
    for row in rows:
        assert len(row["samples_ts"]) == len(row["samples_ns"]) == 2
        assert row["min_ts"] <= row["median_ts"] <= row["max_ts"]
        assert row["ratio_to"] == "f16" and row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
    # 64 tokens at once are read faster than 4 one by one, and nothing is so fast that it was not done.
    assert all(pp["median_ts"] > tg["median_ts"] for pp, tg in zip(rows[0:3], rows[3:6]))
    assert all(row["avg_ns"] > 1e6 for row in rows)
    assert [json.loads(line)["cache_type"] for line in speed("jsonl").splitlines()] == ["f16", "k4v4", "k2v2"] * 4


@pytest.mark.parametrize("args, says", [
    (["-p", 0, "-n", 0], "nothing is left to measure"),
    (["--caches", "k4v9"], "k4v9"),
    (["-d", "deep"], "--n-depth"),
    (["-r", 0], "--repetitions"),
])
def test_mistakes_of_speed_are_said_at_once(programs, args, says):
    err = run(programs, "bench", "speed", "-m", programs.model, *args, code=2).err
    assert says in err and len(err.splitlines()) == 1, err


def test_errors_come_from_where_bits_are_few(programs):
    def errors(cache):
        out = run(programs, "errors", *model(programs), "-c", 512, "--cache", cache, "-o", "json").out
        return json.loads(out)

    coarse_k, coarse_v = errors("k=int2_pc+mean+qw v=int8_pt_sym+had"), errors("k=int8_pc+mean v=tcq2_pt+had")
    assert len(coarse_k["heads"]) == 30 * 3 and coarse_k["not_measured"] == []
    assert coarse_k["error_k"] > 4 * coarse_k["error_v"] > 0
    assert coarse_v["error_v"] > 4 * coarse_v["error_k"] > 0
    for report in (coarse_k, coarse_v):
        largest = max(report["error_k"], report["error_v"])
        assert report["error"] == pytest.approx(largest, rel=0.1)
        assert all(0 <= head["error"] < 2 for head in report["heads"])


def test_f16_has_no_error(programs):
    out = run(programs, "errors", *model(programs), "-c", 256, "--cache", "f16", "-o", "json").out
    assert json.loads(out)["error"] == 0
