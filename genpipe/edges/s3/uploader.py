"""Shards go to S3 behind the run's back: nothing here is ever waited for by what makes records durable."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from genpipe.core.errors import Fenced, StoreError
from genpipe.edges.appender import Appender
from genpipe.edges.background import join_until
from genpipe.edges.files import Files, blaming
from genpipe.edges.list_file import ListFile
from genpipe.edges.s3 import layout
from genpipe.edges.s3.backlog import Backlog, Uploaded, pause_s
from genpipe.edges.s3.commit_log import Batches, CommitLog
from genpipe.edges.s3.commits import UPLOADS, Commit
from genpipe.edges.s3.fence import Fence
from genpipe.edges.s3.housekeeping import Housekeeping
from genpipe.edges.s3.lease import Lease
from genpipe.edges.s3.objects import Objects
from genpipe.edges.s3.packing import pack
from genpipe.edges.s3.troubles import Troubles
from genpipe.edges.shards import SHARDS, Entry, shard_name

WORKERS_END_S = 0.5
"""Threads that put shards are waited for so long at the end, before they are abandoned (seconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadSettings:
    """How the uploader goes about it.

    Attributes:
        uploads: shards that are put at once, and held in memory at most.
        tail_s: from one snapshot of what still grows to the next (seconds).
        progress_s: from one copy of ``progress.json`` to the next, at least 1 (seconds).
        lease_s: a lease that does not change for so long belongs to nobody (seconds).
    """

    uploads: int = 4
    tail_s: float = 45.0
    progress_s: float = 30.0
    lease_s: float = 30.0


class _Damaged(StoreError):
    """A sealed file does not hold what was sealed: no store is to blame, and no other try would help."""


class Uploader:
    """Puts sealed shards into S3, commits them one after the other, and keeps house there.

    All of it is done by daemon threads, so that a store that hangs holds up nobody: some put shards, one
    commits, one renews the lease, one takes snapshots. Once another claim is found to have the prefix,
    nothing more is written or removed there, not even the lease.
    """

    def __init__(
        self,
        folder: Path,
        files: Files,
        objects: Objects,
        lease: Lease,
        *,
        run_id: str,
        commits: Mapping[int, Commit],
        backlog: Sequence[Entry],
        orphans: Sequence[str],
        troubles: Troubles,
        settings: UploadSettings,
        on_fenced: Callable[[Fenced], None],
        next_number: int | None = None,
    ) -> None:
        """Get ready; nothing happens before :meth:`start`.

        Args:
            folder: the run folder, whose lock the caller holds.
            files: the disk.
            objects: the prefix.
            lease: this claim of it, which :meth:`close` gives back.
            run_id: the run.
            commits: the log of commits, by number; it is not kept.
            backlog: the shards that are sealed here and not in the log, by number.
            orphans: objects of shards, of earlier claims, that no commit names.
            troubles: what the tries of ``objects`` met so far.
            settings: how to go about it.
            on_fenced: told once, in a thread of the uploader, that another claim has the prefix.
            next_number: the first place of the log that is free, where that is not the one after the last
                of ``commits``: those before it may hold commits that do not count.
        """
        if next_number is None:
            next_number = max(commits, default=-1) + 1
        self._folder = folder
        self._files = files
        self._lease = lease
        self._run_id = run_id
        self._troubles = troubles
        self._settings = settings
        self._rng = Random()
        self._objects = Fence(objects, self._on_shut)
        self._on_fenced = on_fenced
        self._backlog = Backlog(backlog)
        self._log = CommitLog(self._objects, next_number)
        self._batches = Batches(next_number, commits.values())
        self._committed = {commit.entry.seq for commit in commits.values()}
        self._orphans = dict.fromkeys(orphans)
        self._housekeeping = Housekeeping(
            folder,
            files,
            self._objects,
            epoch=lease.epoch,
            batches=self._batches,
            is_committed=self._committed.__contains__,
            note=self._note,
            tail_s=settings.tail_s,
            progress_s=settings.progress_s,
        )
        self._uploads: ListFile | None = None
        self._uploaded = len(commits)
        self._uploaded_bytes = 0
        self._last_error: tuple[str, float] | None = None
        self._tries_failed = 0
        self._over = threading.Event()
        self._is_abandoned = False
        self._workers = [
            self._thread(f"genpipe-s3-upload-{number}", self._upload_all)
            for number in range(settings.uploads)
        ]
        self._keeper = self._thread("genpipe-s3-lease", self._keep_lease)
        # The lease is given back only when none of these may write any more.
        self._writers = [
            self._thread("genpipe-s3-commit", self._commit_all),
            self._thread("genpipe-s3-housekeeping", self._housekeeping.run),
        ]

    def start(self) -> None:
        """Begin. ``uploads.jsonl`` holds whole lines, if it is there.

        Raises:
            StoreError: that file cannot be opened.
        """
        path = self._folder / UPLOADS
        with blaming(path, "look for"):
            is_new = not self._files.exists(path)
        appender = Appender(self._files, path, new=is_new)
        self._uploads = ListFile(self._files, appender, may_lag=True)
        with blaming(self._folder, "sync"):
            self._files.sync_folder(self._folder)
        for thread in (*self._workers, *self._writers, self._keeper):
            thread.start()

    def sealed(self, entry: Entry) -> None:
        """A shard is sealed and durable: have it uploaded. Returns at once, in any thread."""
        if entry.seq not in self._committed:
            self._backlog.add(entry)

    def snapshot(self) -> None:
        """Have snapshots taken now. Returns at once, in any thread."""
        self._housekeeping.snapshot()

    @property
    def waiting(self) -> int:
        """Shards that are sealed and not in the log of commits."""
        return len(self._backlog)

    def missing(self) -> list[int]:
        """The numbers of those shards, in order."""
        return self._backlog.missing()

    def state(self) -> dict[str, Any]:
        """How things stand, JSON-ready. Returns at once, in any thread.

        Its keys: ``uri``, the prefix; ``waiting``, shards that are sealed and not in the log of commits;
        ``uploaded``, shards in the log; ``uploaded_bytes``, length of the objects that this process
        committed; ``failed``, waiting shards whose last round of tries failed, or that are damaged;
        ``troubles``, tries that failed, by kind; ``retries``, tries that failed in all; ``last_error``, the
        last of them or of what else went wrong, null if nothing has, and ``last_error_age_s``, how long ago
        that was; ``tail_age_s``, how long ago S3 had the whole of the open shard, null if it never had;
        ``epoch``, the number of this claim; ``conditional``, whether the store heeds conditions.
        """
        now_s = time.monotonic()
        troubles = self._troubles.counts()
        tries_failed = self._troubles.total()
        if tries_failed != self._tries_failed:
            # A round of tries may take minutes: what they meet is told before its end.
            self._tries_failed = tries_failed
            self._last_error = (self._troubles.last() or "", now_s)
        last_error = self._last_error
        return {
            "uri": self._objects.name,
            "waiting": len(self._backlog),
            "uploaded": self._uploaded,
            "uploaded_bytes": self._uploaded_bytes,
            "failed": self._backlog.failed,
            "troubles": troubles,
            "retries": tries_failed,
            "last_error": last_error[0] if last_error else None,
            "last_error_age_s": now_s - last_error[1] if last_error else None,
            "tail_age_s": self._housekeeping.tail_age_s,
            "epoch": self._lease.epoch,
            "conditional": self._objects.is_conditional,
        }

    def drain(self, timeout_s: float) -> bool:
        """Wait until all sealed shards are committed.

        Returns:
            Whether they are; False after ``timeout_s`` seconds, or as soon as another claim has the prefix.
        """
        return self._backlog.wait_empty(timeout_s) and not self._objects.is_shut

    @property
    def is_stuck(self) -> bool:
        """Whether waiting is of no use: another claim has the prefix, or all shards that wait are damaged."""
        return self._objects.is_shut or self._backlog.is_stuck

    def close(self, timeout_s: float) -> None:
        """Take the last snapshots, give the lease back, and end the threads.

        Returns after ``timeout_s`` seconds at the latest; what hangs in the store by then is abandoned, and
        the lease runs out by itself. Waiting shards are left for the next start.
        """
        deadline_s = time.monotonic() + timeout_s
        self._over.set()
        self._backlog.close()
        self._housekeeping.end(deadline_s)
        join_until(self._writers, deadline_s)
        self._is_abandoned = True
        # A commit under way may still land: who claims the prefix now would take it for a living driver's.
        if not self._objects.is_shut and not any(thread.is_alive() for thread in self._writers):
            release = self._thread("genpipe-s3-release", self._lease.release)
            release.start()
            join_until([release], deadline_s)
        # What is being put is of use only to a commit, and there will be none: nobody waits long for it.
        join_until([*self._workers, self._keeper], min(deadline_s, time.monotonic() + WORKERS_END_S))
        if self._uploads is not None and not self._writers[0].is_alive():
            self._uploads.close()

    # What the threads do.

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=work, name=name, daemon=True)

    def _upload_all(self) -> None:
        while (entry := self._backlog.take()) is not None:
            try:
                uploaded = self._upload(entry)
            except Fenced:
                return
            except _Damaged as error:
                self._note(error)
                self._backlog.put_aside(entry)
            except Exception as error:  # a bug too is told, and must not end what the others wait for
                self._note(error)
                self._backlog.put_back(entry)
            else:
                if not self._backlog.uploaded(uploaded):
                    self._housekeeping.discard([uploaded.key])

    def _upload(self, entry: Entry) -> Uploaded:
        path = self._folder / SHARDS / shard_name(entry.seq, is_open=False)
        with blaming(path, "read"):
            data = self._files.read(path)
        if not entry.covers(data):
            raise _Damaged(
                f"{path} is not as it was sealed, and is not uploaded: run `genpipe verify {self._folder}`"
            )
        packed = pack(data)
        # A put takes long: the plain bytes are not held meanwhile.
        del data
        key = layout.shard_key(entry.seq, self._lease.epoch, self._lease.nonce)
        self._objects.put(key, packed, metadata={"sha256": entry.digest, "run-id": self._run_id})
        return Uploaded(entry=entry, key=key, object_bytes=len(packed))

    def _commit_all(self) -> None:
        rounds = 0
        try:
            while (uploaded := self._backlog.next_uploaded()) is not None:
                # A place whose put failed may still be taken by it, at any later time. As long as that is not
                # known, the same shard is put there, with the very same bytes: another one would be taken for
                # committed, and be replaced by the late put, or be put a second time elsewhere.
                while not self._commit(uploaded):
                    rounds += 1
                    self._over.wait(pause_s(rounds, self._rng))
                    if self._over.is_set():
                        return
                rounds = 0
        except Fenced as error:
            self._objects.shut(error)

    def _commit(self, uploaded: Uploaded) -> bool:
        """One round of tries to commit a shard; False where it failed."""
        entry = uploaded.entry
        try:
            while True:
                commit = Commit(
                    number=self._log.next_number,
                    run_id=self._run_id,
                    entry=entry,
                    key=uploaded.key,
                    object_bytes=uploaded.object_bytes,
                    epoch=self._lease.epoch,
                    nonce=self._lease.nonce,
                )
                self._lease.check(self._settings.lease_s / 2)
                if self._over.is_set():
                    return False
                there = self._log.put(commit)
                if self._land(there) and there.entry.seq == entry.seq:
                    return True
        except Fenced:
            raise
        except Exception as error:  # a bug too is told, and must not end what the others wait for
            self._note(error)
            self._backlog.stumbled(entry)
            return False

    def _land(self, there: Commit) -> bool:
        """The next place of the log is taken by this commit; False where its object is lost.

        Raises:
            Fenced: it is of a shard that does not wait here.
            ObjectStoreError: its object cannot be looked for.
        """
        # Under an earlier claim, this folder may have sent a commit that landed only after the log was read:
        # of the same shard, or of another that waits here.
        if not (
            there.number == self._log.next_number
            and there.run_id == self._run_id
            and self._backlog.same_as(there.entry)
        ):
            raise self._log.fenced(there)
        if there.nonce != self._lease.nonce and not self._log.has_object(there):
            self._log.next_number += 1
            return False
        self._log.next_number += 1
        self._committed.add(there.entry.seq)
        # From now on it is no orphan.
        self._orphans.pop(there.key, None)
        self._uploaded += 1
        self._write_down(there)
        if self._batches.add(there):
            self._housekeeping.look()
        uploaded = self._backlog.committed(there.entry.seq)
        if uploaded is None or uploaded.key != there.key:
            if uploaded is not None:
                self._housekeeping.discard([uploaded.key])
            return True
        self._uploaded_bytes += there.object_bytes
        # An earlier claim that wakes up wants a place that is taken by now: its objects can no longer be
        # committed. Before our first own commit, it could have put one there that names them.
        orphans, self._orphans = self._orphans, {}
        if orphans:
            self._housekeeping.discard(orphans)
        return True

    def _write_down(self, commit: Commit) -> None:
        """Add a line to ``uploads.jsonl``, which a start makes anew from S3: its loss costs nothing."""
        if self._uploads is None or self._is_abandoned:
            return
        try:
            self._uploads.add(commit.encode())
            self._uploads.sync()
        except Fenced:
            raise
        except StoreError as error:
            self._note(error)
            self._uploads.close()
            self._uploads = None

    def _keep_lease(self) -> None:
        wait_s = self._settings.lease_s / 3
        while not self._over.wait(wait_s):
            wait_s = self._settings.lease_s / 3
            try:
                self._lease.renew()
            except Fenced as error:
                self._objects.shut(error)
            except Exception as error:  # a bug too is told, and must not end what the others wait for
                self._note(error)
                wait_s = self._settings.lease_s / 10

    def _on_shut(self, error: Fenced) -> None:
        self._over.set()
        self._backlog.close()
        self._housekeeping.end(0.0)
        self._on_fenced(error)

    def _note(self, error: Exception) -> None:
        self._tries_failed = self._troubles.total()
        text = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
        self._last_error = (text, time.monotonic())
