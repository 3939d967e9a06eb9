"""llama-completion: the same text as through the host's own cache."""

import pytest

import host
from host import DEFAULT, HOST

CUE = "\n\nFor example, if you distribute copies of such a program, whether gratis or for a fee,"
GOES_ON = "they, too, receive or can get the source code"


@pytest.fixture(scope="module")
def prompt():
    # About 1,350 tokens: twenty pages, nearly all of them coded when the answer comes.
    return host.document(6600) + CUE


@pytest.fixture(scope="module")
def reference(programs, prompt):
    return programs.complete(prompt, 64, cache=HOST).out


def test_the_host_alone_knows_the_text(reference):
    assert GOES_ON in reference


def test_f16_gives_the_text_of_the_host(programs, prompt, reference):
    text = programs.complete(prompt, 64, cache="f16").out
    # Sums are added in another order: where two tokens are as good as equal, either may come.
    assert host.same_words(text, reference) >= 24, f"{text!r}\n{reference!r}"


def test_default_reads_a_long_prompt(programs, prompt, reference):
    text = programs.complete(prompt, 64, cache=DEFAULT).out
    # As the host's for long, or to the same sentence by another way: "receive or can get" and "receive the"
    # are as good as equal to the model, and which comes first differs by processor.
    assert host.same_words(text, reference) >= 16 or GOES_ON in text, f"{text!r}\n{reference!r}"
    assert host.distinct_share(text) >= 0.8 * host.distinct_share(reference), text


@pytest.mark.parametrize("cache", ["f16", "k8v8", "k8v4", "k4v4"])
def test_a_number_is_recalled(programs, cache):
    assert programs.complete(host.question(2500, "48213"), 8, cache=cache).out.startswith(" 48213.")


def test_a_prompt_cache_is_used_again(programs, tmp_path):
    prompt = host.question(1500, "70596")
    args = ["--prompt-cache", tmp_path / "state", "--prompt-cache-all"]
    first = programs.complete(prompt, 8, *args, cache="f16")
    second = programs.complete(prompt, 8, *args, cache="f16")
    assert second.lines("session file has exact match"), host.tail(second.err)
    assert first.out == second.out
    assert first.out.startswith(" 70596")
