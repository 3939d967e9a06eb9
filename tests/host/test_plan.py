"""kvtamp plan: what it says beforehand is what the running cache then takes, within 2 %."""

import json

import pytest

import host


def plan(programs, *args, model=None, code=0):
    result = host.run([programs.command, "plan", model or programs.model, *args, "-o", "json"],
                      env=host.environment(programs.plugin, host.HOST, {}))
    assert result.code == code, result.out + result.err
    return json.loads(result.out)


def running(programs, folder, cache, n_ctx, n_users, n_ubatch=512, **settings):
    """What the plug-in says of its fullest moment, which is of full contexts."""
    stats = folder / "stats.json"
    batches = ["-b", max(n_ctx, n_ubatch), "-ub", n_ubatch]
    if n_users == 1:
        programs.run("llama-bench", "-p", n_ctx, "-n", 0, "-r", 1, "--no-warmup", *batches, "-fa", 1, "-ngl", 99, "-dev",
                     "KVTAMP", cache=cache, limit=3000, KVTAMP_STATS=stats, **settings)
    else:
        programs.run("llama-batched-bench", "-npp", n_ctx - 1, "-ntg", 1, "-npl", n_users, "-c", n_ctx * n_users,
                     *batches, cache=cache, limit=3000, KVTAMP_STATS=stats, **settings)
    return json.loads(stats.read_text())


def check(programs, folder, cache, n_ctx, n_users=1, n_ubatch=512, **settings):
    flags = [word for name, value in settings.items()
             for word in ("--" + name.removeprefix("KVTAMP_").lower().replace("_", "-"), value)]
    told = plan(programs, "--ctx", n_ctx, "--users", n_users, "--cache", cache, "--ubatch-size", n_ubatch, *flags)
    seen = running(programs, folder, cache, n_ctx, n_users, n_ubatch, **settings)
    print(f"{programs.model.name} {cache} {n_ctx} x {n_users} {settings}: plan {told['stored_bytes']}, running "
          f"{seen['stored_bytes']}, {told['stored_bytes'] / seen['stored_bytes'] - 1:+.2%}; peak {told['needed_bytes']}, "
          f"running {seen['resident_peak_bytes']}, of which work {seen['resident_bytes']['scratch']}")
    assert told["logical_bytes"] == pytest.approx(seen["logical_bytes"], rel=0.02)
    assert told["stored_bytes"] == pytest.approx(seen["stored_bytes"], rel=0.02)
    assert told["kv_bpw"] == pytest.approx(16 / seen["compression_factor"], rel=0.02)
    for part in ("codes", "scales", "open"):
        parts = {"codes": ["codes"], "scales": ["scales"], "open": ["sinks", "window", "open"]}[part]
        mine = sum(told["bytes_per_token"][name] for name in parts) * n_ctx * n_users
        theirs = seen["resident_bytes"]["coded" if part == "codes" else part]
        # Of f16 and of a window that is int8 other words are used.
        if cache != "f16" and "KVTAMP_CACHE_RESIDUAL_TYPE" not in settings:
            assert mine == pytest.approx(theirs, rel=0.02, abs=4096), part
    # The plan is a promise for the worst moment.
    assert seen["resident_peak_bytes"] - seen["resident_bytes"]["scratch"] <= told["needed_bytes"] * 1.02
    return told, seen


@pytest.mark.parametrize("cache, n_ctx, n_users", [
    ("k4v4", 2048, 1), ("k2v2", 512, 1), ("k8v8", 512, 1), ("f16", 512, 1), ("k4v4", 512, 3)])
def test_it_takes_what_the_plan_says(programs, tmp_path, cache, n_ctx, n_users):
    check(programs, tmp_path, cache, n_ctx, n_users)


def test_settings_count(programs, tmp_path):
    check(programs, tmp_path, "k4v4", 512, KVTAMP_CACHE_PAGE_SIZE="128", KVTAMP_CACHE_RESIDUAL_LENGTH="128",
          KVTAMP_CACHE_N_SINK="16")
    check(programs, tmp_path, "k4v4", 512, KVTAMP_CACHE_RESIDUAL_TYPE="int8", KVTAMP_CACHE_SKIP_LAYERS="0-4")


