"""Starts store drivers, under ``strace`` where something is to go wrong, and says how they ended."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Self, TypeVar

from tests.faults.store_driver import READY

ROOT = Path(__file__).parents[2]
ANSWER_TIMEOUT_S = 30.0
MUTATING = (
    *("open", "openat", "openat2", "creat", "close"),
    *("write", "pwrite64", "writev", "pwritev", "pwritev2", "ftruncate", "truncate", "fallocate"),
    *("fdatasync", "fsync", "sync_file_range", "syncfs"),
    *("rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat"),
    *("mkdir", "mkdirat", "rmdir", "chmod", "fchmod", "fchmodat"),
)
"""System calls that change files, or end or begin such changes."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A driver that has ended.

    Attributes:
        code: its exit code; of a signal the negative number.
        acked: indices of records that it acknowledged.
        acked_failures: indices of failures that it acknowledged.
        full: how often it found the disk full and tried again.
        err: what it said on stderr.
    """

    code: int
    acked: frozenset[int]
    acked_failures: frozenset[int]
    full: int
    err: str


def parse_acks(data: bytes) -> tuple[frozenset[int], frozenset[int]]:
    """The records and the failures that were acknowledged."""
    words = [word for line in data.split(b"\n")[:-1] if line.startswith(b"ack ") for word in line.split()[1:]]
    return (
        frozenset(int(word) for word in words if not word.startswith(b"f")),
        frozenset(int(word[1:]) for word in words if word.startswith(b"f")),
    )


def wait_for_word(out: Path, word: bytes, times: int) -> bytes:
    """What a driver has said, once it has said ``word`` so often."""
    deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
    while time.monotonic() < deadline_s:
        said = out.read_bytes()
        if said.count(word) >= times:
            return said
        time.sleep(0.0005)
    raise AssertionError(f"{word!r} was not said {times} times: {out.with_name('err').read_text()}")


class Launcher:
    """One server of forked drivers, which runs one driver at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.store_driver", "--serve"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._answer() == READY

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        self._process.stdout.close()

    def run(
        self,
        scratch: Path,
        arguments: Sequence[object],
        *,
        strace: Sequence[str] = (),
        meanwhile: Callable[[Path], None] = lambda out: None,
    ) -> Ended:
        """Run one driver to its end.

        Args:
            scratch: a folder for its output, which holds none yet.
            arguments: the driver's.
            strace: options of a tracer that sees all that it does; none where it is not traced.
            meanwhile: called with the path of its output once it runs.
        """
        out, err = scratch / "out", scratch / "err"
        request = {"arguments": [str(argument) for argument in arguments], "out": str(out), "err": str(err)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        pid = int(self._answer())
        try:
            with _tracing(pid, strace):
                os.kill(pid, signal.SIGCONT)
                meanwhile(out)
                code = int(self._answer())
        except BaseException:
            # It is a child of the server, which has not been told of its end: the number is still its own.
            os.kill(pid, signal.SIGKILL)
            raise
        said = out.read_bytes()
        acked, acked_failures = parse_acks(said)
        return Ended(
            code=code,
            acked=acked,
            acked_failures=acked_failures,
            full=said.count(b"full\n"),
            err=err.read_text(),
        )

    def _answer(self) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_TIMEOUT_S)
        assert ready, f"no word from the driver within {ANSWER_TIMEOUT_S:g} s"
        # Unbuffered, or a second line that came along with the first would hide from the next select.
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._process.stdout.fileno(), 1)
            assert byte, "the server of drivers has ended"
            line += byte
        return line.decode().strip()


@contextmanager
def _tracing(pid: int, options: Sequence[str]) -> Iterator[None]:
    """A tracer at a stopped process, which has ended afterwards."""
    if not options:
        yield
        return
    tracer = subprocess.Popen(["strace", "-f", "-p", str(pid), *options], stderr=subprocess.PIPE)
    assert tracer.stderr is not None
    try:
        first = tracer.stderr.readline()
        assert b"attached" in first, first
        yield
        tracer.wait(ANSWER_TIMEOUT_S)
    finally:
        if tracer.poll() is None:
            tracer.kill()
            tracer.wait(5)
        tracer.stderr.close()


class Launchers:
    """Two servers of drivers, for work on two cores."""

    def __init__(self, launchers: Sequence[Launcher]) -> None:
        self._free: SimpleQueue[Launcher] = SimpleQueue()
        for launcher in launchers:
            self._free.put(launcher)
        self._count = len(launchers)

    @contextmanager
    def one(self) -> Iterator[Launcher]:
        """One of them, for oneself."""
        launcher = self._free.get(timeout=ANSWER_TIMEOUT_S)
        try:
            yield launcher
        finally:
            self._free.put(launcher)

    def run(self, scratch: Path, arguments: Sequence[object], *, strace: Sequence[str] = ()) -> Ended:
        """As :meth:`Launcher.run`, with whichever is free."""
        with self.one() as launcher:
            return launcher.run(scratch, arguments, strace=strace)

    def each(self, work: Callable[[T], None], jobs: Sequence[T]) -> None:
        """Do all jobs, as many at once as there are servers; the first error is raised."""
        with ThreadPoolExecutor(self._count) as pool:
            try:
                for _ in pool.map(work, jobs):
                    pass
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
