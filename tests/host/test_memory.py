"""A context of a million cells costs address space, and memory only for what was written."""

import json

import pytest

import host
from host import DEFAULT

MIB = 1024  # in the KiB of /proc


@pytest.fixture(scope="module")
def sizes(programs, tmp_path_factory):
    """For a small and a huge context, in KiB: the most after loading, and growth by one prompt."""
    result = {}
    for cells in (4096, 1 << 20):
        folder = tmp_path_factory.mktemp("memory")
        # Small batches: the host's own buffers grow with cells times batch.
        with programs.server("-np", 1, "-c", cells, "-b", 32, "-ub", 32, "-fit", "off", "-cram", 0,
                             "--no-warmup", cache=DEFAULT, log=folder / "log",
                             KVTAMP_STATS=folder / "stats.json") as server:
            loaded, resident = server.memory_kib("VmHWM"), server.memory_kib("VmRSS")
            answer = server.complete(host.question(6000, "48213"), 8)
            assert answer["content"].startswith(" 48213")
            grown = server.memory_kib("VmRSS") - resident
            tokens = answer["tokens_evaluated"] + answer["tokens_predicted"]
            assert server.stop() == 0
        stats = json.loads((folder / "stats.json").read_text())
        print(f"-c {cells}: {loaded // MIB} MiB when loaded, {grown // MIB} MiB more for {tokens} tokens;"
              f" the cache holds {stats['resident_total_bytes'] >> 20} MiB of"
              f" {stats['logical_bytes'] >> 20} MiB")
        assert stats["cells_capacity"] == cells
        result[cells] = (loaded, grown, stats)
    return result


def test_a_million_cells_load_in_the_memory_of_4096(sizes):
    (small, _, _), (huge, _, _) = sizes.values()
    assert huge - small <= 64 * MIB


def test_memory_grows_with_tokens_alone(sizes):
    (_, small, _), (_, huge, _) = sizes.values()
    assert huge - small <= 16 * MIB


def test_the_cache_itself_is_the_same(sizes):
    (_, _, small), (_, _, huge) = sizes.values()
    assert huge["stored_bytes"] == pytest.approx(small["stored_bytes"], rel=0.02)
