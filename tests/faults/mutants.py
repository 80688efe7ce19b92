"""Stores that are broken on purpose, each in one way, to see that the tests notice."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from genpipe.edges import mending, shards
from genpipe.edges.files import Files

Patch = Callable[[object, str, object], None]
"""Sets an attribute; undone afterwards where the process goes on to be used."""


class Wrapped:
    """The file port, unchanged; knows the path of each handle."""

    def __init__(self, inner: Files) -> None:
        self.inner = inner
        self.paths: dict[int, Path] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open_append(self, path: Path, *, new: bool) -> int:
        handle = self.inner.open_append(path, new=new)
        self.paths[handle] = path
        return handle


class NoSync(Wrapped):
    """Data of some files is never synced."""

    def __init__(self, inner: Files, left_out: Callable[[Path], bool]) -> None:
        super().__init__(inner)
        self._left_out = left_out

    def sync(self, handle: int) -> None:
        if not self._left_out(self.paths[handle]):
            self.inner.sync(handle)

    def sync_path(self, path: Path) -> None:
        if not self._left_out(path):
            self.inner.sync_path(path)


class NoFolderSync(Wrapped):
    """Names in some folders are never synced."""

    def __init__(self, inner: Files, left_out: Callable[[Path], bool]) -> None:
        super().__init__(inner)
        self._left_out = left_out

    def sync_folder(self, path: Path) -> None:
        if not self._left_out(path):
            self.inner.sync_folder(path)


class IndexBeforeSync(Wrapped):
    """The records are synced only once their indices are listed."""

    def __init__(self, inner: Files) -> None:
        super().__init__(inner)
        self._due: list[int] = []

    def sync(self, handle: int) -> None:
        if is_shard(self.paths[handle]):
            self._due.append(handle)
        else:
            self.inner.sync(handle)

    def write(self, handle: int, data: bytes | memoryview) -> int:
        taken = self.inner.write(handle, data)
        if self.paths[handle].name == ".done_indices":
            self._settle()
        return taken

    def rename(self, old: Path, new: Path) -> None:
        self._settle()
        self.inner.rename(old, new)

    def close(self, handle: int) -> None:
        self._settle()
        self.inner.close(handle)

    def _settle(self) -> None:
        due, self._due = self._due, []
        for handle in due:
            self.inner.sync(handle)


class IndexBeforeWrite(IndexBeforeSync):
    """The records are even written only once their indices are listed."""

    def __init__(self, inner: Files) -> None:
        super().__init__(inner)
        self._held: dict[int, bytes] = {}

    def write(self, handle: int, data: bytes | memoryview) -> int:
        if is_shard(self.paths[handle]):
            self._held[handle] = self._held.get(handle, b"") + bytes(data)
            return len(data)
        return super().write(handle, data)

    def length(self, handle: int) -> int:
        return self.inner.length(handle) + len(self._held.get(handle, b""))

    def _settle(self) -> None:
        for handle, data in self._held.items():
            while data:
                data = data[self.inner.write(handle, data) :]  # noqa: PLW2901  # what a short write left
        self._held.clear()
        super()._settle()


class SyncAgain(Wrapped):
    """A sync that failed is called once more, and then believed."""

    def sync(self, handle: int) -> None:
        try:
            self.inner.sync(handle)
        except OSError:
            self.inner.sync(handle)


class NoCut(Wrapped):
    """Files are never cut, and claim that they were."""

    def __init__(self, inner: Files) -> None:
        super().__init__(inner)
        self._more: dict[int, int] = {}

    def truncate(self, handle: int, size: int) -> None:
        self._more[handle] = self.inner.length(handle) - size

    def length(self, handle: int) -> int:
        return self.inner.length(handle) - self._more.get(handle, 0)

    def close(self, handle: int) -> None:
        self._more.pop(handle, None)
        self.inner.close(handle)


class ShortWrites(Wrapped):
    """No mutant: a disk on which a write takes few bytes, so that any line can be torn by a kill."""

    def __init__(self, inner: Files, most: int) -> None:
        super().__init__(inner)
        self._most = most

    def write(self, handle: int, data: bytes | memoryview) -> int:
        return self.inner.write(handle, data[: self._most])


def is_shard(path: Path) -> bool:
    """Whether records are appended to it."""
    return path.name.startswith("part-") and path.suffix != ".tmp"


def _named(name: str) -> Callable[[Path], bool]:
    return lambda path: path.name == name


def _without_tail_check(files: Files, patch: Patch) -> Files:
    scan = shards.scan
    patch(mending, "scan", lambda data, **options: replace(scan(data, **options), bad=[]))
    return files


def _of(wrapper: Callable[..., Wrapped], *arguments: object) -> Callable[[Files, Patch], Files]:
    return lambda files, patch: cast("Files", wrapper(files, *arguments))


MUTANTS: dict[str, Callable[[Files, Patch], Files]] = {
    "data is not synced": _of(NoSync, is_shard),
    "the manifest is not synced": _of(NoSync, _named("manifest.jsonl")),
    "the list of the done is not synced": _of(NoSync, _named(".done_indices")),
    "failures are not synced": _of(NoSync, _named("failed.jsonl")),
    "a file is not synced before its rename": _of(NoSync, lambda path: path.suffix == ".tmp"),
    "names of shards are not synced": _of(NoFolderSync, _named("shards")),
    "names beside the shards are not synced": _of(NoFolderSync, lambda path: path.name != "shards"),
    "no name is ever synced": _of(NoFolderSync, lambda path: True),
    "the index comes before the sync": _of(IndexBeforeSync),
    "the index comes before the record": _of(IndexBeforeWrite),
    "the tail is not checked": _without_tail_check,
    "a failed sync is tried again": _of(SyncAgain),
    "nothing is cut back": _of(NoCut),
}
