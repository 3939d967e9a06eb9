#!/usr/bin/env python3
"""A long document and a question about it, asked twice: stock llama.cpp with its own f16 cache, and the
same program with the same model through kvtamp's default. Prints both answers and what each cost; every
figure comes from this run. The same as JSON in build/demo.json.

usage: scripts/demo.py [--build DIR] [--model FILE] [--document FILE] [--question TEXT] [--cache TYPE]
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# In package base-files, so on every Debian machine.
DOCUMENT = Path("/usr/share/common-licenses/MPL-2.0")
QUESTION = "Who is the steward of this license?"
# A small model rambles on; the answer is what it says first.
ANSWER_TOKENS = 64
N_CTX = 4352
# One page of the document is enough for a first figure of quality; `kvtamp eval` gives more.
EVAL_CTX = 1024


class Failure(Exception):
    """Ends the program; the text says what to do."""


def say(text):
    print(f"demo: {text}", file=sys.stderr, flush=True)


def fetch(name):
    result = subprocess.run([ROOT / "scripts" / "fetch", name], stdout=subprocess.PIPE, text=True)
    if result.returncode != 0:
        raise Failure(f"scripts/fetch {name} failed")
    return Path(result.stdout.strip())


def find_completion(host):
    for folder in [host / "bin", *sorted(host.glob("build*/bin"))]:
        if (folder / "llama-completion").is_file():
            return folder / "llama-completion"
    raise Failure(f"no llama-completion in bin/ or build*/bin/ of {host}: build that target of llama.cpp")


def step(text, command, env=None):
    """Runs a command; shows that time passes. Returns its stdout and stderr."""
    started = time.monotonic()
    terminal = sys.stderr.isatty()
    if not terminal:
        say(f"{text} ...")
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen([str(c) for c in command], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                   env={**os.environ, **(env or {})})
        try:
            while True:
                try:
                    process.wait(timeout=0.5)
                    break
                except subprocess.TimeoutExpired:
                    if terminal:
                        print(f"\r\033[Kdemo: {text} ... {time.monotonic() - started:.0f} s", end="",
                              file=sys.stderr, flush=True)
        except BaseException:
            process.kill()
            process.wait()
            raise
        out.seek(0)
        err.seek(0)
        stdout, stderr = out.read(), err.read()
    if terminal:
        print("\r\033[K", end="", file=sys.stderr)
    say(f"{text}: {time.monotonic() - started:.0f} s")
    if process.returncode != 0:
        tail = "\n".join(stderr.strip().splitlines()[-15:])
        raise Failure(f"{Path(str(command[0])).name} ended with {process.returncode}:\n{tail}")
    return stdout, stderr


def number(pattern, text, what):
    match = re.search(pattern, text)
    if not match:
        raise Failure(f"the host's log does not say {what}")
    return float(match.group(1))


def clean_answer(text):
    """What the model said, without the host's marks, up to the last whole sentence if there is one."""
    text = " ".join(text.replace("[end of text]", "").replace("> EOF by user", "").split())
    sentences = re.match(r".*[.!?](?=\s|$)", text)
    return sentences.group(0) if sentences else text


def ask(title, command, prompt, model, threads, env=None):
    stdout, stderr = step(title, [
        *command, "-m", model, "-f", prompt, "-st", "--no-display-prompt", "--simple-io", "--temp", "0",
        "-n", ANSWER_TOKENS, "-c", N_CTX, "-t", threads, "-fa", "on", "-lv", "4"], env)
    tokens = number(r"prompt eval time =\s*[\d.]+ ms /\s*(\d+) tokens", stderr, "how many tokens it read")
    generated = number(r" eval time =\s*[\d.]+ ms /\s*(\d+) runs", stderr, "how many tokens it wrote")
    return {
        "prefill_tps": number(r"prompt eval time =.*?([\d.]+) tokens per second", stderr, "its prefill speed"),
        "decode_tps": number(r"\d+ runs\s*\(.*?([\d.]+) tokens per second", stderr, "its decode speed"),
        "n_prompt": int(tokens),
        "n_cells": int(tokens + generated),
        "answer": clean_answer(stdout),
        "log": stderr,
    }


