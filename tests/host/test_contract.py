"""docs/host-contract.md names tests: each of them exists."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def sources(pattern):
    files = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True,
                           check=True).stdout.split()
    return {name: (ROOT / name).read_text() for name in files}


def test_every_test_it_names_exists():
    text = (ROOT / "docs" / "host-contract.md").read_text()
    gtests = set()
    for source in sources("*_test.cc").values():
        gtests |= {f"{suite}.{name}" for suite, name in
                   re.findall(r"^TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\)", source, re.M)}
    named = set(re.findall(r"`([A-Z]\w+\.[A-Z]\w+)`", text))
    assert len(named) > 40
    assert not named - gtests

    named = set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", text))
    assert len(named) > 8
    for file, test in named:
        assert re.search(rf"^def {test}\(", (ROOT / "tests" / "host" / file).read_text(), re.M), (file, test)


def test_every_point_is_there():
    text = (ROOT / "docs" / "host-contract.md").read_text()
    must, traps = text.split("## Traps")
    for part, n in ((must, 13), (traps, 15)):
        assert [int(x) for x in re.findall(r"^\| (\d+) \|", part, re.M)] == list(range(1, n + 1))
