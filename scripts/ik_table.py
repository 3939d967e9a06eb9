#!/usr/bin/env python3
"""The table of scripts/bench-ik, from what the programs printed: medians over the rounds, and ratios of
the same round to the host's f16.

usage: ik_table.py FOLDER      with files ROUND.ik.*.json (llama-bench -o json of ik_llama.cpp) and
                               ROUND.own.*.jsonl (kvtamp bench speed -o jsonl), all of one model
"""

import collections
import json
import statistics
import sys
from pathlib import Path

BASE = "host f16"


def test_of(n_prompt, n_gen, n_depth):
    """(what, tokens, depth), sorted as they are shown."""
    return ("tg", n_gen, n_depth) if n_gen else ("pp", n_prompt, n_depth)


def rows_of(path):
    """(model, cache, test, tokens per second) of each row in a file."""
    text = path.read_text(encoding="utf-8")
    if ".ik." not in path.name:
        for row in map(json.loads, text.splitlines()):
            cache = f"{row['device']} {row['cache_type']}" + (f" {row['settings']}" if row["settings"] else "")
            yield row["model_type"], cache, test_of(row["n_prompt"], row["n_gen"], row["n_depth"]), row["median_ts"]
        return
    # It chats on stdout as well, before and after.
    for row in json.JSONDecoder().raw_decode(text[text.index("[\n"):])[0]:
        cache = f"ik {row['type_k']}" + (f"/{row['type_v']}" if row["type_v"] != row["type_k"] else "")
        # Its decode at a depth is "a prompt, then so many tokens, of which only these are timed".
        depth = row["n_prompt"] if row["n_gen"] else 0
        yield row["model_type"], cache, test_of(row["n_prompt"], row["n_gen"], depth), row["avg_ts"]


def attention_ms(rates, test):
    """How much longer a step takes at the depth than at none: what the depth's attention costs, whatever
    the weights take. None where nothing was measured at depth 0."""
    what, tokens, depth = test
    at_none = rates.get((what, tokens, 0))
    return None if depth == 0 or at_none is None else 1e3 / rates[test] - 1e3 / at_none


def summary(rounds):
    """rounds: [{cache: {test: t/s}}]. {cache: {test: (t/s, ratio to BASE, ms of attention)}}, medians."""
    samples = collections.defaultdict(lambda: collections.defaultdict(list))
    for caches in rounds:
        for cache, rates in caches.items():
            for test, rate in rates.items():
                base = caches.get(BASE, {}).get(test)
                samples[cache][test].append((rate, base and rate / base, attention_ms(rates, test)))

    def median(values):
        values = [value for value in values if value is not None]
        return statistics.median(values) if values else None
    return {cache: {test: tuple(map(median, zip(*parts))) for test, parts in tests.items()}
            for cache, tests in samples.items()}


def markdown(model, found):
    tests = sorted({test for rates in found.values() for test in rates})
    with_attention = [test for test in tests
                      if any(rates.get(test, (0, 0, None))[2] is not None for rates in found.values())]
    head = ["cache"]
    for what, tokens, depth in tests:
        head += [f"{what}{tokens}" + (f" @ d{depth}" if depth else "") + ", t/s", f"of {BASE}"]
    head += [f"d{test[2]} costs, ms/token" for test in with_attention]
    lines = [f"{model}:", "", f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    for cache, rates in found.items():
        cells = [cache]
        for test in tests:
            rate, ratio, _ = rates.get(test, (None, None, None))
            cells += ["" if rate is None else f"{rate:.2f}", "" if ratio is None else f"{ratio:.2f}"]
        for test in with_attention:
            cost = rates.get(test, (None, None, None))[2]
            cells.append("" if cost is None else f"{cost:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    if len(sys.argv) != 2:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    rounds = collections.defaultdict(lambda: collections.defaultdict(dict))
    model = ""
    # The host's first, then kvtamp's, then ik's.
    for path in sorted(Path(sys.argv[1]).glob("*.json*"), key=lambda path: (".ik." in path.name, path.name)):
        number = int(path.name.split(".")[0])
        for name, cache, test, rate in rows_of(path):
            model = model or name
            rounds[number][cache][test] = rate
    print(markdown(model, summary(list(rounds.values()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
