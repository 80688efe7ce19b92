"""Each way in which the store could be broken, and which of the tests here notice it.

A kill leaves what the system has in memory, so it shows no sync that is left out. The disk in memory shows
what costs records, but not a list that lags, for that costs none; the replay of a trace shows that too.
Today's file systems forgive most of what POSIX does not promise: a power loss on one of them shows the
grossest fault only.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from genpipe.edges.files import OsFiles
from tests.faults.audits import Count, verdict_on
from tests.faults.crashes import crash_everywhere, crashed, empty
from tests.faults.drivers import Launchers
from tests.faults.folders import left_by_crashes
from tests.faults.lint import traced
from tests.faults.mounts import CannotMountError, image
from tests.faults.mutants import MUTANTS
from tests.faults.power import losses
from tests.faults.refusals import OPEN, refusal
from tests.faults.soak import SOAK
from tests.faults.store_driver import Plan
from tests.faults.sweep import Sweep, prepared
from tests.faults.weakest import Weakest

UNCOUNTED = "mutants"
"""What a broken store loses is no loss of genpipe's: such counts make no row."""

CAUGHT_BY = {
    "data is not synced": {"lint", "memory"},
    "the manifest is not synced": {"lint"},
    "the list of the done is not synced": {"lint"},
    "failures are not synced": {"lint", "memory"},
    "a file is not synced before its rename": {"lint", "memory"},
    "names of shards are not synced": {"lint", "memory"},
    "names beside the shards are not synced": {"lint", "memory"},
    "no name is ever synced": {"lint", "memory"},
    "the index comes before the sync": {"lint", "memory"},
    "the index comes before the record": {"lint", "memory", "kills"},
    "the tail is not checked": {"lint", "memory", "kills"},
    "a failed sync is tried again": {"lint"},
    "nothing is cut back": {"lint", "memory", "kills", "refusals"},
}


def lint(mutant: str, launchers: Launchers, scratch: Path) -> None:
    """A run that begins, one that goes on after crashes, and one in which a sync fails once."""
    for name, plan, error in (
        ("begins", None, ()),
        ("goes-on", Plan(), ()),
        ("fails", None, ("-e", "inject=fdatasync:error=EIO:when=3")),
    ):
        folder = scratch / name
        if plan is None:
            folder.mkdir()
        else:
            left_by_crashes(folder, plan)
        disk = Weakest(folder)
        traced(launchers, scratch / f"{name}-trace", folder, disk, "--mutant", mutant, strace=error)
        assert disk.complaints == []


def memory(mutant: str, launchers: Launchers, scratch: Path) -> None:
    """Crashes of the disk in memory, before each step."""
    with pytest.MonkeyPatch.context() as patch:
        for start in (empty, crashed(scratch)):
            crash_everywhere(
                start,
                lambda files: MUTANTS[mutant](files, patch.setattr),
                Count(UNCOUNTED),
                Plan(shard_records=4),
            )
            patch.undo()


def kills(mutant: str, launchers: Launchers, scratch: Path) -> None:
    """A kill before each write of a run that goes on after crashes."""
    Sweep(
        launchers=launchers,
        scratch=scratch,
        prepare=prepared(scratch, Plan()),
        plan=Plan(),
        options=("--mutant", mutant),
        only=("write",),
    ).run(Count(UNCOUNTED))


def refusals(mutant: str, launchers: Launchers, scratch: Path) -> None:
    """A sync of a shard that fails once."""
    folder = scratch / "run"
    folder.mkdir()
    strace = refusal("fdatasync", "EIO", "2", OPEN, 0).strace(folder)
    ended = launchers.run(scratch, [folder, "--mutant", mutant], strace=strace)
    Count(UNCOUNTED).audited(verdict_on(OsFiles(), folder, ended.acked, ended.acked_failures))


METHODS: dict[str, Callable[[str, Launchers, Path], None]] = {
    method.__name__: method for method in (lint, memory, kills, refusals)
}


QUICK = (
    "data is not synced",
    "names of shards are not synced",
    "the index comes before the record",
    "a failed sync is tried again",
    "nothing is cut back",
)
"""One of each kind; the soak has them all."""


@pytest.mark.parametrize("mutant", MUTANTS if SOAK > 1 else QUICK)
def test_every_mutant_is_caught_by_the_tests_that_are_said_to_catch_it(launchers, tmp_path, count, mutant):
    caught_by = set()
    for name, method in METHODS.items():
        scratch = tmp_path / name
        scratch.mkdir()
        try:
            method(mutant, launchers, scratch)
        except AssertionError:
            caught_by.add(name)
    count("mutants, each caught").tried()

    assert caught_by == CAUGHT_BY[mutant]
    assert caught_by


def test_a_power_loss_shows_data_that_is_not_synced(launchers, tmp_path, count):
    counted = count("mutants on XFS, each caught")
    rng, mutant = Random("mutant"), ("--mutant", "data is not synced")
    try:
        with (
            image(tmp_path, "xfs") as mounted,
            launchers.one() as launcher,
            pytest.raises(AssertionError, match="lost="),
        ):
            losses(launcher, mounted, tmp_path, Count(UNCOUNTED), rng, times=3, mutant=mutant)
    except CannotMountError as refused:
        counted.skip(str(refused))
        pytest.skip(str(refused))
    counted.tried()
