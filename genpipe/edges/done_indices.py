"""The text of ``.done_indices``: one decimal index a line, of records that are durable.

The file is derived: it may lag behind the shards, and must never lead. A torn line is a wrong number that
looks right (``12`` of ``1234``), so only lines that end in a newline count, and the whole is held against
the shards at every start.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from genpipe.core.bitmap import Bitmap

_CHUNK_BYTES = 1 << 20
_DIGITS_MAX = 18
_PIECE = 1 << 16


def encode(indices: Iterable[int]) -> bytes:
    """The lines of these indices."""
    numbers = iter(indices)
    pieces = []
    # A piece at a time, so that millions of them are never there as objects at once.
    while some := list(islice(numbers, _PIECE)):
        pieces.append("\n".join(map(str, some)) + "\n")
    return "".join(pieces).encode("ascii")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How the file differs from what is done.

    Attributes:
        foreign: lines whose index has no record.
        missing: records that have no line.
        repeated: lines whose index has a line before.
        garbage: lines that are no number.
        is_torn: the last of them has no newline.
    """

    foreign: int
    missing: int
    repeated: int
    garbage: int
    is_torn: bool

    def __str__(self) -> str:
        kinds = {
            "lines without a record": self.foreign,
            "records without a line": self.missing,
            "repeated lines": self.repeated,
            "lines that are no number": self.garbage,
        }
        return ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)


def difference(data: bytes, done: Bitmap) -> Difference | None:
    """How the file differs from what is done; None where it holds just that, each once.

    Memory stays flat: a bit per index beside the data.
    """
    seen = Bitmap()
    for chunk in _chunks(data):
        numbers, bad = _numbers(chunk)
        # The largest is looked up first, so that one huge number cannot make the bitmap huge.
        if bad or (numbers and max(numbers) not in done) or sum(map(seen.add, numbers)) < len(numbers):
            return _differences(data, done)
    return None if seen == done else _differences(data, done)


def _differences(data: bytes, done: Bitmap) -> Difference:
    """The same, slower, with every line looked at."""
    seen = Bitmap()
    foreign = repeated = garbage = 0
    for chunk in _chunks(data):
        numbers, bad = _numbers(chunk)
        garbage += bad
        for index in numbers:
            if index not in done:
                foreign += 1
            elif not seen.add(index):
                repeated += 1
    return Difference(
        foreign=foreign,
        missing=len(done) - len(seen),
        repeated=repeated,
        garbage=garbage,
        is_torn=data != b"" and not data.endswith(b"\n"),
    )


def _chunks(data: bytes) -> Iterator[bytes]:
    """The data in pieces of about a megabyte that end where lines end."""
    start = 0
    while start < len(data):
        stop = data.find(b"\n", min(start + _CHUNK_BYTES, len(data) - 1)) + 1 or len(data)
        yield data[start:stop]
        start = stop


def _numbers(chunk: bytes) -> tuple[list[int], int]:
    """The numbers of a piece, and how many of its lines are none."""
    torn = not chunk.endswith(b"\n")
    if not torn and not chunk.translate(None, b"0123456789\n"):
        pieces = chunk.split()
        if len(pieces) == chunk.count(b"\n") and len(max(pieces, key=len, default=b"")) <= _DIGITS_MAX:
            return list(map(int, pieces)), 0
    pieces = chunk.split(b"\n")[:-1]
    good = [piece for piece in pieces if piece.isdigit() and len(piece) <= _DIGITS_MAX]
    return list(map(int, good)), len(pieces) - len(good) + torn
