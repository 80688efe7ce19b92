"""The file port: the few steps on local files that durability is made of, and nothing else.

The store is written against :class:`Files`, so that a model which forgets whatever was not synced can stand
in for the disk. Every method is one step that can fail or be the last before a crash; longer steps, such as
:func:`replace_atomically`, are functions over the port.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from genpipe.core.errors import DiskFull, StoreError
from genpipe.core.values import Space
from genpipe.edges.interrupted import again, close

TEMPORARY = ".tmp"
"""Ending of a file that is being written; whatever bears it at a start is rubbish."""

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_fdatasync = getattr(os, "fdatasync", os.fsync)


class Files(Protocol):
    """Steps on local files. Every method raises ``OSError`` where the system refuses.

    What is written is durable only after :meth:`sync`; a name that was made, moved or removed only after
    :meth:`sync_folder` of its folder. A sync that failed is never called again on the same file: the system
    may by then have dropped the data and would report success.
    """

    def open_append(self, path: Path, *, new: bool) -> int:
        """Open for appending, and return a handle.

        Args:
            path: the file.
            new: it must not exist and is created; otherwise it must exist.
        """
        ...

    def write(self, handle: int, data: bytes | memoryview) -> int:
        """Append some of ``data``, at least from its start, and return how many bytes were taken."""
        ...

    def sync(self, handle: int) -> None:
        """Return once the file's data and length are on stable storage."""
        ...

    def length(self, handle: int) -> int:
        """The file's length (bytes)."""
        ...

    def truncate(self, handle: int, size: int) -> None:
        """Cut the file to ``size`` bytes; never makes it longer."""
        ...

    def close(self, handle: int) -> None:
        """Give the handle back; the file is not synced by it."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name in the same folder, in one step; a file of that name is replaced."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        ...

    def mkdir(self, path: Path) -> None:
        """Create one folder; its parent must exist, and it must not."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Return once the names in this folder are on stable storage."""
        ...

    def sync_path(self, path: Path) -> None:
        """As :meth:`sync`, for a file that is not open and may be read-only."""
        ...

    def make_read_only(self, path: Path) -> None:
        """Take away everybody's right to write to a file; handles that are open keep theirs."""
        ...

    def space(self, path: Path) -> Space:
        """The room on the disk that a folder is on."""
        ...

    def read(self, path: Path) -> bytes:
        """The whole file."""
        ...

    def read_ends(self, path: Path, size: int) -> tuple[bytes, bytes]:
        """The first and the last ``size`` bytes of a file; all of it twice where it is no longer."""
        ...

    def sizes(self, path: Path) -> dict[str, int]:
        """Names and lengths (bytes) of the files in a folder; folders in it are left out."""
        ...

    def exists(self, path: Path) -> bool:
        """Whether there is a file or a folder of this name."""
        ...


class OsFiles:
    """The machine's own files."""

    def open_append(self, path: Path, *, new: bool) -> int:
        """See :class:`Files`."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
        return os.open(path, flags | os.O_CREAT | os.O_EXCL if new else flags, 0o644)

    def write(self, handle: int, data: bytes | memoryview) -> int:
        """See :class:`Files`."""
        return os.write(handle, data)

    def sync(self, handle: int) -> None:
        """See :class:`Files`."""
        _fdatasync(handle)

    def length(self, handle: int) -> int:
        """See :class:`Files`."""
        return again(lambda: os.fstat(handle)).st_size

    def truncate(self, handle: int, size: int) -> None:
        """See :class:`Files`."""
        assert size <= again(lambda: os.fstat(handle)).st_size
        os.ftruncate(handle, size)

    def close(self, handle: int) -> None:
        """See :class:`Files`."""
        close(handle)

    def rename(self, old: Path, new: Path) -> None:
        """See :class:`Files`."""
        again(lambda: old.replace(new))

    def unlink(self, path: Path) -> None:
        """See :class:`Files`."""
        again(path.unlink)

    def mkdir(self, path: Path) -> None:
        """See :class:`Files`."""
        again(path.mkdir)

    def sync_folder(self, path: Path) -> None:
        """See :class:`Files`."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            close(handle)

    def sync_path(self, path: Path) -> None:
        """See :class:`Files`."""
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _fdatasync(handle)
        finally:
            close(handle)

    def make_read_only(self, path: Path) -> None:
        """See :class:`Files`."""
        again(lambda: path.chmod(0o444))

    def space(self, path: Path) -> Space:
        """See :class:`Files`."""
        disk = again(lambda: os.statvfs(path))
        # What is kept back for the administrator is not ours to use, nor to count.
        usable = disk.f_blocks - disk.f_bfree + disk.f_bavail
        return Space(free_bytes=disk.f_bavail * disk.f_frsize, total_bytes=usable * disk.f_frsize)

    def read(self, path: Path) -> bytes:
        """See :class:`Files`."""
        return again(path.read_bytes)

    def read_ends(self, path: Path, size: int) -> tuple[bytes, bytes]:
        """See :class:`Files`."""
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            length = again(lambda: os.fstat(handle)).st_size
            return os.pread(handle, size, 0), os.pread(handle, size, max(0, length - size))
        finally:
            close(handle)

    def sizes(self, path: Path) -> dict[str, int]:
        """See :class:`Files`."""
        return again(lambda: _sizes(path))

    def exists(self, path: Path) -> bool:
        """See :class:`Files`."""
        return again(path.exists)


