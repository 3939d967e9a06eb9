#!/usr/bin/env python3
"""A server under load for a long time: 8 slots, requests of any length, contexts that shift, clients that
hang up. Nothing may fail or leak, and in f16 each answer must be what the same request gets alone.

usage: tests/host/soak.py [--minutes 20] [--cache f16] [--build DIR] [--llama-bin DIR] [--seed N]
       or ctest --test-dir build/release -C soak -L soak
"""

import argparse
import http.client
import json
import random
import sys
import tempfile
import threading
import time
import urllib.parse
from pathlib import Path

sys.dont_write_bytecode = True
import host  # noqa: E402

SLOTS = 8
CONTEXT = 512  # of each
BYTES_PER_TOKEN = 30 * 3 * 64 * 2 * 2  # layers, KV heads, head size, K and V, f16
MIB = 1024  # in the KiB of /proc


class Soak:
    def __init__(self, server, seed, end):
        self.server, self.end = server, end
        self.seed = seed
        self.text = server.tokens(host.document(30000))
        self.lock = threading.Lock()
        self.counts = {"answered": 0, "shifted": 0, "hung up": 0}
        self.tokens = 0
        self.kept = []  # (prompt, steps), a sample to be asked again
        self.failures = []
        self.resident = []  # (seconds since the start, KiB)

    def client(self, number):
        dice = random.Random(self.seed * 1000 + number)
        while time.monotonic() < self.end and not self.failures:
            try:
                self.request(dice)
            except Exception as error:  # the first is reported, all clients stop
                with self.lock:
                    self.failures.append(f"client {number}: {type(error).__name__}: {error}")

    def request(self, dice):
        n_prompt = int(2 ** dice.uniform(3, 8.5))
        at = dice.choice([0, dice.randrange(len(self.text) - n_prompt)])  # often with a prefix in common
        prompt = self.text[at:at + n_prompt]
        n = int(2 ** dice.uniform(2, 7))
        kind = dice.random()
        if kind < 0.15:
            self.hang_up(prompt, dice.uniform(0, 3))
            name, n = "hung up", 0
        elif kind < 0.25:
            n = CONTEXT - n_prompt + dice.randrange(10, 200)
            self.server.follow(prompt, n, limit=1200)
            name = "shifted"
        else:
            n = min(n, CONTEXT - n_prompt - 1)
            steps = self.server.follow(prompt, n, limit=1200)
            name = "answered"
            with self.lock:
                if len(self.kept) < 60:
                    self.kept.append((prompt, steps))
                elif dice.random() < 0.05:
                    self.kept[dice.randrange(60)] = (prompt, steps)
        with self.lock:
            self.counts[name] += 1
            self.tokens += n

    def hang_up(self, prompt, after):
        where = urllib.parse.urlparse(self.server.url)
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=600)
        connection.request("POST", "/completion", json.dumps(
            {"prompt": prompt, "n_predict": 400, "ignore_eos": True, "stream": True}),
            {"Content-Type": "application/json"})
        time.sleep(after)
        connection.close()

    def run(self):
        start = time.monotonic()
        clients = [threading.Thread(target=self.client, args=(i,)) for i in range(SLOTS)]
        for client in clients:
            client.start()
        while any(client.is_alive() for client in clients):
            self.resident.append((time.monotonic() - start, self.server.memory_kib("VmRSS")))
            time.sleep(min(5, max(0.1, self.end - time.monotonic())))
        for client in clients:
            client.join()

    def check_memory(self):
        total = self.resident[-1][0]
        early = max(kib for s, kib in self.resident if total / 4 <= s <= total / 2)
        late = max(kib for s, kib in self.resident if s > total / 2)
        course = [self.resident[len(self.resident) * i // 10][1] // MIB for i in range(10)]
        print(f"resident: {early // MIB} MiB at most in the second quarter, {late // MIB} MiB after it; each"
              f" tenth of the time: {course}")
        if late > early + 48 * MIB:  # the host with its own cache: 32 MiB
            self.failures.append("memory grew")

    def check_alone(self):
        walks = [host.walk(self.server, prompt, steps, cache_prompt=False, limit=1200)
                 for prompt, steps in self.kept]
        moved = sorted(nats for walk in walks for nats in walk.moved)
        partings = [nats for walk in walks for _, nats in walk.partings]
        print(f"alone: {len(walks)} requests, {len(moved)} tokens, moved by {sum(moved) / len(moved):.4f} nats"
              f" in the mean, {moved[len(moved) * 99 // 100]:.3f} at 99 %; {len(partings)} partings, of at most"
              f" {max(partings, default=0):.3f} nats")
        # What the host's own cache does by meeting other requests in a batch; see test_greedy.py.
        if sum(moved) / len(moved) > 0.08 or sum(nats > 0.5 for nats in partings) > len(moved) // 200:
            self.failures.append("answers differ from those given alone")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = Path(__file__).resolve().parents[2]
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--cache", default="f16", help="or `host` for the host's own, to compare with")
    parser.add_argument("--build", type=Path, default=root / "build" / "release")
    parser.add_argument("--llama-bin", type=Path)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100000)
    args = parser.parse_args()

    def fetched(name):
        answer = host.run([root / "scripts" / "fetch", "--cached", name])
        if answer.code:
            sys.exit(f"not there: scripts/fetch {name}")
        return Path(answer.out.strip())

    programs = host.Programs(llama=args.llama_bin or fetched("llama.cpp") / "bin",
                             plugin=args.build.resolve() / "lib" / "libggml-kvtamp.so",
                             command=args.build.resolve() / "bin" / "kvtamp", model=fetched("smollm2"))
    print(f"{args.minutes} minutes, cache {args.cache}, seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        with programs.server("-np", SLOTS, "-c", SLOTS * CONTEXT, "--context-shift", cache=host.HOST if args.cache == "host" else args.cache,
                             log=Path(folder) / "log", LLAMA_ARG_CACHE_RAM=0,
                             KVTAMP_STATS=Path(folder) / "stats") as server:
            soak = Soak(server, args.seed, time.monotonic() + args.minutes * 60)
            soak.run()
            print(f"{soak.counts}, {soak.tokens} tokens", flush=True)
            if not soak.failures:
                soak.check_memory()
                if args.cache in ("f16", "host"):
                    soak.check_alone()
            code = server.stop()
            stats = Path(folder) / "stats"
            if stats.exists():  # however the load was, no more than all cells in f16 and what comes on top
                peak = json.loads(stats.read_text())["resident_peak_bytes"]
                if peak > 1.1 * SLOTS * CONTEXT * BYTES_PER_TOKEN:
                    soak.failures.append(f"the cache took {peak} bytes")
            if code:
                soak.failures.append(f"the server ended with {code}")
            errors = [line for line in server.log().splitlines() if " E " in line[:30]]
            soak.failures += errors[:5]
            print(host.tail(server.log(), 1))
            if soak.failures:
                print(host.tail(server.log(), 40), file=sys.stderr)
    for failure in soak.failures:
        print("FAILED:", failure)
    return 1 if soak.failures else 0


if __name__ == "__main__":
    sys.exit(main())
