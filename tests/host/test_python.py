"""llama-cpp-python with kvtamp.enable(), which is all its user has to call.

Each case is a process of its own, as a process is enabled once and for all.
"""

import json
import sys
import textwrap

import pytest

import host
from conftest import ROOT, fetched

GGML = "0.25.3"  # what llama-cpp-python 0.3.36, of scripts/packages.lock, declares the functions of

PREAMBLE = """
import json, os, sys
MODEL = os.environ["TEST_MODEL"]
def load(n_ctx=512, **more):
    import llama_cpp
    return llama_cpp.Llama(MODEL, n_ctx=n_ctx, n_threads=2, n_threads_batch=2, verbose=False, **more)
def answer(llama, prompt, n):
    return llama.create_completion(prompt, max_tokens=n, temperature=0)["choices"][0]["text"]
def show(value):
    print("SHOW " + json.dumps(value))
def refused(**settings):
    try:
        kvtamp.enable(**settings)
    except kvtamp.Error as error:
        return str(error)
"""


class Python:
    """Runs code in a process that has llama_cpp and kvtamp."""

    def __init__(self, programs, packages, libraries):
        self.programs = programs
        self.env = host.environment(programs.plugin, host.HOST, {
            "PYTHONPATH": f"{ROOT / 'python'}:{packages}", "PYTHONDONTWRITEBYTECODE": "1",
            "LLAMA_CPP_LIB_PATH": libraries, "KVTAMP_LIB": programs.plugin,
            "TEST_MODEL": programs.model})

    def run(self, code, ok=True, **variables):
        env = {name: str(value) for name, value in {**self.env, **variables}.items()
               if value is not None}
        result = host.run([sys.executable, "-c", PREAMBLE + textwrap.dedent(code)], env=env)
        assert not ok or result.code == 0, host.tail(result.err)
        return result

    def shown(self, code, **variables):
        """What the code gave to show(), each."""
        lines = self.run(code, **variables).out.splitlines()
        return [json.loads(line[5:]) for line in lines if line.startswith("SHOW ")]


def libraries_of(programs):
    """The folder of the host's libraries, or None."""
    for folder in (programs.llama.parent / "lib", programs.llama):
        if (folder / "libllama.so").exists():
            return folder
    return None


@pytest.fixture(scope="module")
def python(programs):
    packages = fetched("llama-cpp-python")
    if packages is None:
        pytest.skip("not fetched: scripts/fetch llama-cpp-python")
    libraries = libraries_of(programs)
    if libraries is None or not (libraries / f"libggml-base.so.{GGML}").exists():
        pytest.skip(f"the host is not the one llama-cpp-python is for (ggml {GGML})")
    return Python(programs, packages, libraries)


def test_f16_gives_the_answer_of_the_host(python):
    # 700 tokens and a line that the licence has only one way to go on with.
    prompt = host.document(3400) + "\n\nFor example, if you distribute copies of such a program,"
    code = f"""
        show(answer(load(2048, flash_attn=True), {prompt!r}, 32))
    """
    reference, = python.shown(code)
    ours, = python.shown("import kvtamp; kvtamp.enable(cache='f16')" + textwrap.dedent(code))
    assert host.same_words(reference, ours) == len(reference.split()) > 15, f"{reference!r} {ours!r}"


def test_the_default_recalls_a_number_and_counts(python):
    result = python.run(f"""
        import kvtamp
        kvtamp.enable()
        kvtamp.enable()  # the same again is nothing new
        llama = load(2048)
        show(answer(llama, {host.question(3400, "48213")!r}, 8))
        show(kvtamp.stats())
        llama.close()
        show(kvtamp.stats())
        show(kvtamp.__version__)
    """)
    text, full, empty, version = [json.loads(line[5:]) for line in result.out.splitlines()]
    assert text.startswith(" 48213"), text
    assert (full["device"], full["ggml_version"], full["version"]) == ("KVTAMP", GGML, version)
    assert full["cells_capacity"] == 2048 and 700 < full["cells_used"] < 1000
    assert full["rows_written_total"] >= full["cells_used"]
    assert len(full["caches"]) == 1 and len(full["caches"][0]["layers"]) == 30
    assert full["uncompressed_bytes"] == 0 and full["compression_factor"] > 2
    assert full["resident_bytes"]["coded"] > 0 and empty["cells_used"] == 0 == len(empty["caches"])
    said = host.lines_with(result.err, "kvtamp: on")
    assert len(said) == 1 and "n_gpu_layers=-1, flash_attn=True" in said[0], result.err


