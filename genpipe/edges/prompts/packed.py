"""Text inside gzip and zstd files, read where it is wanted, without unpacking them to disk."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from genpipe.core.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_BUFFER_BYTES: Final = 256 << 10
_PIECE_BYTES: Final = 2 << 10
"""Given to the zstd library at once: 4 bytes may stand for 128 KiB, so that one call may bring 64 MiB."""


def open_gzip(path: Path) -> BinaryIO:
    """The text of a gzip file, of any number of members; reading it raises ConfigError where it is damaged.

    Raises:
        OSError: it cannot be opened.
    """
    return _open(path, _gzip_pieces)


def open_zstd(path: Path) -> BinaryIO:
    """The text of a zstd file, of any number of frames; reading it raises ConfigError where it is damaged.

    Raises:
        OSError: it cannot be opened.
    """
    return _open(path, _zstd_pieces)


def _open(path: Path, pieces: Callable[[BinaryIO, Path], Iterator[bytes]]) -> BinaryIO:
    return io.BufferedReader(_Unpacked(path, pieces), _BUFFER_BYTES)


class _Unpacked(io.RawIOBase):
    """The text of a packed file: forward by reading on, backward by beginning again."""

    def __init__(self, path: Path, pieces: Callable[[BinaryIO, Path], Iterator[bytes]]) -> None:
        super().__init__()
        self._path = path
        self._unpack = pieces
        self._file = open(path, "rb", buffering=_BUFFER_BYTES)  # noqa: SIM115  # closed by close()
        self._begin()

    def _begin(self) -> None:
        self._file.seek(0)
        self._pieces = self._unpack(self._file, self._path)
        self._piece = memoryview(b"")
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        taken = self._take(memoryview(buffer).nbytes)
        memoryview(buffer).cast("B")[: len(taken)] = taken
        return len(taken)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """To ``offset``, or to the end of the text where that is nearer."""
        assert whence in (io.SEEK_SET, io.SEEK_CUR)
        target = offset if whence == io.SEEK_SET else self._at + offset
        if target < self._at:
            self._begin()
        while self._at < target and self._take(target - self._at):
            pass
        return self._at

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _take(self, size: int) -> memoryview:
        """The next bytes, at most ``size``; none at the end."""
        while not self._piece:
            piece = next(self._pieces, None)
            if piece is None:
                return memoryview(b"")
            self._piece = memoryview(piece)
        taken, self._piece = self._piece[:size], self._piece[size:]
        self._at += len(taken)
        return taken


def _gzip_pieces(file: BinaryIO, path: Path) -> Iterator[bytes]:
    unpacked = gzip.GzipFile(fileobj=file)
    while True:
        try:
            piece = unpacked.read(_BUFFER_BYTES)
        except EOFError:
            raise _cut_off(path, "gzip") from None
        except (zlib.error, gzip.BadGzipFile) as error:
            raise _damaged(path, "gzip", error) from error
        if not piece:
            return
        yield piece


def _zstd_pieces(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Frame by frame: the library's own readers take a frame that is cut off for a whole one."""
    import zstandard

    packer = zstandard.ZstdDecompressor()
    frame = None
    packed = b""
    while packed := packed or file.read(_PIECE_BYTES):
        if frame is None:
            frame = packer.decompressobj()
        try:
            piece = frame.decompress(packed)
        except zstandard.ZstdError as error:
            raise _damaged(path, "zstd", error) from error
        packed = b""
        if frame.eof:
            packed, frame = frame.unused_data, None
        if piece:
            yield piece
    if frame is not None:
        raise _cut_off(path, "zstd")


def _cut_off(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path} is cut off in the middle of its {what} data: make or copy it again")


def _damaged(path: Path, what: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path} cannot be unpacked, its {what} data is damaged ({error}): make or copy it again"
    )