def test_one_pool_for_all(programs, tmp_path):
    told = plan(programs, "--ctx", 512, "--users", 4, "--kv-unified", "--cache", "k4v4")
    assert "-kvu" in told["command"]
    stats = tmp_path / "stats.json"
    programs.run("llama-batched-bench", "-npp", 440, "-ntg", 72, "-npl", 4, "-c", 2048, "-kvu", "-b", 512, "-ub", 512,
                 cache="k4v4", limit=600, KVTAMP_STATS=stats)
    seen = json.loads(stats.read_text())
    assert seen["caches"][0]["n_streams"] == 1
    print(f"one pool: plan {told['stored_bytes']}, running {seen['stored_bytes']}")
    # How the users' tokens lie between each other's is not known beforehand.
    assert told["stored_bytes"] == pytest.approx(seen["stored_bytes"], rel=0.06)
    assert seen["stored_bytes"] <= told["needed_bytes"]


# --- What it says --------------------------------------------------------------------------------

def test_of_two_the_third(programs):
    budget = plan(programs, "--ctx", 8192, "--users", 3)
    assert budget["solved"] == "budget_bytes" and budget["budget_bytes"] is None
    assert budget["needed_bytes"] > budget["stored_bytes"] > 0
    mib = budget["needed_bytes"] / 2**20

    context = plan(programs, "--users", 3, "--budget", f"{mib - 5:.0f}MiB", "--cache", "k4v4")
    assert context["solved"] == "n_ctx" and 6000 < context["n_ctx"] < 8192
    assert context["needed_bytes"] <= context["budget_bytes"]
    # Where another type holds all that the model was trained for, it is that.
    whole = plan(programs, "--users", 3, "--budget", f"{mib - 5:.0f}MiB")
    assert whole["n_ctx"] == 8192 and whole["cache_type"] == "k3.5v3"
    users = plan(programs, "--ctx", 8192, "--budget", f"{mib + 1:.0f}MiB", "--cache", "k4v4")
    assert users["solved"] == "n_users" and users["n_users"] == 3
    best = plan(programs, "--ctx", 8192, "--users", 3, "--budget", f"{mib - 5:.0f}MiB")
    assert best["solved"] == "cache_type" and best["cache_type"] == "k3.5v3"
    assert [t["cache_type"] for t in best["types"] if t["fits"]][0] == "k3.5v3"
    nothing = plan(programs, "--ctx", 8192, "--users", 3, "--budget", "20MiB", code=3)
    assert not nothing["fits"] and "even k2v2" in nothing["why"] and "What would fit" in nothing["why"]


def test_the_command_line_runs(programs):
    told = plan(programs, "--ctx", 1000, "--users", 2, "--cache-residual-type", "int8")
    at = told["command"].index("--")
    assert told["command"][:2] == ["kvtamp", "run"]
    assert told["command"][at:] == ["--", "llama-server", "-m", str(programs.model), "-c", "2048", "-np", "2"]
    assert told["command"][2:at] == ["--cache", "k4v4", "--cache-residual-type", "int8"]
    assert any("1,024 cells" in note for note in told["notes"])
    # Its own part of it, with another program in the place of the server.
    result = host.run([programs.command, *told["command"][1:at], "--", "true"],
                      env=host.environment(programs.plugin, host.HOST, {}))
    assert result.code == 0 and "cache.residual_type = int8" in result.err, result.err


def test_levers_apart_and_together(programs):
    told = plan(programs, "--ctx", 8192)
    k, v = told["levers"]
    assert k["lever"].startswith("K as int4") and v["lever"].startswith("V as lm4")
    assert told["levers_from_bytes"] == told["logical_bytes"]
    assert v["in_turn_bytes"] == told["stored_bytes"]
    # Halves of one sum: each alone leaves the other half as it was.
    assert 1.5 < k["alone_factor"] < 1.7 and 1.5 < v["alone_factor"] < 1.7
    assert v["in_turn_factor"] > 1.2 * k["alone_factor"] * v["alone_factor"]


def test_for_people(programs):
    result = host.run([programs.command, "plan", programs.model, "--budget", "50%", "--ctx", 4096],
                      env=host.environment(programs.plugin, host.HOST, {}))
    assert result.code == 0, result.err
    for part in ("30 layers: 3 KV heads, K 64, V 64", "4,096 tokens", "| **k8v8** |", "recent window", "slack",
                 "Together 1/", "To run:\n  kvtamp run --cache k8v8 -- llama-server -m "):
        assert part in result.out, result.out
