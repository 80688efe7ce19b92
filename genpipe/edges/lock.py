"""The lock on a run folder: one driver at a time, and a clear word about who has it."""

import errno
import fcntl
import json
import os
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from genpipe.core.errors import Fenced
from genpipe.edges.files import blaming
from genpipe.edges.heartbeat import HEARTBEAT, Heartbeat, Pause, Warn
from genpipe.edges.interrupted import again, close
from genpipe.edges.owner import Standing, described, signature, standing

LOCK = ".lock"

_TRIES = 5
_SIGN_TRIES = 50
_SIGN_PAUSE_S = 0.01
_LOOK_PAUSE_S = 0.05
_OWNER_BYTES_MAX = 4096
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})


class FolderLock:
    """An exclusive ``flock`` on ``.lock``, held until :meth:`release` or the end of the process.

    The system frees it when the process dies, however that happens, so a lock file that is left behind means
    nothing. The file is never removed: who held the removed one would not notice the next owner. Its text
    says who the owner is; it is for people, and for counting the claims.

    Where the file system has no locks, a :class:`~genpipe.edges.heartbeat.Heartbeat` takes the place of the
    ``flock``. A heartbeat that is found is heeded where there are locks, too: another machine may see the
    same folder through a file system without.

    Attributes:
        epoch: number of this claim of the folder, from 1.
        nonce: this claim's own name.
        previous: how the owner before signed; empty where nobody did, or not so that it can be read.
    """

    def __init__(self, path: Path, handle: int) -> None:
        self._path = path
        self._handle: int | None = handle
        # As long as the handle is open, no other file can be given this number.
        self._file = _numbers(os.fstat(handle))
        self._heartbeat: Heartbeat | None = None
        self.epoch = 0
        self.nonce = uuid4().hex
        self.previous: Mapping[str, Any] = {}
        _held.add(self)

    @classmethod
    def take(
        cls,
        folder: Path,
        *,
        started_at: str,
        warn: Warn,
        pause: Pause = time.sleep,
        flock: Callable[[int, int], None] = fcntl.flock,
    ) -> "FolderLock":
        """Claim ``folder``, which exists; at once, but where there are no locks and another may have it.

        Args:
            folder: the run folder.
            started_at: the present moment, as text.
            warn: told, in one line each, what is odd and what is waited for.
            pause: waits for some seconds.
            flock: how to lock a file.

        Raises:
            Fenced: another driver has it; the message names its host and process.
            StoreError: the lock file cannot be opened, locked or written.
        """
        path = folder / LOCK
        for _ in range(_TRIES):
            with blaming(path, "open"):
                # Not handed on to child processes: one that outlives us would keep the folder locked.
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            lock = cls(path, handle)
            try:
                has_locks = _lock(handle, path, warn, flock)
                owner = signature(started_at=started_at, nonce=lock.nonce)
                if not has_locks or (folder / HEARTBEAT).exists():
                    lock._heartbeat = Heartbeat.take(folder, owner, warn=warn, pause=pause)
                if lock._is_in_place():
                    lock._sign(owner)
                    return lock
                # Somebody removed the file between the open and the lock: this one guards nothing.
                lock.release()
            except BaseException:
                lock.release()
                raise
        raise Fenced(f"{path} is removed again and again by another program; stop it and start again")

    @property
    def previous_nonce(self) -> str | None:
        """The name of the claim before; None where there was none."""
        nonce = self.previous.get("nonce")
        if self.previous.get("inode") != self._file[1]:
            # The file is a copy: the claim that it tells of is that of another folder, and may live.
            return None
        return nonce if isinstance(nonce, str) else None

    def check_still_mine(self) -> None:
        """Make sure that the lock file is still the one that was locked, and a heartbeat still this claim's.

        Costs one look at a file's number; with a heartbeat, also a read of its file.

        Raises:
            Fenced: it was removed, replaced or taken over, so another driver may have claimed the folder.
            StoreError: it cannot be looked at, or the heartbeat not be kept up.
        """
        assert self._handle is not None
        if not self._is_in_place():
            raise Fenced(
                f"{self._path} was removed or replaced while this driver held it: another driver may own "
                f"{self._path.parent} now. See that only one runs, and start the same command again"
            )
        if self._heartbeat is not None:
            self._heartbeat.check()

    def release(self) -> None:
        """Give the folder back. May be called twice."""
        heartbeat, self._heartbeat = self._heartbeat, None
        try:
            if heartbeat is not None:
                heartbeat.release()
        finally:
            self._let_go()

    def _forget(self) -> None:
        """In a forked child: the lock is the parent's, and must end with it."""
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.forget()
        self._let_go()

    def _let_go(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            close(handle)

    def _is_in_place(self) -> bool:
        with blaming(self._path, "look at"):
            try:
                return _numbers(again(self._path.stat)) == self._file
            except FileNotFoundError:
                return False

    def _sign(self, owner: dict[str, Any]) -> None:
        assert self._handle is not None
        self.previous = _owner(self._handle)
        epoch = self.previous.get("epoch")
        self.epoch = epoch + 1 if isinstance(epoch, int) else 1
        data = json.dumps({**owner, "epoch": self.epoch, "inode": self._file[1]}).encode() + b"\n"
        assert len(data) <= _OWNER_BYTES_MAX
        with blaming(self._path, "write"):
            # Written over the old text before it is cut, so that a full disk cannot leave the file empty.
            os.pwrite(self._handle, data, 0)
            os.ftruncate(self._handle, len(data))
            os.fsync(self._handle)


# Weakly, so that a lock that nobody has any more is not kept for a child that never comes.
_held: "weakref.WeakSet[FolderLock]" = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_held):
        lock._forget()  # noqa: SLF001 - the same module


if hasattr(os, "register_at_fork"):
    # A forked child shares the lock itself: the kernel would free it only when the last of both has ended.
    os.register_at_fork(after_in_child=_forget_all)


def _lock(handle: int, path: Path, warn: Warn, flock: Callable[[int, int], None]) -> bool:
    """Lock the file; False where the file system has no locks."""
    try:
        try:
            flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Whoever only looks whether a driver is at work holds it for an instant.
            time.sleep(_LOOK_PAUSE_S)
            flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = _owner_soon(handle)
        raise Fenced(
            f"{path.parent} is in use by another driver ({described(owner)}, since "
            f"{owner.get('start', 'unknown')}); wait for it, stop it, or give another output folder"
        ) from None
    except OSError as error:
        if error.errno in _NO_LOCKS:
            warn(
                f"cannot lock {path} ({error.strerror}): this file system has no locks, so {HEARTBEAT} keeps "
                "other drivers out; never remove it by hand, and put the output folder on a local disk if "
                "you can"
            )
            return False
        with blaming(path, "lock"):
            raise
    return True


def _numbers(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _owner_soon(handle: int) -> dict[str, Any]:
    """What the lock file says, once an owner that took it just now has signed it.

    Until then the file is empty, or bears the name of a driver that has ended.
    """
    for _ in range(_SIGN_TRIES):
        owner = _owner(handle)
        if owner and standing(owner) is not Standing.GONE:
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
