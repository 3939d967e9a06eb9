"""Other kinds of model: sliding windows, keys with outliers. Not part of `make test`: the models are
large. scripts/fetch gemma3-270m, then ctest -C models -L models"""

import json

import pytest

import host
from host import DEFAULT, HOST

MODELS = ["gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"]


@pytest.fixture(scope="module", params=MODELS)
def subject(request, other_model):
    """A model and what it answers through the host's own cache."""
    programs = other_model(request.param)
    prompt = host.question(6000, "48213")  # longer than Gemma's window of 512
    return programs, prompt, programs.complete(prompt, 32, cache=HOST).out


def test_the_host_alone_recalls(subject):
    assert subject[2].strip().startswith("48213")


def test_f16_gives_the_text_of_the_host(subject):
    programs, prompt, reference = subject
    text = programs.complete(prompt, 32, cache="f16").out
    assert host.same_words(text, reference) >= 12, f"{text!r}\n{reference!r}"


def test_default_recalls(subject, tmp_path):
    programs, prompt, reference = subject
    stats = tmp_path / "stats.json"
    text = programs.complete(prompt, 32, cache=DEFAULT, KVTAMP_STATS=stats).out
    assert text.strip().startswith("48213"), text
    assert host.distinct_share(text) >= 0.7 * host.distinct_share(reference), text
    stats = json.loads(stats.read_text())
    assert stats["fallback_ops"] == []
    assert stats["compression_factor"] > 2


def test_slots_of_a_server(subject, tmp_path):
    programs, prompt, _ = subject
    with programs.server("-c", 4096, "-np", 2, "--slot-save-path", tmp_path, cache=DEFAULT,
                         log=tmp_path / "log") as server:
        assert "48213" in server.complete(prompt, 12, id_slot=0)["content"]
        assert server.post("/slots/0?action=save", {"filename": "a.bin"})[0] == 200
        assert server.post("/slots/1?action=restore", {"filename": "a.bin"})[0] == 200
        assert "48213" in server.complete(prompt, 12, id_slot=1)["content"]
        assert server.stop() == 0
