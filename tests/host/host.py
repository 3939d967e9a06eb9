"""Starts the stock programs, with the host's own cache or with ours, and reads what they say.

Every program runs with a time limit, in a group of its own that is killed whole, and dies with us.
"""

import ctypes
import dataclasses
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

THREADS = os.environ.get("KVTAMP_TEST_THREADS", "2")
HOST = None  # as a cache: the host's own, in f16
DEFAULT = "auto"  # as a cache: ours, as shipped

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def die_with_parent():
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def environment(plugin, cache, settings):
    """Nothing of the caller's that would change the host, but for the choice of kernels."""
    env = {name: value for name, value in os.environ.items()
           if name == "KVTAMP_CPU" or not name.startswith(("KVTAMP_", "LLAMA_", "GGML_"))}
    # Threads that wait asleep: spinning ones starve each other when the machine is busy.
    env["OMP_WAIT_POLICY"] = "passive"
    env["LC_ALL"] = "C.UTF-8"
    env["LLAMA_ARG_FLASH_ATTN"] = "on"
    if cache is not HOST:
        # What `kvtamp run` sets.
        env["GGML_BACKEND_PATH"] = str(plugin)
        env["LLAMA_ARG_DEVICE"] = "KVTAMP"
        env["LLAMA_ARG_N_GPU_LAYERS"] = "999"
        env["KVTAMP_CACHE_TYPE"] = cache
    for name, value in settings.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = str(value)
    return env


@dataclasses.dataclass
class Finished:
    code: int
    out: str
    err: str

    def lines(self, *words):
        """Lines of the log that have all of `words`, without the time and level in front."""
        return lines_with(self.err, *words)


def lines_with(text, *words):
    stamp = re.compile(r"^\d+\.\d\d\.\d{3}\.\d{3} [A-Z] ")
    return [stamp.sub("", line).strip() for line in text.splitlines()
            if all(word in line for word in words)]