def table(rows):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rule = ["-" * width for width in widths]
    for row in [rows[0], rule, *rows[1:]]:
        print("| " + " | ".join(cell.ljust(w) if i == 0 else cell.rjust(w)
                                 for i, (cell, w) in enumerate(zip(row, widths))) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release", metavar="DIR")
    parser.add_argument("--model", type=Path, metavar="FILE", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--document", type=Path, default=DOCUMENT, metavar="FILE")
    parser.add_argument("--question", default=QUESTION, metavar="TEXT")
    parser.add_argument("--cache", default="auto", metavar="TYPE", help="a type of `kvtamp formats`")
    args = parser.parse_args()
    started = time.monotonic()

    kvtamp = args.build / "bin" / "kvtamp"
    plugin = args.build / "lib" / "libggml-kvtamp.so"
    for file in (kvtamp, plugin):
        if not file.is_file():
            raise Failure(f"{file} is not there: `make release` builds it")
    if not args.document.is_file():
        raise Failure(f"{args.document} is not there (package base-files): name another text with --document")
    host_dir = os.environ.get("KVTAMP_LLAMA_DIR")
    completion = find_completion(Path(host_dir) if host_dir else fetch("llama.cpp"))
    model = args.model or fetch("smollm2")
    threads = len(os.sched_getaffinity(0))
    # Settings of the user's own would make this another demo.
    for name in [name for name in os.environ if name.startswith(("LLAMA_ARG_", "KVTAMP_", "GGML_BACKEND"))]:
        if name != "KVTAMP_LLAMA_DIR":
            del os.environ[name]

    with tempfile.TemporaryDirectory(prefix="kvtamp-demo-") as folder:
        prompt, stats_file = Path(folder) / "prompt.txt", Path(folder) / "stats.json"
        document = args.document.read_text(encoding="utf-8", errors="replace").strip()
        prompt.write_text(f"{document}\n\n{args.question}\n", encoding="utf-8")

        host = ask("asking through the host's f16 cache", [completion], prompt, model, threads)
        ours = ask("asking through kvtamp", [kvtamp, "run", "--cache", args.cache, "--", completion], prompt,
                   model, threads, {"KVTAMP_STATS": str(stats_file)})
        stats = json.loads(stats_file.read_text())
        evaluation, _ = step("comparing predictions on a page of text", [
            kvtamp, "eval", "-m", model, "-f", args.document, "-c", EVAL_CTX, "--chunks", "1", "-ub", "512", "-q",
            "-t", threads, "--cache", args.cache, "-o", "json"])
        evaluation = json.loads(evaluation)

    size_mib, cells = re.search(r"llama_kv_cache: size =\s*([\d.]+) MiB \(\s*(\d+) cells", host["log"]).groups()
    host_per_token = float(size_mib) * 2**20 / int(cells)
    exact = evaluation["kv_bytes_logical_per_token"]
    if abs(exact / host_per_token - 1) < 1e-3:
        host_per_token = exact  # the log rounds to 0.01 MiB
    cells_used = stats["cells_used"]
    if cells_used == 0 or stats["stored_bytes"] == 0:
        raise Failure("the plug-in kept nothing: " + json.dumps(stats))
    logical, stored = stats["logical_bytes"] / cells_used, stats["stored_bytes"] / cells_used
    resident = stats["resident_total_bytes"] / cells_used
    ppl_ratio, kld = evaluation["ppl_ratio"], evaluation["kld_mean"]

    result = {
        "document": str(args.document), "question": args.question, "model": model.name, "n_threads": threads,
        "n_prompt": host["n_prompt"], "cache_type": stats["type"], "format_k": stats["format_k"],
        "format_v": stats["format_v"], "ggml_version": stats["ggml_version"], "cpu": stats["cpu"],
        "host": {
            "prefill_tps": host["prefill_tps"], "decode_tps": host["decode_tps"],
            "kv_bytes_per_token": host_per_token,
            "resident_bytes_per_token": host_per_token * int(cells) / host["n_cells"],
            "answer": host["answer"],
        },
        "kvtamp": {
            "prefill_tps": ours["prefill_tps"], "decode_tps": ours["decode_tps"],
            "kv_bytes_per_token": stored, "logical_bytes_per_token": logical,
            "resident_bytes_per_token": resident, "answer": ours["answer"],
            "bits_per_element": stats["bits_per_element"], "cells": cells_used,
        },
        "kv_factor": host_per_token / stored,
        "ppl_ratio": ppl_ratio, "ppl": evaluation["ppl"], "ppl_base": evaluation["ppl_base"],
        "kld_mean": kld, "kld_se": evaluation["kld_se"], "same_top_p": evaluation["same_top_p"],
        "eval": {"n_ctx": EVAL_CTX, "n_scored": evaluation["n_scored"]},
        "seconds": time.monotonic() - started,
    }
    out = ROOT / "build" / "demo.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")

    print(f"\nDocument: {args.document}, {host['n_prompt']} tokens with the question\nQuestion: {args.question}")
    for name, answer in (("f16", host["answer"]), ("kvtamp", ours["answer"])):
        print(textwrap.fill(answer, 96, initial_indent=f"\n{name:>6}: ", subsequent_indent=" " * 8))
    print()
    host_resident = result["host"]["resident_bytes_per_token"]
    table([
        ["", "host f16", f"kvtamp {stats['type']}", "ratio"],
        ["KV bytes per token, as f16", f"{host_per_token:,.0f}", f"{logical:,.0f}", ""],
        ["  stored, all overhead", f"{host_per_token:,.0f}", f"{stored:,.0f}", f"{host_per_token / stored:.2f}x less"],
        ["  resident in memory", f"{host_resident:,.0f}", f"{resident:,.0f}", f"{host_resident / resident:.2f}x less"],
        ["prefill, tokens/s", f"{host['prefill_tps']:.1f}", f"{ours['prefill_tps']:.1f}",
         f"{ours['prefill_tps'] / host['prefill_tps']:.2f}x"],
        ["decode, tokens/s", f"{host['decode_tps']:.1f}", f"{ours['decode_tps']:.1f}",
         f"{ours['decode_tps'] / host['decode_tps']:.2f}x"],
        ["perplexity of a page", f"{evaluation['ppl_base']:.3f}", f"{evaluation['ppl']:.3f}", f"{ppl_ratio:.4f}x"],
        ["mean KL divergence", "0", f"{kld:.4f}", ""],
    ])
    print(f"\nK {stats['format_k']}, V {stats['format_v']}; perplexity and KL: {evaluation['n_scored']} positions "
          f"of the document;\n{threads} threads, kernels {stats['cpu']}; {result['seconds']:.0f} s in all; "
          f"the figures are in {out.relative_to(ROOT)}")


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        say(str(failure))
        sys.exit(1)
    except KeyboardInterrupt:
        say("stopped")
        sys.exit(130)