def test_arguments_that_are_given_win(python):
    result = python.run("""
        import kvtamp
        kvtamp.enable(cache="k8v8", cache_page_size=32, cache_skip_layers=[0, 29], log_level="error")
        show(os.environ["KVTAMP_CACHE_SKIP_LAYERS"])
        llama = load(n_gpu_layers=0)
        answer(llama, "The capital of France is", 2)
        show(kvtamp.stats()["cells_capacity"])
        llama.close()
        llama = load()
        answer(llama, "The capital of France is", 2)
        stats = kvtamp.stats()
        show([stats["page_size"], stats["type"], stats["cells_capacity"]])
    """)
    assert [json.loads(line[5:]) for line in result.out.splitlines()] \
        == ["0,29", 0, [32, "k8v8", 512]]
    assert len(host.lines_with(result.err, "n_gpu_layers=0 was given", "not compressed")) == 1


def test_states_loaded_in_turn(python):
    # Case ST-6: two states of one context, in turn.
    p, r, p_again, r_again, sizes = python.shown(f"""
        import itertools, kvtamp
        kvtamp.enable()
        llama = load()
        tokens = llama.tokenize({host.document(1500)!r}.encode())
        assert len(tokens) > 140
        P, R = tokens[:40], tokens[50:140]
        states = []
        for part in P, R:
            llama.reset()
            llama.eval(part)
            states.append(llama.save_state())
        for i in 0, 1, 0, 1:
            llama.load_state(states[i])
            assert llama.n_tokens == (40, 90)[i]
            show(list(itertools.islice(llama.generate((P, R)[i], temp=0), 5)))
        show([len(state.llama_state) for state in states])
    """)
    assert len(p) == len(r) == 5
    assert p == p_again and r == r_again and p != r
    assert sizes[1] > 2 * sizes[0]


# --- Refusals ------------------------------------------------------------------------------------

def test_other_settings_and_a_loaded_model_are_refused(python):
    early, closed, mistaken, other, stats = python.shown("""
        import kvtamp
        llama = load()
        show(refused())
        llama.close()
        show(refused(cache="f17"))
        show(refused(cache_page_sise=32))
        assert not any(name.startswith("KVTAMP_CACHE") for name in os.environ)
        kvtamp.enable(cache="f16")
        show(refused(cache="k8v8"))
        show(answer(load(), "The capital of France is", 4))
    """)
    assert "a model is loaded already" in early and "before the first Llama" in early
    assert "f17" in closed and "KVTAMP_CACHE_TYPE" in closed
    assert "did you mean KVTAMP_CACHE_PAGE_SIZE?" in mistaken
    assert "already enabled with cache='f16'" in other and "cache='k8v8'" in other
    assert "Paris" in stats


def test_stats_before_enable_are_refused(python):
    assert python.shown("""
        import kvtamp
        try:
            kvtamp.stats()
        except kvtamp.Error as error:
            show(str(error))
    """) == ["not enabled: call kvtamp.enable() first"]


def test_without_llama_cpp(python, tmp_path):
    text, = python.shown("import kvtamp; show(refused())", PYTHONPATH=ROOT / "python")
    assert "llama_cpp cannot be imported" in text and "pip install llama-cpp-python" in text
    text, = python.shown("import kvtamp; show(refused())", LLAMA_CPP_LIB_PATH=tmp_path)
    assert "LLAMA_CPP_LIB_PATH" in text


def test_where_the_library_is_looked_for(python, tmp_path):
    text, = python.shown("import kvtamp; show(refused())", KVTAMP_LIB=tmp_path / "none.so")
    assert "KVTAMP_LIB names" in text and "not a file" in text
    # A copy of the package with nothing around it, then with the library beside it.
    package = tmp_path / "kvtamp"
    package.mkdir()
    source = ROOT / "python" / "kvtamp" / "__init__.py"
    (package / "__init__.py").write_bytes(source.read_bytes())
    path = f"{tmp_path}:{python.env['PYTHONPATH'].split(':')[1]}"
    text, = python.shown("import kvtamp; show(refused())", KVTAMP_LIB=None, PYTHONPATH=path)
    assert "no libggml-kvtamp.so in" in text and "cmake" in text
    (package / "libggml-kvtamp.so").write_bytes(python.programs.plugin.read_bytes())
    assert python.shown("import kvtamp; show(refused())", KVTAMP_LIB=None, PYTHONPATH=path) == [None]


def test_a_library_that_is_none(python, tmp_path):
    (tmp_path / "libggml-kvtamp.so").write_text("no library")
    text, = python.shown("import kvtamp; show(refused())", KVTAMP_LIB=tmp_path / "libggml-kvtamp.so")
    assert "libggml-kvtamp.so" in text and "kvtamp: " not in text


def test_a_library_for_another_ggml(python):
    other = python.programs.plugin.parent / "other" / "libggml-kvtamp.so"
    if not other.exists():
        pytest.skip("the plug-in was not built for a second ggml (KVTAMP_OTHER_LLAMA_DIR)")
    text, refused_then_loads = python.shown(f"""
        import kvtamp
        show(refused())
        os.environ["KVTAMP_LIB"] = {str(python.programs.plugin)!r}
        show(refused())
    """, KVTAMP_LIB=other)
    assert GGML in text and "layout differs" in text and "KVTAMP_LLAMA_DIR" in text
    assert refused_then_loads is None


