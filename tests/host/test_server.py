"""llama-server: slots side by side, saved, restored, shifted; plain HTTP from start to end."""

import concurrent.futures

import pytest

import host
from host import DEFAULT

CUE = "\n\nFor example, if you distribute copies of such a program, whether gratis or for a fee,"
WEEK = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, "


def ask_at_once(server, questions):
    """The answers to (prompt, id_slot) asked at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(questions)) as pool:
        jobs = [pool.submit(server.complete, prompt, 12, id_slot=slot) for prompt, slot in questions]
        return [job.result() for job in jobs]


@pytest.fixture(scope="module", params=["f16", DEFAULT])
def two_slots(request, programs, tmp_path_factory):
    """A server of two slots, each a stream of its own."""
    folder = tmp_path_factory.mktemp("server")
    with programs.server("-np", 2, "-c", 4096, "--slot-save-path", folder, cache=request.param,
                         log=folder / "log") as server:
        server.cache = request.param
        yield server
        assert server.stop() == 0


def test_slots_do_not_mix(two_slots):
    first = ask_at_once(two_slots, [(host.question(1500, "70596"), 0), (host.question(2500, "48213"), 1)])
    assert [answer["id_slot"] for answer in first] == [0, 1]
    assert first[0]["content"].startswith(" 70596")
    assert first[1]["content"].startswith(" 48213")
    # Again, with a slot that was emptied and one that has some of the tokens already.
    assert two_slots.slot(0, "erase")["n_erased"] > 0
    again = ask_at_once(two_slots, [(host.question(2500, "91624"), 0), (host.question(1500, "35087"), 1)])
    assert again[0]["content"].startswith(" 91624")
    assert again[1]["content"].startswith(" 35087")


def test_two_answers_to_one_prompt(two_slots):
    # The prompt's rows are copied to the other slot's stream.
    status, answers = two_slots.post("/completion", {
        "prompt": host.question(1500, "48213"), "n_predict": 8, "temperature": 0, "n_cmpl": 2})
    assert status == 200 and len(answers) == 2, answers
    assert all(answer["content"].startswith(" 48213") for answer in answers)


def test_a_restored_slot_goes_on_as_if_never_left(two_slots):
    prompt = host.question(3500, "91624")
    two_slots.complete(prompt, 1, id_slot=0)
    saved = two_slots.slot(0, "save", "a.bin")["n_saved"]
    assert saved > 600
    prompt += " 91624." + CUE
    straight = two_slots.complete(prompt, 24, id_slot=0)
    for slot in (0, 1):
        two_slots.slot(slot, "erase")
        assert two_slots.slot(slot, "restore", "a.bin")["n_restored"] == saved
        again = two_slots.complete(prompt, 24, id_slot=slot)
        assert again["timings"]["cache_n"] >= saved - 1
        if two_slots.cache == "f16":
            assert again["content"] == straight["content"]
        else:  # decoded, and coded once more
            assert host.same_words(again["content"], straight["content"]) >= 5, again["content"]
        two_slots.slot(slot, "restore", "a.bin")
        recalled = two_slots.complete(host.question(3500, "91624"), 8, id_slot=slot)
        assert recalled["content"].startswith(" 91624")
        assert recalled["timings"]["prompt_n"] <= 2


def test_a_slot_outlives_the_server(two_slots, programs, tmp_path):
    prompt = host.question(1500, "35087")
    two_slots.complete(prompt, 1, id_slot=1)
    saved = two_slots.slot(1, "save", "kept.bin")["n_saved"]
    with programs.server("-np", 2, "-c", 4096, "--slot-save-path", two_slots.log_path.parent,
                         cache=two_slots.cache, log=tmp_path / "log") as other:
        assert other.slot(0, "restore", "kept.bin")["n_restored"] == saved
        again = other.complete(prompt, 8, id_slot=0)
        assert again["content"].startswith(" 35087")
        assert again["timings"]["prompt_n"] <= 2


def test_bad_and_empty_files_harm_nothing(two_slots):
    prompt = host.question(1500, "70596")
    two_slots.complete(prompt, 8, id_slot=0)
    two_slots.slot(1, "erase")
    assert two_slots.slot(1, "save", "empty.bin")["n_saved"] == 0
    assert two_slots.slot(1, "restore", "empty.bin")["n_restored"] == 0
    assert two_slots.post("/slots/1?action=restore", {"filename": "none.bin"})[0] == 400
    assert two_slots.get("/health") == (200, {"status": "ok"})
    again = two_slots.complete(prompt, 8, id_slot=0)
    assert again["content"].startswith(" 70596")
    assert again["timings"]["prompt_n"] <= 2


def test_a_damaged_file_is_refused(two_slots):
    folder = two_slots.log_path.parent
    prompt = host.question(1500, "48213")
    two_slots.complete(prompt, 1, id_slot=0)
    two_slots.slot(0, "save", "whole.bin")
    whole = (folder / "whole.bin").read_bytes()
    (folder / "cut.bin").write_bytes(whole[:len(whole) * 3 // 4])
    assert two_slots.post("/slots/0?action=restore", {"filename": "cut.bin"})[0] == 400
    # What it left half-written must not be attended.
    assert two_slots.complete(prompt, 8, id_slot=0)["content"].startswith(" 48213")


def test_the_default_of_one_cache_for_all_slots(programs, tmp_path):
    with programs.server("-c", 4096, "--slot-save-path", tmp_path, cache=DEFAULT,
                         log=tmp_path / "log") as server:
        assert server.get("/props")[1]["total_slots"] > 1
        secrets = ["70596", "48213", "91624"]
        answers = ask_at_once(server, [(host.question(1500, secret), -1) for secret in secrets])
        assert all(a["content"].startswith(f" {s}") for a, s in zip(answers, secrets))
        # One sequence goes, the other stays: its cells are masked while nobody uses it.
        assert server.slot(answers[0]["id_slot"], "erase")["n_erased"] > 0
        again = ask_at_once(server, [(host.question(1500, secret), -1) for secret in reversed(secrets)])
        assert all(a["content"].startswith(f" {s}") for a, s in zip(again, reversed(secrets)))
        assert server.stop() == 0


@pytest.mark.parametrize("cache", ["f16", DEFAULT])
def test_text_goes_on_when_the_context_shifts(programs, tmp_path, cache):
    with programs.server("-np", 1, "-c", 512, "--context-shift", cache=cache,
                         log=tmp_path / "log") as server:
        # 421 tokens; the context is full after 91 more, and again after another 223.
        answer = server.complete((WEEK * 30).strip(), 330, ignore_eos=True, n_keep=64)
        assert answer["tokens_predicted"] == 330
        assert len(host.lines_with(server.log(), "context shift, n_keep")) == 2
        assert answer["content"].startswith(" " + (WEEK * 20)), answer["content"]
        # Shifted cells are reused for another text.
        assert server.complete(host.question(900, "35087"), 8)["content"].startswith(" 35087")
        assert server.stop() == 0
