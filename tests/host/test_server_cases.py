"""llama-server where others' caches have failed: long context shifts, chunks reused at another place,
damaged files, prompts kept in RAM, drafts, clients that hang up, a server that sleeps."""

import http.client
import json
import time
import urllib.parse

import pytest

import host
from host import DEFAULT, HOST

CUE = "\n\nFor example, if you distribute copies of such a program, whether gratis or for a fee,"
BOTH = pytest.mark.parametrize("cache", ["f16", DEFAULT])


# --- Context shift -------------------------------------------------------------------------------

def shift_for_long(programs, tmp_path, cache, n):
    with programs.server("-np", 1, "-c", 512, "--context-shift", cache=cache,
                         log=tmp_path / "log") as server:
        answer = server.complete("Once upon a time", n, ignore_eos=True, n_keep=4, temperature=0.8,
                                 seed=1, repeat_penalty=1.1, samplers=["penalties", "temperature"])
        assert answer["tokens_predicted"] == n
        assert len(host.lines_with(server.log(), "context shift, n_keep")) >= (n - 500) // 256
        words = answer["content"].split()
        share = [host.distinct_share(" ".join(words[i:i + 150])) for i in range(0, len(words) - 150, 150)]
        print(f"{cache}: distinct words of each 150: {[round(s, 2) for s in share]}")
        assert min(share) > 0.3 and max(map(len, words)) < 200
        assert server.complete(host.question(900, "35087"), 8)["content"].startswith(" 35087")
        assert server.stop() == 0


# 2000 tokens, and a model with windows: test_server_cases_models.py
@BOTH
def test_text_stays_text_over_many_shifts(programs, tmp_path, cache):
    shift_for_long(programs, tmp_path, cache, 800)


def test_as_the_host_before_and_after_the_first_shift(programs, tmp_path):
    def go_on(cache, *flags):
        # What is to be copied lies in the part that shifts.
        text = host.document(700)
        with programs.server("-np", 1, "-c", 256, "--context-shift", *flags, cache=cache,
                             log=tmp_path / "log") as server:
            prompt = server.tokens(f"{text}\n\n{text[:40]}")
            steps = server.follow(prompt, 300, n_keep=4)
            assert len(host.lines_with(server.log(), "context shift, n_keep")) >= 2
            return len(prompt), steps

    def parting(steps):
        return next((i for i, (a, b) in enumerate(zip(reference, steps)) if a.token != b.token), len(steps))

    n_prompt, reference = go_on(HOST)
    _, steps = go_on("f16")
    same = parting(steps)
    # The host parts from itself when only its rounding changes.
    itself = min(parting(go_on(HOST, *flags)[1]) for flags in (["-fa", "off"], ["-ub", 16]))
    print(f"the same for {same} tokens, the host's own roundings for {itself}; "
          f"the first shift comes after {256 - n_prompt}")
    assert same >= min(itself, 256 - n_prompt)
    if same < len(steps):  # a parting must be a near tie, before the shift and after it
        at = reference[same]
        assert at.logprobs[at.token] - at.logprobs.get(steps[same].token, -99) < 0.5
    assert len({s.token for s in steps[-100:]}) >= 0.5 * len({s.token for s in reference[-100:]})


# --- Reuse ---------------------------------------------------------------------------------------

@BOTH
def test_a_chunk_is_reused_at_another_place(programs, tmp_path, cache):
    with programs.server("-np", 1, "-c", 2048, "--cache-reuse", 32, "-cram", 0, cache=cache,
                         log=tmp_path / "log") as server:
        tail = host.question(2500, "48213")
        server.complete("This will be cut out.\n\n" * 20 + tail, 1)
        answer = server.complete(tail, 8)  # what stays is moved to the front: a K-shift
        assert answer["content"].startswith(" 48213")
        assert answer["timings"]["cache_n"] > 0.8 * answer["tokens_evaluated"], answer["timings"]
        assert server.stop() == 0


@BOTH
@pytest.mark.parametrize("mib", [0, 200])
def test_prompts_kept_in_ram(programs, tmp_path, cache, mib):
    with programs.server("-np", 2, "-kvu", "-c", 4096, "-cram", mib, cache=cache,
                         log=tmp_path / "log") as server:
        secrets = ["70596", "48213", "91624", "35087"]
        for secret in secrets:
            assert server.complete(host.question(1800, secret), 8)["content"].startswith(f" {secret}")
        for secret in secrets:  # in f16 rows and back
            again = server.complete(host.question(1800, secret), 8)
            assert again["content"].startswith(f" {secret}")
            if mib:
                assert again["timings"]["prompt_n"] <= 8, again["timings"]
        assert server.stop() == 0


# --- Files ---------------------------------------------------------------------------------------

def test_no_damage_to_a_file_harms_the_next_answer(programs, tmp_path):
    with programs.server("-np", 2, "-c", 2048, "--slot-save-path", tmp_path, cache="f16",
                         log=tmp_path / "log") as server:
        unrelated = "Read this. " + host.question(1000, "35087")  # nothing of it is in the slot
        fresh = server.complete(unrelated, 16, id_slot=1)["content"]
        assert fresh.startswith(" 35087")
        server.complete(host.question(1200, "70596"), 8, id_slot=0)
        server.slot(0, "save", "whole.bin")
        whole = (tmp_path / "whole.bin").read_bytes()
        for percent in (25, 50, 75, 99):
            at = len(whole) * percent // 100
            flipped = bytearray(whole)
            flipped[at] ^= 0x80
            for name, content, codes in (("cut", whole[:at], (400,)), ("flipped", flipped, (200, 400))):
                (tmp_path / "bad.bin").write_bytes(content)
                status, answer = server.post("/slots/0?action=restore", {"filename": "bad.bin"})
                assert status in codes, f"{name} at {percent} %: {answer}"
                again = server.complete(unrelated, 16, id_slot=0)["content"]
                assert host.same_words(again, fresh) >= 4, f"{name} at {percent} %: {again}"
        server.slot(0, "restore", "whole.bin")
        again = server.complete(host.question(1200, "70596"), 8, id_slot=0)
        assert again["content"].startswith(" 70596") and again["timings"]["prompt_n"] <= 9
        assert server.stop() == 0


