"""64 sequences at once, each with a stream of its own; all in one cache: test_many_sequences_models.py."""

import concurrent.futures
import json

import host

N = 64


def check_64_sequences(programs, tmp_path, unified):
    secrets = [str(10007 * (i + 3) % 90000 + 10000) for i in range(N)]
    stats = tmp_path / "stats.json"
    # Pages that are coded after a few tokens.
    with programs.server("-np", N, "-c", N * 256, "-kvu" if unified else "-no-kvu", cache="k8v8",
                         log=tmp_path / "log", LLAMA_ARG_CACHE_RAM=0, KVTAMP_STATS=stats,
                         KVTAMP_CACHE_RESIDUAL_LENGTH=0, KVTAMP_CACHE_PAGE_SIZE=16) as server, \
            concurrent.futures.ThreadPoolExecutor(N) as pool:

        def ask(slot):
            line = "The serial number printed on this copy is"
            prompt = f"{line} {secrets[slot]}.\n\n{host.document(120)}\n\n{line}"
            return server.complete(prompt, 6, id_slot=slot)
        for answer, secret in zip(pool.map(ask, range(N)), secrets):
            assert answer["content"].startswith(f" {secret}")
        # From what each has kept, after all the others came.
        for answer, secret in zip(pool.map(ask, range(N)), secrets):
            assert answer["content"].startswith(f" {secret}")
            assert answer["timings"]["prompt_n"] <= 2, answer["timings"]
        assert server.stop() == 0
    stats = json.loads(stats.read_text())
    assert stats["caches"][0]["n_streams"] == (1 if unified else N)
    assert stats["cells_used"] > 32 * N and stats["pages"]["sealed"] >= 30 * N
    assert stats["fallback_ops"] == []


def test_a_stream_for_each(programs, tmp_path):
    check_64_sequences(programs, tmp_path, unified=False)
