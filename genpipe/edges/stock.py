"""What a start finds to be there: counted shard by shard, each index once."""

from collections.abc import Callable, Iterable
from pathlib import Path

from genpipe.core.bitmap import Bitmap
from genpipe.core.sums import Sums
from genpipe.edges import lines
from genpipe.edges.committed import Committed, overlap
from genpipe.edges.files import Files, blaming
from genpipe.edges.record import facts_of
from genpipe.edges.shards import SHARDS, Entry, scan, shard_name


class Stock:
    """The records of a run, wherever their shards are.

    Attributes:
        done: indices with a durable record.
        sums: totals over those records, each index counted once.
        sealed: the sealed shards in the folder, by number.
        unlisted: what the manifest does not say yet, in the order in which it shall.
        brought: records that came from elsewhere, and that no list of the folder has yet.
    """

    def __init__(self, folder: Path, files: Files, committed: Committed, warn: Callable[[str], None]) -> None:
        self.done = Bitmap()
        self.sums = Sums()
        self.sealed: dict[int, Entry] = {}
        self.unlisted: list[Entry] = []
        self.brought = 0
        self._shards = folder / SHARDS
        self._files = files
        self._committed = committed
        self._warn = warn

    def take(self, entry: Entry, *, is_listed: bool = True) -> None:
        """Count a sealed shard of the folder, which is as it shall be.

        Raises:
            StoreError: it holds records of an earlier shard too, and cannot be read.
        """
        self.sealed[entry.seq] = entry
        if not is_listed:
            self.unlisted.append(entry)
        self.count(entry, is_open=False)

    def count(self, entry: Entry, *, is_open: bool) -> None:
        """Take a shard's records into the whole, but for those that a shard before it has.

        Raises:
            StoreError: it holds some of those, and cannot be read.
        """
        if not overlap(self.done, entry):
            self.done.add_ranges(entry.ranges)
            self.sums.merge(entry.sums)
            return
        fresh = [index for index in entry.indices() if self.done.add(index)]
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
                self.sums.add(*facts_of(lines.body_of(line)))

    def take_elsewhere(self, listed: dict[int, Entry]) -> None:
        """Count what S3 has and the folder has not; to be called after all shards of the folder were taken.

        Args:
            listed: what the manifest says so far.
        """
        first_of: dict[int, Entry] = {}
        for entry in self._committed.entries:
            here = self.sealed.get(entry.seq)
            if here is not None and here.digest == entry.digest:
                continue
            first_of.setdefault(entry.seq, entry)
            fresh = entry.count - overlap(self.done, entry)
            self.done.add_ranges(entry.ranges)
            known = listed.get(entry.seq)
            if known is None or not known.says_the_same(entry):
                self.brought += fresh
            if fresh == entry.count:
                self.sums.merge(entry.sums)
            else:
                # The lines that would tell more of these are not here.
                self.sums.merge(Sums(records=fresh, usage_unknown=fresh))
        for seq in sorted(first_of.keys() - self.sealed.keys()):
            entry = first_of[seq]
            known = listed.get(seq)
            if known is None or not known.says_the_same(entry):
                self.unlisted.append(entry)

    def take_in(self, sealed: Iterable[Entry], sums: Sums) -> None:
        """Records were appended to the shard that grows, and are in ``done``.

        Args:
            sealed: the shards that were filled by that.
            sums: totals over those records.
        """
        for entry in sealed:
            self.sealed[entry.seq] = entry
            self.unlisted.append(entry)
        self.sums.merge(sums)
        self.brought += sums.records

    def warn_of_lost(self, listed: dict[int, Entry], found: set[int]) -> None:
        """Tell of shards that are gone, unless other shards have their prompts by now.

        Args:
            listed: what the manifest says.
            found: numbers of the shards that were found in the folder.
        """
        for seq in sorted(listed.keys() - found):
            lost = listed[seq].count - overlap(self.done, listed[seq])
            if lost:
                self._warn(
                    f"{self._shards / shard_name(seq, is_open=False)} is gone, with {lost} records that no "
                    "other shard has: those prompts run again unless it is put back first"
                )

    def unsent(self) -> list[Entry]:
        """The sealed shards of the folder that S3 is not known to have, by number; empty ones left out."""
        return [
            entry
            for _, entry in sorted(self.sealed.items())
            if entry.count and not self._committed.holds(entry)
        ]