@BOTH
def test_saved_and_restored_over_and_over(programs, tmp_path, cache):
    with programs.server("-np", 1, "-c", 2048, "--slot-save-path", tmp_path, cache=cache,
                         log=tmp_path / "log") as server:
        prompt = host.question(2500, "91624")
        server.complete(prompt, 1)
        for _ in range(10):
            server.slot(0, "save", "a.bin")
            server.slot(0, "erase")
            server.slot(0, "restore", "a.bin")
        again = server.complete(prompt, 12)
        assert again["timings"]["prompt_n"] <= 2
        assert again["content"].startswith(" 91624")
        assert server.stop() == 0


# --- Drafts --------------------------------------------------------------------------------------

def test_drafts_change_nothing(programs, tmp_path):
    def answers(*args):
        with programs.server("-np", 1, "-c", 2048, *args, cache="f16", log=tmp_path / "log") as server:
            # Counting leaves no doubt how it goes on, whatever the rounding.
            prompt = host.document(1500) + "\n\n" + " ".join(f"{i}," for i in range(100, 160))
            first = server.complete(prompt, 224)
            again = server.complete(prompt, 224)  # after rejected drafts were taken back
            assert server.stop() == 0
            return first, again
    plain, _ = answers()
    # A model is the best draft of itself: what is rejected is rejected by a rounding.
    first, again = answers("--spec-type", "draft-simple", "-md", programs.model, "--spec-draft-n-max", 8)
    assert first["timings"]["draft_n"] > 0 and first["timings"]["draft_n_accepted"] > 64, first["timings"]
    for answer in (first, again):
        assert host.same_words(answer["content"], plain["content"]) >= 40, answer["content"]


def test_rejected_drafts_leave_nothing(programs, tmp_path):
    # Drafts from what the text said before: most are wrong, and every one is taken back.
    prompt = (host.document(1500) + CUE + " " + host.document(400)).strip()
    texts = []
    for args in ((), ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", 3,
                      "--spec-ngram-simple-size-m", 16)):
        with programs.server("-np", 1, "-c", 2048, *args, cache="f16", log=tmp_path / "log") as server:
            answer = server.complete(prompt, 128)
            texts.append(answer["content"])
            timings = answer["timings"]
            assert server.stop() == 0
    assert timings["draft_n"] > timings["draft_n_accepted"], timings
    assert host.same_words(*texts) >= 24, texts


# --- Clients and the server's life ---------------------------------------------------------------

def hang_up(server, body, after):
    """Asks, and closes the connection after so many seconds."""
    where = urllib.parse.urlparse(server.url)
    connection = http.client.HTTPConnection(where.hostname, where.port)
    connection.request("POST", "/completion", json.dumps({"stream": True, "temperature": 0, **body}),
                       {"Content-Type": "application/json"})
    time.sleep(after)
    connection.close()


def idle(server, within):
    end = time.monotonic() + within
    while any(slot["is_processing"] for slot in server.get("/slots")[1]):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@BOTH
def test_clients_that_hang_up(programs, tmp_path, cache):
    with programs.server("-np", 2, "-c", 8192, "-b", 128, "-ub", 128, "--slots", cache=cache,
                         log=tmp_path / "log") as server:
        long, short = host.question(9000, "48213"), host.question(1500, "70596")
        hang_up(server, {"prompt": long, "n_predict": 4, "id_slot": 0}, 1.0)  # within the prompt
        assert idle(server, 60)  # a busy machine takes long for the batch that it is at
        hang_up(server, {"prompt": short, "n_predict": 3500, "ignore_eos": True, "id_slot": 1}, 4)
        assert idle(server, 15)  # else it would go on for all of the 3500
        again = server.complete(long, 8, id_slot=0)
        assert again["content"].startswith(" 48213")
        again = server.complete(short, 8, id_slot=1)
        assert again["content"].startswith(" 70596")
        assert again["timings"]["prompt_n"] <= 2  # the prompt's rows outlived the client
        assert server.stop() == 0


def test_asleep_and_awake(programs, tmp_path):
    with programs.server("-np", 2, "-c", 2048, "--sleep-idle-seconds", 1, cache=DEFAULT,
                         log=tmp_path / "log") as server:
        for secret in ("48213", "70596"):
            assert server.complete(host.question(1200, secret), 8)["content"].startswith(f" {secret}")
            end = time.monotonic() + 20
            while not server.get("/props")[1]["is_sleeping"]:
                assert time.monotonic() < end
                time.sleep(0.2)
        assert server.stop() == 0


@pytest.mark.parametrize("fit", ["on", "off"])
def test_fitted_and_not(programs, tmp_path, fit):
    with programs.server("-np", 1, "-fit", fit, "-c", 0 if fit == "on" else 1024, cache=DEFAULT,
                         log=tmp_path / "log", LLAMA_ARG_N_GPU_LAYERS=None) as server:
        assert server.complete(host.question(900, "35087"), 8)["content"].startswith(" 35087")
        assert server.stop() == 0
    assert host.lines_with(server.log(), "tokens written"), host.tail(server.log())
