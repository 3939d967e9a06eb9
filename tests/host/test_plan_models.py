"""test_plan.py's 2 % on larger models: sliding windows, few KV heads, heads of 128."""

import pytest

from test_plan import check


@pytest.mark.parametrize("cache, n_ctx", [("k4v4", 8192), ("k2v2", 8192)])
def test_smollm2(programs, tmp_path, cache, n_ctx):
    check(programs, tmp_path, cache, n_ctx)


@pytest.mark.parametrize("cache, n_ctx, n_users", [
    ("k4v4", 2048, 1), ("k4v4", 8192, 1), ("k2v2", 8192, 1), ("f16", 4096, 1), ("k4v4", 2048, 4)])
def test_gemma(other_model, tmp_path, cache, n_ctx, n_users):
    programs = other_model("gemma3-270m")
    told, _ = check(programs, tmp_path, cache, n_ctx, n_users)
    assert sum(layer["swa"] for layer in told["layers"]) == 15
    assert told["levers"][0]["lever"].endswith("sliding windows")


@pytest.mark.parametrize("model, cache, n_ctx", [
    ("qwen2.5-coder-0.5b", "k4v4", 4096), ("qwen2.5-coder-0.5b", "k2v2", 4096),
    ("qwen2.5-coder-1.5b", "k4v4", 2048), ("qwen2.5-coder-1.5b", "k2v2", 4096)])
def test_qwen(other_model, tmp_path, model, cache, n_ctx):
    check(other_model(model), tmp_path, cache, n_ctx)
