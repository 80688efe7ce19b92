"""A disk in memory that tells what was written from what was synced."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from random import Random

from genpipe.core.values import Space


class PowerLoss(BaseException):
    """The machine stopped before a step. No code under test may catch it."""


class Inode:
    """One file's bytes: as programs see them, and as they would be after a power loss."""

    def __init__(self, data: bytes = b"", synced: bytes = b"") -> None:
        self.data = bytearray(data)
        self.synced = synced
        self.read_only = False
        self.sync_failed = False

    def sync(self) -> None:
        # After a sync that failed the system has forgotten what was to be written, and reports success.
        if not self.sync_failed:
            self.synced = bytes(self.data)

    def copied(self, data: bytes, synced: bytes) -> "Inode":
        copy = Inode(data, synced)
        copy.read_only = self.read_only
        return copy

    def after_loss(self, rng: Random | None) -> bytes:
        if rng is None:
            return self.synced
        if self.data.startswith(self.synced):
            return bytes(self.data[: rng.randint(len(self.synced), len(self.data))])
        return rng.choice([self.synced, bytes(self.data)])


class MemoryFiles:
    """The ``Files`` port on a disk in memory, under the weakest rules that POSIX allows.

    Data is safe after ``sync`` of its file, a name after ``sync_folder`` of its folder; a power loss drops
    the rest, or any part of it. Folders that the test makes with ``base`` are safe from the start.

    Attributes:
        log: the steps so far that change something, as (method, name).
        reads: names of the files that were read.
        stop_before: the number of the step, from 0, before which the power goes.
        write_max: most bytes that one write takes.
        refuse: error number to raise, by (method, name); stays until it is removed.
        refuse_once: likewise, for the first such step alone.
        refuse_step: the number of a step, from 0, and the error number that it raises.
        room: what the disk says of its room.
        lazy: methods that claim to have worked and do nothing, to see that the tests notice.
    """

    def __init__(
        self, base: Iterable[Path] = (), *, stop_before: int | None = None, write_max: int = 1 << 30
    ) -> None:
        self.log: list[tuple[str, str]] = []
        self.reads: list[str] = []
        self.stop_before = stop_before
        self.write_max = write_max
        self.refuse: dict[tuple[str, str], int] = {}
        self.refuse_once: dict[tuple[str, str], int] = {}
        self.refuse_step: tuple[int, int] | None = None
        self.lazy: set[str] = set()
        self.room = Space(free_bytes=1 << 40, total_bytes=1 << 41)
        # None stands for a folder.
        self._names: dict[Path, Inode | None] = dict.fromkeys([Path("/"), *base])
        self._safe_names = dict(self._names)
        self._pending: list[tuple[Path, dict[Path, Inode | None], tuple[Path, ...]]] = []
        self._open: dict[int, tuple[Path, Inode]] = {}
        self._next_handle = 3

    # The port.

    def open_append(self, path: Path, *, new: bool) -> int:
        if new:
            self._step("create", path)
            if path in self._names:
                raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            self._folder(path.parent)
            self._change(path.parent, {path: Inode()})
        inode = self._inode(path)
        if inode.read_only:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        handle = self._next_handle
        self._next_handle += 1
        self._open[handle] = (path, inode)
        return handle

    def write(self, handle: int, data: bytes | memoryview) -> int:
        path, inode = self._open[handle]
        self._step("write", path)
        taken = bytes(data)[: self.write_max]
        inode.data += taken
        return len(taken)

    def sync(self, handle: int) -> None:
        self._sync(*self._open[handle])

    def length(self, handle: int) -> int:
        return len(self._open[handle][1].data)

    def truncate(self, handle: int, size: int) -> None:
        path, inode = self._open[handle]
        self._step("truncate", path)
        assert size <= len(inode.data)
        del inode.data[size:]

    def close(self, handle: int) -> None:
        del self._open[handle]

    def rename(self, old: Path, new: Path) -> None:
        self._step("rename", old)
        assert old.parent == new.parent
        self._change(old.parent, {new: self._inode(old)}, removed=(old,))

    def unlink(self, path: Path) -> None:
        self._step("unlink", path)
        self._inode(path)
        self._change(path.parent, {}, removed=(path,))

    def mkdir(self, path: Path) -> None:
        self._step("mkdir", path)
        if path in self._names:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        self._folder(path.parent)
        self._change(path.parent, {path: None})

    def sync_folder(self, path: Path) -> None:
        self._step("sync_folder", path)
        self._folder(path)
        if "sync_folder" not in self.lazy:
            for _, added, removed in [change for change in self._pending if change[0] == path]:
                _apply(self._safe_names, added, removed)
            self._pending = [change for change in self._pending if change[0] != path]

    def sync_path(self, path: Path) -> None:
        self._sync(path, self._inode(path))

    def make_read_only(self, path: Path) -> None:
        self._inode(path).read_only = True

    def space(self, path: Path) -> Space:
        self._folder(path)
        return self.room

    def read(self, path: Path) -> bytes:
        self.reads.append(path.name)
        return bytes(self._inode(path).data)

    def read_ends(self, path: Path, size: int) -> tuple[bytes, bytes]:
        data = bytes(self._inode(path).data)
        return data[:size], data[max(0, len(data) - size) :]

    def sizes(self, path: Path) -> dict[str, int]:
        self._folder(path)
        return {
            name.name: len(inode.data)
            for name, inode in self._names.items()
            if name.parent == path and inode is not None
        }

    def exists(self, path: Path) -> bool:
        return path in self._names

    # For tests.

    @property
    def open_count(self) -> int:
        """Handles that were not given back."""
        return len(self._open)

    def put(self, path: Path, data: bytes) -> None:
        """Let a file hold these bytes, safely, as if they had always been there."""
        inode = Inode(data, data)
        self._names[path] = self._safe_names[path] = inode

    def remove(self, path: Path) -> None:
        """Take a file or a folder with all in it away, safely."""
        for names in (self._names, self._safe_names):
            for name in [name for name in names if name == path or path in name.parents]:
                del names[name]

    def crash(self, rng: Random | None = None) -> "MemoryFiles":
        """The disk after a power loss: only what is safe; with ``rng``, and some of what is not."""
        names = dict(self._safe_names)
        for _, added, removed in self._pending if rng is not None else ():
            assert rng is not None
            if rng.random() < 0.5:
                _apply(names, added, removed)
        return self._restarted(names, lambda inode: inode.after_loss(rng), synced=True)

    def kill(self) -> "MemoryFiles":
        """The disk after the process was killed: all that was written is seen, synced or not."""
        copies: dict[int, Inode] = {}
        after = self._restarted(self._names, lambda inode: bytes(inode.data), synced=False, copies=copies)
        after._safe_names = _copied(self._safe_names, copies)
        after._pending = [(f, _copied(added, copies), removed) for f, added, removed in self._pending]
        return after

    def _restarted(self, names, data_of, *, synced, copies=None) -> "MemoryFiles":
        after = MemoryFiles()
        copies = {} if copies is None else copies
        for inode in [*names.values(), *self._safe_names.values()]:
            if inode is not None and id(inode) not in copies:
                data = data_of(inode)
                copies[id(inode)] = inode.copied(data, data if synced else inode.synced)
        # What lies in a folder that is lost is lost with it.
        folders = {path for path, inode in names.items() if inode is None}
        reachable = {path: inode for path, inode in names.items() if folders.issuperset(path.parents)}
        after._names = _copied(reachable, copies)
        after._safe_names = dict(after._names)
        return after

    def _sync(self, path: Path, inode: Inode) -> None:
        try:
            self._step("sync", path)
        except OSError:
            inode.sync_failed = True
            raise
        if "sync" not in self.lazy:
            inode.sync()

    def _step(self, method: str, path: Path) -> None:
        if self.stop_before is not None and len(self.log) >= self.stop_before:
            raise PowerLoss
        error = self.refuse_once.pop((method, path.name), None) or self.refuse.get((method, path.name))
        if self.refuse_step is not None and len(self.log) == self.refuse_step[0]:
            error = self.refuse_step[1]
        self.log.append((method, path.name))
        if error is not None:
            raise OSError(error, os.strerror(error), str(path))

    def _change(self, folder: Path, added: dict[Path, Inode | None], removed: tuple[Path, ...] = ()) -> None:
        _apply(self._names, added, removed)
        self._pending.append((folder, added, removed))

    def _inode(self, path: Path) -> Inode:
        inode = self._names.get(path)
        if inode is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return inode

    def _folder(self, path: Path) -> None:
        if path not in self._names or self._names[path] is not None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _apply(
    names: dict[Path, Inode | None], added: dict[Path, Inode | None], removed: tuple[Path, ...]
) -> None:
    for path in removed:
        names.pop(path, None)
    names.update(added)


def _copied(names: dict[Path, Inode | None], copies: dict[int, Inode]) -> dict[Path, Inode | None]:
    for inode in names.values():
        if inode is not None and id(inode) not in copies:
            copies[id(inode)] = inode.copied(bytes(inode.data), inode.synced)
    return {path: None if inode is None else copies[id(inode)] for path, inode in names.items()}
