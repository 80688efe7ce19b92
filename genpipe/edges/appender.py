"""One file that only grows: what of it was written, and what of that is durable."""

import errno
from pathlib import Path

from genpipe.core.errors import Fenced, StoreError
from genpipe.edges.files import Files, blaming, write_what_fits


class Appender:
    """One file that only grows, and how much of it is known to be durable.

    One owner. After any error the owner must assume nothing about the bytes past ``durable_bytes``.

    Attributes:
        path: the file.
        size_bytes: what was written, whether durable or not.
        durable_bytes: what a power loss would leave at least.
    """

    __slots__ = ("_files", "_handle", "durable_bytes", "path", "size_bytes")

    def __init__(self, files: Files, path: Path, *, new: bool) -> None:
        """Open ``path``: created if ``new`` (its name is not durable yet), else synced as it stands.

        Raises:
            StoreError: it cannot be opened or synced.
        """
        self._files = files
        self.path = path
        with blaming(path, "create" if new else "open"):
            self._handle: int | None = files.open_append(path, new=new)
        self.size_bytes = self.durable_bytes = 0
        if not new:
            try:
                with blaming(path, "sync"):
                    # After a kill the page cache may be newer than the disk: what was read from it must be
                    # made durable before anything is built upon it.
                    files.sync(self._handle)
                    self.size_bytes = self.durable_bytes = files.length(self._handle)
            except StoreError:
                self.close()
                raise

    def append(self, data: bytes) -> None:
        """Write ``data`` at the end, or nothing of it; it is durable only after :meth:`sync`.

        Raises:
            DiskFull: there is no room for it; the file is as it was.
            Fenced: somebody else writes to the file.
            StoreError: it was not written.
        """
        assert self._handle is not None
        with blaming(self.path, "append to"):
            whole_bytes = self.size_bytes
            taken, trouble = write_what_fits(self._files, self._handle, data)
            self.size_bytes += taken
            self._check_length()
            if trouble is not None:
                self._cut_back(whole_bytes)
                raise trouble

    def sync(self) -> None:
        """Make everything durable that had been appended when this was called.

        Raises:
            StoreError: what was appended since the last sync may be lost; this is not to be tried again.
        """
        assert self._handle is not None
        size_bytes = self.size_bytes
        with blaming(self.path, "sync"):
            self._files.sync(self._handle)
        self.durable_bytes = size_bytes

    def forget(self) -> None:
        """Cut off what is not known to be durable. Nothing is synced, so that the cut may be undone.

        Raises:
            Fenced: somebody else writes to the file; it was not cut.
            StoreError: it was not cut.
        """
        if self.size_bytes > self.durable_bytes:
            with blaming(self.path, "cut"):
                self._check_length()
                self._cut_back(self.durable_bytes)

    def cut(self, size_bytes: int) -> None:
        """Shorten the file to ``size_bytes``, durably.

        Raises:
            StoreError: it was not cut.
        """
        assert self._handle is not None
        assert size_bytes <= self.size_bytes
        with blaming(self.path, "cut"):
            self._files.truncate(self._handle, size_bytes)
            self._files.sync(self._handle)
        self.size_bytes = self.durable_bytes = size_bytes

    def _check_length(self) -> None:
        """Where the file is not as long as we made it, what stands in it is not ours to cut."""
        assert self._handle is not None
        length = self._files.length(self._handle)
        if length != self.size_bytes:
            raise Fenced(
                f"{self.path} holds {length} bytes where {self.size_bytes} were written: another program "
                "writes to it. See that only one driver runs, and start the same command again"
            )

    def _cut_back(self, size_bytes: int) -> None:
        assert self._handle is not None
        try:
            self._files.truncate(self._handle, size_bytes)
        except OSError as error:
            # Where there is no room and no cut either, the file is beyond us: waiting would be no help.
            raise OSError(errno.EIO, f"{error.strerror}, after it could not be written") from error
        self.size_bytes = size_bytes

    def close(self) -> None:
        """Give the handle back; nothing is synced. May be called twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with blaming(self.path, "close"):
                self._files.close(handle)
