"""llama-perplexity: how well the next token is foretold, two chunks as two streams of one batch.

In micro-batches of 64: a chunk in one micro-batch would be attended in f16 before any row is coded.
"""

import re

import pytest

import host
from host import DEFAULT, HOST


@pytest.fixture(scope="module")
def perplexity(programs):
    def measure(cache):
        result = programs.run("llama-perplexity", "-f", host.GPL, "-c", 512, "--chunks", 2, "-ub", 64,
                              cache=cache)
        found = re.search(r"Final estimate: PPL = ([\d.]+)", result.out + result.err)
        assert found, host.tail(result.err)
        return float(found.group(1))
    return measure


@pytest.fixture(scope="module")
def reference(perplexity):
    return perplexity(HOST)


@pytest.mark.parametrize("cache, error", [("f16", 0.002), ("k8v8", 0.01), (DEFAULT, 0.03)])
def test_is_that_of_the_host(perplexity, reference, cache, error):
    ours = perplexity(cache)
    print(f"PPL {ours} ({cache}), {reference} (host, f16)")
    assert ours == pytest.approx(reference, rel=error)
