"""More of test_server_cases.py: longer, and with models that have windows. ctest -C models -L models"""

import concurrent.futures

import pytest

import host
from host import DEFAULT, HOST
from test_server_cases import BOTH, shift_for_long


@BOTH
def test_text_stays_text_over_very_many_shifts(programs, tmp_path, cache):
    shift_for_long(programs, tmp_path, cache, 2000)


@pytest.fixture(scope="module")
def gemma(other_model):
    return other_model("gemma3-270m")


@pytest.mark.parametrize("full", [False, True])
def test_a_model_with_windows_shifts_or_says_it_cannot(gemma, tmp_path, full):
    def go_on(cache):
        with gemma.server("-np", 1, "-c", 1024, "--context-shift", *(["--swa-full"] if full else []),
                          cache=cache, log=tmp_path / "log") as server:
            answer = server.complete(host.document(1500), 900, ignore_eos=True, n_keep=4, repeat_penalty=1.1,
                                     samplers=["penalties", "temperature"], temperature=0.8, seed=1)
            return answer["tokens_predicted"], host.distinct_share(" ".join(answer["content"].split()[-150:]))
    n, share = go_on(HOST)
    for cache in ("f16", DEFAULT):
        ours = go_on(cache)
        print(f"swa-full {full}: {cache} {ours}, host {(n, share)}")
        assert ours[0] == n and ours[1] >= 0.5 * share


@pytest.mark.parametrize("unified", [False, True])
def test_long_prompts_at_once_find_cells(gemma, tmp_path, unified):
    def warnings(cache):
        with gemma.server("-np", 4, "-c", 8192, "-kvu" if unified else "-no-kvu", cache=cache,
                          log=tmp_path / "log") as server, concurrent.futures.ThreadPoolExecutor(4) as pool:
            secrets = ["70596", "48213", "91624", "35087"]
            jobs = [pool.submit(server.complete, host.question(7600, secret), 64) for secret in secrets]
            for job, secret in zip(jobs, secrets):
                assert secret in job.result()["content"]
            return len(host.lines_with(server.log(), "failed to find"))
    at_most = warnings(HOST)
    for cache in ("f16", DEFAULT):
        assert warnings(cache) <= at_most


@BOTH
def test_the_same_prompt_again_is_not_computed_again(gemma, tmp_path, cache):
    def twice(cache):
        with gemma.server("-np", 1, "-c", 2048, cache=cache, log=tmp_path / "log") as server:
            prompt = host.question(4200, "48213")
            return [server.complete(prompt, 32) for _ in range(2)]
    most = twice(HOST)[1]["timings"]["prompt_n"]
    first, again = twice(cache)
    assert again["timings"]["prompt_n"] <= most
    assert "48213" in again["content"]
    assert host.same_words(again["content"], first["content"]) >= (8 if cache == "f16" else 1)


def test_drafts_of_a_second_model(other_model, tmp_path):
    def answer(*args):
        with other_model("qwen2.5-coder-0.5b").server("-np", 1, "-c", 2048, *args, cache="f16",
                                                      log=tmp_path / "log") as server:
            answer = server.complete("def quicksort(items):\n", 256)
            assert server.stop() == 0
            return answer
    plain = answer()
    drafted = answer("--spec-type", "draft-simple", "-md", other_model("qwen2.5-coder-0.5b").model,
                     "--spec-draft-n-max", 8)
    assert drafted["timings"]["draft_n_accepted"] > 64
    same = host.same_words(drafted["content"], plain["content"])
    print(f"the same {same} words of {len(plain['content'].split())}")
    assert same >= 40


def test_no_step_in_error_where_the_window_ends(gemma, tmp_path):
    lengths = [400, 512, 513, 700, 1024, 1025, 1500, 3000]

    def steps_at(cache, reference=None):
        with gemma.server("-np", 1, "-c", 4096, "--swa-full", cache=cache, log=tmp_path / "log") as server:
            tokens = server.tokens(host.document(16000))
            if reference is None:
                return [server.follow(tokens[:n], 24) for n in lengths]
            return [host.walk(server, tokens[:n], steps) for n, steps in zip(lengths, reference)]
    walks = steps_at(DEFAULT, steps_at(HOST))
    moved = [sum(walk.moved) / len(walk.moved) for walk in walks]
    print({n: round(nats, 3) for n, nats in zip(lengths, moved)})
    assert max(moved) <= 3 * max(moved[0], 0.05)
