"""Two versions of ggml: the same source built for each, and the wrong pair refused."""

import pytest

import host
from conftest import fetched
from host import DEFAULT, HOST

CUE = "\n\nFor example, if you distribute copies of such a program, whether gratis or for a fee,"
GOES_ON = "they, too, receive or can get the source code"

@pytest.fixture(scope="module")
def second(programs):
    """The programs of the second llama.cpp, with the plug-in for it."""
    plugin = programs.plugin.parent / "other" / programs.plugin.name
    prefix = fetched("llama.cpp-0.26")
    if prefix is None or not plugin.exists():
        pytest.skip("no second ggml: run scripts/fetch llama.cpp-0.26, then `make both`")
    return host.dataclasses.replace(programs, llama=prefix / "bin", plugin=plugin)


@pytest.fixture(scope="module")
def prompt():
    return host.document(6600) + CUE


def test_completion_as_the_host(second, prompt):
    reference = second.complete(prompt, 32, cache=HOST).out
    assert GOES_ON in reference
    assert host.same_words(second.complete(prompt, 32, cache="f16").out, reference) >= 16
    text = second.complete(prompt, 32, cache=DEFAULT)
    assert GOES_ON in text.out, text.out
    summary = text.lines("kvtamp: KVTAMP (", "tokens written")
    assert len(summary) == 1, text.err


@pytest.mark.parametrize("cache", ["f16", DEFAULT])
def test_server(second, cache, tmp_path):
    with second.server("-np", 2, "-c", 4096, "--slot-save-path", tmp_path, cache=cache,
                       log=tmp_path / "log") as server:
        ask = host.question(2500, "48213")
        assert server.complete(ask, 8, id_slot=0)["content"].startswith(" 48213")
        server.slot(0, "save", "a.bin")
        server.slot(1, "restore", "a.bin")
        again = server.complete(ask, 8, id_slot=1)
        assert again["content"].startswith(" 48213")
        assert again["timings"]["cache_n"] > 400  # of the restored rows
        assert server.stop() == 0
        assert len(host.lines_with(server.log(), "KVTAMP (", "tokens written")) == 1, server.log()


def test_every_architecture(second):
    # The host's own test: logits of each architecture, small and made of random numbers, against the
    # CPU's.
    result = second.run_test("test-llama-archs", "-b", "KVTAMP", "-s", 1, cache="f16")
    rows = [line for line in result.out.splitlines() if "compressed KV cache" in line]
    assert len(rows) > 100 and not any("FAIL" in row for row in rows), result.out


@pytest.mark.parametrize("mixed", ["the plug-in of the first", "the plug-in of the second"])
def test_the_wrong_pair_is_refused_and_the_host_lives_on(programs, second, mixed):
    pair = (second, programs.plugin) if mixed.endswith("first") else (programs, second.plugin)
    theirs = host.dataclasses.replace(pair[0], plugin=pair[1])
    # llama-bench loads what GGML_BACKEND_PATH names, and any device will do for it.
    result = theirs.run("llama-bench", "-p", 8, "-n", 4, "-r", 1, cache="f16", LLAMA_ARG_DEVICE=None)
    assert "tg4" in result.out
    lines = result.lines("kvtamp")
    assert len([line for line in lines if line.startswith("kvtamp: ")]) == 1, result.err
    versions = ("0.26.0", "0.25.3")
    has, built = versions if mixed.endswith("first") else reversed(versions)
    assert lines[0].startswith(f"kvtamp: this process has ggml {has}")
    assert f"what this plug-in was built for, ggml {built}" in lines[0]
    assert "KVTAMP_LLAMA_DIR" in lines[0]
    listed = host.run([theirs.llama / "llama-completion", "--list-devices"],
                      env=host.environment(theirs.plugin, "f16", {"LLAMA_ARG_DEVICE": None}))
    assert listed.code == 0 and "KVTAMP" not in listed.out
