"""What the files of a run are called, how they are scanned, and what the manifest says of a shard."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from genpipe.core.sums import Sums
from genpipe.edges import lines
from genpipe.edges.record import facts_of

SHARDS = "shards"
QUARANTINE = "quarantine"
FAILED = "failed.jsonl"
MANIFEST = "manifest.jsonl"
DONE_INDICES = ".done_indices"

PENDING_MAX = 2
"""A shard is listed while the next one is written, so that a crash leaves at most so many that are not."""

_NAME = re.compile(r"part-([0-9]{6,18})\.jsonl(\.open)?")


def shard_name(seq: int, *, is_open: bool) -> str:
    """The file name of shard ``seq``, while it grows or once it is sealed."""
    return f"part-{seq:06d}.jsonl{'.open' if is_open else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """One shard as it was found.

    Attributes:
        seq: its number, from 0.
        is_open: it was still growing.
        size_bytes: its length.
    """

    seq: int
    is_open: bool
    size_bytes: int

    @property
    def name(self) -> str:
        """Its file name."""
        return shard_name(self.seq, is_open=self.is_open)


def shard_files(sizes: dict[str, int]) -> list[ShardFile]:
    """The shards among the files of a folder, by number; a sealed one before an open one of that number."""
    found = []
    for name, size_bytes in sizes.items():
        match = _NAME.fullmatch(name)
        if match and name == shard_name(int(match[1]), is_open=bool(match[2])):
            found.append(ShardFile(seq=int(match[1]), is_open=bool(match[2]), size_bytes=size_bytes))
    return sorted(found, key=lambda shard: (shard.seq, shard.is_open))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The lines of one file, told apart; the good ones are copied only where they are asked for.

    Attributes:
        data: the whole file.
        spans: where the good lines stand, whole and with the right checksum, in order: start and stop.
        indices: the index of each of them; empty where no index was asked for.
        bad: where other bytes stand: offset, and the bytes; neighbours are joined.
        good_bytes: length of the good lines together.
    """

    data: bytes
    spans: list[tuple[int, int]]
    indices: list[int]
    bad: list[tuple[int, bytes]]
    good_bytes: int

    @property
    def good(self) -> list[bytes]:
        """The good lines, in order."""
        return [self.data[start:stop] for start, stop in self.spans]

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return len(self.data)

    @property
    def is_torn(self) -> bool:
        """There are bad bytes, and only after the last good line: what a crash in a write leaves."""
        return len(self.bad) == 1 and self.bad[0][0] == self.good_bytes


