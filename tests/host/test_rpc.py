"""ggml-rpc-server: beside our device, a server computes whole layers, and their cache is its own. A server
cannot offer our device to others: it says so, and serves as it would without us."""

import contextlib
import json
import socket
import subprocess
import time

import pytest

import host
from host import DEFAULT, HOST


@contextlib.contextmanager
def rpc_server(programs, folder, cache):
    """The endpoint, and the path of the log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "rpc.log"
    with open(log, "w") as out:
        server = subprocess.Popen([programs.llama / "ggml-rpc-server", "-p", str(port), "-t", host.THREADS],
                                  env=host.environment(programs.plugin, cache, {}), stdout=out, stderr=out,
                                  stdin=subprocess.DEVNULL, preexec_fn=host.die_with_parent)
    try:
        end = time.monotonic() + 30
        while True:
            assert server.poll() is None and time.monotonic() < end, log.read_text()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"127.0.0.1:{port}", log
        assert server.poll() is None, log.read_text()
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("devices, layers", [
    (["-dev", "KVTAMP"], range(30, 31)),
    (["-dev", "KVTAMP,RPC0", "-ts", "1,1"], range(10, 21)),
    (["-dev", "RPC0,KVTAMP", "-ts", "1,1"], range(10, 21)),
    (["-dev", "RPC0"], range(0, 1)),
])
def test_a_server_beside_us(programs, tmp_path, devices, layers):
    stats = tmp_path / "stats.json"
    with rpc_server(programs, tmp_path, HOST) as (endpoint, _):
        answer = programs.complete(host.question(1500, "48213"), 8, "--rpc", endpoint, *devices,
                                   cache=DEFAULT, LLAMA_ARG_DEVICE=None, KVTAMP_STATS=stats)
    assert answer.out.startswith(" 48213")
    caches = json.loads(stats.read_text())["caches"]
    assert sum(len(cache["layers"]) for cache in caches) in layers
    assert len(answer.lines("tokens written")) == (0 if layers == range(0, 1) else 1)


def test_a_server_does_not_offer_us(programs, tmp_path):
    with rpc_server(programs, tmp_path, DEFAULT) as (endpoint, log):
        answer = programs.complete("The capital of France is", 8, "--rpc", endpoint, "-dev", "RPC0",
                                   cache=HOST, ctx=512)
        assert answer.out.startswith(" Paris.")
    lines = [line for line in log.read_text().splitlines() if line.startswith("kvtamp")]
    assert len(lines) == 1 and "GGML_BACKEND_PATH" in lines[0], log.read_text()
    # Not even by name.
    refused = host.run([programs.llama / "ggml-rpc-server", "-d", "KVTAMP"],
                       env=host.environment(programs.plugin, DEFAULT, {}), limit=30)
    assert refused.code == 1 and "unknown device: KVTAMP" in refused.err
