"""The lock of a folder whose file system has no locks: a file that its holder signs anew every few seconds.

No clock is compared with another machine's: who wants the folder looks at the file for as long as its own
monotonic clock says, and takes the folder over only where the file did not change in all that time.
"""

import contextlib
import errno
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from genpipe.core.errors import Fenced, StoreError
from genpipe.edges.files import TEMPORARY, blaming
from genpipe.edges.interrupted import again, close
from genpipe.edges.owner import Standing, described, standing

HEARTBEAT = ".lock.heartbeat"

BEAT_S = 3.0
"""From one beat to the next (seconds)."""

TTL_S = 30.0
"""A file that does not change for so long belongs to nobody (seconds)."""

LOOK_S = 0.5
"""How often a waiting driver looks at the file (seconds)."""

SETTLE_S = 1.0
"""From the claim to the second look at it (seconds): time for another's half-done claim to show."""

_TRIES = 5
_FILE_BYTES_MAX = 4096

Warn = Callable[[str], None]
Pause = Callable[[float], None]


class Heartbeat:
    """A claim that lasts as long as it is renewed. One owner; :meth:`release` gives it back.

    A thread rewrites the file in place, with as many bytes as before, so that a full disk does not hinder it.
    """

    def __init__(self, path: Path, handle: int, signature: Mapping[str, Any]) -> None:
        self._path = path
        self._handle: int | None = handle
        self._signature = dict(signature)
        self._count = itertools.count(1)
        self._beaten_s = time.monotonic()
        self._trouble: OSError | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="genpipe-heartbeat", daemon=True)

    @classmethod
    def take(
        cls, folder: Path, signature: Mapping[str, Any], *, warn: Warn, pause: Pause = time.sleep
    ) -> "Heartbeat":
        """Claim ``folder``, which exists; may take as long as :data:`TTL_S`.

        Args:
            folder: the run folder.
            signature: this claim, as :func:`genpipe.edges.owner.signature` gives it.
            warn: told, in one line each, what is waited for and what is taken over.
            pause: waits for some seconds.

        Raises:
            Fenced: another driver has it; the message names its host and process.
            StoreError: the file cannot be read or written.
        """
        path = folder / HEARTBEAT
        for _ in range(_TRIES):
            handle = _create(path)
            if handle is not None:
                return cls._begun(path, handle, signature, pause)
            left = _read(path)
            if left == b"":
                # It was created this instant, and bears a name in the next.
                pause(LOOK_S)
                left = _read(path)
            if left is not None and _is_abandoned(path, left, warn, pause):
                _set_aside(path, left)
        raise Fenced(f"{path} changes hands again and again: see that only one driver runs on {folder}")

    @classmethod
    def _begun(cls, path: Path, handle: int, signature: Mapping[str, Any], pause: Pause) -> "Heartbeat":
        """Sign the file that was just created, and see whether the claim holds."""
        this = cls(path, handle, signature)
        try:
            with blaming(path, "write"):
                try:
                    this._beat()
                except OSError:
                    # It bears no name yet, and would make the next start wait for nobody.
                    path.unlink(missing_ok=True)
                    raise
            this._thread.start()
            pause(SETTLE_S)
            if not this._is_ours(_read(path)):
                # One that took us for somebody else puts the file back at once.
                pause(SETTLE_S)
                this.check()
        except BaseException:
            this.release()
            raise
        return this

    def check(self) -> None:
        """Make sure that the folder is still ours.

        The file is read by its name each time, and no look is left out because the last was a moment ago: of
        a machine that was suspended, the clocks may have stood still too.

        Raises:
            Fenced: another driver took it over, because this one had been suspended or cut off for too long.
            StoreError: the file could not be renewed for so long that one may do so soon, or not be read.
        """
        if time.monotonic() - self._beaten_s > 2 * BEAT_S:
            # Either the disk refuses, or this process was suspended. The beat comes before the look, as a
            # challenger's rename comes before its own: one of both sees the other.
            self._try_to_beat()
            if self._trouble is not None and time.monotonic() - self._beaten_s > TTL_S / 2:
                with blaming(self._path, "renew"):
                    raise self._trouble
        found = _read(self._path)
        if not self._is_ours(found):
            now = f" by {described(_owner(found))}" if found else ""
            raise Fenced(
                f"{self._path} was removed or taken over{now} while this driver was suspended or cut off: "
                f"another driver may own {self._path.parent} now. See that only one runs, and start the same "
                "command again"
            )

    def release(self) -> None:
        """Stop, and remove the file if it is still ours. May be called twice."""
        if self._handle is None:
            return
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(BEAT_S)
        # A file that is left behind costs the next start a wait, and nothing else.
        with contextlib.suppress(OSError, StoreError):
            if self._is_ours(_read(self._path)):
                again(self._path.unlink)
        # A beat that hangs in the disk must not find the number of another file in its handle's place.
        if not self._thread.is_alive():
            self.forget()

    def forget(self) -> None:
        """Let go without a trace, as a forked child must, whose parent still holds the folder."""
        handle, self._handle = self._handle, None
        if handle is not None:
            close(handle)

    def _is_ours(self, data: bytes | None) -> bool:
        return data is not None and _owner(data).get("nonce") == self._signature["nonce"]

    def _keep_beating(self) -> None:
        while not self._over.wait(BEAT_S):
            self._try_to_beat()

    def _try_to_beat(self) -> None:
        try:
            self._beat()
        except OSError as error:
            self._trouble = error

    def _beat(self) -> None:
        assert self._handle is not None
        # The count has a fixed width, so that the new bytes just cover the old ones.
        data = json.dumps({**self._signature, "beat": f"{next(self._count):012d}"}).encode() + b"\n"
        if os.pwrite(self._handle, data, 0) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(self._handle)
        self._trouble = None
        self._beaten_s = time.monotonic()


