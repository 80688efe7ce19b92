"""Where records become durable: groups, shards, and what is derived from them.

The order of every step is what makes this safe; it is written down in ``FORMAT.md``.
"""

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from genpipe.core.errors import StoreError
from genpipe.core.values import Finished, GivenUp, Group, Sums
from genpipe.edges import done_indices
from genpipe.edges.files import Appender, Files, blaming
from genpipe.edges.record import Wall, encode_finished, encode_given_up
from genpipe.edges.recovery import Recovered, Recovery
from genpipe.edges.shards import SHARDS, Tally, shard_name

SealedHook = Callable[[Path, bytes], None]
"""Called with the path of a sealed shard and its line of the manifest, once both are durable."""


def _nothing() -> None:
    """The guard of a folder that nobody else can claim."""


class Store:
    """The records of one run folder, whose lock the caller holds. Blocking, for one thread at a time.

    Invariants, at every instant and after every crash: a record that was acknowledged (``commit`` returned)
    stands in exactly one shard; an index stands in ``.done_indices`` only when its record is durable; a
    line of the manifest is there only when its shard is durable under its sealed name.

    After a ``StoreError`` nothing may be committed any more; the next :meth:`open` finds out what is durable.

    Attributes:
        done: indices with a durable record; changes only in :meth:`commit`.
        skip: what the input must not offer: what was done at the start, and what had failed for good unless
            that is to be tried again. Never changes, so that another thread may read it.
        sums: totals over all durable records of the run, each index counted once.
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
    ) -> None:
        self.done = state.done
        self.sums = state.sums
        self.skip = copy.deepcopy(state.done)
        if not retry_failed:
            for index in state.failed_for_good:
                self.skip.add(index)
        self._shards = folder / SHARDS
        self._files = files
        self._shard_records = shard_records
        self._wall = wall
        self._settings = settings
        self._epoch = epoch
        self._guard = guard
        self._on_sealed = on_sealed
        self._failed = state.failed
        self._failed_for_good = state.failed_for_good
        self._seq = state.seq
        self._tally = state.tally
        self._journal = state.journal
        self._manifest = state.manifest
        self._failures = state.failures
        self._done_indices = state.done_indices
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
            guard: raises ``Fenced`` where the folder is no longer ours; called before a shard is sealed.
            on_sealed: told of each shard that is sealed after the recovery.

        Raises:
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
        )

    @property
    def failed_now_count(self) -> int:
        """Prompts whose last word is a failure, for good or not, and that have no record."""
        return len(self._failed)

    @property
    def failed_for_good_count(self) -> int:
        """Those of them that the same again would not help."""
        return len(self._failed_for_good)

    @property
    def next_seq(self) -> int:
        """The number that the next sealed shard will have."""
        return self._seq

    def commit(self, group: Group) -> None:
        """Make a group durable and mark its indices done, in that order.

        Raises:
            StoreError: nothing may be assumed durable of this group; the store takes no other.
        """
        self._begin()
        self._check_new(group)
        encoded = [encode_finished(finished, self._wall, self._settings) for finished in group.finished]
        start = 0
        while start < len(encoded):
            stop = start + self._shard_records - self._tally.lines
            self._write(group.finished[start:stop], encoded[start:stop])
            if self._tally.lines >= self._shard_records:
                self._seal(is_last=False)
            start = stop
        if group.given_up:
            self._write_failures(group.given_up)
        self._usable = True

    def seal_last(self) -> None:
        """Seal the short shard at the end of a run; an empty one is removed. Nothing is committed after it.

        Raises:
            StoreError: it stays open, or open in name only; what was committed is durable all the same.
        """
        self._begin()
        if self._tally.lines:
            self._seal(is_last=True)
            return
        self._journal.close()
        with blaming(self._journal.path, "remove"):
            self._files.unlink(self._journal.path)
            self._files.sync_folder(self._shards)

    def close(self) -> None:
        """Close the files; nothing is written. May be called twice, and after an error."""
        self._usable = False
        for appender in (self._journal, self._manifest, self._failures, self._done_indices):
            appender.close()

    def _begin(self) -> None:
        """From here to the end of a good step the store counts as broken."""
        if not self._usable:
            raise StoreError(
                f"{self._shards} takes no more records in this process; start the same command again"
            )
        self._usable = False

    def _check_new(self, group: Group) -> None:
        """Each prompt ends once: a second record, or a failure after one, is a bug of the caller."""
        indices = [finished.prompt.index for finished in group.finished]
        indices += [given_up.index for given_up in group.given_up]
        assert len(set(indices)) == len(indices), f"group {group.number} holds a prompt twice"
        for index in indices:
            assert index not in self.done, f"prompt {index} of group {group.number} is done already"

    def _write(self, part: Sequence[Finished], encoded: Sequence[bytes]) -> None:
        """Make records durable in the open shard, and only then let them count."""
        data = b"".join(encoded)
        self._journal.append(data)
        self._journal.sync()
        self._tally.take(data, len(encoded))
        indices = [finished.prompt.index for finished in part]
        sums = Sums()
        for finished in part:
            sums.add(finished.answer.output_tokens, finished.answer.flags)
        for index in indices:
            self.done.add(index)
            self._failed.discard(index)
            self._failed_for_good.discard(index)
        self._tally.count(indices, sums)
        self.sums.merge(sums)
        # Derived, and never ahead of the shards: so it comes last, and needs no sync of its own.
        self._done_indices.append(done_indices.encode(indices))

    def _write_failures(self, given_up: Sequence[GivenUp]) -> None:
        self._failures.append(b"".join([encode_given_up(failure) for failure in given_up]))
        self._failures.sync()
        for failure in given_up:
            self._failed.add(failure.index)
            if failure.for_good:
                self._failed_for_good.add(failure.index)
            else:
                self._failed_for_good.discard(failure.index)

    def _seal(self, *, is_last: bool) -> None:
        """The checkpoint: all lines of the open shard are durable, it is closed for ever."""
        self._guard()
        sealed = self._shards / shard_name(self._seq, is_open=False)
        self._journal.close()
        with blaming(self._journal.path, "seal"):
            self._files.rename(self._journal.path, sealed)
        entry = self._tally.entry(self._seq, self._epoch)
        self._seq += 1
        if not is_last:
            self._journal = Appender(
                self._files, self._shards / shard_name(self._seq, is_open=True), new=True
            )
            self._tally = Tally()
        with blaming(self._shards, "sync"):
            # Covers the new name of the full shard and the name of the next: nothing is acknowledged in a
            # shard that a power loss could take away whole.
            self._files.sync_folder(self._shards)
        self._done_indices.sync()
        line = entry.encode()
        self._manifest.append(line)
        self._manifest.sync()
        if self._on_sealed is not None:
            self._on_sealed(sealed, line)


class StoreThread:
    """A :class:`Store` behind the core's ``Store`` port: its blocking work is done in one thread of its own.

    A caller that is cancelled stops waiting; the step that it began is carried out to its end.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="genpipe-store")

    async def commit(self, group: Group) -> None:
        """See :meth:`Store.commit`."""
        await self._carry_out(lambda: self._store.commit(group))

    async def seal_last(self) -> None:
        """See :meth:`Store.seal_last`."""
        await self._carry_out(self._store.seal_last)

    async def close(self) -> None:
        """Wait for the step in progress, close the store and end the thread."""
        try:
            await self._carry_out(self._store.close)
        finally:
            # Its last step has been done: this waits for the thread to end, and for no work.
            self._executor.shutdown(wait=True)

    async def _carry_out(self, step: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._executor, step)
