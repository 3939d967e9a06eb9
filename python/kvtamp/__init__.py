"""A compressed KV cache for llama-cpp-python.

    import kvtamp
    kvtamp.enable()                       # or cache="k8v8", cache_page_size=32, log_level="info"
    llama = llama_cpp.Llama("model.gguf", n_ctx=32768)
    kvtamp.stats()

The work is done by libggml-kvtamp.so, a backend that ggml loads; this package only loads it in the
right order. It is the file that KVTAMP_LIB names (or KVTAMP_PLUGIN, as for the kvtamp command), else
the first that fits llama_cpp's ggml of libggml-kvtamp*.so in this folder and those of the source
tree's build folder.
"""

import contextlib
import ctypes
import functools
import gc
import json
import logging
import os
import sys
import tempfile
from pathlib import Path

__all__ = ["Error", "enable", "stats"]
__version__ = "0.1.0"

# What llama_cpp.Llama() is given instead of its own defaults, 0 and False, with which K and V would
# never come to us.
LLAMA_DEFAULTS = {"n_gpu_layers": -1, "flash_attn": True}

_HERE = Path(__file__).resolve().parent
_CPU = 0  # GGML_BACKEND_DEVICE_TYPE_CPU

_log = logging.getLogger("kvtamp")


class Error(RuntimeError):
    """kvtamp cannot be used as asked; the text says why and what to do."""


class _Enabled:
    """What the successful call of enable() left."""

    def __init__(self, asked, ggml, reg):
        self.asked = asked
        address = ggml.ggml_backend_reg_get_proc_address(reg, b"kvtamp_stats_json")
        self.stats_json = ctypes.CFUNCTYPE(ctypes.c_char_p)(address)


_enabled = None


def enable(cache="auto", **settings):
    """Makes every Llama created from now on keep its keys and values in the compressed cache.

    To be called once, before the first Llama is created. Also changes what Llama() takes for
    n_gpu_layers and flash_attn when they are not given; arguments that are given win. The weights
    stay on the CPU all the same.

    cache     a cache type of `kvtamp formats`, such as "k8v8"; "auto" leaves it to KVTAMP_CACHE_TYPE
              or the settings file, else to the shipped default
    settings  any other setting, named as its variable without KVTAMP_: cache_page_size=32 is
              KVTAMP_CACHE_PAGE_SIZE; a list becomes 0,3,5
    """
    global _enabled
    asked = dict(settings, cache=cache)
    if _enabled is not None:
        if asked != _enabled.asked:
            raise Error(f"already enabled with {_described(_enabled.asked)}; a process has one set of "
                        f"settings, so start another for {_described(asked)}")
        return

    ggml, llama = _llama_cpp()
    if _loaded_models():
        raise Error("a model is loaded already, and its cache stays the host's. Call "
                    "kvtamp.enable() before the first Llama(...), or close() that one first")
    variables = {"KVTAMP_" + name.upper(): _text(value) for name, value in settings.items()}
    if cache != "auto":
        variables["KVTAMP_CACHE_TYPE"] = _text(cache)
    with _environment(variables):
        _prepare(ggml, llama)
        path, reg = _load(ggml)
    _enabled = _Enabled(asked, ggml, reg)
    _set_defaults(llama.Llama)

    if not _log.hasHandlers():
        _log.addHandler(logging.StreamHandler())
        _log.handlers[0].setFormatter(logging.Formatter("kvtamp: %(message)s"))
        _log.setLevel(logging.INFO)
    defaults = ", ".join(f"{name}={value}" for name, value in LLAMA_DEFAULTS.items())
    _log.info("on, by %s (ggml %s); Llama() has the defaults %s from here on", path,
              ggml.ggml_version().decode(), defaults)


def stats():
    """The caches there are at this moment, as a dict: bytes, tokens, formats. The fields are those of
    control/stats.h in the source tree."""
    if _enabled is None:
        raise Error("not enabled: call kvtamp.enable() first")
    return json.loads(_enabled.stats_json())


# --- The host -----------------------------------------------------------------------------------

