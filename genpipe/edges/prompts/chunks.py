"""The input in chunks: where records begin and end, and what is no record.

Lines end at the byte 0x0A and nowhere else. A line is blank, and no record, if nothing is left of it without
white space and byte order marks (which stand inside a file where files were glued together).
"""

import hashlib
from dataclasses import dataclass, field
from typing import BinaryIO, Final, Protocol

CHUNK_RECORDS_MAX: Final = 1_000
CHUNK_BYTES_MAX: Final = 4 << 20
LINE_BYTES_MAX: Final = 64 << 20
"""Longest line that becomes a prompt, its newline not counted; also the longest row, as JSON."""

TOO_LONG: Final = f"longer than {LINE_BYTES_MAX >> 20} MiB"
IS_ARRAY: Final = "this looks like one JSON array; jq -c '.[]' FILE makes lines of it"
IS_SPREAD: Final = "this looks like JSON that is spread over lines; jq -c . FILE makes one line of each value"

_BOM = b"\xef\xbb\xbf"
_BLANKS = b" \t\r\n"
_PIECE_BYTES = 1 << 20
_LINES_HELD_MAX = 8_192
_BRACE = ord("{")
_NOWHERE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One chunk of the input.

    Attributes:
        file: which input file, from 0.
        first: index of its first record.
        records: how many records it has; blank lines are none.
        lines: physical lines, or rows, of this file up to the chunk's end.
        start: where it begins in the file: bytes of its text, as it is where it is unpacked, or rows.
        end: where the next one begins, likewise.
        digest: the first 64 bits of the SHA-256 of its bytes, or of its rows as JSON.
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
        texts: each record's bytes without a byte order mark; where there are none to be had, the reason.
        numbers: each record's 1-based physical line, or row, in its file.
    """

    entry: Entry
    texts: list[bytes | str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)


class InputFile(Protocol):
    """One input file, open in one thread. Reading it in order is cheap; going back may not be."""

    def cut(
        self,
        *,
        file: int,
        first: int,
        lines_before: int,
        start: int,
        end: int | None = None,
        keep: bool = True,
    ) -> Cut | None:
        """Read the chunk that begins at ``start``; None at the end of the file.

        Args:
            file: which input file this is.
            first: index of the chunk's first record.
            lines_before: physical lines before it.
            start: where it begins.
            end: where it ends, whatever it holds; else it goes as far as a chunk's limits allow.
            keep: the records are wanted, and not only counted.

        Raises:
            ConfigError: the file is damaged.
            OSError: it cannot be read.
        """
        ...

    def digest(self, start: int, end: int) -> int | None:
        """As :attr:`Entry.digest`, of what stands there; None where the file ends before. Raises likewise."""
        ...

    def goes_on(self, end: int) -> bool:
        """Whether anything stands behind ``end``. Raises likewise."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class LineFile:
    """A file of lines; an :class:`InputFile`."""

    def __init__(self, handle: BinaryIO) -> None:
        """Take over ``handle``, which stands at the beginning of the file, and can seek."""
        self._handle = handle
        # Where the handle stands, and whether a line begins there: chunks in a row are read without a seek,
        # which costs much in a file that is packed.
        self._at = 0
        self._at_line = True

    def cut(
        self,
        *,
        file: int,
        first: int,
        lines_before: int,
        start: int,
        end: int | None = None,
        keep: bool = True,
    ) -> Cut | None:
        """See :class:`InputFile`. A line over the limit is passed without being held."""
        number = lines_before
        if not self._go_to(start):
            # The file had no newline at its end when this place was reached, and has grown since: the next
            # newline ends a line that is counted already.
            number -= 1
        handle = self._handle
        hasher = hashlib.sha256()
        held: list[bytes] = []
        texts: list[bytes | str] = []
        numbers: list[int] = []
        records = 0
        position = start
        last = b"\n" if self._at_line else b""
        self._at = _NOWHERE
        limit = start + CHUNK_BYTES_MAX if end is None else end
        while position < limit and (end is not None or records < CHUNK_RECORDS_MAX):
            line = handle.readline(
                LINE_BYTES_MAX + 1 if end is None else min(LINE_BYTES_MAX + 1, end - position)
            )
            if not line:
                break
            number += 1
            position += len(line)
            held.append(line)
            last = line
            text: bytes | str = line
            if is_long := len(line) > LINE_BYTES_MAX and line[-1:] != b"\n":
                text = TOO_LONG if line[:1] != b"[" else f"{TOO_LONG}; {IS_ARRAY}"
            elif line[0] != _BRACE and not (text := _stripped(line)):
                if len(held) > _LINES_HELD_MAX:
                    hasher.update(b"".join(held))
                    held.clear()
                continue
            records += 1
            if keep:
                texts.append(text)
                numbers.append(number)
            if is_long:
                hasher.update(b"".join(held))
                held.clear()
                line = last = b""
                passed, last = self._pass_line(hasher, None if end is None else end - position)
                position += passed
        hasher.update(b"".join(held))
        self._at, self._at_line = position, last[-1:] == b"\n"
        if position == start:
            return None
        entry = Entry(
            file=file,
            first=first,
            records=records,
            lines=number,
            start=start,
            end=position,
            digest=_digest_of(hasher),
        )
        return Cut(entry=entry, texts=texts, numbers=numbers)

    def digest(self, start: int, end: int) -> int | None:
        """See :class:`InputFile`."""
        self._go_to(start)
        self._at = _NOWHERE
        hasher = hashlib.sha256()
        left = end - start
        last = b""
        while left and (piece := self._handle.read(min(left, _PIECE_BYTES))):
            hasher.update(piece)
            left -= len(piece)
            last = piece
        if left:
            return None
        self._at, self._at_line = end, last[-1:] == b"\n"
        return _digest_of(hasher)

    def goes_on(self, end: int) -> bool:
        """See :class:`InputFile`."""
        self._go_to(end)
        self._at = _NOWHERE
        return bool(self._handle.read(1))

    def line_goes_on(self, end: int) -> bool:
        """Whether the line that was the last one, and ended at ``end``, goes on there. Raises likewise."""
        at_line = self._go_to(end)
        self._at = _NOWHERE
        behind = self._handle.read(2)
        return bool(behind) and not at_line and behind[:1] != b"\n" and behind != b"\r\n"

    def close(self) -> None:
        """See :class:`InputFile`."""
        self._handle.close()

    def _go_to(self, start: int) -> bool:
        """Stand at ``start``; whether a line begins there."""
        if self._at != start:
            self._handle.seek(max(start - 1, 0))
            self._at_line = not start or self._handle.read(1) == b"\n"
            self._at = start
        return self._at_line

    def _pass_line(self, hasher: "hashlib._Hash", left_bytes: int | None) -> tuple[int, bytes]:
        """Read on to the end of the line, or over ``left_bytes``; how many they were, and the last ones."""
        passed, last = 0, b""
        while left_bytes is None or passed < left_bytes:
            piece = self._handle.readline(
                _PIECE_BYTES if left_bytes is None else min(_PIECE_BYTES, left_bytes - passed)
            )
            if not piece:
                break
            hasher.update(piece)
            passed += len(piece)
            last = piece
            if piece.endswith(b"\n"):
                break
        return passed, last


def digest_of_texts(texts: list[bytes | str]) -> int:
    """The first 64 bits of the SHA-256 of records, each with a newline."""
    parts = [text if isinstance(text, bytes) else text.encode() for text in texts]
    return _digest_of(hashlib.sha256(b"".join([part + b"\n" for part in parts])))


def _stripped(line: bytes) -> bytes:
    """The line without what surrounds its JSON: white space, and byte order marks of files glued together."""
    text = line.strip(_BLANKS)
    while text.startswith(_BOM):
        text = text[len(_BOM) :].strip(_BLANKS)
    return text


def _digest_of(hasher: "hashlib._Hash") -> int:
    return int.from_bytes(hasher.digest()[:8], "big")
