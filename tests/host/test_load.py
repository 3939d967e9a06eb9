"""What the host says while it loads: with us nothing changes but where K and V lie."""

import re

import pytest

from host import DEFAULT, HOST

N_LAYERS = 30


@pytest.fixture(scope="module")
def logs(programs):
    """The log of a short run without and with us; flash attention is left to the host's choice."""
    def load(cache):
        return programs.complete("The capital of France is", 4, "-lv", 4, "-fa", "auto", ctx=1024,
                                 cache=cache)
    return load(HOST), load(DEFAULT)


def both(logs, *words):
    return logs[0].lines(*words), logs[1].lines(*words)


def test_the_device_is_ours(logs):
    theirs, ours = both(logs, "using device")
    assert theirs == []
    assert len(ours) == 1 and "using device KVTAMP (compressed KV cache" in ours[0]


def test_weights_are_mapped_and_placed_as_without_us(logs):
    theirs, ours = both(logs, "load_mode")
    assert theirs == ours and "load_mode = mmap" in ours[0]
    theirs, ours = both(logs, "model buffer size")
    assert theirs == ours and len(ours) > 0
    theirs, ours = both(logs, "output buffer size")
    assert theirs == ours and len(ours) == 1


def test_all_layers_keep_their_cache_with_us(logs):
    theirs, ours = both(logs, "KV buffer size")
    assert [line.replace("CPU", "KVTAMP").split() for line in theirs] == [line.split() for line in ours]
    assert logs[1].lines(f"offloaded {N_LAYERS + 1}/{N_LAYERS + 1} layers")
    theirs, ours = both(logs, "llama_kv_cache: size =")
    assert theirs == ours


def test_flash_attention_stays_on(logs):
    theirs, ours = both(logs, "Flash Attention")
    assert theirs == ours == ["resolve_fused_ops: Flash Attention enabled"]


def test_the_graph_is_cut_twice_a_layer(logs):
    theirs, ours = both(logs, "splits =")
    assert [re.search(r"splits = (\d+)", lines[-1]).group(1) for lines in (theirs, ours)] \
        == ["1", str(2 * N_LAYERS + 1)]


def test_the_answer_is_the_same(logs):
    assert logs[0].out == logs[1].out and "Paris" in logs[1].out


def test_we_say_what_is_stored_and_the_summary(logs):
    lines = logs[1].lines("kvtamp: ")
    assert len(lines) == 2, lines
    assert lines[0] == f"kvtamp: KV cache of 1024 cells; layers 0-{N_LAYERS - 1} stored as k4v4"
    assert "tokens written" in lines[1]