def test_a_state_loses_nothing_on_its_way(python, tmp_path):
    # How far the default's predictions are from those over the host's cache, and how much further once
    # the state was saved and loaded before them.
    code = f"""
        import numpy as np, llama_cpp
        llama = load(2048, flash_attn=True)
        tokens = llama.tokenize({host.document(9000)!r}.encode())[:1400]
        assert len(tokens) == 1400
        def predictions():
            rows = []
            for token in tokens[1200:]:
                llama.eval([token])
                row = llama_cpp.llama_get_logits_ith(llama.ctx, -1)[:llama.n_vocab()]
                row = np.array(row) - max(row)
                rows.append(row - np.log(np.exp(row).sum()))
            return np.array(rows)
        def divergence(truth, rows):
            return float((np.exp(truth) * (truth - rows)).sum(axis=1).mean())
        llama.eval(tokens[:1200])
        state = llama.save_state()
        halves = np.frombuffer(state.llama_state, np.uint16, state.llama_state_size // 2)
        first = predictions()
        llama.load_state(state)
        again = llama.save_state()
        changed = halves != np.frombuffer(again.llama_state, np.uint16, halves.size)
        show(float(changed.mean()))
        then = predictions()
    """
    file = tmp_path / "host.npy"
    unchanged, = python.shown(textwrap.dedent(code) + f"np.save({str(file)!r}, first)")
    assert unchanged == 0
    changed, coding, both = python.shown(
        "import kvtamp; kvtamp.enable()" + textwrap.dedent(code) + f"""
exact = np.load({str(file)!r})
show(divergence(exact, first))
show(divergence(exact, then))
""")
    print(f"{100 * changed:.2f} % of the state's halves changed; KL of coding {coding:.5f}, "
          f"with saving and loading {both:.5f}")
    assert changed < 0.01
    assert 1e-4 < coding < 0.05
    assert both <= 1.1 * coding


def test_sequences_written_in_turns_are_restored_as_they_were(python):
    # Of one cache for all, which knows no sequences: each is coded in pages of its own, and a state of it gives
    # those pages again, in another context as in its own.
    code = f"""
        import ctypes, numpy as np, llama_cpp as C, kvtamp
        kvtamp.enable("k3v3")
        N, LENGTH, STEP = 4, 256, 16
        tokens = load().tokenize({host.document(9000)!r}.encode())
        model = C.llama_model_load_from_file(MODEL.encode(), C.llama_model_default_params())
        def context():
            params = C.llama_context_default_params()
            params.n_ctx, params.n_ubatch, params.n_seq_max, params.kv_unified = 2048, 64, N, True
            params.flash_attn_type = C.LLAMA_FLASH_ATTN_TYPE_ENABLED
            return C.llama_init_from_model(model, params)
        def decode(context, first, n):
            batch = C.llama_batch_init(N * n, 0, 1)
            for i in range(N * n):
                sequence, position = i // n, first + i % n
                batch.token[i], batch.pos[i] = tokens[sequence * LENGTH + position], position
                batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, False
            batch.n_tokens = N * n
            assert C.llama_decode(context, batch) == 0
            C.llama_batch_free(batch)
        def state(context, sequence):
            data = (ctypes.c_uint8 * C.llama_state_seq_get_size(context, sequence))()
            assert C.llama_state_seq_get_data(context, data, len(data), sequence) == len(data)
            return data
        def changed(before, after):
            n = min(len(before), len(after)) // 2
            a, b = (np.frombuffer(bytes(x), np.float16, n).astype(np.float32) for x in (before, after))
            with np.errstate(invalid="ignore"):
                return float((np.abs(a - b) > 0.002 * np.maximum(np.abs(a), 0.1)).mean())
        first = context()
        for position in range(0, LENGTH, STEP):
            decode(first, position, STEP)
        states = [state(first, s) for s in range(N)]
        other = context()
        for s, data in enumerate(states):
            assert C.llama_state_seq_set_data(other, data, len(data), s)
            C.llama_memory_seq_rm(C.llama_get_memory(first), s, -1, -1)
            assert C.llama_state_seq_set_data(first, data, len(data), s)
        for restored in (first, other):  # and coded: the windows of all have moved on
            decode(restored, LENGTH, 64)
            for s in range(N):
                C.llama_memory_seq_rm(C.llama_get_memory(restored), s, LENGTH, -1)
        show([changed(states[s], state(restored, s)) for restored in (first, other) for s in range(N)])
        show(changed(states[0], states[1]))
        show(kvtamp.stats()["pages"]["sealed"])
    """
    shares, other_text, sealed = python.shown(code)
    assert other_text > 0.8  # so the measure can tell
    assert sealed >= 2 * 2 * 30 * 3
    # The last window was f16 when the states were taken, and has been coded since.
    window = 64 / 256
    assert max(shares) <= window + 0.01, shares
