"""The lock on a run folder: one driver at a time, and a clear word about who has it."""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from genpipe.core.errors import Fenced, StoreError
from genpipe.edges.files import blaming

LOCK = ".lock"

_TRIES = 5
_SIGN_TRIES = 20
_SIGN_PAUSE_S = 0.01
_OWNER_BYTES_MAX = 4096
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class FolderLock:
    """An exclusive ``flock`` on ``.lock``, held until :meth:`release` or the end of the process.

    The system frees it when the process dies, however that happens, so a lock file that is left behind means
    nothing. The file is never removed: who held the removed one would not notice the next owner. Its text
    says who the owner is; it is for people, and for counting the claims.

    Attributes:
        epoch: number of this claim of the folder, from 1.
        nonce: this claim's own name.
    """

    def __init__(self, path: Path, handle: int, *, epoch: int, nonce: str) -> None:
        self._path = path
        self._handle: int | None = handle
        self.epoch = epoch
        self.nonce = nonce

    @classmethod
    def take(
        cls, folder: Path, *, started_at: str, flock: Callable[[int, int], None] = fcntl.flock
    ) -> "FolderLock":
        """Claim ``folder``, which exists.

        Args:
            folder: the run folder.
            started_at: the present moment, as text.
            flock: how to lock a file.

        Raises:
            Fenced: another driver has it; the message names its host and process.
            StoreError: the file system knows no locks, or refuses.
        """
        path = folder / LOCK
        for _ in range(_TRIES):
            with blaming(path, "open"):
                # Not handed on to child processes: one that outlives us would keep the folder locked.
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                _lock(handle, path, flock)
                if not _is_same_file(handle, path):
                    # Somebody removed the file between the open and the lock: this one guards nothing.
                    os.close(handle)
                    continue
                epoch, nonce = _owner(handle).get("epoch"), uuid4().hex
                lock = cls(path, handle, epoch=epoch + 1 if isinstance(epoch, int) else 1, nonce=nonce)
                with blaming(path, "write"):
                    lock._sign(started_at)
            except BaseException:
                os.close(handle)
                raise
            return lock
        raise Fenced(f"{path} is removed again and again by another program; stop it and start again")

    def check_still_mine(self) -> None:
        """Make sure that the lock file is still the one that was locked.

        Raises:
            Fenced: it was removed or replaced, so another driver may have claimed the folder.
        """
        assert self._handle is not None
        if not _is_same_file(self._handle, self._path):
            raise Fenced(
                f"{self._path} was removed or replaced while this driver held it: another driver may own "
                f"{self._path.parent} now. See that only one runs, and start the same command again"
            )

    def release(self) -> None:
        """Give the folder back. May be called twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def _sign(self, started_at: str) -> None:
        assert self._handle is not None
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "boot_id": _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else None,
            "start": started_at,
            "epoch": self.epoch,
            "nonce": self.nonce,
        }
        data = json.dumps(owner).encode() + b"\n"
        assert len(data) <= _OWNER_BYTES_MAX
        # Written over the old text before it is cut, so that a full disk cannot leave the file empty.
        os.pwrite(self._handle, data, 0)
        os.ftruncate(self._handle, len(data))
        os.fsync(self._handle)


def _lock(handle: int, path: Path, flock: Callable[[int, int], None]) -> None:
    try:
        flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = _owner_soon(handle)
        who = f"host {owner.get('host', 'unknown')}, pid {owner.get('pid', 'unknown')}"
        raise Fenced(
            f"{path.parent} is in use by another driver ({who}, since {owner.get('start', 'unknown')}); "
            "wait for it, stop it, or give another output folder"
        ) from None
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise StoreError(
                f"cannot lock {path}: {error.strerror}; this file system has no locks, so a second driver "
                "could not be kept out. Put the output folder on a local disk"
            ) from error
        with blaming(path, "lock"):
            raise


def _is_same_file(handle: int, path: Path) -> bool:
    with blaming(path, "look at"):
        try:
            there = path.stat()
        except FileNotFoundError:
            return False
        mine = os.fstat(handle)
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def _owner_soon(handle: int) -> dict[str, Any]:
    """What the lock file says, once an owner that took it just now has signed it."""
    for _ in range(_SIGN_TRIES):
        owner = _owner(handle)
        if owner:
            return owner
        time.sleep(_SIGN_PAUSE_S)
    return {}


def _owner(handle: int) -> dict[str, Any]:
    """What the lock file says; empty where it says nothing that can be read."""
    try:
        owner = json.loads(os.pread(handle, _OWNER_BYTES_MAX, 0))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}
