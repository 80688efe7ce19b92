"""``progress.json`` and the display: written by a thread of their own, from snapshots taken on the loop."""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from genpipe.core.flow import Core
from genpipe.core.progress import Progress
from genpipe.edges import strict_json
from genpipe.edges.console import Display
from genpipe.edges.record import Wall

PROGRESS = "progress.json"


class Report:
    """Publishes a run's state. ``progress.json`` is for reading only: no resume ever looks at it.

    A failure to write it is told once and does not touch the run.
    """

    def __init__(
        self,
        folder: Path,
        progress: Progress,
        *,
        total: Callable[[], int | None],
        facts: dict[str, Any],
        wall: Wall,
        display: Display,
        s3: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """Begin reporting.

        Args:
            folder: the run folder.
            progress: looks at the core.
            total: records in the input, None before it is counted.
            facts: ``run_id``, ``segment``, ``started_at``.
            wall: the process's anchor of the wall clock.
            display: shows each snapshot.
            s3: says how the uploads are, or None where there are none.
        """
        self._path = folder / PROGRESS
        self._progress = progress
        self._total = total
        self._facts = facts
        self._wall = wall
        self._display = display
        self._s3 = s3
        self._latest: dict[str, Any] | None = None
        self._news = threading.Condition()
        self._closing = False
        self._told = False
        self._is_ours = True
        self._thread = threading.Thread(target=self._work, name="genpipe-report")
        self._thread.start()

    def publish(
        self, core: Core, now_s: float, *, state: str | None = None, worked_until_s: float | None = None
    ) -> None:
        """Take a snapshot, which the thread then writes and shows; only the newest is kept for it.

        Args:
            core: the scheduler.
            now_s: the run's clock.
            state: what the run is at once nothing is left to be asked; as the core knows it if None.
            worked_until_s: when that was, by the run's clock; rates and slot time end there.
        """
        self._put(self._snapshot(core, now_s, state=state, worked_until_s=worked_until_s))

    def note(self, text: str) -> None:
        """Show a line at once."""
        with contextlib.suppress(OSError):
            self._display.note(text)

    def close(
        self,
        core: Core,
        now_s: float,
        *,
        state: str,
        worked_until_s: float | None = None,
        last_error: str | None = None,
        is_ours: bool = True,
    ) -> dict[str, Any]:
        """Write the last snapshot, durably, and end the thread.

        Args:
            core: the scheduler.
            now_s: the run's clock.
            state: how the run ended.
            worked_until_s: see :meth:`publish`.
            last_error: what ended it, if an error did.
            is_ours: the folder is; in another driver's, nothing is written any more.

        Returns:
            The last snapshot.
        """
        last: dict[str, Any] | None = None
        try:
            last = self._snapshot(core, now_s, state=state, worked_until_s=worked_until_s)
            if last_error is not None:
                last["last_error"] = last_error
        finally:
            # The thread must end though a snapshot cannot be taken, or the process never would.
            with self._news:
                self._latest = last
                self._is_ours = is_ours
                self._closing = True
                self._news.notify()
            self._thread.join()
        if self._latest is not None:
            # A bug in the display has ended the thread; how the run ended is to be found all the same.
            self._write(self._latest)
        self._display.close()
        return last

    def _snapshot(
        self, core: Core, now_s: float, *, state: str | None, worked_until_s: float | None = None
    ) -> dict[str, Any]:
        until_s = now_s if worked_until_s is None else worked_until_s
        snapshot = self._progress.snapshot(core, self._total(), until_s)
        snapshot["elapsed_s"] = round(snapshot["elapsed_s"] + now_s - until_s, 3)
        if state is not None:
            snapshot["state"] = state
        over = state is not None
        eta_hours = None if over else snapshot["eta_hours"]
        if over:
            snapshot |= {"eta_hours": None, "eta_hours_low": None, "eta_hours_high": None}
        if self._s3 is not None:
            snapshot["s3"] = self._s3()
        eta_at = None if eta_hours is None else self._wall.text(now_s + 3600 * eta_hours)
        return {**snapshot, "eta_at": eta_at, **self._facts, "updated_at": self._wall.text(now_s)}

    def _put(self, snapshot: dict[str, Any]) -> None:
        with self._news:
            self._latest = snapshot
            self._news.notify()

    def _work(self) -> None:
        closing = False
        while not closing:
            with self._news:
                while self._latest is None and not self._closing:
                    self._news.wait()
                snapshot, self._latest = self._latest, None
                closing = self._closing
            if snapshot is None:
                return
            self._write(snapshot)
            with contextlib.suppress(OSError):
                # Nobody may be left to look; the file is for everybody else.
                self._display.show(snapshot)

    def _write(self, snapshot: dict[str, Any]) -> None:
        """Replace the file, so that a reader at any instant sees one whole document."""
        if not self._is_ours:
            return
        temporary = self._path.with_name(self._path.name + ".tmp")
        try:
            with open(temporary, "wb") as out:
                out.write(_json(snapshot))
                out.flush()
                # A power loss after a rename of bytes that were not synced leaves an empty file on XFS.
                os.fsync(out.fileno())
            temporary.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if not self._told:
                self._told = True
                self.note(f"warning: cannot write {self._path}: {error.strerror or error}; the run goes on")


def _json(snapshot: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(snapshot, option=orjson.OPT_INDENT_2) + b"\n"
    except orjson.JSONEncodeError:
        # Text that is none, such as a path of odd bytes in an error, or a whole number beyond 64 bits.
        return strict_json.dumps(snapshot) + b"\n"
