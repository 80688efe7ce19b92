"""Crashes of a disk in memory that forgets whatever POSIX lets it forget, before each step."""

import pytest

from tests.faults.crashes import crash_everywhere, crashed, empty
from tests.faults.store_driver import Plan


@pytest.mark.parametrize("begins", [True, False], ids=["a run that begins", "a run that goes on"])
def test_a_crash_before_any_step_costs_nothing_on_the_weakest_disk(tmp_path, count, soak, begins):
    start = empty if begins else crashed(tmp_path)
    counted = count("crashes of a disk in memory")
    crash_everywhere(start, lambda files: files, counted, Plan(records=30 * soak, shard_records=4))

    assert counted.points > 150