def scan(data: bytes, *, indexed: bool = True) -> Scan:
    """Look at every line of a file.

    Args:
        data: the whole file.
        indexed: a line must begin with an index to be good.
    """
    spans: list[tuple[int, int]] = []
    indices: list[int] = []
    bad: list[tuple[int, bytes]] = []
    view = memoryview(data)
    good_bytes = start = 0
    bad_since: int | None = None
    index_of, counts = lines.index_of, lines.counts
    size_bytes = len(data)
    while start < size_bytes:
        stop = data.find(b"\n", start) + 1 or size_bytes
        index = index_of(data, start) if indexed else 0
        if index is not None and counts(data, view, start, stop):
            if bad_since is not None:
                bad.append((bad_since, data[bad_since:start]))
                bad_since = None
            spans.append((start, stop))
            if indexed:
                indices.append(index)
            good_bytes += stop - start
        elif bad_since is None:
            bad_since = start
        start = stop
    if bad_since is not None:
        bad.append((bad_since, data[bad_since:]))
    return Scan(data=data, spans=spans, indices=indices, bad=bad, good_bytes=good_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the manifest says of one sealed shard.

    Attributes:
        seq: the shard's number.
        size_bytes: its length.
        digest: SHA-256 of its bytes, in hex.
        ranges: the indices in it, as runs (first, last), both included, in order.
        sums: totals over its records, each index counted once.
        epoch: the claim of the run folder under which it was sealed.
    """

    seq: int
    size_bytes: int
    digest: str
    ranges: list[tuple[int, int]]
    sums: Sums
    epoch: int

    @property
    def count(self) -> int:
        """How many indices are in the shard."""
        return sum(last - first + 1 for first, last in self.ranges)

    def indices(self) -> Iterator[int]:
        """The indices in the shard, in order."""
        for first, last in self.ranges:
            yield from range(first, last + 1)

    def covers(self, data: bytes) -> bool:
        """Whether these are the bytes that were sealed."""
        return len(data) == self.size_bytes and hashlib.sha256(data).hexdigest() == self.digest

    def says_the_same(self, other: "Entry") -> bool:
        """Whether both say the same of the shard's bytes, whoever sealed it and when."""
        return (self.seq, self.size_bytes, self.digest, self.ranges, self.sums.as_json()) == (
            *(other.seq, other.size_bytes, other.digest, other.ranges),
            other.sums.as_json(),
        )

    def as_json(self) -> dict[str, Any]:
        """For a line of the manifest, or a commit object."""
        return {
            "seq": self.seq,
            "file": shard_name(self.seq, is_open=False),
            "bytes": self.size_bytes,
            "sha256": self.digest,
            "count": self.count,
            "indices": self.ranges,
            "sums": self.sums.as_json(),
            "epoch": self.epoch,
        }

    def encode(self) -> bytes:
        """As a line of the manifest."""
        return lines.encode(orjson.dumps(self.as_json())[:-1])

    @classmethod
    def decode(cls, line: bytes) -> "Entry | None":
        """From a line of the manifest; None where it is none, or does not agree with itself."""
        body = lines.decode(line)
        if body is None:
            return None
        try:
            return cls.from_json(orjson.loads(body))
        except ValueError:
            return None

    @classmethod
    def from_json(cls, fields: Any) -> "Entry | None":
        """From what :meth:`as_json` gave; None where it is something else, or does not agree with itself."""
        try:
            entry = cls(
                seq=int(fields["seq"]),
                size_bytes=int(fields["bytes"]),
                digest=str(fields["sha256"]),
                ranges=[(first, last) for first, last in fields["indices"]],
                sums=Sums.from_json(fields["sums"]),
                epoch=int(fields["epoch"]),
            )
            sums = entry.sums
            agrees = entry.count == sums.records == fields["count"]
            agrees = agrees and sums.lengths.count + sums.usage_unknown == sums.records
            previous = -1
            for first, last in entry.ranges:
                agrees = agrees and previous < first <= last
                previous = last
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        return entry if agrees and entry.seq >= 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What ``manifest.jsonl`` says.

    Attributes:
        listed: its entries, by shard; the last line about a shard counts.
        good: the lines that count and agree with themselves, in order.
        bad_count: how many do not.
    """

    listed: dict[int, Entry]
    good: list[bytes]
    bad_count: int

    @classmethod
    def decode(cls, data: bytes) -> "Manifest":
        """From the file's bytes."""
        listed: dict[int, Entry] = {}
        good = []
        bad_count = 0
        for line in data.splitlines(keepends=True):
            entry = Entry.decode(line)
            if entry is None:
                bad_count += 1
            else:
                good.append(line)
                listed[entry.seq] = entry
        return cls(listed=listed, good=good, bad_count=bad_count)


class Tally:
    """What an :class:`Entry` needs to know of a shard, gathered line by line as it grows.

    Attributes:
        lines: how many it holds.
        size_bytes: their length together.
        sums: totals over its records.
    """

    __slots__ = ("_digest", "_indices", "lines", "size_bytes", "sums")

    def __init__(self) -> None:
        self.lines = 0
        self.size_bytes = 0
        self.sums = Sums()
        self._digest = hashlib.sha256()
        self._indices: set[int] = set()

    @classmethod
    def of(cls, good: Iterable[bytes]) -> "Tally":
        """The tally of a shard that was scanned; of lines with one index, the first counts."""
        tally = cls()
        for line in good:
            index = lines.index_of(line)
            assert index is not None
            tally.take(line, 1)
            if index not in tally._indices:
                tally._indices.add(index)
                tally.sums.add(*facts_of(lines.body_of(line)))
        return tally

    def __len__(self) -> int:
        return len(self._indices)

    def take(self, data: bytes, line_count: int) -> None:
        """Go on over the bytes of so many whole lines."""
        self._digest.update(data)
        self._go_on(len(data), line_count)

    def digest_over(self, data: bytes) -> "hashlib._Hash":
        """The digest of the shard if ``data`` came next; changes nothing, so it may run beside a sync."""
        digest = self._digest.copy()
        digest.update(data)
        return digest

    def take_hashed(self, size_bytes: int, line_count: int, digest: "hashlib._Hash") -> None:
        """As :meth:`take`, with what :meth:`digest_over` gave for those bytes."""
        self._digest = digest
        self._go_on(size_bytes, line_count)

    def _go_on(self, size_bytes: int, line_count: int) -> None:
        self.lines += line_count
        self.size_bytes += size_bytes

    def count(self, indices: Sequence[int], sums: Sums) -> None:
        """Count the records of those bytes; none of their indices was counted before."""
        before = len(self._indices)
        self._indices.update(indices)
        assert len(self._indices) == before + len(indices) == before + sums.records
        self.sums.merge(sums)

    def entry(self, seq: int, epoch: int) -> Entry:
        """For the manifest."""
        return Entry(
            seq=seq,
            size_bytes=self.size_bytes,
            digest=self._digest.hexdigest(),
            ranges=_ranges(sorted(self._indices)),
            sums=self.sums,
            epoch=epoch,
        )


def _ranges(indices: list[int]) -> list[tuple[int, int]]:
    """Sorted indices as runs (first, last)."""
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1] = (ranges[-1][0], index)
        else:
            ranges.append((index, index))
    return ranges


def failure_of(line: bytes) -> tuple[int, bool] | None:
    """Index and "for good" of a line of ``failed.jsonl``; None where it holds no failure."""
    index = lines.index_of(line)
    body = lines.decode(line)
    if index is None or body is None:
        return None
    try:
        fields: Any = orjson.loads(body)
    except ValueError:
        return None
    return index, fields.get("for_good") is True
