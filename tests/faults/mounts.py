"""File systems of a test's own: small ones, and ones whose power can be cut."""

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FS_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2
IMAGE_MB = {"ext4": 64, "xfs": 320}
"""XFS refuses less than 300 MB; the images are sparse."""

_COMMAND_TIMEOUT_S = 30.0


class CannotMountError(Exception):
    """This machine does not let us; the message says what it said."""


class Mounted:
    """A file system on a folder.

    Attributes:
        folder: where it is.
    """

    def __init__(self, folder: Path, mount: tuple[str, ...]) -> None:
        self.folder = folder
        self._mount = mount

    def cut_power(self) -> None:
        """From now on nothing more reaches the disk, not even what the journal holds."""
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(handle, FS_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(handle)

    def start_again(self) -> None:
        """What a machine does that got its power back."""
        _command("umount", str(self.folder))
        _command(*self._mount)

    def resize(self, size: str) -> None:
        """Give a file system in memory more or less room."""
        _command("mount", "-o", f"remount,size={size}", str(self.folder))


@contextmanager
def image(scratch: Path, kind: str) -> Iterator[Mounted]:
    """An ext4 or XFS in a file below ``scratch``, which is not mounted any more afterwards.

    Raises:
        CannotMountError: it cannot be made here.
    """
    if shutil.which(f"mkfs.{kind}") is None:
        raise CannotMountError(f"mkfs.{kind} is not installed")
    path = scratch / f"{kind}.img"
    with open(path, "wb") as file:
        file.truncate(IMAGE_MB[kind] << 20)
    _command(f"mkfs.{kind}", "-q", str(path))
    with _mounted(scratch / kind, "-o", "loop", str(path)) as mounted:
        yield mounted


@contextmanager
def in_memory(scratch: Path, size: str) -> Iterator[Mounted]:
    """A file system in memory with little room, which is not mounted any more afterwards.

    Raises:
        CannotMountError: it cannot be made here.
    """
    with _mounted(scratch / "memory", "-t", "tmpfs", "-o", f"size={size}", "tmpfs") as mounted:
        yield mounted


@contextmanager
def _mounted(folder: Path, *arguments: str) -> Iterator[Mounted]:
    if os.geteuid() != 0:
        raise CannotMountError("only root may mount")
    folder.mkdir()
    mount = ("mount", *arguments, str(folder))
    _command(*mount)
    try:
        yield Mounted(folder, mount)
    finally:
        if folder.is_mount():
            try:
                _command("umount", str(folder))
            except CannotMountError:
                # A handle that was left open must not leave a file system behind for ever.
                _command("umount", "-l", str(folder))


def _command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    if done.returncode != 0:
        raise CannotMountError(f"{' '.join(words)}: {' '.join(done.stderr.split())}")
