"""Several drivers on one folder: started at one instant, and on file systems without locks."""

import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.e2e.harness import Running, running

# The program's own, with its imports behind it, so that nothing is left between the instant and the run.
_PROGRAM = """
import sys, time
{before}
from genpipe import compose
from genpipe.cli import main
moment = float(sys.argv.pop(1))
time.sleep(max(0.0, moment - time.time()))
main()
"""

_NO_LOCKS = """
import errno, fcntl, os
def refuse(handle, operation, *more):
    raise OSError(errno.{error}, os.strerror(errno.{error}))
fcntl.flock = fcntl.lockf = refuse
"""


def program(error: str | None = None, *, before: str = "") -> tuple[str, ...]:
    """Genpipe's command; its first argument is the time of day at which it begins.

    Args:
        error: the name of what every call for a lock fails with, or None where locks work.
        before: further lines of Python that come first.
    """
    refusing = "" if error is None else _NO_LOCKS.format(error=error)
    return (sys.executable, "-c", _PROGRAM.format(before=refusing + before))


@contextmanager
def at_one_instant(
    command: Sequence[object], logs: Sequence[Path], *, error: str | None = None
) -> Iterator[list[Running]]:
    """The same command as many times as there are logs, all begun at the same moment."""
    moment = time.time() + 1.5
    with ExitStack() as stack:
        yield [
            stack.enter_context(running(f"{moment:.6f}", *command, err=log, command=program(error)))
            for log in logs
        ]


def told_apart(runs: Sequence[Running], timeout_s: float = 60.0) -> tuple[Running, Running]:
    """Of two drivers that have ended, the one that did the run and the one that was turned away."""
    codes = [run.wait(timeout_s) for run in runs]
    assert sorted(codes) == [0, 75], [run.err for run in runs]
    winner, loser = runs if codes[0] == 0 else reversed(runs)
    return winner, loser


def assert_turned_away(loser: Running, folder: Path, winner: Running, *, warnings: int = 0) -> None:
    """It ended with one line that names the folder and who has it, after so many warnings."""
    lines = loser.err.splitlines()

    assert len(lines) == warnings + 1, loser.err
    assert all("warning: " in line for line in lines[:-1]), loser.err
    assert lines[-1].startswith("genpipe: error: "), loser.err
    for word in (str(folder), f"host {socket.gethostname()}", f"pid {winner.pid}"):
        assert word in lines[-1], loser.err