def _llama_cpp():
    """(the handle of libllama, through which ggml's functions are reached too; the module)"""
    if not sys.platform.startswith("linux"):
        raise Error(f"kvtamp runs on Linux only, this is {sys.platform}")
    try:
        import llama_cpp
    except ModuleNotFoundError as error:
        raise Error(f"llama_cpp cannot be imported ({error}). Install it: "
                    "pip install llama-cpp-python") from error
    except (FileNotFoundError, RuntimeError, OSError, AttributeError) as error:
        raise Error(f"llama_cpp cannot be imported ({error}). Its library is missing or of another "
                    "version; is LLAMA_CPP_LIB_PATH right?") from error
    # Not llama_cpp._ggml: that opens libggml by its path, which may be another copy.
    ggml = llama_cpp.llama_cpp._lib
    p, s = ctypes.c_void_p, ctypes.c_char_p
    for name, result, *arguments in (
            ("ggml_version", s), ("ggml_backend_load", p, s), ("ggml_backend_load_all", None),
            ("ggml_backend_load_all_from_path", None, s), ("ggml_backend_reg_count", ctypes.c_size_t),
            ("ggml_backend_dev_by_type", p, ctypes.c_int),
            ("ggml_backend_reg_get_proc_address", p, p, s)):
        try:
            function = getattr(ggml, name)
        except AttributeError:
            raise Error(f"llama_cpp's library has no {name}: it is too old, or has ggml inside, which "
                        "no plug-in can join. Build it with shared libraries (-DBUILD_SHARED_LIBS=ON)"
                        ) from None
        function.restype, function.argtypes = result, arguments
    return ggml, llama_cpp


def _loaded_models():
    internals = sys.modules.get("llama_cpp._internals")
    return [thing for thing in gc.get_objects()
            if type(thing) is internals.LlamaModel and getattr(thing, "model", None)]


def _prepare(ggml, llama):
    """Where the host's own backends are modules, it loads them only while none is registered: once
    we are there it would do without its CPU backend."""
    if ggml.ggml_backend_reg_count() == 0:
        ggml.ggml_backend_load_all()
    if not ggml.ggml_backend_dev_by_type(_CPU):
        ggml.ggml_backend_load_all_from_path(os.fsencode(llama.llama_cpp._base_path))
    if not ggml.ggml_backend_dev_by_type(_CPU):
        raise Error(f"ggml finds no CPU backend (looked in {llama.llama_cpp._base_path} too): "
                    "llama_cpp itself is not installed whole")


def _set_defaults(cls):
    init = cls.__init__

    @functools.wraps(init)
    def with_defaults(self, *args, **kwargs):
        kwargs = {**LLAMA_DEFAULTS, **kwargs}
        for name, off in (("n_gpu_layers", 0), ("flash_attn", False), ("offload_kqv", False)):
            if kwargs.get(name, True) == off and not kwargs.get("vocab_only"):
                _log.warning("%s=%s was given: this model's cache is not compressed", name, off)
        init(self, *args, **kwargs)

    cls.__init__ = with_defaults


# --- The library --------------------------------------------------------------------------------

def _candidates():
    for variable in ("KVTAMP_LIB", "KVTAMP_PLUGIN"):
        named = os.environ.get(variable)
        if named and not os.path.isfile(named):
            raise Error(f"{variable} names {named}, which is not a file")
        if named:
            return [Path(named).resolve()]
    build = _HERE.parents[1] / "build" / "release" / "lib"
    found = sorted(_HERE.glob("libggml-kvtamp*.so"))
    found += [path for path in (build / "libggml-kvtamp.so", build / "other" / "libggml-kvtamp.so")
              if path.is_file()]
    if not found:
        raise Error(f"no libggml-kvtamp.so in {_HERE} or {build}. Build it (cmake --preset release && "
                    "cmake --build build/release), or name it as KVTAMP_LIB")
    return found


def _load(ggml):
    """(path, registry) of the first library that fits."""
    reasons = []
    for path in _candidates():
        with _standard_error() as said:
            reg = ggml.ggml_backend_load(os.fsencode(path))
        if reg:
            return path, reg
        # The plug-in says why in one line; where it could not even start, the dynamic linker does.
        lines = [line for line in said() if line.startswith("kvtamp: ")] or said() or ["no reason given"]
        reasons.append(lines[0].replace("kvtamp: ", "", 1))
    # One that fits and dislikes the settings tells more than those that do not fit.
    fits = [reason for reason in reasons if "the plug-in is not loaded" in reason]
    raise Error("; ".join(dict.fromkeys(fits or reasons)))


@contextlib.contextmanager
def _standard_error():
    """Keeps what C code writes to stderr meanwhile: gives a function that returns its lines."""
    lines = []
    try:
        kept = os.dup(2)
    except OSError:  # a process without one
        yield lambda: lines
        return
    with tempfile.TemporaryFile() as file:
        if sys.stderr:
            sys.stderr.flush()
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: lines
        finally:
            if sys.stderr:
                sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


# --- Settings -----------------------------------------------------------------------------------

def _text(value):
    return ",".join(map(str, value)) if isinstance(value, (list, tuple, range)) else str(value)


def _described(asked):
    return ", ".join(f"{name}={value!r}" for name, value in sorted(asked.items()))


@contextlib.contextmanager
def _environment(variables):
    """Variables for the plug-in, which it reads again for each context; taken back on failure."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    except BaseException:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        raise
