"""``limits.json``: what of the fleet was changed while a run goes on, written by anybody, watched by the run.

One JSON object, a number for each address: how many requests it may have at once, 0 to use it no more. It
says only what differs from the servers that the run began with; without the file, all is as configured.
"""

import fcntl
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from genpipe.core.errors import ConfigError
from genpipe.edges.address import base_address
from genpipe.edges.files import OsFiles, blaming, replace_atomically

LIMITS = "limits.json"

LIMIT_MAX = 65_535
"""Between two addresses there are no more ports (count)."""

FILE_BYTES_MAX = 4 << 20
EXAMPLE = '{"http://gpu1:30000": 16}'

LOCK_WAIT_S = 5.0
"""So long another command may take to change the file; it takes milliseconds (seconds)."""

CLOSE_WAIT_S = 2.0

_NAMED_MAX = 5

Limits = dict[str, int]
"""Requests at once by address, 0 for a server that is to be used no more."""


def read(path: Path) -> Limits:
    """What a file of limits says; nothing where there is none. Addresses are as servers are named.

    Raises:
        ConfigError: it cannot be read, or something stands in it that it cannot hold; the message names the
            file and the key.
    """
    try:
        # Not to wait for whoever may write into a pipe of that name.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise ConfigError(f"{path} is no file: remove it")
            data = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} is longer than {FILE_BYTES_MAX} bytes: write it anew, as in {EXAMPLE}")
    return _parse(data, path)


def write(path: Path, limits: Mapping[str, int]) -> None:
    """Put a file of limits in the place of what is there, durably; a reader sees the old one or the new.

    Raises:
        StoreError: the old one stands.
    """
    data = json.dumps(dict(limits), indent=2).encode() + b"\n"
    with blaming(path, "write"):
        replace_atomically(OsFiles(), path, data)


def clear(path: Path) -> Limits:
    """Take away what an earlier segment was told, so that the run begins with the servers as configured.

    Returns:
        What the file said; nothing where there was none, or none that can be understood.

    Raises:
        StoreError: it cannot be removed.
    """
    said: Limits = {}
    with suppress(ConfigError):
        said = read(path)
    files = OsFiles()
    with blaming(path, "remove"):
        if files.exists(path):
            files.unlink(path)
            files.sync_folder(path.parent)
    return said


def described(limits: Mapping[str, int]) -> str:
    """Limits in a line, such as ``http://a:1=16, http://b:1=0``."""
    named = [f"{url}={limit}" for url, limit in limits.items()]
    more = len(named) - _NAMED_MAX
    return ", ".join(named[:_NAMED_MAX]) + (f" and {more:,} more" if more > 0 else "")


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """Keep other commands from changing the file in between; for reading it and writing it once.

    Where the file system has no locks, the last one to write counts.

    Raises:
        ConfigError: another one has been at it for :data:`LOCK_WAIT_S`.
    """
    handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until_s = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise ConfigError(f"another command is changing {path}: try again in a moment") from None
                time.sleep(0.02)
            except OSError:
                break
            else:
                break
        yield
    finally:
        os.close(handle)


class Watcher:
    """Looks at a file of limits, in a thread of its own, and tells what it says each time that this changes.

    A file that was taken away says nothing. One that cannot be understood is told of once, when it is so at
    two looks in a row, since an editor may be in the midst of it; until it is mended, what it said before
    counts.
    """

    def __init__(
        self,
        path: Path,
        on_change: Callable[[Limits], None],
        warn: Callable[[str], None],
        *,
        every_s: float = 1.0,
    ) -> None:
        """Begin to look, as if the file had said nothing so far.

        Args:
            path: the file; its folder must be there.
            on_change: told all that it says now. Called in the watcher's thread; must not raise.
            warn: told in one line of what cannot be understood. Likewise.
            every_s: from one look to the next (seconds).
        """
        self._path = path
        self._on_change = on_change
        self._warn = warn
        self._every_s = every_s
        self._said: Limits = {}
        self._mark: tuple[int, ...] | None = None
        # Two changes within one tick of the file system's clock have the same mark: what has just changed is
        # read at the following look as well.
        self._is_settled = True
        self._trouble: str | None = None
        self._told: str | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="genpipe-limits", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more, and end the thread. May be called twice."""
        self._closing.set()
        # A file system that hangs must not hold up the end of a run.
        self._thread.join(CLOSE_WAIT_S)

    def _work(self) -> None:
        while not self._closing.is_set():
            self._look()
            self._closing.wait(self._every_s)

    def _look(self) -> None:
        mark = _mark_of(self._path)
        if mark == self._mark and self._is_settled:
            return
        self._is_settled = mark == self._mark
        self._mark = mark
        try:
            said = read(self._path)
        except ConfigError as error:
            self._met(str(error))
            return
        self._trouble = self._told = None
        if said != self._said:
            self._said = said
            self._on_change(dict(said))

    def _met(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            # Or else the look that would confirm it is never made.
            self._is_settled = False
        elif trouble != self._told:
            self._told = trouble
            self._warn(f"{trouble}; until then the limits stay as they are")


def _mark_of(path: Path) -> tuple[int, ...] | None:
    """What tells one state of a file from another without reading it; None where there is none."""
    try:
        seen = path.stat()
    except OSError:
        return None
    return (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)


def _parse(data: bytes, path: Path) -> Limits:
    try:
        pairs = json.loads(data, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError):
        pairs = None
    if not isinstance(pairs, _Pairs):
        raise ConfigError(
            f"{path} is damaged ({len(data)} bytes, no JSON object): write it anew, as in {EXAMPLE}, or "
            "remove it"
        )
    limits: Limits = {}
    for key, value in pairs:
        try:
            url = base_address(key)
        except ValueError as error:
            # It may hold a password.
            shown = "an address" if "@" in key else repr(key)[:80]
            raise ConfigError(f"{path}: {shown} {error}") from None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LIMIT_MAX:
            raise ConfigError(
                f"{path}: {url} must have a whole number from 0 to {LIMIT_MAX:,}, got {_shown(value)}"
            )
        if limits.setdefault(url, value) != value:
            raise ConfigError(f"{path}: {url} stands in it twice, with {limits[url]} and {value}: keep one")
    return limits


class _Pairs(list[tuple[str, Any]]):
    """A JSON object's members, those of the same name too."""


def _shown(value: Any) -> str:
    # Whole numbers of thousands of digits cannot be shown at all.
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if abs(value) < 10**20 else "a larger one"
    return "another object" if isinstance(value, _Pairs) else json.dumps(value)[:60]
