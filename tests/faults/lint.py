"""Runs a driver, and replays what it did on the weakest disk."""

from pathlib import Path

from tests.faults.drivers import Ended, Launchers
from tests.faults.traces import LINE_OPTIONS, calls
from tests.faults.weakest import TRACED, Weakest


def traced(
    launchers: Launchers, scratch: Path, folder: Path, disk: Weakest, *options: object, strace=()
) -> Ended:
    """Run a driver, and replay what it did."""
    scratch.mkdir()
    trace = scratch / "trace"
    ended = launchers.run(
        scratch,
        [folder, *options],
        strace=["-o", str(trace), *LINE_OPTIONS, "-e", f"trace={TRACED}", *strace],
    )
    replay(disk, trace)
    return ended


def replay(disk: Weakest, trace: Path) -> None:
    with open(trace, encoding="latin-1", newline="\n") as lines:
        disk.replay(calls(lines))
