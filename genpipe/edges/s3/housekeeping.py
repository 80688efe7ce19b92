"""What is put beside the shards and their commits, and may come late: snapshots, progress, index, rubbish."""

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from genpipe.core.errors import Fenced
from genpipe.edges.files import Files, blaming
from genpipe.edges.report import PROGRESS
from genpipe.edges.s3 import layout
from genpipe.edges.s3.commit_log import Batches
from genpipe.edges.s3.objects import Objects
from genpipe.edges.s3.snapshots import Snapshots

PROGRESS_EVERY_S = 1.0
"""An object that is put again and again may be put this often at most (seconds): stores throttle it."""

FIRST_S = 2.0
"""The first copy of ``progress.json`` is tried so often (seconds)."""

_TRIES = 2


class Housekeeping:
    """The work of one thread of the uploader, which nothing else waits for.

    Attributes:
        finish_by_s: until when, by the monotonic clock, the last round may wait for anything.
    """

    def __init__(
        self,
        folder: Path,
        files: Files,
        objects: Objects,
        *,
        epoch: int,
        batches: Batches,
        is_committed: Callable[[int], bool],
        note: Callable[[Exception], None],
        tail_s: float,
        progress_s: float,
    ) -> None:
        """Get ready; :meth:`run` does the work.

        Args:
            folder: the run folder.
            files: the disk.
            objects: the prefix.
            epoch: the number of this claim of the prefix.
            batches: what of the index is due.
            is_committed: whether the shard of this number is in the log of commits.
            note: told what went wrong; all of it is tried again later.
            tail_s: from one snapshot to the next (seconds).
            progress_s: from one copy of ``progress.json`` to the next (seconds).
        """
        self.finish_by_s = 0.0
        self._folder = folder
        self._files = files
        self._objects = objects
        self._batches = batches
        self._is_committed = is_committed
        self._note = note
        self._tail_s = tail_s
        self._progress_s = max(progress_s, PROGRESS_EVERY_S)
        self._snapshots = Snapshots(folder, files, objects, epoch=epoch)
        self._wake = threading.Event()
        self._wants_snapshots = False
        self._is_ending = False
        self._rubbish: list[str] = []
        self._progress = b""
        self._progress_at_s: float | None = None

    @property
    def tail_age_s(self) -> float | None:
        """How long ago S3 had the whole of the open shard (seconds); None if it never had."""
        at_s = self._snapshots.tail_at_s
        return None if at_s is None else time.monotonic() - at_s

    def snapshot(self) -> None:
        """Have snapshots taken now."""
        self._wants_snapshots = True
        self._wake.set()

    def look(self) -> None:
        """There is something to put for the index."""
        self._wake.set()

    def discard(self, keys: Iterable[str]) -> None:
        """Have objects removed that nothing in the log of commits names, or ever will."""
        self._rubbish += keys
        self._wake.set()

    def end(self, finish_by_s: float) -> None:
        """Have everything put once more, and :meth:`run` return."""
        self.finish_by_s = finish_by_s
        self._is_ending = True
        self._wake.set()

    def run(self) -> None:
        """Do what is due, until :meth:`end` is called or the prefix is another's."""
        tail_due_s = time.monotonic() + self._tail_s
        progress_due_s = time.monotonic()
        try:
            while not self._is_ending:
                now_s = time.monotonic()
                if self._wants_snapshots or now_s >= tail_due_s:
                    self._wants_snapshots = False
                    self._try(self._take_snapshots)
                    tail_due_s = time.monotonic() + self._tail_s
                if now_s >= progress_due_s:
                    self._try(self._put_progress)
                    # At the beginning there is no such file yet: the first is not waited for so long.
                    progress_due_s = time.monotonic() + (self._progress_s if self._progress else FIRST_S)
                self._try(self._tidy)
                self._wake.wait(max(0.0, min(tail_due_s, progress_due_s) - time.monotonic()))
                self._wake.clear()
            for step in (self._take_snapshots, self._tidy, self._put_last_progress):
                self._try(step)
        except Fenced:
            # Whoever found out has said so.
            return

    def _try(self, step: Callable[[], None]) -> None:
        """Take a step; what goes wrong in it is told, and keeps no other from being taken."""
        try:
            step()
        except Fenced:
            raise
        except Exception as error:  # a bug too is told, and must not end the housekeeping
            self._note(error)

    def _take_snapshots(self) -> None:
        for error in self._snapshots.take(self._is_committed):
            self._note(error)

    def _put_last_progress(self) -> None:
        if self._progress_at_s is not None:
            if self._read_progress() == self._progress:
                return
            due_s = self._progress_at_s + PROGRESS_EVERY_S
            if due_s > self.finish_by_s:
                return
            time.sleep(max(0.0, due_s - time.monotonic()))
        self._put_progress()

    def _put_progress(self) -> None:
        """For display only: nothing of it is tried again, or verified."""
        data = self._read_progress()
        if data != self._progress:
            self._progress_at_s = time.monotonic()
            self._objects.put(layout.PROGRESS, data, verify=False, tries=1)
            self._progress = data

    def _read_progress(self) -> bytes:
        """The file as it is; what was put last where there is none."""
        path = self._folder / PROGRESS
        with blaming(path, "read"):
            return self._files.read(path) if self._files.exists(path) else self._progress

    def _tidy(self) -> None:
        """What may as well be done later: the index, and objects that are of no use."""
        self._batches.put_due(self._objects)
        while self._rubbish and not self._is_ending:
            self._objects.delete(self._rubbish[0], tries=_TRIES)
            del self._rubbish[0]
