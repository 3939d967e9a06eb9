"""What a user gets wrong: one clear line, a sane exit code, and the host goes on where it can."""

import json

import pytest

from host import DEFAULT

PROMPT = "The capital of France is"


def answer(programs, *args, **settings):
    """Checks that the host answers as ever; what we said, less the summary at exit."""
    result = programs.complete(PROMPT, 8, *args, ctx=512, cache=DEFAULT, **settings)
    assert result.out.startswith(" Paris."), result.out
    return [line for line in result.lines("kvtamp: ") if "KVTAMP (" not in line]


def refusal(programs, **settings):
    """Our only line of a run that the host ends since there is no device KVTAMP."""
    result = programs.complete(PROMPT, 8, ctx=512, cache=DEFAULT, ok=False, **settings)
    assert result.code == 1
    assert "KVTAMP" in result.err
    lines = result.lines("kvtamp: ")
    assert len(lines) == 1, lines
    return lines[0]


def test_unknown_cache_type(programs):
    line = refusal(programs, KVTAMP_CACHE_TYPE="k9v9")
    assert "k9v9" in line and "KVTAMP_CACHE_TYPE" in line


def test_misspelt_variable(programs):
    line = refusal(programs, KVTAMP_CACHE_TYP="f16")
    assert "KVTAMP_CACHE_TYP;" in line and "did you mean KVTAMP_CACHE_TYPE?" in line


def test_a_host_that_does_not_insist_goes_on(programs):
    # llama-bench loads us whether or not our device is asked for.
    result = programs.run("llama-bench", "-p", 8, "-n", 0, "-r", 1, "-o", "json", cache="k9v9")
    assert '"backends": "CPU"' in result.out
    assert len(result.lines("kvtamp: ", "k9v9")) == 1


def test_group_that_does_not_divide(programs):
    lines = answer(programs, KVTAMP_CACHE_TYPE_V="lm4_g48_pt+had")
    assert len(lines) == 1
    assert "48" in lines[0] and "64" in lines[0]


def test_no_layer_offloaded(programs, tmp_path):
    stats = tmp_path / "stats.json"
    assert answer(programs, "-ngl", 0, KVTAMP_STATS=stats) == []
    assert json.loads(stats.read_text())["logical_bytes"] == 0


def test_cache_kept_from_the_device(programs):
    assert answer(programs, "-nkvo") == []


def test_flash_attention_off(programs, tmp_path):
    stats = tmp_path / "stats.json"
    lines = answer(programs, "-fa", "off", KVTAMP_STATS=stats)
    assert len(lines) == 1
    assert "flash attention is off" in lines[0] and "uncompressed" in lines[0]
    # At load, of all its layers; answer() sees what is shown without -lv.
    log = programs.complete(PROMPT, 1, "-fa", "off", "-lv", 4, ctx=512, cache=DEFAULT)
    assert len(log.lines("kvtamp: KV cache of 512 cells; layers 0-29 uncompressed, flash attention is off")) == 1
    assert json.loads(stats.read_text())["uncompressed_bytes"] > 0


@pytest.mark.parametrize("types", [("q8_0", "q8_0"), ("f16", "q8_0"), ("f32", "f32"), ("bf16", "bf16")])
def test_types_of_the_host(programs, types):
    lines = answer(programs, "-ctk", types[0], "-ctv", types[1])
    assert len(lines) == 1
    assert "-ctk" in lines[0] and types[1] in lines[0]