def _create(path: Path) -> int | None:
    """A new file, or None where there is one."""
    with blaming(path, "create"):
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return None


def _read(path: Path) -> bytes | None:
    """The file as it stands; None where there is none."""
    with blaming(path, "read"):
        try:
            # Opened anew for each look: network file systems ask their server then, and perhaps only then.
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.pread(handle, _FILE_BYTES_MAX, 0)
            finally:
                close(handle)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return None
            raise


def _owner(data: bytes) -> dict[str, Any]:
    """What the file says; empty where it says nothing that can be read."""
    try:
        owner = json.loads(data)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _is_abandoned(path: Path, left: bytes, warn: Warn, pause: Pause) -> bool:
    """Whether the file, which holds ``left``, may be set aside; False where it is gone by itself.

    Raises:
        Fenced: its owner lives.
    """
    owner = _owner(left)
    found = standing(owner)
    if found is Standing.ALIVE:
        raise _in_use(path, owner)
    # Without the kernel's own name, two machines of one name could not be told apart.
    if found is Standing.GONE and owner.get("boot_id") is not None:
        return True
    warn(
        f"{path.parent} was claimed by another driver ({described(owner)}) that cannot be looked at from "
        f"here: waiting {TTL_S:g} s to see whether {path.name} is still renewed"
    )
    until_s = time.monotonic() + TTL_S
    while time.monotonic() < until_s:
        pause(LOOK_S)
        now = _read(path)
        if now is None:
            return False
        if now != left:
            raise _in_use(path, _owner(now))
    warn(f"{path} was not renewed for {TTL_S:g} s: taking {path.parent} over from {described(owner)}")
    return True


def _in_use(path: Path, owner: Mapping[str, Any]) -> Fenced:
    return Fenced(
        f"{path.parent} is in use by another driver ({described(owner)}, since "
        f"{owner.get('start', 'unknown')}); wait for it, stop it, or give another output folder"
    )


def _set_aside(path: Path, left: bytes) -> None:
    """Remove the file if it still holds ``left``; whatever else it holds by now stays, or is put back."""
    aside = path.with_name(f"{path.name}.{uuid4().hex}{TEMPORARY}")
    with blaming(path, "take over"):
        try:
            again(lambda: path.rename(aside))
        except FileNotFoundError:
            return
        if _read(aside) != left:
            # Another challenger was quicker and has signed it, or the owner woke up.
            _put_back(aside, path)
        again(lambda: aside.unlink(missing_ok=True))


def _put_back(aside: Path, path: Path) -> None:
    try:
        # Never over the file of a third one, who may have come in the meantime.
        again(lambda: path.hardlink_to(aside))
    except FileExistsError:
        return
    except OSError:
        # No hard links here: whoever comes within this instant is found out at the second look at its claim.
        if not path.exists():
            again(lambda: aside.rename(path))
