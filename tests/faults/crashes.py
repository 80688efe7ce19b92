"""Crashes of a disk in memory before each step of a driver's work, with an audit after each."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

from genpipe.edges.files import Files
from tests.edges.audit import FOLDER
from tests.edges.memory_files import MemoryFiles, PowerLoss
from tests.faults.audits import Count, assert_complete, verdict_on
from tests.faults.drivers import parse_acks
from tests.faults.folders import left_by_crashes
from tests.faults.store_driver import Plan, run

PLAN = Plan(records=15, shard_records=4)
WAYS = {
    "all that was not synced is gone": lambda files, step: files.crash(),
    "any part of it is gone": lambda files, step: files.crash(Random(f"crash {step}")),
    "only the process is gone": lambda files, step: files.kill(),
}


def empty() -> tuple[MemoryFiles, frozenset[int]]:
    """A run that begins."""
    return MemoryFiles([FOLDER]), frozenset()


def crashed(scratch: Path) -> Callable[[], tuple[MemoryFiles, frozenset[int]]]:
    """Makes disks with what several crashes have left, all of it safe, and the indices of its records."""
    plan = Plan(records=30, shard_records=4)
    acked = left_by_crashes(scratch / "model", plan)

    def start() -> tuple[MemoryFiles, frozenset[int]]:
        folders = [path for path in (scratch / "model").rglob("*") if path.is_dir()]
        files = MemoryFiles([FOLDER, *(FOLDER / path.relative_to(scratch / "model") for path in folders)])
        for path in sorted((scratch / "model").rglob("*")):
            if path.is_file():
                files.put(FOLDER / path.relative_to(scratch / "model"), path.read_bytes())
        return files, acked

    return start


def crash_everywhere(
    start: Callable[[], tuple[MemoryFiles, frozenset[int]]],
    wrap: Callable[[Files], Files],
    count: Count,
    plan: Plan = PLAN,
) -> None:
    """Let the power go before each step of a driver that begins on a disk of ``start``."""
    whole, _ = start()
    run(FOLDER, wrap(whole), plan, lambda line: None)
    for step in range(len(whole.log)):
        for way in WAYS.values():
            files, before = start()
            files.stop_before = step
            said: list[bytes] = []
            with suppress(PowerLoss):
                run(FOLDER, wrap(files), plan, said.append)
            acked, failures = parse_acks(b"".join(said))
            after = way(files, step)
            count.tried()
            count.audited(verdict_on(after, FOLDER, before | acked, failures))
            run(FOLDER, wrap(after), plan, said.append)
            acked, failures = parse_acks(b"".join(said))
            last = after.crash()
            count.audited(verdict_on(last, FOLDER, before | acked, failures))
            assert_complete(after, FOLDER, plan)
