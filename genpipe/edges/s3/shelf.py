"""A run in an object store as a shelf: what its log commits, and what only the last snapshots hold."""

from functools import partial
from pathlib import Path
from typing import Any

from genpipe.edges import reading
from genpipe.edges.reading import Held, Inventory, Lack
from genpipe.edges.s3.commits import Commit
from genpipe.edges.s3.fetching import THREADS, fetch_shard
from genpipe.edges.s3.log import (
    UPLOAD_THEM,
    Tail,
    never_uploaded,
    only_in_tails,
    read_log,
    read_tails,
    report_at,
    run_at,
    run_id_of,
)
from genpipe.edges.s3.objects import Objects


class S3Shelf:
    """The shards of a run below a prefix; only read."""

    threads = THREADS

    def __init__(self, objects: Objects) -> None:
        """Prepare; nothing is read yet.

        Args:
            objects: the prefix.
        """
        self._objects = objects

    @property
    def name(self) -> str:
        """See :class:`Shelf`."""
        return self._objects.name

    @property
    def folder(self) -> Path | None:
        """See :class:`Shelf`."""
        return None

    def run(self) -> dict[str, Any]:
        """See :class:`Shelf`."""
        return run_at(self._objects)

    def is_at_work(self) -> bool:
        """See :class:`Shelf`; whatever is read here was put whole."""
        return False

    def total(self) -> int | None:
        """See :class:`Shelf`."""
        return reading.total_of(report_at(self._objects))

    def inventory(self) -> Inventory:
        """See :class:`Shelf`."""
        run_id = run_id_of(self._objects)
        # Before the rest: what it tells of is there by then, or never was put.
        report = report_at(self._objects)
        tails, bad_tails = read_tails(self._objects)
        log = read_log(self._objects, run_id)
        held = [self._held(commit) for commit in log.commits]
        if data := only_in_tails(tails, log.committed()):
            held.append(self._last(tails[0], data))
        bad = [*log.bad, *bad_tails]
        for tail in tails:
            if tail.found.bad:
                size_bytes = sum(len(piece) for _, piece in tail.found.bad)
                bad.append((tail.key, f"holds {size_bytes} bytes that are no record"))
        lacks = [Lack(file=f"{self.name}/{key}", what=what, then=self._then) for key, what in bad]
        missing = never_uploaded(report, len(log.committed()) + data.count(b"\n"))
        if missing is not None:
            lacks.append(Lack(file=self.name, what=missing, then=UPLOAD_THEM))
        return Inventory(held=held, lacks=lacks)

    @property
    def _then(self) -> str:
        return f"`genpipe verify {self.name}` looks at all that is there"

    def _held(self, commit: Commit) -> Held:
        return Held(
            file=f"{self.name}/{commit.key}",
            size_bytes=commit.entry.size_bytes,
            entry=commit.entry,
            is_open=False,
            read=partial(fetch_shard, self._objects, commit.key, commit.entry),
            then=self._then,
            noted_in="its commit",
        )

    def _last(self, newest: Tail, data: bytes) -> Held:
        return Held(
            file=f"{self.name}/{newest.key}",
            size_bytes=len(data),
            entry=None,
            is_open=True,
            read=lambda: data,
            then=self._then,
        )
