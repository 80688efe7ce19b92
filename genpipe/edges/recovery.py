"""What a start makes of what the last process left behind. The rules stand in ``FORMAT.md``."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from genpipe.core.bitmap import Bitmap
from genpipe.core.errors import StoreError
from genpipe.core.sums import Sums
from genpipe.edges import lines
from genpipe.edges.appender import Appender
from genpipe.edges.committed import Committed, refuse_behind
from genpipe.edges.files import TEMPORARY, Files, blaming, make_folder, replace_atomically
from genpipe.edges.lists_at_start import put_right_done_indices, read_failures
from genpipe.edges.mending import Mender
from genpipe.edges.restoring import Restorer
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
    shard_files,
    shard_name,
)
from genpipe.edges.stock import Stock


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
        unsent: what the manifest says of sealed shards that are not known to be in S3, by number; shards
            without a record are left out.
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
    unsent: list[Entry]


class Recovery:
    """One recovery of one run folder, by the process that holds its lock.

    Nothing is appended to a file before its end was checked; nothing found is trusted before it was synced;
    bytes that count as no record are copied to ``quarantine/`` before they are cut. A crash at any point of
    it leaves a folder that the next recovery can deal with.

    Records of shards that ``uploads.jsonl`` says are in S3 are done, whether the shards' files are here or
    not.
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
                index stand once on disk, and let the manifest list what is there and nothing else. A shard
                that fell behind what is in S3 gets a new number, and loses the records that S3 has.
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
        self._committed = Committed()
        self._was_used = False
        self._newest = -1
        self._to_protect: list[Path] = []

    def run(self) -> Recovered:
        """Recover.

        Raises:
            StoreError: a file refuses, or the shards are gone; no record was removed.
            Fenced: another driver owns the folder, or has gone on with the run in S3 (only where the recovery
                is not deep; nothing was changed then).
        """
        self._committed = Committed.read(self._folder, self._files, self._warn)
        self._stock = stock = Stock(self._folder, self._files, self._committed, self._warn)
        if not self._deep:
            refuse_behind(self._folder, self._files, self._committed)
        found = self._find()
        manifest = self._read_manifest(found)
        found = self._part_twins(found, manifest.listed)
        self._newest = self._newest_of(found, manifest.listed)
        growing: Tally | None = None
        for shard in found:
            known = None if shard.is_open else manifest.listed.get(shard.seq)
            if known is not None and self._is_trusted(shard, known):
                stock.take(known)
                continue
            good = self._read_shard(shard)
            tally = Tally.of(good)
            entry: Entry | None = tally.entry(shard.seq, self._epoch)
            if self._committed.is_behind(tally.entry(shard.seq, self._epoch), is_open=shard.is_open):
                entry, known = self._set_apart(shard, good), None
            elif self._may_grow(shard, tally):
                growing = tally
                continue
            elif shard.is_open and not self._seal(shard, tally):
                continue
            if entry is None:
                continue
            is_listed = known is not None and entry.says_the_same(known)
            if not is_listed:
                self._warn_of_change(entry, known)
            stock.take(entry, is_listed=is_listed)
        stock.take_elsewhere(manifest.listed)
        stock.warn_of_lost(manifest.listed, {shard.seq for shard in found})
        seq = self._newest if growing is not None else self._newest + 1
        return self._open(seq, growing, manifest)

    def _newest_of(self, found: list[ShardFile], listed: dict[int, Entry]) -> int:
        """The largest number that was ever given, as far as can be known; -1 where none was."""
        return max([*listed, *(shard.seq for shard in found), *self._committed.seqs], default=-1)

    def _may_grow(self, shard: ShardFile, tally: Tally) -> bool:
        """Whether an open shard goes on growing."""
        is_last = shard.is_open and shard.seq == self._newest and shard.seq not in self._committed.seqs
        return is_last and tally.lines < self._shard_records

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
        if ((has_begun and gone) or (self._was_used and not found)) and not (
            self._committed.has_all_of(self._folder, self._files)
        ):
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
        newest = self._newest_of(found, listed)
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

    def _read_manifest(self, found: list[ShardFile]) -> Manifest:
        """What the manifest lists; lines of it that do not count are dropped."""
        path = self._folder / MANIFEST
        with blaming(path, "read"):
            there = self._files.exists(path)
            manifest = Manifest.decode(self._files.read(path) if there else b"")
        if manifest.bad_count:
            self._warn(f"{path} is damaged: what it lacks is made again from the shards")
            with blaming(path, "rewrite"):
                replace_atomically(self._files, path, b"".join(manifest.good))
        sealed = {shard.seq for shard in found if not shard.is_open}
        strangers = len(sealed - manifest.listed.keys())
        # More, or no manifest at all, is somebody's doing.
        if strangers > PENDING_MAX or (strangers and not there):
            self._warn(f"{path} does not list {strangers} sealed shards: they are read, and listed again")
        return manifest

    def _forget_gone(self, manifest: Manifest) -> None:
        """Let the manifest list nothing that is neither here nor in S3."""
        there = self._stock.sealed.keys() | self._committed.seqs
        if manifest.listed.keys() <= there:
            return
        path = self._folder / MANIFEST
        self._mender.keep_aside(path, 0, b"".join(manifest.good))
        kept = [line for line in manifest.good if (entry := Entry.decode(line)) and entry.seq in there]
        self._warn(
            f"{path} lists what is gone no longer; as it was, it was moved to {self._folder / QUARANTINE}"
        )
        with blaming(path, "rewrite"):
            replace_atomically(self._files, path, b"".join(kept))

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

    def _read_shard(self, shard: ShardFile) -> list[bytes]:
        """The lines of a shard that is not listed, or not to be trusted, once it is mended."""
        path = self._shards / shard.name
        good = self._mender.mend(path, is_sealed=not shard.is_open)
        # Where a refused sync made records go into the next shard, and the power went before the old one was
        # listed, both may have them.
        good = self._mender.drop_doubled(path, good, self._stock.done)
        if not shard.is_open:
            self._to_protect.append(path)
        return good

    def _set_apart(self, shard: ShardFile, good: list[bytes]) -> Entry | None:
        """Give a shard that fell behind what is in S3 a new number; None where S3 has all of it.

        Args:
            shard: the shard.
            good: its lines, which are all good and all that it holds.
        """
        self._guard()
        path = self._shards / shard.name
        kept = self._mender.drop_doubled(path, good, self._committed.indices, what="that S3 has")
        with blaming(path, "rename"):
            if not kept:
                self._files.unlink(path)
                return None
            self._newest += 1
            apart = self._shards / shard_name(self._newest, is_open=False)
            self._warn(f"{path} is not what S3 has: its other {len(kept)} records become {apart.name}")
            self._files.rename(path, apart)
        self._to_protect.append(apart)
        return Tally.of(kept).entry(self._newest, self._epoch)

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

    # Opening.

    def _open(self, seq: int, growing: Tally | None, manifest: Manifest) -> Recovered:
        """Open the shard that grows, let it take in what was restored, and open the other files."""
        tally = growing or Tally()
        restorer = Restorer(
            self._folder,
            self._files,
            self._open_journal(seq, new=growing is None),
            tally,
            seq=seq,
            shard_records=self._shard_records,
            epoch=self._epoch,
            guard=self._guard,
        )
        try:
            self._stock.count(tally.entry(seq, self._epoch), is_open=True)
            if self._deep:
                self._forget_gone(manifest)
            restorer.take_in(self._stock.done, self._warn)
            self._stock.take_in(restorer.sealed, restorer.sums)
            return self._open_others(restorer)
        except BaseException:
            restorer.journal.close()
            raise

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

    def _open_others(self, restorer: Restorer) -> Recovered:
        stock, folder, files = self._stock, self._folder, self._files
        put_right_done_indices(folder, files, stock.done, brought=stock.brought, warn=self._warn)
        failed_for_good = read_failures(
            folder, files, self._mender, stock.done, was_used=self._was_used, warn=self._warn
        )
        if self._deep and self._files.exists(self._folder / SEGMENTS):
            self._mender.mend(self._folder / SEGMENTS, indexed=False)
        opened: list[Appender] = []
        try:
            for name in (MANIFEST, FAILED, DONE_INDICES):
                path = self._folder / name
                opened.append(Appender(self._files, path, new=not self._files.exists(path)))
            manifest, failures, indices = opened
            if stock.unlisted:
                manifest.append(b"".join([entry.encode() for entry in stock.unlisted]))
                manifest.sync()
            with blaming(self._folder, "sync"):
                self._files.sync_folder(self._folder)
        except BaseException:
            for appender in opened:
                appender.close()
            raise
        return Recovered(
            done=stock.done,
            failed_for_good=failed_for_good,
            sums=stock.sums,
            seq=restorer.seq,
            tally=restorer.tally,
            journal=restorer.journal,
            manifest=manifest,
            failures=failures,
            done_indices=indices,
            unsent=stock.unsent(),
        )
