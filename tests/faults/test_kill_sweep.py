"""SIGKILL before every system call that changes a file; then a resume, and an audit after each."""

import pytest

from tests.faults.drivers import MUTATING
from tests.faults.store_driver import Plan
from tests.faults.sweep import Sweep, empty, prepared


@pytest.mark.parametrize(
    ("options", "only"), [((), MUTATING), (("--write-max", 150), ("write",))], ids=["whole", "short writes"]
)
def test_a_run_killed_before_any_change_goes_on_with_nothing_lost_or_doubled(
    launchers, tmp_path, count, soak, options, only
):
    plan = Plan(records=30 * soak)
    sweep = Sweep(launchers=launchers, scratch=tmp_path, prepare=empty, plan=plan, options=options, only=only)

    assert sweep.run(count("kills in a run")) > 100 * soak


def test_a_start_killed_before_any_change_goes_on_with_nothing_lost_or_doubled(
    launchers, tmp_path, count, soak
):
    plan = Plan(records=30 * soak)
    sweep = Sweep(launchers=launchers, scratch=tmp_path, prepare=prepared(tmp_path, plan), plan=plan)

    assert sweep.run(count("kills in a recovery and after it")) > 100
