"""scripts/bench-ik: ik_llama.cpp's rows and ours in one table. Its llama-bench is played by a script that
prints what that prints, since nothing of ik_llama.cpp is here; kvtamp and the host are the real ones."""

import stat
import subprocess
from pathlib import Path

import host

STAND_IN = r"""#!/usr/bin/env python3
import json, sys
arguments = sys.argv[1:]
if "--help" in arguments:
    print("  -gp <pp,tg>                         (default: )", file=sys.stderr)
    sys.exit()
options, gp = {}, []
for name, value in zip(arguments[::2], arguments[1::2]):
    gp.append(value) if name == "-gp" else options.__setitem__(name, value)
if options["-ctk"] == "q8_KV":
    print("q8_KV is not for this model", file=sys.stderr)
    sys.exit(1)
assert options["-fa"] == "1" and options["-r"] == "1" and options["-o"] == "json", options
tests = [(int(p), 0, 100) for p in options["-p"].split(",")] + [(0, int(options["-n"]), 50)]
tests += [(*map(int, pair.split(",")), 25) for pair in gp]
print("[some chatter]")
print(json.dumps([{"model_type": "a model", "type_k": options["-ctk"], "type_v": options["-ctv"],
                   "n_prompt": p, "n_gen": n, "avg_ts": rate} for p, n, rate in tests], indent=2))
print("more")
"""


def bench_ik(*args):
    script = Path(__file__).resolve().parents[2] / "scripts" / "bench-ik"
    return subprocess.run([script, *map(str, args)], capture_output=True, text=True, timeout=600,
                          env=host.environment(None, host.HOST, {}))


def stand_in(folder):
    program = folder / "build-cpu" / "bin" / "llama-bench"
    program.parent.mkdir(parents=True)
    program.write_text(STAND_IN)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def test_one_table(programs, tmp_path):
    result = bench_ik("--build", programs.command.parents[1], "-r", 2, "-t", host.THREADS,
                      "-d", "0,64", "-p", "16,32", "-n", 4, "--host-types", "f16,q4_0", "--ik-types",
                      "f16,q8_KV,q8_0/q4_0", stand_in(tmp_path), programs.model)
    assert result.returncode == 0, result.stderr
    assert "ik_llama.cpp cannot do q8_KV" in result.stderr
    lines = [line.strip("| ").split(" | ") for line in result.stdout.splitlines() if line.startswith("|")]
    head, rows = lines[0], {line[0]: line[1:] for line in lines[2:]}
    assert head[1::2][:4] == ["pp16, t/s", "pp32, t/s", "tg4, t/s", "tg4 @ d64, t/s"]
    assert head[-1] == "d64 costs, ms/token"
    assert list(rows) == ["host f16", "host q4_0", "kvtamp k4v4", "ik f16", "ik q8_0/q4_0"]
    assert rows["host f16"][1:8:2] == ["1.00"] * 4
    # The stand-in says 100, 50 and 25 tokens a second: a token of depth 64 takes 20 ms longer.
    assert rows["ik f16"][:8:2] == ["100.00", "100.00", "50.00", "25.00"]
    assert rows["ik f16"][-1] == "20.00"


def test_what_is_missing_is_said(programs, tmp_path):
    for args, code, words in [
            ([], 2, "usage:"),
            (["-d"], 2, "-d needs a value"),
            (["--depth", "3", tmp_path], 2, "unknown option --depth"),
            (["-d", "0;4096", tmp_path], 2, "not numbers"),
            ([tmp_path / "nowhere"], 1, "no folder"),
            ([tmp_path], 1, "neither llama-bench nor"),
            ([programs.llama], 1, "not that of ik_llama.cpp"),
            (["--build", tmp_path, stand_in(tmp_path / "ik")], 1, "build kvtamp first")]:
        result = bench_ik(*args)
        assert result.returncode == code, (args, result)
        assert words in result.stderr, (args, result.stderr)
