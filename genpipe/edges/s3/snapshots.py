"""Copies in S3 of the local files that still grow, so that a new machine loses little of them."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from genpipe.core.errors import Fenced, StoreError
from genpipe.edges.files import Files, blaming
from genpipe.edges.run_folder import SEGMENTS
from genpipe.edges.s3 import layout
from genpipe.edges.s3.objects import Objects
from genpipe.edges.s3.packing import pack
from genpipe.edges.shards import FAILED, SHARDS, ShardFile, shard_files

TAIL = "tail"
"""The kind of snapshot that holds the whole lines of the open shard."""

KINDS = {"failed": FAILED, "input": "input.idx", "segments": SEGMENTS}
"""The other kinds, and the file of the run folder that each holds the whole lines of."""

_TRIES = 2


@dataclass(slots=True, kw_only=True)
class _Kind:
    """What is known of the snapshots of one kind.

    Attributes:
        name: the kind.
        held: name and length (bytes) of the file that the newest snapshot holds; None while there is none.
        keys: the snapshots that may be in the store, oldest first, each with the file that it is of; empty
            for those of earlier claims, and None until they are listed.
        number: of the next one.
    """

    name: str
    held: tuple[str, int] | None = None
    keys: list[tuple[str, str]] | None = None
    number: int = 0


@dataclass(slots=True)
class _Errors:
    """What went wrong, kept until everything else was tried."""

    met: list[StoreError] = field(default_factory=list)

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> bool:
        if isinstance(error, StoreError) and not isinstance(error, Fenced):
            self.met.append(error)
            return True
        return False


class Snapshots:
    """The snapshots that one claim of the prefix makes. One thread.

    A snapshot is written once, under a name of its own; older ones are removed once a newer one is there.
    The files are read while the store appends to them: their lines carry checksums, and half a last line is
    left out. Within a process they only grow, so that a file of the same length is the same file.

    Attributes:
        tail_at_s: when the whole of the open shard was last known to be in S3, or in commits, by the
            monotonic clock; None before.
    """

    def __init__(
        self,
        folder: Path,
        files: Files,
        objects: Objects,
        *,
        epoch: int,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with nothing known.

        Args:
            folder: the run folder.
            files: the disk.
            objects: the prefix.
            epoch: the number of this claim of the prefix.
            now_s: the clock of ``tail_at_s`` (seconds).
        """
        self.tail_at_s: float | None = None
        self._folder = folder
        self._files = files
        self._objects = objects
        self._epoch = epoch
        self._now_s = now_s
        self._tail = _Kind(name=TAIL)
        self._others = [(_Kind(name=kind), file) for kind, file in KINDS.items()]

    def take(self, is_committed: Callable[[int], bool]) -> list[StoreError]:
        """Put what has changed since the last time, and remove what that makes old.

        Args:
            is_committed: whether the shard of this number is in the log of commits.

        Returns:
            What went wrong; nothing of that kept the other kinds from being tried.
        """
        errors = _Errors()
        with errors:
            self._take_tail(is_committed)
        sizes: dict[str, int] = {}
        with errors, blaming(self._folder, "list"):
            sizes = self._files.sizes(self._folder)
        for kind, file in self._others:
            with errors:
                if sizes.get(file):
                    self._put_if_changed(kind, self._folder / file, sizes[file])
                    self._remove(kind, kind.keys[:-1] if kind.keys and kind.held else [])
        return errors.met

    def _take_tail(self, is_committed: Callable[[int], bool]) -> None:
        looked_s = self._now_s()
        folder, kind = self._folder / SHARDS, self._tail
        with blaming(folder, "list"):
            shards = shard_files(self._files.sizes(folder))
        # A shard may have been sealed, and not yet be on the uploader's list: so the folder is asked.
        all_committed = all(shard.is_open or is_committed(shard.seq) for shard in shards)
        open_shard = _newest_open(shards)
        name = open_shard.name if open_shard is not None else ""
        if open_shard is not None and open_shard.size_bytes:
            if not self._put_if_changed(kind, folder / name, open_shard.size_bytes):
                return
            self.tail_at_s = looked_s
            superseded = kind.keys[:-1] if kind.keys and kind.held else []
        else:
            self._list_once(kind)
            superseded = kind.keys or []
            if all_committed:
                self.tail_at_s = looked_s
                kind.held = None
        # Until a sealed shard is committed, the last tail of it is all that S3 has of its records.
        self._remove(kind, [(key, file) for key, file in superseded if all_committed or file == name != ""])

    def _put_if_changed(self, kind: _Kind, path: Path, size_bytes: int) -> bool:
        """Put a new snapshot if need be; False where the file is gone, or holds no whole line."""
        self._list_once(kind)
        if kind.held == (path.name, size_bytes):
            return True
        with blaming(path, "read"):
            try:
                data = self._files.read(path)
            except FileNotFoundError:
                # It was sealed this moment.
                return False
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:
            return False
        # A put that failed may still land: its name is never used again, and is removed like any older one.
        key = layout.snapshot_key(kind.name, self._epoch, kind.number)
        kind.number += 1
        assert kind.keys is not None
        kind.keys.append((key, path.name))
        kind.held = None
        self._objects.put(key, pack(whole), tries=_TRIES)
        kind.held = (path.name, len(data))
        return True

    def _list_once(self, kind: _Kind) -> None:
        """Learn which snapshots earlier claims left; those of later ones are none of our business."""
        if kind.keys is None:
            listed = list(self._earlier(kind.name))
            kind.number = max((number + 1 for epoch, number, _ in listed if epoch == self._epoch), default=0)
            kind.keys = [(key, "") for _, _, key in sorted(listed)]

    def _earlier(self, kind: str) -> Iterator[tuple[int, int, str]]:
        for listed in self._objects.list(f"{layout.SNAPSHOTS}{kind}/", tries=_TRIES):
            order = layout.order_of_snapshot(listed.key)
            if order is not None and order[0] <= self._epoch:
                yield *order, listed.key

    def _remove(self, kind: _Kind, old: list[tuple[str, str]]) -> None:
        for key, file in list(old):
            self._objects.delete(key, tries=_TRIES)
            assert kind.keys is not None
            kind.keys.remove((key, file))


def _newest_open(shards: list[ShardFile]) -> ShardFile | None:
    found = [shard for shard in shards if shard.is_open]
    return found[-1] if found else None