def without_colours(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def tail(text, n=25):
    return "\n".join(text.splitlines()[-n:])


# Seconds until a program is taken to hang. It says nothing of speed: machines may be slow, and busy.
LIMIT = 600


def run(command, env=None, limit=LIMIT, stdin=None, cwd=None):
    """Runs a command to its end. A program that ends by a signal, or not at all, fails the test."""
    process = subprocess.Popen([str(word) for word in command], env=env, text=True,
                               errors="replace", stdin=stdin or subprocess.DEVNULL, cwd=cwd,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               start_new_session=True, preexec_fn=die_with_parent)
    try:
        out, err = process.communicate(timeout=limit)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise AssertionError(f"{command[0]} took more than {limit} s:\n{tail(err)}") from None
        raise
    assert process.returncode >= 0, f"{command[0]} died of signal {-process.returncode}:\n{tail(err)}"
    return Finished(process.returncode, out, err)


@dataclasses.dataclass(frozen=True)
class Programs:
    llama: Path  # folder of llama-server and the like
    plugin: Path
    command: Path
    model: Path

    def with_model(self, model):
        return dataclasses.replace(self, model=model)

    def run(self, program, *args, cache, ok=True, limit=LIMIT, **settings):
        """A stock program with the model. `settings`: variables, None to unset one."""
        result = run([self.llama / program, "-m", self.model, "-t", THREADS, *args],
                     env=environment(self.plugin, cache, settings), limit=limit)
        assert not ok or result.code == 0, f"{program} exited with {result.code}:\n{tail(result.err)}"
        return result

    def run_test(self, program, *args, cache, ok=True, limit=LIMIT, cwd=None, **settings):
        """One of the host's own tests, which has options of its own and may load no backends itself."""
        settings["LD_PRELOAD"] = self.plugin.with_name("libkvtamp_preload.so")
        result = run([self.llama / program, *args], env=environment(self.plugin, cache, settings),
                     limit=limit, cwd=cwd)
        result = dataclasses.replace(result, out=without_colours(result.out),
                                     err=without_colours(result.err))
        assert not ok or result.code == 0, (f"{program} exited with {result.code}:\n{tail(result.out)}\n"
                                            f"{tail(result.err)}")
        return result

    def complete(self, prompt, n, *args, cache, ctx=2048, **more):
        """The n most likely tokens after `prompt`, by llama-completion."""
        return self.run("llama-completion", "-no-cnv", "--no-display-prompt", "--temp", "0", "-c", ctx,
                        "-n", n, "-p", prompt, *args, cache=cache, **more)

    def server(self, *args, cache, log, **settings):
        return Server(self, args, cache, log, settings)


class Server:
    """llama-server on a port of its own choice; to be used in a `with`."""

    def __init__(self, programs, args, cache, log, settings):
        self.command = [programs.llama / "llama-server", "-m", programs.model, "-t", THREADS,
                        "--host", "127.0.0.1", "--port", "0", *args]
        self.env = environment(programs.plugin, cache, settings)
        self.log_path = Path(log)
        self.url = None

    def __enter__(self):
        with open(self.log_path, "w") as log:
            self.process = subprocess.Popen([str(word) for word in self.command], env=self.env,
                                            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                            start_new_session=True, preexec_fn=die_with_parent)
        try:
            self.wait_until_ready(limit=LIMIT)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_):
        self.kill()

    def wait_until_ready(self, limit):
        end = time.monotonic() + limit
        while time.monotonic() < end:
            assert self.process.poll() is None, f"the server exited:\n{tail(self.log())}"
            if self.url is None:
                found = re.search(r"listening on (http://\S+)", self.log())
                self.url = found and found.group(1)
            elif self.get("/health")[0] == 200:
                return
            time.sleep(0.1)
        raise AssertionError(f"the server was not ready after {limit} s:\n{tail(self.log())}")

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self):
        """As a user would; the exit code."""
        self.process.terminate()
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server did not stop:\n{tail(self.log())}") from None

    def log(self):
        return self.log_path.read_text(errors="replace")

    def memory_kib(self, key):
        """VmHWM or VmRSS, from /proc."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"^{key}:\s+(\d+) kB", status, re.M).group(1))

    def get(self, path):
        return self.request(path, None)

    def post(self, path, body):
        return self.request(path, json.dumps(body).encode())

    def request(self, path, data, limit=LIMIT):
        """(status, parsed JSON); an HTTP error is an answer too."""
        request = urllib.request.Request(self.url + path, data,
                                         {"Content-Type": "application/json"} if data else {})
        # Not through a proxy of the user's.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=limit) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def complete(self, prompt, n, **body):
        """The whole answer of POST /completion to a greedy request; `content` is the text."""
        status, answer = self.post("/completion", {"prompt": prompt, "n_predict": n, "temperature": 0,
                                                   **body})
        assert status == 200, f"HTTP {status}: {answer}\n{tail(self.log())}"
        return answer

    def follow(self, prompt, n, limit=LIMIT, **body):
        """A greedy answer of exactly n tokens with what each was chosen from; see Step."""
        status, answer = self.request("/completion", json.dumps({
            "prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, "n_probs": 16,
            **body}).encode(), limit=limit)
        assert status == 200, f"HTTP {status}: {answer}\n{tail(self.log())}"
        steps = [Step(p["id"], {t["id"]: t["logprob"] for t in p["top_logprobs"]})
                 for p in answer["completion_probabilities"]]
        assert len(steps) == n, answer
        return steps

    def tokens(self, text):
        status, answer = self.post("/tokenize", {"content": text, "add_special": True})
        assert status == 200, answer
        return answer["tokens"]

    def slot(self, number, action, filename=None):
        """What POST /slots/N?action=… answers, which must be well."""
        status, answer = self.post(f"/slots/{number}?action={action}", {"filename": filename})
        assert status == 200, f"HTTP {status}: {answer}\n{tail(self.log())}"
        return answer


# --- Text to work on -----------------------------------------------------------------------------

GPL = Path("/usr/share/common-licenses/GPL-3")  # of Debian's base-files


def document(n_chars, secret=None):
    """The licence's text from its start, with one sentence near it that no model has seen: it can be
    known from the cache alone. Five characters make about one token."""
    text = " ".join(GPL.read_text()[:n_chars].split())
    if secret:
        at = text.index("Preamble")
        text = f"{text[:at]}The serial number printed on this copy is {secret}. {text[at:]}"
    return text


def question(n_chars, secret):
    """A prompt that a model with a sound cache goes on with " `secret`"."""
    return document(n_chars, secret) + "\n\nThe serial number printed on this copy is"


def same_words(a, b):
    """How many words the two texts begin with alike."""
    n = 0
    for x, y in zip(a.split(), b.split()):
        if x != y:
            break
        n += 1
    return n


def distinct_share(text):
    words = text.split()
    return len(set(words)) / max(1, len(words))


# --- Greedy answers, token for token -------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Step:
    token: int
    logprobs: dict  # of the few most likely tokens


@dataclasses.dataclass
class Walk:
    """How a server went along with an answer that another had given."""
    moved: list = dataclasses.field(default_factory=list)  # by how many nats each choice was likelier
    partings: list = dataclasses.field(default_factory=list)  # (token, by how many nats it was chosen)


def walk(server, prompt, reference, **body):
    """Lets `server` answer too. Where it parts from the reference, the parting is noted, and it goes on
    from the reference's token."""
    result = Walk()
    at = 0
    while at < len(reference):
        given = prompt + [step.token for step in reference[:at]]
        for mine in server.follow(given, len(reference) - at, **body):
            theirs = reference[at]
            if theirs.token in mine.logprobs and theirs.token in theirs.logprobs:
                result.moved.append(abs(mine.logprobs[theirs.token] - theirs.logprobs[theirs.token]))
            at += 1
            if mine.token != theirs.token:
                least = min(theirs.logprobs.values())
                result.partings.append((at - 1, theirs.logprobs.get(theirs.token, 0)
                                        - theirs.logprobs.get(mine.token, least - 1)))
                break
    return result
