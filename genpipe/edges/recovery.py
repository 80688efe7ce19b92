"""What a start makes of what the last process left behind. The rules stand in ``FORMAT.md``."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from genpipe.core.bitmap import Bitmap
from genpipe.core.errors import StoreError
from genpipe.core.values import Sums
from genpipe.edges import done_indices, lines
from genpipe.edges.files import TEMPORARY, Appender, Files, blaming, make_folder, replace_atomically
from genpipe.edges.record import facts_of
from genpipe.edges.shards import (
    DONE_INDICES,
    FAILED,
    MANIFEST,
    QUARANTINE,
    SHARDS,
    Entry,
    ShardFile,
    Tally,
    failure_of,
    scan,
    shard_files,
    shard_name,
)


@dataclass(slots=True, kw_only=True)
class Recovered:
    """A run's state on disk, checked and mended, and its files opened for appending.

    Attributes:
        done: indices with a durable record.
        failed: indices whose last word is a failure, and that are not done.
        failed_for_good: those of them that the same again would not help.
        sums: totals over the durable records, each index counted once.
        seq: number of the shard that grows.
        tally: what that shard holds.
        journal: that shard.
        manifest: ``manifest.jsonl``.
        failures: ``failed.jsonl``.
        done_indices: ``.done_indices``, which holds exactly ``done``.
    """

    done: Bitmap
    failed: Bitmap
    failed_for_good: Bitmap
    sums: Sums
    seq: int
    tally: Tally
    journal: Appender
    manifest: Appender
    failures: Appender
    done_indices: Appender


class Recovery:
    """One recovery of one run folder, by the process that holds its lock.

    Nothing is appended to a file before its end was checked; nothing found is trusted before it was synced;
    bytes that count as no record are copied to ``quarantine/`` before they are cut. A crash at any point of
    it leaves a folder that the next recovery can deal with.
    """

    def __init__(
        self,
        folder: Path,
        files: Files,
        *,
        shard_records: int,
        epoch: int,
        warn: Callable[[str], None],
        guard: Callable[[], None],
    ) -> None:
        self._folder = folder
        self._shards = folder / SHARDS
        self._files = files
        self._shard_records = shard_records
        self._epoch = epoch
        self._warn = warn
        self._guard = guard
        self._done = Bitmap()
        self._sums = Sums()

    def run(self) -> Recovered:
        """Recover.

        Raises:
            StoreError: a file refuses, or the shards are gone; no record was removed.
            Fenced: another driver owns the folder.
        """
        found = self._find()
        listed = self._read_manifest(found)
        newest = max([*listed, *(shard.seq for shard in found)], default=-1)
        for seq in sorted(listed.keys() - {shard.seq for shard in found}):
            self._warn(
                f"{self._shards / shard_name(seq, is_open=False)} is gone, with {listed[seq].count} records "
                "that the manifest lists: those prompts run again unless it is put back first"
            )
        sealed: list[Entry] = []
        unlisted: list[Entry] = []
        growing: Tally | None = None
        for shard in found:
            entry = listed.get(shard.seq)
            if not shard.is_open and entry is not None and entry.size_bytes == shard.size_bytes:
                sealed.append(entry)
                continue
            tally = self._read_shard(shard, entry)
            if shard.is_open:
                if shard.seq == newest and tally.lines < self._shard_records:
                    growing = tally
                    continue
                if not self._seal(shard, tally):
                    continue
            entry = tally.entry(shard.seq, self._epoch)
            sealed.append(entry)
            unlisted.append(entry)
        seq = newest if growing is not None else newest + 1
        journal = self._open_journal(seq, new=growing is None)
        try:
            for entry in sealed:
                self._count(entry, is_open=False)
            tally = growing or Tally()
            self._count(tally.entry(seq, self._epoch), is_open=True)
            return self._open_others(journal, seq, tally, unlisted)
        except BaseException:
            journal.close()
            raise

    # Looking around.

    def _find(self) -> list[ShardFile]:
        """The shards of the folder, after leftovers were removed and each has a number of its own."""
        files = self._files
        with blaming(self._folder, "look into"):
            there = files.sizes(self._folder)
            gone = not files.exists(self._shards)
            if not gone:
                found = shard_files(files.sizes(self._shards))
        was_used = there.get(DONE_INDICES, 0) > 0 or there.get(MANIFEST, 0) > 0
        if was_used and (gone or not found):
            raise StoreError(
                f"{self._shards} {'is gone' if gone else 'is empty'}, but {self._folder / DONE_INDICES} or "
                f"{MANIFEST} beside it tell of records; put the shards back (is a disk not mounted?), or "
                "begin anew in another folder"
            )
        with blaming(self._shards, "create"):
            make_folder(files, self._shards)
        for folder in (self._folder, self._shards):
            with blaming(folder, "clean up"):
                for name in sorted(files.sizes(folder)):
                    if name.endswith(TEMPORARY):
                        files.unlink(folder / name)
        return [] if gone else self._part_twins(found)

    def _part_twins(self, found: list[ShardFile]) -> list[ShardFile]:
        """Give an open shard a new number where a sealed one has the same: sealing it would destroy that."""
        sealed = {shard.seq for shard in found if not shard.is_open}
        newest = max((shard.seq for shard in found), default=-1)
        parted = []
        for shard in found:
            if shard.is_open and shard.seq in sealed:
                newest += 1
                twin = ShardFile(seq=newest, is_open=True, size_bytes=shard.size_bytes)
                self._warn(f"{self._shards / shard.name} has a sealed twin: it becomes {twin.name}")
                with blaming(self._shards / shard.name, "rename"):
                    self._files.rename(self._shards / shard.name, self._shards / twin.name)
                shard = twin  # noqa: PLW2901  # the same file under its new name
            parted.append(shard)
        return sorted(parted, key=lambda shard: shard.seq)

    def _read_manifest(self, found: list[ShardFile]) -> dict[int, Entry]:
        """What the manifest lists, by shard; the last line about a shard counts."""
        path = self._folder / MANIFEST
        with blaming(path, "read"):
            there = self._files.exists(path)
            data = self._files.read(path) if there else b""
        good = []
        listed = {}
        for line in data.split(b"\n"):
            entry = Entry.decode(line + b"\n")
            if entry is not None:
                good.append(line + b"\n")
                listed[entry.seq] = entry
        whole = b"".join(good)
        if whole != data:
            self._warn(f"{path} is damaged: what it lacks is made again from the shards")
            with blaming(path, "rewrite"):
                replace_atomically(self._files, path, whole)
        strangers = [shard for shard in found if not shard.is_open and shard.seq not in listed]
        # A crash while a shard is sealed leaves one; more, or no manifest at all, is somebody's doing.
        if len(strangers) > 1 or (strangers and not there):
            self._warn(
                f"{path} does not list {len(strangers)} sealed shards: they are read, and listed again"
            )
        return listed

    # Shards.

    def _read_shard(self, shard: ShardFile, entry: Entry | None) -> Tally:
        """Read and mend a shard of which the manifest says nothing, or something else."""
        path = self._shards / shard.name
        if entry is not None:
            self._warn(
                f"{path} has {shard.size_bytes} bytes where the manifest says {entry.size_bytes}: read again"
            )
        tally = Tally.of(self._mend(path))
        doubled = tally.lines - len(tally)
        if doubled:
            self._warn(f"{path} holds {doubled} more lines than prompts: of each, the first line counts")
        return tally

    def _mend(self, path: Path) -> list[bytes]:
        """The good lines of a file of records, which are durable, and all that it holds, on return."""
        with blaming(path, "read"):
            data = self._files.read(path)
        found = scan(data)
        for offset, bad in found.bad:
            self._quarantine(path, offset, bad)
        if found.bad and not found.is_torn:
            self._warn(
                f"{path} IS DAMAGED: {len(found.bad)} bad places before good lines (first at byte "
                f"{found.bad[0][0]}) were moved to {self._folder / QUARANTINE}; the {len(found.good)} good "
                "lines are kept, what was lost runs again. Have the disk checked"
            )
            with blaming(path, "rewrite"):
                replace_atomically(self._files, path, b"".join(found.good))
            return found.good
        appender = Appender(self._files, path, new=False)
        try:
            if found.is_torn:
                self._warn(
                    f"{path} ended in {len(found.bad[0][1])} bytes of an unfinished write: they were moved "
                    f"to {self._folder / QUARANTINE}"
                )
                appender.cut(found.good_bytes)
        finally:
            appender.close()
        return found.good

    def _quarantine(self, path: Path, offset: int, bad: bytes) -> None:
        """Keep bytes that are about to be cut; what lies in quarantine is never replaced or removed."""
        folder = self._folder / QUARANTINE
        with blaming(folder, "write to"):
            make_folder(self._files, folder)
            name = f"{path.name}@{offset}"
            taken = 0
            while self._files.exists(folder / name):
                if self._files.read(folder / name) == bad:
                    return
                taken += 1
                name = f"{path.name}@{offset}.{taken}"
            replace_atomically(self._files, folder / name, bad)

    def _seal(self, shard: ShardFile, tally: Tally) -> bool:
        """Seal an open shard that shall not grow; False where it was empty and is removed instead."""
        self._guard()
        path = self._shards / shard.name
        with blaming(path, "seal"):
            if tally.lines == 0:
                self._files.unlink(path)
                return False
            self._files.rename(path, self._shards / shard_name(shard.seq, is_open=False))
        return True

    def _count(self, entry: Entry, *, is_open: bool) -> None:
        """Take a shard's records into the whole, but for those that a shard before it has."""
        done = self._done
        if not any(done.count_between(first, last + 1) for first, last in entry.ranges):
            for first, last in entry.ranges:
                done.add_range(first, last)
            self._sums.merge(entry.sums)
            return
        fresh = [index for index in entry.indices() if done.add(index)]
        path = self._shards / shard_name(entry.seq, is_open=is_open)
        self._warn(
            f"{path} holds {entry.count - len(fresh)} records of prompts that an earlier shard has: the "
            "earlier ones count"
        )
        with blaming(path, "read"):
            good = scan(self._files.read(path)).good
        wanted = set(fresh)
        for line in good:
            index = lines.index_of(line)
            if index in wanted:
                wanted.discard(index)
                self._sums.add(*facts_of(lines.body_of(line)))

    # Opening.

    def _open_journal(self, seq: int, *, new: bool) -> Appender:
        journal = Appender(self._files, self._shards / shard_name(seq, is_open=True), new=new)
        try:
            with blaming(self._shards, "sync"):
                # Also covers what was renamed, removed or cut before; nothing may be acknowledged, nor
                # listed in the manifest, while a name could still be lost.
                self._files.sync_folder(self._shards)
        except BaseException:
            journal.close()
            raise
        return journal

    def _open_others(self, journal: Appender, seq: int, tally: Tally, unlisted: list[Entry]) -> Recovered:
        self._check_done_indices()
        failed, for_good = self._read_failures()
        opened: list[Appender] = []
        try:
            for name in (MANIFEST, FAILED, DONE_INDICES):
                path = self._folder / name
                opened.append(Appender(self._files, path, new=not self._files.exists(path)))
            manifest, failures, indices = opened
            if unlisted:
                manifest.append(b"".join([entry.encode() for entry in unlisted]))
                manifest.sync()
            with blaming(self._folder, "sync"):
                self._files.sync_folder(self._folder)
        except BaseException:
            for appender in opened:
                appender.close()
            raise
        return Recovered(
            done=self._done,
            failed=failed,
            failed_for_good=for_good,
            sums=self._sums,
            seq=seq,
            tally=tally,
            journal=journal,
            manifest=manifest,
            failures=failures,
            done_indices=indices,
        )

    def _check_done_indices(self) -> None:
        """Let ``.done_indices`` hold just what is done."""
        path = self._folder / DONE_INDICES
        with blaming(path, "read"):
            there = self._files.exists(path)
            data = self._files.read(path) if there else b""
        what = done_indices.difference(data, self._done)
        if what is not None:
            self._warn(f"{path} {'had' if there else 'was missing:'} {what}: rewritten from the shards")
            with blaming(path, "rewrite"):
                replace_atomically(self._files, path, done_indices.encode(self._done))

    def _read_failures(self) -> tuple[Bitmap, Bitmap]:
        """The indices whose last word is a failure, and those of them that failed for good."""
        path = self._folder / FAILED
        failed, for_good = Bitmap(), Bitmap()
        with blaming(path, "read"):
            there = self._files.exists(path)
        for line in self._mend(path) if there else ():
            failure = failure_of(line)
            if failure is None or failure[0] in self._done:
                continue
            index, is_for_good = failure
            failed.add(index)
            if is_for_good:
                for_good.add(index)
            else:
                for_good.discard(index)
        return failed, for_good
