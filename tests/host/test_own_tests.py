"""The host's own tests of a KV cache, run on our device: state files, sequence copies, fragmented caches,
contexts on several threads at once; and of single ops."""

import re

import pytest

import host
from host import DEFAULT


@pytest.mark.parametrize("cache", ["f16", DEFAULT])
def test_save_load_state(programs, tmp_path, cache):
    result = programs.run_test("test-save-load-state", "-m", programs.model, "-t", host.THREADS,
                               cache=cache, cwd=tmp_path)
    assert "All tests passed" in result.out and "KVTAMP" in result.err


@pytest.mark.parametrize("cache", ["f16", DEFAULT])
def test_state_restore_fragmented(programs, cache):
    result = programs.run_test("test-state-restore-fragmented", "-m", programs.model, "-t", host.THREADS,
                               cache=cache)
    assert "SUCCESS" in result.err and "tokens written" in result.err


@pytest.mark.parametrize("cache", ["f16", DEFAULT])
def test_thread_safety(programs, cache):
    # Three models, the CPU's among them, and two contexts of each; pages small enough to be coded.
    result = programs.run_test("test-thread-safety", "-m", programs.model, "-t", 1, "-np", 2, "-n", 48,
                               "-p", host.document(400), cache=cache, KVTAMP_CACHE_RESIDUAL_LENGTH=16,
                               KVTAMP_CACHE_PAGE_SIZE=16)
    assert result.lines("All threads finished without errors") or "All threads finished" in result.out
    assert result.lines("tokens written")


# --- test-backend-ops ----------------------------------------------------------------------------
# It asks for the support of an op before its tensors have memory, so nothing would reach us without
# debug.accept_ops. K and V there bear other names than a cache's: they run on plain memory of ours,
# through ggml's own code. A part of the cases only; all of them: scripts/pytest tests/host -m whole

def backend_ops(programs, op, *args, limit=host.LIMIT):
    result = programs.run_test("test-backend-ops", "test", "-b", "KVTAMP", "-o", op, *args, cache="f16",
                               limit=limit, KVTAMP_DEBUG_ACCEPT_OPS=1)
    passed, total = map(int, re.search(r"(\d+)/(\d+) tests passed", result.out).groups())
    assert passed == total
    assert "not supported [KVTAMP" not in result.out
    print(f"{op}: {passed} of {total}")
    return passed


@pytest.mark.parametrize("op, part, least", [
    ("SET_ROWS", "type_dst=(f16|f32|q8_0|q4_0)", 50),
    ("ROPE", "ne_a=.(64|80|128),(32|40|1|8),2,1.", 50),
    ("FLASH_ATTN_EXT", "hsk=(64|576|80),.*nh=4,.*kv=(113|512),nb=(1|3),.*type_K=(f16|q8_0)", 50),
])
def test_single_ops(programs, op, part, least):
    assert backend_ops(programs, op, "-p", part) >= least


def test_single_ops_are_not_ours_otherwise(programs):
    result = programs.run_test("test-backend-ops", "test", "-b", "KVTAMP", "-o", "SET_ROWS", "-p",
                               "type_dst=f16", cache="f16")
    assert "not supported [KVTAMP" in result.out and "0/0 tests passed" in result.out


@pytest.mark.whole
@pytest.mark.parametrize("op", ["SET_ROWS", "ROPE", "FLASH_ATTN_EXT"])
def test_single_ops_whole(programs, op):
    assert backend_ops(programs, op, limit=3600) > 400
