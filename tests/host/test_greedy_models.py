"""test_greedy.py in full: 512 tokens of every sequence, with more models. ctest -C models -L models"""

import pytest

import test_greedy

N_TOKENS = 512


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m", "qwen2.5-coder-0.5b"])
def subject(request, other_model, tmp_path_factory):
    programs = other_model(request.param)
    folder = tmp_path_factory.mktemp("greedy")
    return programs, test_greedy.follow_all(programs, folder, [N_TOKENS] * test_greedy.N_SEQUENCES)


@pytest.mark.parametrize("n_slots, unified", test_greedy.ALL_SHAPES)
def test_token_for_token(subject, tmp_path, n_slots, unified):
    programs, cases = subject
    test_greedy.check(programs, cases, n_slots, unified, N_TOKENS, tmp_path / "log")
