"""What a simulated server remembers: attempts per text, and a log of every request with monotonic times."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import orjson

from genpipe.sim.batching import Job


@dataclass(slots=True, eq=False, kw_only=True)
class Visit:
    """One HTTP request while it is open; one line of the log when it is over.

    Attributes:
        port: the port that was asked.
        path: of the request.
        arrival_s: when its head was read (seconds, monotonic).
        rid: its id, or None before it was read.
        row: hash of its user text, or None.
        attempt: how often that text was asked in this process, this time included; 0 if it is not counted.
        in_flight: generation requests open on this port when it arrived, itself included (count).
        running: requests that held a slot just after it was taken in (count).
        jobs: its sequences in the batch.
        gone_s: when its client left, or None.
        status: HTTP status sent, or None if none was.
        tokens: tokens of a good answer (count).
        closed: it has been logged.
        cut: the server itself ends the connection.
    """

    port: int
    path: str
    arrival_s: float
    rid: str | None = None
    row: str | None = None
    attempt: int = 0
    in_flight: int = 0
    running: int = 0
    jobs: tuple[Job, ...] = ()
    gone_s: float | None = None
    status: int | None = None
    tokens: int = 0
    closed: bool = False
    cut: bool = False

    def line(self, end_s: float) -> bytes:
        """The log line; ``start_s`` is when generation began, all times are monotonic seconds."""
        starts = [job.started_s for job in self.jobs if job.started_s is not None]
        return orjson.dumps(
            {
                "port": self.port,
                "path": self.path,
                "rid": self.rid,
                "row": self.row,
                "attempt": self.attempt,
                "arrival_s": self.arrival_s,
                "start_s": min(starts) if starts else None,
                "end_s": end_s,
                "in_flight": self.in_flight,
                "running": self.running,
                "client_gone": self.gone_s is not None,
                "gone_s": self.gone_s,
                "status": self.status,
                "completion_tokens": self.tokens,
            },
            option=orjson.OPT_APPEND_NEWLINE,
        )


class Journal:
    """Attempts per text and the request log, shared by all ports of a process.

    Lines are appended in whole writes, so that several processes may share a file. A reader sees a line at
    most ``flush_s`` after its request was over, and all of them after ``close``.

    Attributes:
        flush_s: longest that a line is held back (seconds).
    """

    flush_s = 0.5

    def __init__(self, path: Path | None, *, count_attempts: bool) -> None:
        self._lines: list[bytes] = []
        self._attempts: dict[str, int] | None = {} if count_attempts or path is not None else None
        self._file: int | None = None
        if path is not None:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @property
    def wanted(self) -> bool:
        """Somebody reads the log."""
        return self._file is not None

    def attempt(self, row: str) -> int:
        """Count one more request for this text: its number, from 1; 0 where nobody counts."""
        if self._attempts is None:
            return 0
        number = self._attempts.get(row, 0) + 1
        self._attempts[row] = number
        return number

    def write(self, visit: Visit) -> None:
        """Log a request that is over now."""
        if self._file is not None:
            self._lines.append(visit.line(time.monotonic()))

    def flush(self) -> None:
        """Hand all lines to the operating system."""
        if self._file is None or not self._lines:
            return
        rest = b"".join(self._lines)
        self._lines.clear()
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def close(self) -> None:
        """Flush, and end the log."""
        self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None
