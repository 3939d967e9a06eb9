"""All of test_archs.py with both types; a minute each. ctest -C models -L models"""

import pytest

from test_archs import check_doctor, check_plan, coded, lossless, whole_run  # noqa: F401


@pytest.mark.parametrize("cache, limit", [("k8v8", 1e-4), ("k4v4", 1e-2)])
def test_every_architecture_coded(programs, lossless, cache, limit):  # noqa: F811
    coded(programs, lossless, cache, ".", limit)


def test_doctor_tells_of_every_architecture(programs, whole_run, tmp_path):  # noqa: F811
    assert check_doctor(programs, whole_run, tmp_path, ".") > 120


def test_plan_counts_every_architecture(programs, whole_run, tmp_path):  # noqa: F811
    assert check_plan(programs, whole_run, tmp_path, ".") > 120
