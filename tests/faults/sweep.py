"""Kills a driver before each of its calls that changes a file."""

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from genpipe.edges.files import OsFiles
from tests.faults.audits import Count, assert_complete, verdict_on
from tests.faults.drivers import MUTATING, Launchers
from tests.faults.folders import copy_of, left_by_crashes
from tests.faults.store_driver import Plan
from tests.faults.traces import calls

TRACE_ALL = ("-e", f"trace={','.join(f'?{name}' for name in MUTATING)}")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Kills at every point of one driver's work.

    Attributes:
        launchers: start the drivers.
        scratch: an empty folder.
        prepare: makes the run folder that a driver starts from; gives the indices of its records.
        plan: what is committed.
        options: further arguments of the drivers.
        only: the system calls to kill before.
    """

    launchers: Launchers
    scratch: Path
    prepare: Callable[[Path], frozenset[int]]
    plan: Plan
    options: tuple[object, ...] = ()
    only: tuple[str, ...] = MUTATING

    def arguments(self, folder: Path) -> list[object]:
        """The driver's."""
        return [folder, "--records", self.plan.records, *self.options]

    def points(self) -> list[tuple[str, int]]:
        """Every call that a driver makes from the store's first step on: its name, and which of that name."""
        folder = self.scratch / "counted"
        self.prepare(folder / "run")
        trace = folder / "trace"
        ended = self.launchers.run(
            folder, self.arguments(folder / "run"), strace=["-o", str(trace), *TRACE_ALL]
        )
        assert ended.code == 0, ended.err
        with open(trace, encoding="latin-1") as lines:
            counts = Counter(call.name for call in calls(lines) if call.returned)
        return [(name, at) for name in self.only for at in range(1, counts[name] + 1)]

    def kill_at(self, point: tuple[str, int], count: Count) -> None:
        """Kill before one call, audit, resume to the end, and audit again."""
        name, at = point
        scratch = self.scratch / f"{name}-{at}"
        folder = scratch / "run"
        before = self.prepare(folder)
        (scratch / "killed").mkdir()
        (scratch / "resumed").mkdir()
        inject = ["-o", "/dev/null", "-e", f"trace={name}", "-e", f"inject={name}:signal=SIGKILL:when={at}"]
        killed = self.launchers.run(scratch / "killed", self.arguments(folder), strace=inject)
        assert killed.code == -9, f"{point} was not met"
        count.tried()
        count.audited(verdict_on(OsFiles(), folder, before | killed.acked, killed.acked_failures))
        resumed = self.launchers.run(scratch / "resumed", self.arguments(folder))
        assert resumed.code == 0, f"killed before {point}: {resumed.err}"
        acked_failures = killed.acked_failures | resumed.acked_failures
        count.audited(verdict_on(OsFiles(), folder, self.plan.indices, acked_failures))
        assert_complete(OsFiles(), folder, self.plan)
        shutil.rmtree(scratch)

    def run(self, count: Count) -> int:
        """All points; how many."""
        points = self.points()
        self.launchers.each(lambda point: self.kill_at(point, count), points)
        return len(points)


def empty(folder: Path) -> frozenset[int]:
    """A run that begins."""
    folder.mkdir(parents=True)
    return frozenset()


def prepared(scratch: Path, plan: Plan) -> Callable[[Path], frozenset[int]]:
    """Makes copies of one folder that crashes have left."""
    original = scratch / "original"
    acked = left_by_crashes(original, plan)

    def prepare(folder: Path) -> frozenset[int]:
        copy_of(original, folder)
        return acked

    return prepare