def _sizes(path: Path) -> dict[str, int]:
    found = {}
    with os.scandir(path) as entries:
        for entry in entries:
            # A driver at work may rename or remove it meanwhile.
            with suppress(FileNotFoundError):
                if entry.is_file():
                    found[entry.name] = entry.stat().st_size
    return found


@contextmanager
def blaming(path: Path, doing: str) -> Iterator[None]:
    """Turn an ``OSError`` of the block into a store error that names the file and the next step.

    Args:
        path: the file or folder that the block works on.
        doing: what the block does with it, as in "cannot <doing> <path>".

    Raises:
        DiskFull: no space, or the quota is used up.
        StoreError: any other refusal.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _NO_SPACE:
            raise DiskFull(
                f"cannot {doing} {path}: {reason}; free some space there, or raise the quota"
            ) from error
        raise StoreError(
            f"cannot {doing} {path}: {reason}; see to the disk (or its permissions) and start the same "
            "command again: what was durable before is kept"
        ) from error


def write_what_fits(files: Files, handle: int, data: bytes) -> tuple[int, OSError | None]:
    """Append ``data``, however little each write takes: how many bytes were taken, and what stopped it."""
    view = memoryview(data)
    done = 0
    while done < len(data):
        try:
            taken = files.write(handle, view[done:])
        except OSError as error:
            return done, error
        if taken <= 0:
            return done, OSError(errno.EIO, "a write took no bytes")
        done += taken
    return done, None


def write_all(files: Files, handle: int, data: bytes) -> None:
    """Append all of ``data``.

    Raises:
        OSError: it cannot be written; part of it may stand in the file.
    """
    _, trouble = write_what_fits(files, handle, data)
    if trouble is not None:
        raise trouble


def replace_atomically(files: Files, path: Path, data: bytes) -> None:
    """Let ``path`` hold ``data``, durably; at every instant it holds the old bytes or the new ones whole.

    One writer at a time: the temporary file's name is fixed.

    Raises:
        OSError: the old file stands.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    if files.exists(temporary):
        files.unlink(temporary)
    handle = files.open_append(temporary, new=True)
    try:
        write_all(files, handle, data)
        # Some file systems make a rename durable before the data that it names: an empty file would be left.
        files.sync(handle)
    finally:
        files.close(handle)
    files.rename(temporary, path)
    files.sync_folder(path.parent)


def make_folder(files: Files, path: Path) -> None:
    """Create a folder and the missing ones above it, each with a durable name.

    Raises:
        OSError: it cannot be created, or something else has its name.
    """
    if files.exists(path):
        # A process that was killed may have made it and not synced its name. Where the folder above may not
        # be read, it was there before anything of ours.
        with suppress(PermissionError):
            files.sync_folder(path.parent)
        return
    make_folder(files, path.parent)
    # Another process may have made it since: that is as good.
    with suppress(FileExistsError):
        files.mkdir(path)
    files.sync_folder(path.parent)
