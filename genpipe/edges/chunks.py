"""The input in chunks: where records begin and end, and what is no record.

Records are split at the byte 0x0A and nowhere else. A line is blank, and no record, if nothing is left of it
without white space and byte order marks (which stand inside a file where files were glued together).
"""

import hashlib
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from genpipe.core.errors import ConfigError

CHUNK_RECORDS_MAX: Final = 1_000
CHUNK_BYTES_MAX: Final = 4 << 20
LINE_BYTES_MAX: Final = 64 << 20
"""Longest line that becomes a prompt, its newline not counted."""

_BOM = b"\xef\xbb\xbf"
_BLANKS = b" \t\r\n"
_PIECE_BYTES = 1 << 20
_BUFFER_BYTES = 256 << 10
_LINES_HELD_MAX = 8_192
_BRACE = ord("{")
_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "Parquet"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One chunk of the input.

    Attributes:
        file: which input file, from 0.
        first: index of its first record.
        records: how many records it has; blank lines are none.
        lines: physical lines of this file up to the chunk's end.
        start: where it begins in the file (bytes).
        end: where the next one begins (bytes).
        digest: the first 64 bits of the SHA-256 of its bytes.
    """

    file: int
    first: int
    records: int
    lines: int
    start: int
    end: int
    digest: int


@dataclass(slots=True, kw_only=True)
class Cut:
    """A chunk with its records.

    Attributes:
        entry: where it is.
        texts: each record's bytes without a byte order mark; None for a line longer than the limit.
        numbers: each record's 1-based physical line in its file.
    """

    entry: Entry
    texts: list[bytes | None] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)


class Handles:
    """The input files as one thread reads them, one open at a time."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._number = -1
        self._handle: BinaryIO | None = None

    @contextmanager
    def reading(self, number: int) -> Iterator[BinaryIO]:
        """File ``number``, wherever it was last read.

        Raises:
            ConfigError: it cannot be opened, or reading it fails.
        """
        try:
            if self._handle is None or self._number != number:
                self.close()
                path = self._files[number]
                self._handle = open(path, "rb", buffering=_BUFFER_BYTES)  # noqa: SIM115  # closed by close()
                self._number = number
            yield self._handle
        except OSError as error:
            raise unreadable(self._files[number], error) from error

    def close(self) -> None:
        """Close what is open; a later use opens it again."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None


def cut_chunk(
    handle: BinaryIO,
    *,
    file: int,
    first: int,
    lines_before: int,
    start: int,
    end: int | None = None,
    keep: bool = True,
) -> Cut | None:
    """Read the chunk that begins at ``start``; None at the end of the file.

    With ``end`` the chunk reaches up to there, whatever it holds, else as far as a chunk's limits allow.
    Without ``keep`` the records are only counted. A line over the limit is passed without being held.
    """
    number = lines_before
    handle.seek(max(start - 1, 0))
    if start and handle.read(1) != b"\n":
        # The file had no newline at its end when this place was reached, and has grown since: the next
        # newline ends a line that is counted already.
        number -= 1
    hasher = hashlib.sha256()
    held: list[bytes] = []
    texts: list[bytes | None] = []
    numbers: list[int] = []
    records = 0
    position = start
    limit = start + CHUNK_BYTES_MAX if end is None else end
    while position < limit and (end is not None or records < CHUNK_RECORDS_MAX):
        line = handle.readline(LINE_BYTES_MAX + 1 if end is None else min(LINE_BYTES_MAX + 1, end - position))
        if not line:
            break
        number += 1
        position += len(line)
        held.append(line)
        text: bytes | None = line
        if len(line) > LINE_BYTES_MAX and line[-1:] != b"\n":
            text = None
        elif line[0] != _BRACE and not (text := _stripped(line)):
            if len(held) > _LINES_HELD_MAX:
                hasher.update(b"".join(held))
                held.clear()
            continue
        records += 1
        if keep:
            texts.append(text)
            numbers.append(number)
        if text is None:
            hasher.update(b"".join(held))
            held.clear()
            del line
            position += _pass_line(handle, hasher, None if end is None else end - position)
    hasher.update(b"".join(held))
    if position == start:
        return None
    entry = Entry(
        file=file,
        first=first,
        records=records,
        lines=number,
        start=start,
        end=position,
        digest=digest_of(hasher),
    )
    return Cut(entry=entry, texts=texts, numbers=numbers)


def check_readable(path: Path) -> int:
    """The size of an input file (bytes).

    Raises:
        ConfigError: it is not there, is no plain file, may not be read, or is not text.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            what = "is a directory" if stat.S_ISDIR(status.st_mode) else "is not a plain file"
            raise ConfigError(f"{path} {what}: name the input files themselves")
        with open(path, "rb", buffering=0) as handle:
            head = handle.read(4)
    except OSError as error:
        raise unreadable(path, error) from error
    for magic, packing in _PACKED.items():
        if head.startswith(magic):
            raise ConfigError(f"{path} is {packing}, not lines of JSON: unpack it to JSONL first")
    return status.st_size


def unreadable(path: Path, error: OSError) -> ConfigError:
    """The ConfigError for an input file that the system will not give us."""
    return ConfigError(f"{path} cannot be read: {error.strerror or error}")


def _stripped(line: bytes) -> bytes:
    """The line without what surrounds its JSON: white space, and byte order marks of files glued together."""
    text = line.strip(_BLANKS)
    while text.startswith(_BOM):
        text = text[len(_BOM) :].strip(_BLANKS)
    return text


def _pass_line(handle: BinaryIO, hasher: "hashlib._Hash", left_bytes: int | None) -> int:
    """Read on to the end of the line, or over at most ``left_bytes``; how many bytes that was."""
    passed = 0
    while left_bytes is None or passed < left_bytes:
        piece = handle.readline(
            _PIECE_BYTES if left_bytes is None else min(_PIECE_BYTES, left_bytes - passed)
        )
        if not piece:
            break
        hasher.update(piece)
        passed += len(piece)
        if piece.endswith(b"\n"):
            break
    return passed


def digest_of(hasher: "hashlib._Hash") -> int:
    """The first 64 bits of a hash."""
    return int.from_bytes(hasher.digest()[:8], "big")
