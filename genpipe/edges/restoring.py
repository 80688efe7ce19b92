"""Records of a shard that was still open on another machine, taken into the shard that grows here."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from genpipe.core.bitmap import Bitmap
from genpipe.core.errors import StoreError
from genpipe.core.sums import Sums
from genpipe.edges import lines
from genpipe.edges.appender import Appender
from genpipe.edges.files import Files, blaming
from genpipe.edges.record import facts_of
from genpipe.edges.shards import SHARDS, Entry, Tally, scan, shard_name

RESTORED = "restored.jsonl"
"""The file of the run folder that holds such records until a start has taken them in."""


class Restorer:
    """Appends to the shard that grows, before the store does.

    A crash at any point leaves each record in a shard, or in ``restored.jsonl`` still: the next start takes
    in what no shard has.

    Attributes:
        journal: the shard that grows; another one after each that was filled.
        seq: its number.
        tally: what it holds.
        sealed: the shards that were filled; their names are durable.
        sums: totals over the records that were taken in.
    """

    def __init__(
        self,
        folder: Path,
        files: Files,
        journal: Appender,
        tally: Tally,
        *,
        seq: int,
        shard_records: int,
        epoch: int,
        guard: Callable[[], None],
    ) -> None:
        self._path = folder / RESTORED
        self._shards = folder / SHARDS
        self._files = files
        self._shard_records = shard_records
        self._epoch = epoch
        self._guard = guard
        self.journal = journal
        self.seq = seq
        self.tally = tally
        self.sealed: list[Entry] = []
        self.sums = Sums()

    def take_in(self, done: Bitmap, warn: Callable[[str], None]) -> None:
        """Take in what is not done, and remove ``restored.jsonl``; nothing where there is none.

        Args:
            done: what the shards have; grows.
            warn: told, in one line, what was odd.

        Raises:
            Fenced: the folder is somebody else's.
            StoreError: a file refuses; what was not taken in is in ``restored.jsonl`` still.
        """
        with blaming(self._path, "read"):
            if not self._files.exists(self._path):
                return
            found = scan(self._files.read(self._path))
        if found.bad:
            warn(f"{self._path} is damaged: what its bad lines stood for runs again")
        wanted: dict[int, bytes] = {}
        for index, line in zip(found.indices, found.good, strict=True):
            if index not in done:
                wanted.setdefault(index, line)
        left = list(wanted.items())
        while left:
            room = self._shard_records - self.tally.lines
            if room <= 0:
                self._next()
                continue
            self._append(left[:room], done)
            left = left[room:]
        with blaming(self._path, "remove"):
            self._files.unlink(self._path)

    def _append(self, part: Sequence[tuple[int, bytes]], done: Bitmap) -> None:
        data = b"".join([line for _, line in part])
        self._guard()
        try:
            self.journal.append(data)
            self.journal.sync()
        except StoreError:
            # What a later sync says of these bytes could not be believed.
            with suppress(StoreError):
                self.journal.forget()
            raise
        self._guard()
        sums = Sums()
        for index, line in part:
            sums.add(*facts_of(lines.body_of(line)))
            done.add(index)
        self.tally.take(data, len(part))
        self.tally.count([index for index, _ in part], sums)
        self.sums.merge(sums)

    def _next(self) -> None:
        """Seal the shard, which is full and durable, and begin the one after it."""
        self._guard()
        path = self.journal.path
        sealed = self._shards / shard_name(self.seq, is_open=False)
        self.journal.close()
        with blaming(path, "seal"):
            self._files.rename(path, sealed)
        self.sealed.append(self.tally.entry(self.seq, self._epoch))
        self.seq += 1
        self.tally = Tally()
        self.journal = Appender(self._files, self._shards / shard_name(self.seq, is_open=True), new=True)
        with blaming(self._shards, "sync"):
            self._files.sync_folder(self._shards)
        # Against accidents only, and not every file system has such rights.
        with suppress(OSError):
            self._files.make_read_only(sealed)
