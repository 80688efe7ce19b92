"""What a start makes of what the last process left behind. The rules stand in ``FORMAT.md``."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from genpipe.core.bitmap import Bitmap
from genpipe.core.errors import StoreError
from genpipe.core.values import Sums
from genpipe.edges import done_indices, lines
from genpipe.edges.appender import Appender
from genpipe.edges.files import TEMPORARY, Files, blaming, make_folder, replace_atomically
from genpipe.edges.mending import Mender
from genpipe.edges.record import facts_of
from genpipe.edges.run_folder import SEGMENTS
from genpipe.edges.shards import (
    DONE_INDICES,
    FAILED,
    MANIFEST,
    PENDING_MAX,
    QUARANTINE,
    SHARDS,
    Entry,
    Manifest,
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
        failed_for_good: indices whose last word is a failure that the same again would not help, and that are
            not done.
        sums: totals over the durable records, each index counted once.
        seq: number of the shard that grows.
        tally: what that shard holds.
        journal: that shard.
        manifest: ``manifest.jsonl``.
        failures: ``failed.jsonl``.
        done_indices: ``.done_indices``, which holds exactly ``done``.
    """

    done: Bitmap
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
        deep: bool = False,
    ) -> None:
        """Prepare a recovery; nothing is read yet.

        Args:
            folder: the run folder.
            files: the disk.
            shard_records: lines of a full shard.
            epoch: the number of this claim of the folder.
            warn: told, in one line each, what was odd and what was done about it.
            guard: raises ``Fenced`` where the folder is no longer ours.
            deep: believe nothing: read every sealed shard whole and hold it against the manifest, let each
                index stand once on disk, and let the manifest list what is there and nothing else.
        """
        self._folder = folder
        self._shards = folder / SHARDS
        self._files = files
        self._shard_records = shard_records
        self._epoch = epoch
        self._warn = warn
        self._guard = guard
        self._deep = deep
        self._mender = Mender(folder, files, warn)
        self._done = Bitmap()
        self._sums = Sums()
        self._was_used = False
        self._to_protect: list[Path] = []

    def run(self) -> Recovered:
        """Recover.

        Raises:
            StoreError: a file refuses, or the shards are gone; no record was removed.
            Fenced: another driver owns the folder.
        """
        found = self._find()
        listed = self._read_manifest(found)
        found = self._part_twins(found, listed)
        newest = max([*listed, *(shard.seq for shard in found)], default=-1)
        unlisted: list[Entry] = []
        growing: Tally | None = None
        for shard in found:
            known = None if shard.is_open else listed.get(shard.seq)
            if known is not None and self._is_trusted(shard, known):
                self._count(known, is_open=False)
                continue
            tally = self._read_shard(shard)
            if shard.is_open:
                if shard.seq == newest and tally.lines < self._shard_records:
                    growing = tally
                    continue
                if not self._seal(shard, tally):
                    continue
            entry = tally.entry(shard.seq, self._epoch)
            if known is None or not entry.says_the_same(known):
                self._warn_of_change(entry, known)
                unlisted.append(entry)
            self._count(entry, is_open=False)
        self._warn_of_lost(listed, found)
        seq = newest if growing is not None else newest + 1
        journal = self._open_journal(seq, new=growing is None)
        try:
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
        with blaming(self._shards, "look into"):
            found = [] if gone else shard_files(files.sizes(self._shards))
        self._was_used = there.get(DONE_INDICES, 0) > 0 or there.get(MANIFEST, 0) > 0
        # A process notes that it began only when there is a folder for the shards.
        has_begun = self._was_used or there.get(SEGMENTS, 0) > 0
        if (has_begun and gone) or (self._was_used and not found):
            raise StoreError(
                f"{self._shards} {'is gone' if gone else 'is empty'}, but what is beside it tells of a run "
                "that has begun; put the shards back (is a disk not mounted?), or give another folder"
            )
        with blaming(self._shards, "create"):
            make_folder(files, self._shards)
        for folder in (self._folder, self._shards):
            with blaming(folder, "clean up"):
                for name in sorted(files.sizes(folder)):
                    if name.endswith(TEMPORARY):
                        files.unlink(folder / name)
        return found

    def _part_twins(self, found: list[ShardFile], listed: dict[int, Entry]) -> list[ShardFile]:
        """Give an open shard a new number where a sealed one has the same: sealing it would destroy that."""
        sealed = {shard.seq for shard in found if not shard.is_open}
        newest = max([*listed, *(shard.seq for shard in found)], default=-1)
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
            manifest = Manifest.decode(self._files.read(path) if there else b"")
        listed, good = manifest.listed, manifest.good
        if manifest.bad_count:
            self._warn(f"{path} is damaged: what it lacks is made again from the shards")
        sealed = {shard.seq for shard in found if not shard.is_open}
        if self._deep and not listed.keys() <= sealed:
            self._mender.keep_aside(path, 0, b"".join(good))
            good = [line for line in good if (entry := Entry.decode(line)) and entry.seq in sealed]
            self._warn(
                f"{path} lists what is gone no longer; as it was, it was moved to {self._folder / QUARANTINE}"
            )
        if manifest.bad_count or len(good) < len(manifest.good):
            with blaming(path, "rewrite"):
                replace_atomically(self._files, path, b"".join(good))
        strangers = len(sealed - listed.keys())
        # More, or no manifest at all, is somebody's doing.
        if strangers > PENDING_MAX or (strangers and not there):
            self._warn(f"{path} does not list {strangers} sealed shards: they are read, and listed again")
        return listed

    # Shards.

    def _is_trusted(self, shard: ShardFile, entry: Entry) -> bool:
        """Whether a sealed shard is what the manifest says, as far as that can be told without reading it."""
        path = self._shards / shard.name
        if shard.size_bytes != entry.size_bytes:
            if shard.size_bytes > entry.size_bytes and self._mender.cut_back(path, entry):
                self._to_protect.append(path)
                return not self._deep
            self._warn(
                f"{path} has {shard.size_bytes} bytes where the manifest says {entry.size_bytes}: read again"
            )
            return False
        if self._deep or shard.size_bytes == 0:
            return not self._deep
        with blaming(path, "read"):
            ends = self._files.read_ends(path, lines.ENDS_BYTES)
        if lines.looks_whole(*ends):
            return True
        self._warn(f"{path} does not begin and end as a shard does: read again")
        return False

    def _read_shard(self, shard: ShardFile) -> Tally:
        """Read and mend a shard of which the manifest says nothing, or which is not to be trusted."""
        path = self._shards / shard.name
        good = self._mender.mend(path, is_sealed=not shard.is_open)
        # Where a refused sync made records go into the next shard, and the power went before the old one was
        # listed, both may have them.
        good = self._mender.drop_doubled(path, good, self._done)
        if not shard.is_open:
            self._to_protect.append(path)
        return Tally.of(good)

    def _warn_of_lost(self, listed: dict[int, Entry], found: list[ShardFile]) -> None:
        """Tell of shards that are gone, unless other shards have their prompts by now."""
        for seq in sorted(listed.keys() - {shard.seq for shard in found}):
            entry = listed[seq]
            lost = entry.count - sum(
                self._done.count_between(first, last + 1) for first, last in entry.ranges
            )
            if lost:
                self._warn(
                    f"{self._shards / shard_name(seq, is_open=False)} is gone, with {lost} records that no "
                    "other shard has: those prompts run again unless it is put back first"
                )

    def _warn_of_change(self, entry: Entry, known: Entry | None) -> None:
        path = self._shards / shard_name(entry.seq, is_open=False)
        if known is not None:
            self._warn(f"{path} is listed again, with {entry.count} records where there were {known.count}")
        elif self._deep:
            self._warn(f"{path} is listed now, with {entry.count} records")

    def _seal(self, shard: ShardFile, tally: Tally) -> bool:
        """Seal an open shard that shall not grow; False where it was empty and is removed instead."""
        self._guard()
        path = self._shards / shard.name
        with blaming(path, "seal"):
            if tally.lines == 0:
                self._files.unlink(path)
                return False
            sealed = self._shards / shard_name(shard.seq, is_open=False)
            self._files.rename(path, sealed)
        self._to_protect.append(sealed)
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
            found = scan(self._files.read(path))
        wanted = set(fresh)
        for index, line in zip(found.indices, found.good, strict=True):
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
            # Not before: were the right to write lost and the old name of an open shard back after a power
            # loss, nobody could append to it.
            for path in self._to_protect:
                # Against accidents only, and not every file system has such rights.
                with suppress(OSError):
                    self._files.make_read_only(path)
        except BaseException:
            journal.close()
            raise
        return journal

    def _open_others(self, journal: Appender, seq: int, tally: Tally, unlisted: list[Entry]) -> Recovered:
        self._check_done_indices()
        failed_for_good = self._read_failures()
        if self._deep and self._files.exists(self._folder / SEGMENTS):
            self._mender.mend(self._folder / SEGMENTS, indexed=False)
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
            failed_for_good=failed_for_good,
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
            again = "; what they stood for is lost, and those prompts run again" if what.foreign else ""
            self._warn(
                f"{path} {'had' if there else 'was missing:'} {what}: rewritten from the shards{again}"
            )
            with blaming(path, "rewrite"):
                replace_atomically(self._files, path, done_indices.encode(self._done))

    def _read_failures(self) -> Bitmap:
        """The indices whose last word is a failure for good."""
        path = self._folder / FAILED
        for_good = Bitmap()
        with blaming(path, "read"):
            there = self._files.exists(path)
        if self._was_used and not there:
            self._warn(f"{path} is missing: prompts that had failed for good are asked again")
        for line in self._mender.mend(path) if there else ():
            failure = failure_of(line)
            if failure is None or failure[0] in self._done:
                continue
            index, is_for_good = failure
            if is_for_good:
                for_good.add(index)
            else:
                for_good.discard(index)
        return for_good
