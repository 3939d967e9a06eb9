#!/usr/bin/env python3
"""One question about a long document, answered by stock llama.cpp with each of several caches: the host's own types and kvtamp's. Prints the
answers and what a token takes in each cache, as markdown; greedy, so that it prints the same again.

usage: scripts/answers.py [--model NAME|FILE] [--document FILE] [--question TEXT] [--host-types f16,q4_0] [--caches k2.75v2.5]
"""

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import demo


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--build", type=Path, default=demo.ROOT / "build" / "release", metavar="DIR")
    parser.add_argument("--model", default="qwen2.5-coder-1.5b", metavar="NAME|FILE",
                        help="a name scripts/fetch knows, or a file")
    parser.add_argument("--question", default=demo.QUESTION, metavar="TEXT")
    parser.add_argument("--document", type=Path, default=demo.DOCUMENT, metavar="FILE")
    parser.add_argument("--host-types", default="f16,q4_0", metavar="LIST")
    parser.add_argument("--caches", default="k2.75v2.5", metavar="LIST", help="types of `kvtamp formats`")
    parser.add_argument("-n", type=int, default=64, metavar="N", help="tokens of an answer at most")
    parser.add_argument("-c", type=int, default=demo.N_CTX, metavar="N", help="context")
    args = parser.parse_args()
    model = Path(args.model) if Path(args.model).is_file() else demo.fetch(args.model)
    host_dir = os.environ.get("KVTAMP_LLAMA_DIR")
    completion = demo.find_completion(Path(host_dir) if host_dir else demo.fetch("llama.cpp"))
    threads = len(os.sched_getaffinity(0))

    rows = []
    with tempfile.TemporaryDirectory(prefix="kvtamp-answers-") as folder:
        prompt, stats_file = Path(folder) / "prompt.txt", Path(folder) / "stats.json"
        document = args.document.read_text(encoding="utf-8", errors="replace").strip()
        prompt.write_text(f"{document}\n\n{args.question}\n", encoding="utf-8")

        def ask(title, command, env=None):
            return demo.step(title, [*command, "-m", model, "-f", prompt, "-st", "--no-display-prompt", "--simple-io",
                                     "--temp", "0", "-n", args.n, "-c", args.c, "-t", threads, "-fa", "on", "-lv", 4],
                             env)

        for kind in filter(None, args.host_types.split(",")):
            out, log = ask(f"the host's {kind}", [completion, "-ctk", kind, "-ctv", kind])
            size_mib, cells = re.search(r"llama_kv_cache: size =\s*([\d.]+) MiB \(\s*(\d+) cells", log).groups()
            rows.append((f"host {kind}", float(size_mib) * 2**20 / int(cells), demo.clean_answer(out)))
        for kind in filter(None, args.caches.split(",")):
            out, _ = ask(f"kvtamp's {kind}", [args.build / "bin" / "kvtamp", "run", "--cache", kind, "--", completion],
                         {"KVTAMP_STATS": str(stats_file)})
            stats = json.loads(stats_file.read_text())
            rows.append((f"kvtamp {kind}", stats["stored_bytes"] / stats["cells_used"], demo.clean_answer(out)))
    print(f"{model.name}, asked: {args.question}\n\n| cache | bytes per token | answer |\n| --- | ---: | --- |")
    for name, size, answer in rows:
        print(f"| {name} | {size:,.0f} | {answer.replace('|', chr(92) + '|')} |")


if __name__ == "__main__":
    try:
        main()
    except demo.Failure as failure:
        demo.say(str(failure))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
