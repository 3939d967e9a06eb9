"""The command around the stock programs: run, doctor, and the figures it all ends with."""

import json

import pytest

import host
from host import DEFAULT, HOST

PROMPT = "The capital of France is"
BYTES_PER_TOKEN = 30 * 3 * 64 * 2 * 2  # layers, KV heads, head size, K and V, f16


def kvtamp(programs, *args, limit=host.LIMIT, **settings):
    # As a user's shell: nothing of what `run` sets is there yet.
    env = host.environment(programs.plugin, HOST, {"LLAMA_ARG_FLASH_ATTN": None, **settings})
    return host.run([programs.command, *args], env=env, limit=limit)


def completion(programs, *args):
    return [programs.llama / "llama-completion", "-m", programs.model, "-t", host.THREADS, "-c", 512,
            "-no-cnv", "--no-display-prompt", "--temp", 0, "-n", 8, "-p", PROMPT, *args]


def test_run_gives_the_program_our_cache(programs):
    result = kvtamp(programs, "run", "--cache", "k8v8", "--", *completion(programs))
    assert result.code == 0
    assert result.out.startswith(" Paris.")
    first = result.err.splitlines()[0]
    assert first.startswith("kvtamp run: device KVTAMP, cache k8v8")
    assert "LLAMA_ARG_DEVICE=KVTAMP" in first
    assert result.lines("tokens written", "k8v8", "smaller")


def test_run_gives_llama_bench_the_flags_it_needs(programs):
    result = kvtamp(programs, "run", "--", programs.llama / "llama-bench", "-m", programs.model,
                    "-t", host.THREADS, "-p", 16, "-n", 0, "-r", 1, "-o", "json")
    assert result.code == 0, result.err
    assert json.loads(result.out)[0]["devices"] == "KVTAMP"


@pytest.mark.parametrize("args, code, words", [
    (["run", "--", "true"], 0, []),
    (["run", "--", "sh", "-c", "exit 7"], 7, []),
    (["run", "--", "/nowhere/llama-server"], 127, ["/nowhere/llama-server"]),
    (["run", "--", "/etc/passwd"], 126, ["/etc/passwd"]),
    (["run"], 2, ["no PROGRAM given"]),
    (["run", "--cache", "k9v9", "--", "true"], 2, ["--cache", "k9v9"]),
    (["run", "--cach", "f16", "--", "true"], 2, ["--cach", "did you mean --cache"]),
    (["doktor"], 2, ["doktor"]),
])
def test_exit_codes(programs, args, code, words):
    result = kvtamp(programs, *args)
    assert result.code == code, result.err
    if words:
        line = result.err.splitlines()[-1]
        assert line.startswith("kvtamp") and all(word in line for word in words), result.err


def test_misspelt_variable_stops_run(programs):
    result = kvtamp(programs, "run", "--", "true", KVTAMP_CACHE_TIPE="f16")
    assert result.code == 2
    assert "did you mean KVTAMP_CACHE_TYPE?" in result.err


def test_doctor_is_content(programs):
    # A forced choice of kernels is worth a warning, and then the exit code is 1.
    result = kvtamp(programs, "doctor", "-m", programs.model, KVTAMP_CPU=None)
    assert result.code == 0, result.out + result.err
    assert "[ok]" in result.out and "[FAIL]" not in result.out
    assert "30 layers" in result.out


def test_doctor_finds_what_is_wrong(programs, tmp_path):
    result = kvtamp(programs, "doctor", KVTAMP_PLUGIN=tmp_path / "none.so")
    assert result.code == 2, result.out + result.err
    assert "[FAIL] plugin.found" in result.out


def test_the_device_is_listed(programs):
    result = programs.run("llama-completion", "--list-devices", cache=DEFAULT)
    assert "KVTAMP: compressed KV cache" in result.out + result.err


# --- Profiles ------------------------------------------------------------------------------------

def profile(tmp_path, heads):
    """Of SmolLM2's shape: the first head of layer 3 is worth more than all others."""
    layers = [f"[[layer]]\nindex = {i}\nhead_size_k = 64\nhead_size_v = 64\n"
              f"k = {[0.1 if (i, h) == (3, 0) else 1e-4 for h in range(heads)]}\nv = {[1e-4] * heads}\n"
              for i in range(30)]
    path = tmp_path / "profile.toml"
    path.write_text('version = 1\nmodel = "test"\n' + "\n".join(layers))
    return path


def stored(programs, tmp_path, **settings):
    stats = tmp_path / "stats.json"
    result = programs.complete(host.document(5000), 4, cache="k2.5v2.5", KVTAMP_STATS=stats, **settings)
    figures = json.loads(stats.read_text())
    return [layer["stored_bytes"] for layer in figures["caches"][0]["layers"]], figures, result


def test_a_profile_moves_bits_where_they_matter(programs, tmp_path):
    even, _, _ = stored(programs, tmp_path)
    shared, figures, _ = stored(programs, tmp_path, KVTAMP_CACHE_PROFILE=profile(tmp_path, 3))
    assert shared[3] > 1.1 * even[3]
    assert sum(shared) == pytest.approx(sum(even), rel=0.01)
    assert figures["warnings"] == [] and figures["fallback_ops"] == []


