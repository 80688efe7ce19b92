"""Shards that are in S3, as far as the run folder knows, and shards of the folder that fell behind them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from genpipe.core.bitmap import Bitmap
from genpipe.core.errors import Fenced
from genpipe.core.wording import number
from genpipe.edges import done_indices, lines
from genpipe.edges.files import Files, blaming
from genpipe.edges.reading import Contents, contents_of
from genpipe.edges.s3.commits import UPLOADS, Commit
from genpipe.edges.shards import (
    DONE_INDICES,
    MANIFEST,
    QUARANTINE,
    SHARDS,
    Entry,
    Manifest,
    ShardFile,
    Tally,
    scan,
)

_NAMED_MAX = 5


class Committed:
    """Shards that are in S3, whether their files are in the run folder or not.

    Attributes:
        entries: what was committed, in the order of the log, each once.
        seqs: their numbers.
        indices: the prompts that have a record in them.
    """

    def __init__(self, commits: Iterable[Commit] = ()) -> None:
        self.entries: list[Entry] = []
        self.seqs: set[int] = set()
        self.indices = Bitmap()
        self._digests: set[tuple[int, str]] = set()
        for commit in sorted(commits, key=lambda commit: commit.number):
            entry = commit.entry
            if not self.holds(entry):
                self._digests.add((entry.seq, entry.digest))
                self.entries.append(entry)
                self.seqs.add(entry.seq)
                self.indices.add_ranges(entry.ranges)

    @classmethod
    def read(cls, folder: Path, files: Files, warn: Callable[[str], None]) -> "Committed":
        """What ``uploads.jsonl`` says; nothing where there is no such file.

        Raises:
            StoreError: it cannot be read.
        """
        path = folder / UPLOADS
        with blaming(path, "read"):
            data = files.read(path) if files.exists(path) else b""
        told = data.splitlines(keepends=True)
        # A kill leaves half a line at the end.
        whole = told if data.endswith(b"\n") else told[:-1]
        commits = [commit for commit in map(Commit.decode, whole) if commit is not None]
        if len(commits) < len(whole):
            warn(
                f"{path} is damaged: what is in S3 is not known of {len(whole) - len(commits)} shards until "
                "a start with --s3 looks there"
            )
        return cls(commits)

    def holds(self, entry: Entry) -> bool:
        """Whether just this shard is in S3: the same number, and the same bytes."""
        return (entry.seq, entry.digest) in self._digests

    def overlap(self, entry: Entry) -> int:
        """How many of a shard's prompts have a record in S3."""
        return overlap(self.indices, entry)

    def is_behind(self, entry: Entry, *, is_open: bool, has_own_number: bool = True) -> bool:
        """Whether a shard cannot go to S3 as it is: its number, or prompts of it, were committed otherwise.

        Args:
            entry: what it holds.
            is_open: it was still growing.
            has_own_number: no sealed shard of the folder has its number too.
        """
        if self.holds(entry) or (is_open and entry.count == 0):
            return False
        return (has_own_number and entry.seq in self.seqs) or self.overlap(entry) > 0

    def has_all_of(self, folder: Path, files: Files) -> bool:
        """Whether S3 has all records that the lists of a folder tell of, so that it needs no shards.

        Raises:
            StoreError: a list cannot be read.
        """
        if not self.entries:
            return False
        told = []
        for name in (MANIFEST, DONE_INDICES):
            with blaming(folder / name, "read"):
                told.append(files.read(folder / name) if files.exists(folder / name) else b"")
        what = done_indices.difference(told[1], self.indices)
        listed = Manifest.decode(told[0]).listed.values()
        return (what is None or not what.foreign) and all(
            self.overlap(entry) == entry.count for entry in listed
        )


def overlap(indices: Bitmap, entry: Entry) -> int:
    """How many of a shard's prompts are among ``indices``."""
    return sum(indices.count_between(first, last + 1) for first, last in entry.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Behind:
    """One shard that fell behind.

    Attributes:
        name: its file name.
        records: how many it holds.
        in_s3: how many of them S3 has a record of.
    """

    name: str
    records: int
    in_s3: int


def refuse_behind(folder: Path, files: Files, committed: Committed) -> None:
    """Make sure that what the folder has can go to S3; changes nothing.

    Raises:
        Fenced: another claim has gone on with the run, and shards of the folder fell behind.
        StoreError: a file cannot be read.
    """
    if not committed.entries:
        return
    contents = contents_of(files, folder)
    behind = _behind(folder, files, committed, contents)
    if not behind:
        return
    names = ", ".join(f"{SHARDS}/{one.name}" for one in behind[:_NAMED_MAX])
    more = f" and {len(behind) - _NAMED_MAX} more" if len(behind) > _NAMED_MAX else ""
    records, in_s3 = sum(one.records for one in behind), sum(one.in_s3 for one in behind)
    raise Fenced(
        f"another driver has gone on with the run in {folder}, or its shards were changed: {names}{more} "
        f"are not what S3 has under these numbers, or for these prompts. S3 has {number(in_s3)} of their "
        f"{number(records)} records by now. Nothing was changed. Run `genpipe verify {folder} --repair`, "
        f"which moves those to {QUARANTINE}/ and keeps the others under new numbers, and start the same "
        "command again"
    )


def _behind(folder: Path, files: Files, committed: Committed, contents: Contents) -> list[_Behind]:
    sealed = {shard.seq for shard in contents.shards or () if not shard.is_open}
    found = []
    for shard, listed in contents.pairs():
        entry = _entry_of(folder, files, shard, listed)
        has_own_number = not (shard.is_open and shard.seq in sealed)
        if committed.is_behind(entry, is_open=shard.is_open, has_own_number=has_own_number):
            found.append(_Behind(name=shard.name, records=entry.count, in_s3=committed.overlap(entry)))
    return found


def _entry_of(folder: Path, files: Files, shard: ShardFile, listed: Entry | None) -> Entry:
    """What a recovery will make of a shard: what the manifest lists, where that may be trusted."""
    path = folder / SHARDS / shard.name
    with blaming(path, "read"):
        if (
            listed is not None
            and shard.size_bytes == listed.size_bytes
            and (shard.size_bytes == 0 or lines.looks_whole(*files.read_ends(path, lines.ENDS_BYTES)))
        ):
            return listed
        data = files.read(path)
    if listed is not None and len(data) > listed.size_bytes and listed.covers(data[: listed.size_bytes]):
        return listed
    return Tally.of(scan(data).good).entry(shard.seq, 0)
