"""Where records become durable: groups, shards, and what is derived from them.

The order of every step is what makes this safe; it is written down in ``FORMAT.md``.
"""

import contextlib
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from genpipe.core.errors import DiskFull, Fenced, StoreError
from genpipe.core.sums import Sums
from genpipe.core.values import Finished, GivenUp, Group, Space
from genpipe.edges import done_indices
from genpipe.edges.background import Background, Job
from genpipe.edges.files import Files, blaming
from genpipe.edges.journal import Journal
from genpipe.edges.list_file import ListFile
from genpipe.edges.record import Wall, encode_finished, encode_given_up
from genpipe.edges.recovery import Recovered, Recovery
from genpipe.edges.shards import MANIFEST, SHARDS, Entry, shard_name

SealedHook = Callable[[Entry], None]
"""Called with what the manifest says of a sealed shard, once both are durable."""


def _nothing() -> None:
    """The guard of a folder that nobody else can claim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedGroup:
    """A group as the lines that are to be written.

    Attributes:
        group: what was encoded.
        records: a line for each of ``group.finished``.
        failures: the lines of ``group.given_up``.
    """

    group: Group
    records: list[bytes]
    failures: bytes


class Store:
    """The records of one run folder, whose lock the caller holds. Blocking, for one thread at a time.

    Invariants, at every instant and after every crash: a record that was acknowledged (``commit`` returned)
    stands in exactly one shard; an index stands in ``.done_indices`` only when its record is durable; a
    line of the manifest is there only when its shard is durable under its sealed name.

    After a ``DiskFull`` the same group may come again; what of it was durable by then is not written twice.
    After any other ``StoreError`` nothing may be committed any more; the next :meth:`open` finds out what is
    durable.

    Attributes:
        done: indices with a durable record; changes only in :meth:`commit`.
        skip: what the input must not offer: what was done at the start, and what had failed for good unless
            that is to be tried again. Never changes, so that another thread may read it.
        sums: totals over all durable records of the run, each index counted once.
        unsent: sealed shards that were not known to be in S3 at the start, by number. Never changes.
    """

    def __init__(
        self,
        folder: Path,
        files: Files,
        state: Recovered,
        *,
        shard_records: int,
        wall: Wall,
        settings: str | None,
        retry_failed: bool,
        epoch: int,
        guard: Callable[[], None],
        on_sealed: SealedHook | None,
        pool: Executor | None,
    ) -> None:
        self.done = state.done
        self.sums = state.sums
        self.unsent = state.unsent
        self.skip = copy.deepcopy(state.done)
        if not retry_failed:
            for index in state.failed_for_good:
                self.skip.add(index)
        self._folder = folder
        self._files = files
        self._shard_records = shard_records
        self._wall = wall
        self._settings = settings
        self._guard = guard
        self._on_sealed = on_sealed
        self._background = Background(pool)
        self._failed_for_good = state.failed_for_good
        self._journal = Journal(
            files,
            folder / SHARDS,
            state.journal,
            state.tally,
            seq=state.seq,
            epoch=epoch,
            guard=guard,
            background=self._background,
        )
        self._manifest = ListFile(files, state.manifest, may_lag=False)
        self._done_indices = ListFile(files, state.done_indices, may_lag=True)
        self._failures = ListFile(files, state.failures, may_lag=False)
        # Shards that are sealed and that the manifest is not known to list, oldest first.
        self._unlisted: list[Entry] = []
        self._must_list = False
        self._checkpoint: Job[list[Entry]] | None = None
        # Of groups that met a full disk half-way, by number: how many of their records are durable.
        self._half_done: dict[int, int] = {}
        self._usable = True

    @classmethod
    def open(
        cls,
        folder: Path,
        files: Files,
        *,
        shard_records: int,
        wall: Wall,
        warn: Callable[[str], None],
        settings: str | None = None,
        retry_failed: bool = False,
        epoch: int = 0,
        guard: Callable[[], None] = _nothing,
        on_sealed: SealedHook | None = None,
        pool: Executor | None = None,
    ) -> "Store":
        """Recover what is on disk, and be ready to commit.

        Args:
            folder: the run folder; it exists, and its lock is held.
            files: the disk.
            shard_records: lines of a full shard; the same at every start of a run.
            wall: the process's anchor of the wall clock.
            warn: told, in one line each, what was odd and what was done about it.
            settings: put into every record where the settings are not those of ``run.json``.
            retry_failed: prompts that failed for good are not to be skipped.
            epoch: the number of this claim of the folder.
            guard: raises ``Fenced`` where the folder is no longer ours; called before each write to a shard,
                and again before what was written counts.
            on_sealed: told of each shard that is sealed after the recovery, perhaps in a thread of ``pool``.
            pool: threads for what may be done beside a commit: digests, and the lists of a sealed shard.
                Without one, everything is done in the caller's thread.

        Raises:
            Fenced: another driver has gone on with the run in S3; nothing was changed.
            StoreError: a file refuses, or the shards are gone.
        """
        assert shard_records >= 1
        state = Recovery(
            folder, files, shard_records=shard_records, epoch=epoch, warn=warn, guard=guard
        ).run()
        return cls(
            folder,
            files,
            state,
            shard_records=shard_records,
            wall=wall,
            settings=settings,
            retry_failed=retry_failed,
            epoch=epoch,
            guard=guard,
            on_sealed=on_sealed,
            pool=pool,
        )

    @property
    def failed_for_good_count(self) -> int:
        """Prompts without a record whose last word is a failure that the same again would not help."""
        return len(self._failed_for_good)

    def commit(self, group: Group) -> None:
        """Make a group durable and mark its indices done, in that order.

        Raises:
            DiskFull: there is no room for all of it; the same group may be committed again.
            StoreError: nothing may be assumed durable of this group; the store takes no other.
        """
        self.write(self.encode(group))

    def encode(self, group: Group) -> EncodedGroup:
        """The first half of :meth:`commit`: touches nothing, and may be called beside a :meth:`write`."""
        return EncodedGroup(
            group=group,
            records=[encode_finished(finished, self._wall, self._settings) for finished in group.finished],
            failures=b"".join([encode_given_up(failure) for failure in group.given_up]),
        )

    def write(self, encoded: EncodedGroup) -> None:
        """The second half of :meth:`commit`."""
        self._begin()
        try:
            self._write(encoded)
        except DiskFull:
            self._usable = True
            raise
        self._usable = True

    def space(self) -> Space:
        """The room on the disk.

        Raises:
            StoreError: the folder is gone.
        """
        with blaming(self._folder, "look at"):
            return self._files.space(self._folder)

    def seal_last(self) -> None:
        """Seal the short shard at the end of a run; an empty one is removed. Nothing is committed after it.

        Raises:
            StoreError: it stays open, or open in name only; what was committed is durable all the same.
        """
        self._begin()
        if not self._journal.is_sealed:
            self._seal()
        self._journal.sync_names()
        self._list_all()

    def close(self) -> None:
        """Close the files; nothing is written. May be called twice, and after an error."""
        self._usable = False
        if self._checkpoint is not None:
            self._checkpoint.wait()
        for file in (self._journal, self._manifest, self._failures, self._done_indices):
            file.close()

    def _begin(self) -> None:
        """From here to the end of a good step the store counts as broken."""
        if not self._usable:
            raise StoreError(
                f"{self._folder / SHARDS} takes no more records in this process; start the same command again"
            )
        self._usable = False

    def _check_new(self, finished: Sequence[Finished], given_up: Sequence[GivenUp]) -> None:
        """Each prompt ends once: a second record, or a failure after one, is a bug of the caller."""
        indices = [one.prompt.index for one in finished] + [failure.index for failure in given_up]
        assert len(set(indices)) == len(indices), "a group holds a prompt twice"
        for index in indices:
            assert index not in self.done, f"prompt {index} is done already"

    def _write(self, encoded: EncodedGroup) -> None:
        group = encoded.group
        start = self._half_done.pop(group.number, 0)
        self._check_new(group.finished[start:], group.given_up)
        try:
            self._go_on()
            while start < len(encoded.records):
                stop = start + self._shard_records - self._journal.tally.lines
                self._write_records(encoded.records[start:stop])
                self._count(group.finished[start:stop])
                start = stop
                if self._journal.tally.lines >= self._shard_records:
                    self._go_on()
            if group.given_up:
                self._write_failures(encoded.failures, group.given_up)
        except DiskFull:
            self._half_done[group.number] = start
            raise

    def _write_records(self, lines: Sequence[bytes]) -> None:
        """Make lines durable: where the disk errs, in a new shard, once."""
        try:
            self._journal.write(lines)
        except (DiskFull, Fenced):
            raise
        except StoreError:
            # Never another sync of that file: its word could not be believed.
            self._go_on()
            self._journal.write(lines)
        self._guard()

    def _go_on(self) -> None:
        """Let there be a shard to write to, and finish what a full disk had put off."""
        if self._checkpoint is not None and self._checkpoint.is_over:
            self._join()
        self._must_list |= self._journal.is_spoiled
        if self._journal.is_spoiled or self._journal.tally.lines >= self._shard_records:
            self._seal()
        if self._journal.is_sealed:
            self._journal.begin_next()
        self._list_sealed()
        if self._must_list:
            # The shard was cut, and the cut is not synced: its length must be durable in the manifest before
            # what was cut off stands in the next shard.
            self._list_all()
            self._must_list = False

    def _count(self, part: Sequence[Finished]) -> None:
        """Durable records are done."""
        indices = [finished.prompt.index for finished in part]
        sums = Sums()
        for finished in part:
            sums.add(finished.answer.output_tokens, finished.answer.flags)
        for index in indices:
            self.done.add(index)
            self._failed_for_good.discard(index)
        self._journal.tally.count(indices, sums)
        self.sums.merge(sums)
        # Derived, and never ahead of the shards: so it comes last, and needs no sync of its own.
        self._done_indices.add(done_indices.encode(indices))

    def _write_failures(self, data: bytes, given_up: Sequence[GivenUp]) -> None:
        self._guard()
        self._failures.add(data)
        self._failures.sync()
        self._guard()
        for failure in given_up:
            if failure.for_good:
                self._failed_for_good.add(failure.index)
            else:
                self._failed_for_good.discard(failure.index)

    def _seal(self) -> None:
        """All lines of the open shard are durable; it is closed for ever."""
        entry = self._journal.seal()
        if entry is not None:
            self._unlisted.append(entry)

    def _list_sealed(self) -> None:
        """Begin the checkpoint of the shards whose sealed names are durable: see ``FORMAT.md``."""
        if self._unlisted:
            self._join()
            entries, self._unlisted = self._unlisted, []
            self._checkpoint = self._background.submit(self._list, entries)

    def _list_all(self) -> None:
        """Return once the manifest durably lists every sealed shard."""
        self._list_sealed()
        self._join()
        if self._unlisted:
            raise DiskFull(
                f"cannot append to {self._folder / MANIFEST}: no space left; free some space there, or raise "
                "the quota"
            )

    def _join(self) -> None:
        """Wait for the checkpoint under way; raises what it raised."""
        job, self._checkpoint = self._checkpoint, None
        if job is not None:
            self._unlisted[:0] = job.result()

    def _list(self, entries: list[Entry]) -> list[Entry]:
        """The checkpoint; returns those shards that the manifest had no room for."""
        self._guard()
        self._done_indices.sync()
        try:
            self._manifest.add(b"".join([entry.encode() for entry in entries]))
            self._manifest.sync()
        except DiskFull:
            return entries
        for entry in entries:
            path = self._folder / SHARDS / shard_name(entry.seq, is_open=False)
            # Against accidents only, and not every file system has such rights.
            with contextlib.suppress(OSError):
                self._files.make_read_only(path)
            if self._on_sealed is not None:
                self._on_sealed(entry)
        return []
