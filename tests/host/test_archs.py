"""The host's test-llama-archs: a tiny random model of every architecture it knows, through our device and
through the host's CPU. 128 tokens in two micro-batches: the second attends what the first left coded."""

import json
import math
import re

import pytest

import host
from conftest import ROOT

ROW = re.compile(r"\|\s*(\S+)\|[^|]*\|\s*(Dense|MoE)\|\s*(OK|FAIL|SKIP)( \(toggle\))?\s*(?:\((\S+)\))?"
                 r"\s*\|\s*(OK|FAIL|SKIP)\s*\|")
SEED = 1  # of the weights; the program's default is another one each time


def errors(result):
    """Of each model that ran: the program's NMSE. A model that did not run counts as such in none."""
    table = {}
    for line in result.out.splitlines():
        if row := ROW.fullmatch(line.strip()):
            arch, kind, status, toggle, nmse, roundtrip = row.groups()
            if status == "SKIP":
                continue
            assert not toggle, line  # NaN, or no logits, when attention is not causal
            assert roundtrip != "FAIL", line  # the same model again, and not the same answer
            table[f"{arch} {kind}"] = float(nmse)
    total = re.search(r"Summary: (?:all )?(\d+) test", result.out)
    assert total and len(table) == int(total.group(1)), result.out[-500:]
    return table


@pytest.fixture(scope="module")
def whole_run(programs):
    # -v 4: what the host says while it loads, and we.
    return programs.run_test("test-llama-archs", "-b", "KVTAMP", "-s", SEED, "-v", 4, cache="f16")


@pytest.fixture(scope="module")
def lossless(whole_run):
    return errors(whole_run)


def test_every_architecture_in_f16(lossless):
    assert len(lossless) > 120
    assert max(lossless.values()) <= 1e-4  # the program's own limit, for which it also exits with 0


# All of them with both types take too long for every day: test_archs_models.py.
@pytest.mark.parametrize("cache, archs, limit", [("k8v8", "^[a-g]", 1e-4), ("k4v4", "^[^a-g]", 1e-2)])
def test_coded(programs, lossless, cache, archs, limit):
    coded(programs, lossless, cache, archs, limit)


def run_coded(programs, cache, archs, **settings):
    # With nothing kept in f16, and pages that are full after a few tokens.
    return errors(programs.run_test("test-llama-archs", "-b", "KVTAMP", "-s", SEED, "-a", archs,
                                    cache=cache, ok=False, KVTAMP_CACHE_N_SINK=0,
                                    KVTAMP_CACHE_RESIDUAL_LENGTH=0, KVTAMP_CACHE_PAGE_SIZE=16, **settings))


def test_pages_were_coded(programs, tmp_path):
    run_coded(programs, "k4v4", "llama", KVTAMP_STATS=tmp_path / "stats.json")
    stats = json.loads((tmp_path / "stats.json").read_text())
    # Of so small pages: 4 bits of codes and 20 / 16 of scales, minima and widths for K, 4.25 for V; with
    # the index and the page being filled.
    assert stats["resident_bytes"]["coded"] > 0 and stats["compression_factor"] > 2.7


def coded(programs, lossless, cache, archs, limit):
    table = run_coded(programs, cache, archs)
    for name, nmse in sorted(table.items(), key=lambda item: -item[1]):
        print(f"{cache} {name}: NMSE {nmse:.2e} (f16 {lossless[name]:.2e})")
    assert all(math.isfinite(nmse) and nmse <= limit for nmse in table.values())
    # Those without a cache, and those whose cache stays plain, err as in f16.
    moved = [name for name, nmse in table.items() if nmse > 10 * lossless[name]]
    assert len(moved) >= 0.75 * len(table), sorted(set(table) - set(moved))


# --- What is compressed, and what is not ---------------------------------------------------------

# Kinds that need not be compressed, or not all, or not as others are.
KINDS = ("^(llama|gemma3|gpt-oss|deepseek2|minicpm3|mamba|falcon-h1|jamba|kimi-linear|nemotron_h|lfm2"
         "|qwen3next|minimax-01|grok|qwen4exp|deepseek32|deepseek4|glm-dsa|glm5-next|dots3note|hy_v4"
         "|minimax-m3)$")


def numbers(ranges):
    return {n for part in ranges.split(",") for a, _, b in [part.partition("-")]
            for n in range(int(a), int(b or a) + 1)}


def said_at_load(log):
    """Of each architecture: the layers whose K and V are stored, those that stay uncompressed with the
    reason, and other state."""
    said, arch = {}, None
    for line in log.splitlines():
        if found := re.search(r"print_info: arch\s+= (\S+)", line):
            arch = found.group(1)
        stored, plain, state = said.setdefault(arch, (set(), {}, set()))
        if found := re.search(r"kvtamp: KV cache of \d+ cells(?: x \d+ streams)?; (.*)", line):
            for layers, fate in re.findall(r"layers? ([\d,-]+) (.*?)(?=; layers? \d|$)", found.group(1)):
                if fate.startswith("stored as"):
                    stored.update(numbers(layers))
                else:
                    plain.update(dict.fromkeys(numbers(layers), fate))
        elif found := re.search(r"kvtamp: (.*) \(\d+ tensors, .*\): as the host keeps it", line):
            state.add(found.group(1))
    return said


