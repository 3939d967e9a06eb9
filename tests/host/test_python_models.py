"""More of test_python.py: predictions after context shifts, and a ggml whose backends are modules, which is
built for it. ctest -C models -L models"""

import os
import shutil
import textwrap

import pytest

import host
from test_python import Python, libraries_of, python  # noqa: F401


def test_predictions_after_a_shift_are_those_of_the_host(python, tmp_path):  # noqa: F811
    # Case SH-4: greedy until the context is full, then shifts as the server makes them; ours is led along
    # the host's tokens.
    code = f"""
        import numpy as np, llama_cpp
        N_CTX, KEEP, STEPS = 256, 4, 400
        llama = load(N_CTX, flash_attn=True)
        tokens = llama.tokenize({host.document(3000)!r}.encode())[:200]
        def step(tokens):
            if llama.n_tokens + len(tokens) > N_CTX:
                n = (llama.n_tokens - KEEP) // 2
                memory = llama_cpp.llama_get_memory(llama.ctx)
                llama_cpp.llama_memory_seq_rm(memory, 0, KEEP, KEEP + n)
                llama_cpp.llama_memory_seq_add(memory, 0, KEEP + n, llama.n_tokens, -n)
                llama.n_tokens -= n
                shifts.append(len(rows))
            llama.eval(tokens)
            row = np.array(llama_cpp.llama_get_logits_ith(llama.ctx, -1)[:llama.n_vocab()])
            row -= row.max()
            rows.append(row - np.log(np.exp(row).sum()))
        rows, shifts = [], []
        step(tokens)
        path = np.load(TRUTH)["path"] if TRUTH else []
        for i in range(STEPS):
            step([int(path[i]) if TRUTH else int(rows[-1].argmax())])
    """
    file = tmp_path / "host.npz"
    python.run("TRUTH = None" + textwrap.dedent(code)
               + f"np.savez({str(file)!r}, rows=rows, path=[row.argmax() for row in rows])")
    for cache, limit in (("f16", 0.01), ("auto", 0.05)):
        agree, gap, before, after, all_after = python.shown(
            f"TRUTH = {str(file)!r}\nimport kvtamp; kvtamp.enable({cache!r})" + textwrap.dedent(code) + """
truth = np.load(TRUTH)["rows"]
kl = (np.exp(truth) * (truth - rows)).sum(axis=1)
first = shifts[0]
assert len(shifts) >= 3
agree = int(np.argmax([a.argmax() != b.argmax() for a, b in zip(truth, rows)] + [True]))
show(agree)
show(float(truth[agree].max() - truth[agree][rows[agree].argmax()]) if agree < len(rows) else 0.0)
for part in kl[1:first], kl[first:first + 64], kl[first:]:
    show(float(part.mean()))
""")
        print(f"{cache}: the host's choice for {agree} tokens, then one {gap:.3f} nats less likely; mean KL {before:.5f} before the first shift,"
              f" {after:.5f} in the 64 steps after it, {all_after:.5f} in all after it")
        assert after <= limit and all_after <= limit
        if cache == "f16":
            assert agree >= 50 or gap < 0.05


@pytest.fixture(scope="module")
def modular(python, tmp_path_factory):  # noqa: F811
    """llama-cpp-python over a ggml that loads even its CPU backend at run time (GGML_BACKEND_DL)."""
    libraries = libraries_of(python.programs)
    source = python.programs.llama.parent / "src"
    if not source.is_dir():
        pytest.skip("no sources beside the host")
    build, lib = tmp_path_factory.mktemp("build"), tmp_path_factory.mktemp("lib")
    for command in (["cmake", "-S", source, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                     "-DBUILD_SHARED_LIBS=ON", "-DGGML_BACKEND_DL=ON", "-DGGML_NATIVE=OFF", "-DGGML_CCACHE=OFF",
                     "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF",
                     "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF",
                     "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON", "-DCMAKE_INSTALL_RPATH=$ORIGIN"],
                    ["cmake", "--build", build, "--target", "ggml", "ggml-cpu"]):
        result = host.run(command, limit=500)
        assert result.code == 0, host.tail(result.out + result.err)
    others = [path for path in libraries.glob("lib*.so*") if not path.name.startswith("libggml")]
    for library in [*(build / "bin").glob("libggml*.so*"), *others]:
        shutil.copy2(library, lib, follow_symlinks=False)
    assert list(lib.glob("libggml-cpu*.so")), os.listdir(lib)
    return Python(python.programs, python.env["PYTHONPATH"].split(":")[1], lib)


def test_the_host_keeps_its_cpu_where_that_is_a_module(modular):
    # Loaded by itself, our library would be the only backend there is, and the host would look no further.
    code = f"""
        llama = load(1024)
        show(answer(llama, {host.question(1500, "48213")!r}, 8))
        show(kvtamp.stats()["caches"][0]["layers"][0]["format_k"])
    """
    text, format_k = modular.shown("import kvtamp; kvtamp.enable()" + textwrap.dedent(code))
    assert text.startswith(" 48213") and format_k == "int4_pc+qw"
    alone = modular.run("""
        import llama_cpp
        from llama_cpp.llama_cpp import _lib
        import ctypes
        _lib.ggml_backend_load.argtypes, _lib.ggml_backend_load.restype = [ctypes.c_char_p], ctypes.c_void_p
        assert _lib.ggml_backend_load(os.environ["KVTAMP_LIB"].encode())
        load()
    """, ok=False)
    assert alone.code != 0  # else the order would not matter here
