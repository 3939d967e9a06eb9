"""A ggml that the plug-in was not built for: refused with one line, and nothing crashes."""

import re

import pytest

import host
from conftest import ROOT

SOURCE = host.Path(__file__).with_name("foreign.c")

LOG = """
#include <stdarg.h>
#include <stdio.h>
void ggml_log_internal(int level, const char* format, ...) {
  (void)level;
  va_list args;
  va_start(args, format);
  vfprintf(stderr, format, args);
  va_end(args);
}
"""


def compile_c(out, *args):
    result = host.run(["cc", "-w", "-o", out, *args])
    assert result.code == 0, result.err
    return out


@pytest.fixture
def foreign_host(programs, tmp_path):
    """A function: a program whose ggml has `version` and answers nothing to everything else, less
    the functions in `without`."""
    symbols = host.run(["nm", "-D", "--undefined-only", programs.plugin]).out
    names = set(re.findall(r"\b[wU] (ggml_\w+)", symbols)) - {"ggml_log_internal"}
    assert "ggml_version" in names

    def make(version, without=()):
        base = [LOG] + [f'const char* {name}(void) {{ return "{version}"; }}' if name == "ggml_version"
                        else f"void* {name}(void) {{ return 0; }}"
                        for name in sorted(names - set(without))]
        (tmp_path / "base.c").write_text("\n".join(base))
        (tmp_path / "empty.c").write_text("")
        for library, source in (("ggml-base", "base.c"), ("ggml", "empty.c")):
            compile_c(tmp_path / f"lib{library}.so.0", "-shared", "-fPIC",
                      f"-Wl,-soname,lib{library}.so.0", tmp_path / source)
        return compile_c(tmp_path / "host", SOURCE, "-Wl,--no-as-needed",
                         tmp_path / "libggml-base.so.0", tmp_path / "libggml.so.0",
                         f"-Wl,-rpath,{tmp_path}")
    return make


def refusal(program, plugin):
    result = host.run([program, plugin], limit=20)
    assert (result.code, result.out) == (0, "refused\n"), result.out + result.err
    lines = result.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("kvtamp: "), result.err
    return lines[0]


def test_another_layout_is_refused(foreign_host, programs):
    line = refusal(foreign_host("0.99.0"), programs.plugin)
    assert "0.99.0" in line and "KVTAMP_LLAMA_DIR" in line


def test_an_older_ggml_that_lacks_functions_is_refused(foreign_host, programs):
    newer = ("ggml_backend_tensor_set_2d", "ggml_backend_tensor_get_2d")
    assert "0.9.4" in refusal(foreign_host("0.9.4", without=newer), programs.plugin)


def test_a_program_with_ggml_inside_is_refused(programs, tmp_path):
    # The plug-in brings a ggml along then, which is of the right version and used by nobody.
    line = refusal(compile_c(tmp_path / "host", SOURCE), programs.plugin)
    assert "ggml inside its own binary" in line


def test_the_docs_list_every_refusal():
    code = (ROOT / "plugins" / "ggml" / "backend.cc").read_text()
    code += (ROOT / "plugins" / "ggml" / "abi_check.cc").read_text()
    refusals = re.findall(r'(?:Refuse|Unsupported)\(\s*"([^"]{20,30})', code)
    docs = " ".join((ROOT / "docs" / "hosts.md").read_text().split())
    assert len(refusals) >= 3
    for text in refusals:
        assert f"`{text}" in docs, text
