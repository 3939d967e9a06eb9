"""All of test_archs.py with both types; a minute each. ctest -C models -L models"""

import pytest

from test_archs import coded, lossless  # noqa: F401


@pytest.mark.parametrize("cache, limit", [("k8v8", 1e-4), ("k4v4", 1e-2)])
def test_every_architecture_coded(programs, lossless, cache, limit):  # noqa: F811
    coded(programs, lossless, cache, ".", limit)
