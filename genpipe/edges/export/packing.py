"""Rows as JSON Lines: plain, or packed with gzip or zstd, by the ending of the file's name."""

import contextlib
import gzip
from collections.abc import Iterable
from typing import Any, BinaryIO, Protocol

from genpipe.edges import strict_json

_ZSTD_LEVEL, _GZIP_LEVEL = 3, 6


class Sink(Protocol):
    """A file format. Raises ``OSError`` where the file below refuses."""

    def put(self, rows: Iterable[dict[str, Any] | bytes], size_bytes: int) -> None:
        """Take the rows of one record.

        Args:
            rows: in order; bytes are a line, for sinks of lines only.
            size_bytes: length of the record.
        """
        ...

    def close(self) -> None:
        """Write what is still held, and the format's own end. The file below stays open."""
        ...

    def abandon(self) -> None:
        """Let go of the file below, which nobody wants any more; to be called while that is still open."""
        ...


class Lines:
    """A line for each row."""

    def __init__(self, stream: BinaryIO) -> None:
        """Write to ``stream``."""
        self._stream = stream

    def put(self, rows: Iterable[dict[str, Any] | bytes], size_bytes: int) -> None:  # noqa: ARG002  # a contract
        """See :class:`Sink`."""
        for row in rows:
            self._stream.write(row if isinstance(row, bytes) else strict_json.dumps(row) + b"\n")

    def close(self) -> None:
        """See :class:`Sink`."""
        self._stream.flush()

    def abandon(self) -> None:
        """See :class:`Sink`."""


class PackedLines(Lines):
    """Lines through a packer, which is closed at the end."""

    def __init__(self, packer: Any) -> None:
        """Write to ``packer``, which may be a little less than a stream."""
        super().__init__(packer)

    def close(self) -> None:
        """See :class:`Sink`."""
        self._stream.close()

    def abandon(self) -> None:
        """See :class:`Sink`."""
        with contextlib.suppress(Exception):
            self._stream.close()


def lines_to(stream: BinaryIO, name: str) -> Lines:
    """Lines to a file, packed as its name's ending (``.gz``, ``.zst``, in any case) says."""
    name = name.lower()
    if name.endswith(".gz"):
        # Without a time stamp or a name, so that the same records are the same bytes.
        packer = gzip.GzipFile(filename="", mode="wb", compresslevel=_GZIP_LEVEL, fileobj=stream, mtime=0)
        return PackedLines(packer)
    if name.endswith(".zst"):
        import zstandard

        compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True)
        return PackedLines(compressor.stream_writer(stream, closefd=False))
    return Lines(stream)
