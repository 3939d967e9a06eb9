"""The other half of test_many_sequences.py. ctest -C models -L models"""

from test_many_sequences import check_64_sequences


def test_all_in_one_cache(programs, tmp_path):
    check_64_sequences(programs, tmp_path, unified=True)
