"""The host's test-llama-archs: a tiny random model of every architecture it knows, through our device and
through the host's CPU. 128 tokens in two micro-batches: the second attends what the first left coded."""

import json
import math
import re

import pytest

ROW = re.compile(r"\|\s*(\S+)\|[^|]*\|\s*(Dense|MoE)\|\s*(OK|FAIL|SKIP)( \(toggle\))?\s*(?:\((\S+)\))?"
                 r"\s*\|\s*(OK|FAIL|SKIP)\s*\|")
SEED = 1  # of the weights; the program's default is another one each time


def errors(result):
    """Of each model that ran: the program's NMSE. A model that did not run counts as such in none."""
    table = {}
    for line in result.out.splitlines():
        if row := ROW.fullmatch(line.strip()):
            arch, kind, status, toggle, nmse, roundtrip = row.groups()
            if status == "SKIP":
                continue
            assert not toggle, line  # NaN, or no logits, when attention is not causal
            assert roundtrip != "FAIL", line  # the same model again, and not the same answer
            table[f"{arch} {kind}"] = float(nmse)
    total = re.search(r"Summary: (?:all )?(\d+) test", result.out)
    assert total and len(table) == int(total.group(1)), result.out[-500:]
    return table


@pytest.fixture(scope="module")
def lossless(programs):
    return errors(programs.run_test("test-llama-archs", "-b", "KVTAMP", "-s", SEED, cache="f16"))


def test_every_architecture_in_f16(lossless):
    assert len(lossless) > 120
    assert max(lossless.values()) <= 1e-4  # the program's own limit, for which it also exits with 0


# All of them with both types take too long for every day: test_archs_models.py.
@pytest.mark.parametrize("cache, archs, limit", [("k8v8", "^[a-g]", 1e-4), ("k4v4", "^[^a-g]", 1e-2)])
def test_coded(programs, lossless, cache, archs, limit):
    coded(programs, lossless, cache, archs, limit)


def run_coded(programs, cache, archs, **settings):
    # With nothing kept in f16, and pages that are full after a few tokens.
    return errors(programs.run_test("test-llama-archs", "-b", "KVTAMP", "-s", SEED, "-a", archs,
                                    cache=cache, ok=False, KVTAMP_CACHE_N_SINK=0,
                                    KVTAMP_CACHE_RESIDUAL_LENGTH=0, KVTAMP_CACHE_PAGE_SIZE=16, **settings))


def test_pages_were_coded(programs, tmp_path):
    run_coded(programs, "k4v4", "llama", KVTAMP_STATS=tmp_path / "stats.json")
    stats = json.loads((tmp_path / "stats.json").read_text())
    assert stats["resident_bytes"]["coded"] > 0 and stats["compression_factor"] > 3


def coded(programs, lossless, cache, archs, limit):
    table = run_coded(programs, cache, archs)
    for name, nmse in sorted(table.items(), key=lambda item: -item[1]):
        print(f"{cache} {name}: NMSE {nmse:.2e} (f16 {lossless[name]:.2e})")
    assert all(math.isfinite(nmse) and nmse <= limit for nmse in table.values())
    # Those without a cache, and those whose cache stays plain, err as in f16.
    moved = [name for name, nmse in table.items() if nmse > 10 * lossless[name]]
    assert len(moved) >= 0.75 * len(table), sorted(set(table) - set(moved))
