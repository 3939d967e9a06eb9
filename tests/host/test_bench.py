"""llama-bench, also at a depth, where it saves and restores the sequence; llama-batched-bench, where
sequences share a prompt, which is copied from stream to stream."""

import json

from host import DEFAULT


def bench(programs, *args, **settings):
    # It reads no LLAMA_ARG_ variable.
    result = programs.run("llama-bench", "-dev", "KVTAMP", "-ngl", 99, "-fa", 1, "-p", 64, "-n", 8,
                          "-r", 2, "-o", "json", *args, cache=DEFAULT, **settings)
    rows = json.loads(result.out)
    assert [(row["n_prompt"], row["n_gen"]) for row in rows] == [(64, 0), (0, 8)]
    for row in rows:
        assert row["devices"] == "KVTAMP"
        assert "KVTAMP" in row["backends"]
        assert (row["type_k"], row["type_v"]) == ("f16", "f16")  # of the host: ours is beneath
        assert (row["n_gpu_layers"], row["flash_attn"]) == (99, 1)
        assert len(row["samples_ts"]) == 2 and min(row["samples_ts"]) > 0
    return rows


def test_the_rows_name_our_device(programs):
    assert all(row["n_depth"] == 0 for row in bench(programs))


def test_at_a_depth(programs, tmp_path):
    stats = tmp_path / "stats.json"
    assert all(row["n_depth"] == 256 for row in bench(programs, "-d", 256, KVTAMP_STATS=stats))
    stats = json.loads(stats.read_text())
    assert stats["cells_used"] == 256 + 64
    assert stats["pages"]["sealed"] > 0
    assert stats["fallback_ops"] == []


def test_a_prompt_for_two_sequences(programs, tmp_path):
    stats = tmp_path / "stats.json"
    result = programs.run("llama-batched-bench", "-c", 1024, "-npp", 128, "-ntg", 8, "-npl", "1,2", "-pps",
                          "--output-format", "jsonl", cache=DEFAULT, KVTAMP_STATS=stats)
    rows = [json.loads(line) for line in result.out.splitlines() if line.startswith("{")]
    assert [(row["pl"], row["n_kv"]) for row in rows] == [(1, 128 + 8), (2, 2 * (128 + 8))]
    assert all(row["speed"] > 0 for row in rows)
    stats = json.loads(stats.read_text())
    assert stats["cells_used"] == 2 * (128 + 8)
    assert stats["fallback_ops"] == []
