"""Options of the host tests. By hand: scripts/pytest tests/host -k slots"""

import subprocess
from pathlib import Path

import pytest

pytest.register_assert_rewrite("host")  # else an assert in host.py says only that it failed

import host  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def pytest_addoption(parser):
    group = parser.getgroup("kvtamp")
    group.addoption("--build", default=str(ROOT / "build" / "release"), metavar="DIR",
                    help="build folder with bin/kvtamp and lib/libggml-kvtamp.so")
    group.addoption("--llama-bin", metavar="DIR",
                    help="where llama-server and the like are (else what scripts/fetch built)")


def fetched(name):
    """The path of what scripts/fetch has fetched, or None."""
    answer = subprocess.run([ROOT / "scripts" / "fetch", "--cached", name], capture_output=True,
                            text=True)
    return Path(answer.stdout.strip()) if answer.returncode == 0 else None


@pytest.fixture(scope="session")
def programs(pytestconfig):
    """Where the programs are; see host.Programs."""
    build = Path(pytestconfig.getoption("--build")).resolve()
    given = pytestconfig.getoption("--llama-bin")
    prefix = None if given else fetched("llama.cpp")
    assert given or prefix, "no llama.cpp: run scripts/fetch llama.cpp, or give --llama-bin"
    model = fetched("smollm2")
    assert model, "no model: run scripts/fetch smollm2"
    return host.Programs(llama=Path(given) if given else prefix / "bin",
                         plugin=build / "lib" / "libggml-kvtamp.so",
                         command=build / "bin" / "kvtamp", model=model)


@pytest.fixture(scope="session")
def other_model(programs):
    """A function: the programs with another model of scripts/fetch; skips where it is not there."""
    def take(name):
        model = fetched(name)
        if model is None:
            pytest.skip(f"not fetched: scripts/fetch {name}")
        return programs.with_model(model)
    return take
