"""kvtamp sensitivity on a real model: what it measures must pay."""

import json

import host


def tool(programs, *args):
    result = host.run([programs.command, *args], env=host.environment(programs.plugin, host.HOST, {}),
                      limit=3000)
    assert result.code == 0, result.err
    return result


def evaluate(programs, text, *flags):
    result = tool(programs, "eval", "-m", programs.model, "-f", text, "-c", 1024, "--ubatch-size", 64,
                  "--chunks", 2, "-q", "-o", "json", *flags)
    return json.loads(result.out)


def test_a_measured_profile_takes_a_quarter_off_the_loss(programs, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(host.document(60000))
    profile = tmp_path / "profile.toml"
    result = tool(programs, "sensitivity", "-m", programs.model, "-f", text, "-o", profile, "-c", 384,
                  "--scored", 128)
    assert "noise floor" in result.out and profile.exists()
    even = evaluate(programs, text, "--cache", "k2.25v2")
    shared = evaluate(programs, text, "--cache", "k2.25v2", "--cache-profile", profile)
    assert shared["kld_mean"] < 0.75 * even["kld_mean"]
    assert shared["kv_bpw"] < 1.02 * even["kv_bpw"]
