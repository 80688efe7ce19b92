"""A run folder's other place: the prefix in S3 that it goes on from, and that it is sent to."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from genpipe.core.bitmap import Bitmap
from genpipe.core.errors import (
    ConfigError,
    Fenced,
    ObjectStoreError,
    PreconditionFailed,
    ResumeMismatch,
    TroubleKind,
)
from genpipe.core.wording import number as with_commas
from genpipe.edges import lines
from genpipe.edges.files import Files, OsFiles, blaming, make_folder, replace_atomically
from genpipe.edges.lock import FolderLock
from genpipe.edges.reading import contents_of
from genpipe.edges.restoring import RESTORED
from genpipe.edges.run_folder import encode_run, parse_run
from genpipe.edges.s3 import history, layout
from genpipe.edges.s3.commits import UPLOADS, Commit, decode_all, encode_all
from genpipe.edges.s3.lease import Lease
from genpipe.edges.s3.objects import Objects
from genpipe.edges.s3.place import Place
from genpipe.edges.s3.snapshots import KINDS
from genpipe.edges.shards import SHARDS, scan, shard_name

_RENEWALS = 4
"""So often at least a lease is renewed in the time that it may be silent, while the prefix is read."""

_NAMED_MAX = 5


class Remote:
    """The prefix of one run, for the process that holds the lock of its folder. Blocking, for one thread.

    Attributes:
        lease: the claim of the prefix; None before :meth:`take_over`.
        commits: the log of commits, as far as it counts, by number.
        next_number: the first place of the log that is free; greater than all of ``commits``.
        orphans: objects of shards, of earlier claims, that no commit names.
    """

    def __init__(
        self,
        objects: Objects,
        *,
        owner: Mapping[str, Any],
        ttl_s: float,
        warn: Callable[[str], None],
        note: Callable[[str], None],
        pause: Callable[[float], None],
        files: Files | None = None,
        place: Place | None = None,
    ) -> None:
        """Get ready; nothing is asked yet.

        Args:
            objects: the prefix.
            owner: who claims it, for people, JSON-ready.
            ttl_s: a lease that does not change for so long belongs to nobody (seconds).
            warn: told, in one line each, what is odd and what is waited for.
            note: told, in one line, what was brought to the folder.
            pause: waits for some seconds; what it raises ends the claim.
            files: the disk of the run folder; the machine's own if None.
            place: noted in the run folder once the prefix is claimed; nothing is noted if None.
        """
        self.lease: Lease | None = None
        self.commits: dict[int, Commit] = {}
        self.next_number = 0
        self.orphans: list[str] = []
        self._objects = objects
        self._owner = owner
        self._ttl_s = ttl_s
        self._warn = warn
        self._note = note
        self._pause = pause
        self._files: Files = OsFiles() if files is None else files
        self._place = place
        self._run_id = ""
        self._renewed_s = 0.0

    @property
    def name(self) -> str:
        """What is shown of the prefix, such as ``s3://bucket/run1``."""
        return self._objects.name

    def recorded_run(self) -> dict[str, Any] | None:
        """The ``run.json`` of the run that is there; None where there is none.

        Raises:
            ConfigError: it is not to be understood.
            ObjectStoreError: it cannot be read.
        """
        fetched = self._objects.get(layout.RUN)
        return None if fetched is None else parse_run(fetched.data, f"{self.name}/{layout.RUN}")

    def agree(self, run: dict[str, Any], *, is_new: bool) -> dict[str, Any]:
        """See :class:`genpipe.edges.run_folder.Elsewhere`."""
        there = self.recorded_run()
        if there is None:
            if is_new:
                self._refuse_headless()
            # Where conditions are ignored, the last put wins: so it is read back.
            try:
                self._objects.put(layout.RUN, encode_run(run), if_none_match=True)
            except PreconditionFailed:
                pass
            else:
                if self._objects.is_conditional:
                    self._run_id = run["run_id"]
                    return run
            there = self.recorded_run()
        if there is None:
            raise ObjectStoreError(
                f"{self.name}/{layout.RUN} is there and cannot be read: see who else writes to this prefix",
                kind=TroubleKind.BROKEN,
            )
        if not is_new and there["run_id"] != run["run_id"]:
            raise ResumeMismatch(
                f"this folder holds run {run['run_id']}, and {self.name} holds run {there['run_id']}: give "
                "the prefix that this run was sent to, or another prefix, or another output folder"
            )
        self._run_id = there["run_id"]
        return there

    def _refuse_headless(self) -> None:
        """Refuse to begin a run where another one lost its ``run.json``."""
        for listed in self._objects.list(layout.COMMITS):
            raise ConfigError(
                f"{self.name} holds {listed.key} but no {layout.RUN}: put that back, from the run folder or "
                "an older version of the object, or give another prefix with --s3"
            )

    def take_over(self, path: Path, lock: FolderLock) -> None:
        """See :class:`genpipe.edges.run_folder.Elsewhere`."""
        assert self._run_id
        assert self.lease is None
        epoch_min = history.highest_epoch(self._objects) + 1
        self.lease = Lease.claim(
            self._objects,
            owner=self._owner,
            nonce=lock.nonce,
            previous_nonce=lock.previous_nonce,
            epoch_min=epoch_min,
            ttl_s=self._ttl_s,
            pause=self._pause,
            warn=self._warn,
        )
        self._renewed_s = time.monotonic()
        try:
            self._bring(path, self.lease)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the prefix back, where nobody else does. May be called twice, and before :meth:`take_over`."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()

    def _bring(self, path: Path, lease: Lease) -> None:
        """Let the folder know, and have, what is there."""
        before = self._read(path / UPLOADS)
        former = Place.read(path, self._files)
        if former is not None and former.uri == self.name:
            former = None
        # What is known of one prefix says nothing of another.
        known = decode_all(before) if former is None else {}
        log = history.read_commits(
            self._objects, known, run_id=self._run_id, warn=self._warn, beat=self._beat
        )
        later = [commit for commit in log.commits.values() if commit.epoch > lease.epoch]
        if later:
            raise Fenced(
                f"{self.name}/{layout.commit_key(later[0].number)} is of claim {later[0].epoch}, and this is "
                f"claim {lease.epoch}: another driver has taken the prefix over. See that only one runs"
            )
        if former is not None:
            self._refuse_to_leave(former, path, decode_all(before), log)
        self._warn_of_lost(path, log)
        self.commits, self.next_number = log.commits, log.next_number
        self.orphans = [
            key for key in log.unnamed if (layout.epoch_of_shard(key) or lease.epoch) < lease.epoch
        ]
        # Before the lists that a start makes of it: they would be taken for wrong.
        uploads = encode_all(commit for _, commit in sorted(log.commits.items()))
        if uploads != before:
            self._write(path / UPLOADS, uploads)
        # Only now: or else, after a kill, those of one prefix would be taken for another's.
        if self._place is not None:
            self._place.write(path, self._files)
        restored = self._restore_tail(path)
        self._restore_lists(path)
        brought = sum(commit.entry.count for number, commit in log.commits.items() if number not in known)
        if brought or restored:
            self._note(
                f"{self.name}: taken over as claim {lease.epoch}, with {with_commas(len(log.commits))} "
                f"shards; this folder did not know of {with_commas(brought)} records in them, and had not "
                f"{with_commas(restored)} records of shards that were open"
            )

    def _refuse_to_leave(
        self, former: Place, path: Path, known: Mapping[int, Commit], log: history.Log
    ) -> None:
        """Refuse a prefix that lacks what the folder's former one has, and the folder has not."""
        counted = {commit.entry.seq for commit in log.commits.values()}
        gone = [c for c in known.values() if c.entry.seq not in counted and not self._has_shard(path, c)]
        if gone:
            records = with_commas(sum(commit.entry.count for commit in gone))
            raise ResumeMismatch(
                f"{len(gone)} shards of this run, with {records} records, are in {former.uri} alone: give "
                f"that prefix again, or copy it to {self.name} before the first start there"
            )

    def _warn_of_lost(self, path: Path, log: history.Log) -> None:
        if not log.lost:
            return
        here = [commit for commit in log.lost if self._has_shard(path, commit)]
        if here:
            self._warn(
                f"{self.name} has lost {len(here)} shards that are still in this folder ({_named(here)}): "
                "they are uploaded again"
            )
        log.lost = [commit for commit in log.lost if commit not in here]
        records = log.lost_records()
        if records:
            self._warn(
                f"{self.name} HAS LOST {len(log.lost)} shards that were committed ({_named(log.lost)}), with "
                f"{with_commas(records)} records that no other shard has: those prompts run again. Put the "
                "objects back first if the bucket keeps older versions"
            )

    def _has_shard(self, path: Path, commit: Commit) -> bool:
        file = path / SHARDS / shard_name(commit.entry.seq, is_open=False)
        with blaming(file, "look for"):
            return self._files.exists(file)

    def _restore_tail(self, path: Path) -> int:
        """Leave records that only tails have to the recovery: how many they are."""
        before = self._read(path / RESTORED)
        tail = history.read_tail(self._objects, warn=self._warn, beat=self._beat)
        # A start that ended before the recovery may have left some, too.
        kept = {}
        for line in reversed([*tail, *scan(before).good]):
            index = lines.index_of(line)
            assert index is not None
            kept[index] = line
        if kept:
            done = self._done(path)
            kept = {index: line for index, line in kept.items() if index not in done}
        data = b"".join(kept.values())
        if data and data != before:
            self._write(path / RESTORED, data)
        return len(kept)

    def _done(self, path: Path) -> Bitmap:
        """The prompts that have a record in a commit, or in the folder."""
        done = Bitmap()
        entries = [commit.entry for commit in self.commits.values()]
        contents = contents_of(self._files, path)
        for shard, entry in contents.pairs():
            if entry is not None:
                entries.append(entry)
                continue
            for index in scan(self._read(path / SHARDS / shard.name)).indices:
                done.add(index)
        for entry in entries:
            done.add_ranges(entry.ranges)
        return done

    def _restore_lists(self, path: Path) -> None:
        """Bring the lists that the folder lacks."""
        with blaming(path / SHARDS, "create"):
            # A list of segments in a folder without shards would tell of a lost disk.
            if not self._files.exists(path / KINDS["segments"]):
                make_folder(self._files, path / SHARDS)
        for kind, name in KINDS.items():
            self._beat()
            with blaming(path / name, "look for"):
                if self._files.exists(path / name):
                    continue
            data = history.newest(self._objects, kind, warn=self._warn)
            if data:
                self._write(path / name, data)

    def _beat(self) -> None:
        """Keep the lease alive."""
        assert self.lease is not None
        now_s = time.monotonic()
        if now_s - self._renewed_s > self._ttl_s / _RENEWALS:
            self.lease.renew()
            self._renewed_s = time.monotonic()

    def _read(self, file: Path) -> bytes:
        with blaming(file, "read"):
            return self._files.read(file) if self._files.exists(file) else b""

    def _write(self, file: Path, data: bytes) -> None:
        with blaming(file, "write"):
            replace_atomically(self._files, file, data)


def _named(commits: list[Commit]) -> str:
    keys = ", ".join(commit.key for commit in commits[:_NAMED_MAX])
    return keys + (f" and {len(commits) - _NAMED_MAX} more" if len(commits) > _NAMED_MAX else "")