def check_doctor(programs, whole_run, folder, archs):
    said = said_at_load(whole_run.err)
    programs.run_test("test-llama-archs", "-o", folder, "-s", SEED, "-a", archs, cache=host.HOST)
    models = sorted(folder.glob("*.gguf"))
    for model in models:
        result = host.run([programs.command, "doctor", "-m", model, "-o", "json"],
                          env=host.environment(programs.plugin, host.HOST, {}))
        told = json.loads(result.out)["model"]
        stored, plain, state = said.get(told["architecture"], (set(), {}, set()))
        layers = told.get("layers", [])
        assert {layer["layer"] for layer in layers if layer["stored"]} == stored, model.name
        for layer in layers:
            assert layer["stored"] or layer["layer"] in plain, model.name
        assert (told["n_recurrent"] > 0) == ("recurrent state" in state), model.name
    return len(models)


def test_doctor_tells_beforehand_what_is_said_at_load(programs, whole_run, tmp_path):
    assert check_doctor(programs, whole_run, tmp_path, KINDS) > 20


def allocated(log):
    """Of each architecture, of each time it was loaded: (cells, layers, MiB of K, MiB of V) of each cache, and the
    MiB of recurrent state."""
    found, arch = {}, None
    for line in log.splitlines():
        if match := re.search(r"print_info: arch\s+= (\S+)", line):
            arch = match.group(1)
            found.setdefault(arch, []).append(([], []))
        elif match := re.search(r"llama_kv_cache: size =.*\(\s*(\d+) cells,\s*(\d+) layers,.*K \(\w+\):\s+([\d.]+) MiB, "
                                r"V \(\w+\):\s+([\d.]+) MiB", line):
            found[arch][-1][0].append(tuple(float(n) for n in match.groups()))
        elif match := re.search(r"llama_memory_recurrent: size =\s+([\d.]+) MiB", line):
            found[arch][-1][1].append(float(match.group(1)))
    return found


def check_plan(programs, whole_run, folder, archs):
    said = allocated(whole_run.err)
    programs.run_test("test-llama-archs", "-o", folder, "-s", SEED, "-a", archs, cache=host.HOST)
    models = sorted(folder.glob("*.gguf"))
    for model in models:
        result = host.run([programs.command, "plan", model, "--ctx", 256, "-o", "json"],
                          env=host.environment(programs.plugin, host.HOST, {}))
        assert result.code == 0, result.err
        told = json.loads(result.out)
        # Their index of the sparse attention and the like is a cache, too, and not in the plan.
        plain = any("sparse" in layer["why_not_stored"] for layer in told["layers"])

        def agrees(caches, states):
            left = list(caches)
            for swa in (False, True):
                layers = [layer for layer in told["layers"] if layer["swa"] == swa]
                mine = (256, len(layers), *(sum(layer["n_head_kv"] * layer[size] for layer in layers) * 2 * 256 / 2**20
                                            for size in ("head_size_k", "head_size_v")))
                same = [c for c in left if all(abs(a - b) < 0.006 for a, b in zip(c, mine))]
                if same:
                    left.remove(same[0])
                elif layers:
                    return False
            state = told["state_bytes_per_user"] / 2**20
            return (plain or all(c[1] == 0 for c in left)) and (plain or abs(sum(states) - state) < 0.006)
        assert any(agrees(*load) for load in said[told["architecture"]]), (model.name, told["layers"])
    return len(models)


def test_plan_counts_what_the_host_allocates(programs, whole_run, tmp_path):
    assert check_plan(programs, whole_run, tmp_path, KINDS) > 20


def test_the_docs_list_what_stays_uncompressed(whole_run):
    said = said_at_load(whole_run.err)
    table = (ROOT / "docs" / "hosts.md").read_text().split("## What is compressed")[1].split("##")[0]

    def listed(title):
        row, = re.findall(rf"^\| {title} \|([^|]*)\|", table, re.M)
        return set(re.findall(r"`([^`]+)`", row))
    assert listed("all of the cache") == {a for a, (_, plain, _) in said.items()
                                          if any("flash attention is off" in why for why in plain.values())}
    other = {a for a, (_, plain, _) in said.items() if any("read by the host" in why for why in plain.values())}
    assert listed("layers with sparse attention") == other - {"t5"}  # of which the docs tell, too
    assert {a for a, (*_, state) in said.items() if "recurrent state" in state} >= {"mamba", "jamba"}
    assert sum(bool(stored) and not plain for stored, plain, _ in said.values()) > 90
