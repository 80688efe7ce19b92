r"""The checksummed line: the unit of every file that genpipe appends to.

A line is one JSON object that ends in a checksum of its own bytes::

    {"index":123, ... ,"_c":"1a2b3c4d"}\n

``_c`` is the CRC-32 (eight lower-case hex digits) of all bytes before ``,"_c"``. A line counts only if it
ends in a newline, has the field, and the checksum is right, so half a line is never taken for a whole one.
"""

from zlib import crc32

_FIELD = b',"_c":"'
_END = b'"}\n'
TRAILER_BYTES = len(_FIELD) + 8 + len(_END)
"""Bytes that :func:`encode` adds."""

_FIRST_KEY = b'{"index":'
_MOST_DIGITS = 19


def encode(members: bytes) -> bytes:
    """A line of these JSON members.

    Args:
        members: a JSON object's text without its closing brace, on one line, with at least one member.
    """
    return b'%b,"_c":"%08x"}\n' % (members, crc32(members))


def decode(line: bytes) -> bytes | None:
    """The JSON object of a line, without its checksum; None where the line does not count.

    Args:
        line: a line with its newline.
    """
    split = len(line) - TRAILER_BYTES
    if split <= 0 or not line.endswith(_END) or not line.startswith(_FIELD, split):
        return None
    members = line[:split]
    if line[split + len(_FIELD) : -len(_END)] != b"%08x" % crc32(members):
        return None
    return members + b"}"


def body_of(line: bytes) -> bytes:
    """What :func:`decode` gives for a line that is known to count; nothing is checked."""
    return line[:-TRAILER_BYTES] + b"}"


def index_of(line: bytes) -> int | None:
    """The record's index, read off the first key without a JSON parse; None where there is none."""
    if not line.startswith(_FIRST_KEY):
        return None
    start = len(_FIRST_KEY)
    stop = start
    while line[stop : stop + 1].isdigit():
        stop += 1
    if not 0 < stop - start <= _MOST_DIGITS or line[stop : stop + 1] not in {b",", b"}"}:
        return None
    return int(line[start:stop])