def test_a_profile_of_another_model_is_said(programs, tmp_path):
    result = programs.complete("Hello", 4, cache="k2.5v2.5", KVTAMP_CACHE_PROFILE=profile(tmp_path, 2))
    assert result.lines("kvtamp", "a profile of 2 KV heads for a layer that has 3")


def test_sensitivity_says_what_is_wrong(programs, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Too short.")
    result = kvtamp(programs, "sensitivity", "-m", programs.model, "-f", text, "-o", tmp_path / "p.toml")
    assert result.code == 1 and "tokens" in result.err
    result = kvtamp(programs, "sensitivity", "-m", programs.model, "-f", text, "-o", tmp_path / "p.toml",
                    "-c", 256, "--scored", 250)
    assert result.code == 2 and "--scored" in result.err
    assert not (tmp_path / "p.toml").exists()


# --- The figures ---------------------------------------------------------------------------------

@pytest.fixture(scope="module", params=["f16", "k8v8", DEFAULT])
def stats(request, programs, tmp_path_factory):
    path = tmp_path_factory.mktemp("stats") / "stats.json"
    result = programs.complete(host.document(5000), 8, cache=request.param, KVTAMP_STATS=path)
    summary = result.lines("kvtamp", "tokens written")
    assert len(summary) == 1
    return json.loads(path.read_text()), summary[0]


def test_the_stats_name_the_cache(stats, request):
    figures, summary = stats
    asked = request.node.callspec.params["stats"]
    assert figures["type"] == ("k4v4" if asked == DEFAULT else asked)
    assert figures["device"] == "KVTAMP"
    assert f"KVTAMP ({figures['type']})" in summary
    for key in ("version", "ggml_version", "cpu", "format_k", "format_v"):
        assert figures[key]
    assert figures["fallback_ops"] == [] and figures["warnings"] == []
    assert figures["uncompressed_bytes"] == 0
    assert [layer["layer"] for layer in figures["caches"][0]["layers"]] == list(range(30))


def test_bytes_add_up(stats):
    figures, _ = stats
    assert sum(figures["resident_bytes"].values()) == figures["resident_total_bytes"]
    assert figures["resident_peak_bytes"] >= figures["resident_total_bytes"]
    assert sum(figures["stored_bytes_by_tensor"].values()) == figures["stored_bytes"]
    assert sum(figures["logical_bytes_by_tensor"].values()) == figures["logical_bytes"]
    layers = figures["caches"][0]["layers"]
    assert sum(layer["logical_bytes"] for layer in layers) == figures["logical_bytes"]
    # Scratch is work space; all else is kept for the tokens.
    kept = figures["resident_total_bytes"] - figures["resident_bytes"]["scratch"]
    assert figures["stored_bytes"] == kept
    factor = figures["logical_bytes"] / figures["stored_bytes"]
    assert figures["compression_factor"] == pytest.approx(factor)


def test_bytes_are_those_of_the_format(stats, programs):
    figures, _ = stats
    n = figures["cells_used"]
    assert n > 900 and figures["rows_written_total"] >= n
    assert figures["logical_bytes"] == n * BYTES_PER_TOKEN
    bits = 16
    if figures["type"] != "f16":
        names = json.loads(kvtamp(programs, "formats", "-o", "json").out)
        bits = next(row["bits"]["64"]["kv"] for row in names if row["name"] == figures["type"])
    # Sinks, the recent window and the page being filled are in f16; the page that holds the window's
    # oldest row may be, too.
    page, window = figures["page_size"], figures["residual_length"]
    f16 = [figures["n_sink"] + window, figures["n_sink"] + window + 2 * page]
    low, high = (BYTES_PER_TOKEN * (rows + (n - rows) * bits / 16) for rows in f16)
    # Memory is taken in slabs of each size of page, and the last one of each is not full.
    assert 0.99 * low <= figures["stored_bytes"] <= 1.03 * high + (3 << 19)


def test_the_fullest_moment_and_the_end_are_both_told(programs, tmp_path):
    with programs.server("-np", 1, "-c", 2048, "--slot-save-path", tmp_path, cache=DEFAULT, log=tmp_path / "log",
                         LLAMA_ARG_CACHE_RAM=0, KVTAMP_STATS=tmp_path / "stats.json") as server:
        assert server.complete(host.document(3500), 1)["tokens_evaluated"] > 512
        server.slot(0, "erase")
        server.complete(PROMPT, 1)  # what lies beyond its 256 cells is known to be gone
        assert server.stop() == 0
        stats = json.loads((tmp_path / "stats.json").read_text())
        assert stats["at_end"]["cells_used"] <= 256 < 512 < stats["cells_used"]
        assert stats["at_end"]["stored_bytes"] < stats["stored_bytes"]
        summary, = host.lines_with(server.log(), "kvtamp: KVTAMP (", "tokens written")
        assert "that was the fullest, at the end 256 cells in use" in summary
