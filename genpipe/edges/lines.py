r"""The checksummed line: the unit of every file that genpipe appends to.

A line is one JSON object that ends in a checksum of its own bytes::

    {"index":123, ... ,"_c":"1a2b3c4d"}\n

``_c`` is the CRC-32 (eight lower-case hex digits) of all bytes before ``,"_c"``. A line counts only if it
ends in a newline, has the field, and the checksum is right, so half a line is never taken for a whole one.
"""

import re
from zlib import crc32

_FIELD = b',"_c":"'
_END = b'"}\n'
TRAILER_BYTES = len(_FIELD) + 8 + len(_END)
"""Bytes that :func:`encode` adds."""

_FIRST_KEY = re.compile(rb'\{"index":([0-9]{1,19})[,}]')
_TRAILER = re.compile(rb',"_c":"[0-9a-f]{8}"\}\n')
ENDS_BYTES = 32
"""So many bytes from either end of a file of records are enough for :func:`looks_whole`."""


def encode(*members: bytes) -> bytes:
    """A line of these JSON members.

    Args:
        members: a JSON object's text without its closing brace, on one line, with at least one member; it
            may be given in pieces, which are copied once.
    """
    checksum = 0
    for piece in members:
        checksum = crc32(piece, checksum)
    return b"".join([*members, b',"_c":"%08x"}\n' % checksum])


def decode(line: bytes) -> bytes | None:
    """The JSON object of a line, without its checksum; None where the line does not count.

    Args:
        line: a line with its newline.
    """
    return body_of(line) if counts(line, memoryview(line), 0, len(line)) else None


def counts(data: bytes, view: memoryview, start: int, stop: int) -> bool:
    """Whether the bytes from ``start`` to ``stop`` are a line that counts; they are not copied.

    Args:
        data: the bytes.
        view: the same, as a view, which is made once for many lines.
        start: where the line begins.
        stop: where it ends, with its newline.
    """
    split = stop - TRAILER_BYTES
    return split > start and data[split:stop] == b',"_c":"%08x"}\n' % crc32(view[start:split])


def body_of(line: bytes) -> bytes:
    """What :func:`decode` gives for a line that is known to count; nothing is checked."""
    return line[:-TRAILER_BYTES] + b"}"


def index_of(data: bytes, start: int = 0) -> int | None:
    """The index of the record that begins at ``start``, without a JSON parse; None where none does."""
    found = _FIRST_KEY.match(data, start)
    return int(found[1]) if found else None


def indices_of(data: bytes) -> list[int] | None:
    """The indices of the records of a file whose lines are known to count; None where one has none."""
    indices = []
    start, size_bytes = 0, len(data)
    match, find = _FIRST_KEY.match, data.find
    while start < size_bytes:
        found = match(data, start)
        if found is None:
            return None
        indices.append(int(found[1]))
        start = find(b"\n", start) + 1 or size_bytes
    return indices


def looks_whole(first: bytes, last: bytes) -> bool:
    """Whether a file of records may be whole, by its first and last bytes (:data:`ENDS_BYTES` of each).

    It begins as a record does and ends as a line does. A file that lost its bytes and kept its length, as a
    power loss leaves it on some file systems, does not.
    """
    return index_of(first) is not None and _TRAILER.fullmatch(last[-TRAILER_BYTES:]) is not None
