"""A run as others than its driver look at it: nothing is claimed or changed, whoever is at work."""

import fcntl
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Protocol, TypeVar

from genpipe.core.errors import ConfigError
from genpipe.edges.files import Files, blaming
from genpipe.edges.heartbeat import HEARTBEAT
from genpipe.edges.lock import LOCK
from genpipe.edges.owner import Standing, standing
from genpipe.edges.report import PROGRESS
from genpipe.edges.run_folder import recorded_run
from genpipe.edges.shards import MANIFEST, SHARDS, Entry, Manifest, ShardFile, shard_files, shard_name

_LOOKS_MAX = 20

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One shard of a run, wherever it is.

    Attributes:
        file: what it is called in messages.
        size_bytes: length of its lines.
        entry: what was noted of it when it was sealed, or None.
        is_open: it was still growing.
        read: gives its lines, in any thread. Raises ``OSError`` where the disk refuses, ``StoreError`` where
            the store does, and ``ValueError``, which says what is wrong, where it is not there or is not
            what was noted.
        then: what is to be done if it is not as it should be.
        noted_in: what the entry is from.
    """

    file: str
    size_bytes: int
    entry: Entry | None
    is_open: bool
    read: Callable[[], bytes]
    then: str = ""
    noted_in: str = "the manifest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """Something whose loss, or damage, may have cost records.

    Attributes:
        file: what it is called in messages.
        what: what is wrong with it.
        then: what is to be done about it.
    """

    file: str
    what: str
    then: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What a shelf holds.

    Attributes:
        held: its shards; of two records of one prompt the one that comes first counts.
        lacks: what is missing, as far as can be told without reading them.
    """

    held: list[Held]
    lacks: list[Lack]


class Shelf(Protocol):
    """Where the shards of a run stand, as somebody from outside looks at them.

    Attributes:
        name: what is shown of it.
        folder: the run folder, in which nothing may be written; None where it is no folder.
        threads: how many shards are worth reading at once.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def folder(self) -> Path | None: ...  # noqa: D102

    @property
    def threads(self) -> int: ...  # noqa: D102

    def run(self) -> dict[str, Any]:
        """What ``run.json`` says of it.

        Raises:
            ConfigError: there is none, or it is not to be understood.
            StoreError: it cannot be looked at.
        """
        ...

    def is_at_work(self) -> bool:
        """Whether a driver may just be writing at the end of the open shard."""
        ...

    def inventory(self) -> Inventory:
        """What it holds now.

        Raises:
            ConfigError: not all of it is within reach; the message says how it would be.
            StoreError: it cannot be looked at.
        """
        ...

    def total(self) -> int | None:
        """Prompts of the run, as far as its last report knows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The shards in a run folder and what the manifest says of them.

    The manifest was read first: whatever it lists had its sealed name before the names were looked up.

    Attributes:
        manifest_data: the manifest's bytes, or None where there is none.
        manifest: what they say.
        shards: the shards, by number; None where the folder for them is gone.
    """

    manifest_data: bytes | None
    manifest: Manifest
    shards: list[ShardFile] | None

    @property
    def sealed(self) -> set[int]:
        """The numbers of the sealed shards."""
        return {shard.seq for shard in self.shards or () if not shard.is_open}

    def pairs(self) -> Iterator[tuple[ShardFile, Entry | None]]:
        """Each shard, and what the manifest says of it if it is a sealed one."""
        for shard in self.shards or ():
            yield shard, None if shard.is_open else self.manifest.listed.get(shard.seq)


def run_of(files: Files, folder: Path) -> dict[str, Any]:
    """What ``run.json`` says of the run in ``folder``.

    Raises:
        ConfigError: there is no run in it, or its ``run.json`` is not to be understood.
        StoreError: it cannot be read.
    """
    run = recorded_run(files, folder)
    if run is None:
        raise ConfigError(f"{folder} holds no run: give a run folder, the one that `--out` named")
    return run


def shard_records_of(files: Files, folder: Path) -> int:
    """Lines of a full shard of the run in ``folder``; raises as :func:`run_of` does."""
    return int(run_of(files, folder)["shard_records"])


def contents_of(files: Files, folder: Path) -> Contents:
    """What shards a run folder has.

    Raises:
        StoreError: it cannot be read.
    """
    path = folder / MANIFEST
    with blaming(path, "read"):
        data = files.read(path) if files.exists(path) else None
    shards = folder / SHARDS
    with blaming(shards, "look into"):
        names = files.sizes(shards) if files.exists(shards) else None
        for _ in range(_LOOKS_MAX):
            # A driver that seals a shard meanwhile could show it under both of its names, or under none.
            again = files.sizes(shards) if names is not None else None
            settled = again is None or names is None or again.keys() == names.keys()
            names = again
            if settled:
                break
    return Contents(
        manifest_data=data,
        manifest=Manifest.decode(data or b""),
        shards=None if names is None else shard_files(names),
    )


def read_shard(files: Files, folder: Path, shard: ShardFile) -> bytes:
    """The bytes of a shard, also of one that was sealed since it was found open.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return files.read(folder / SHARDS / shard.name)
    except FileNotFoundError:
        if not shard.is_open:
            raise
    try:
        return files.read(folder / SHARDS / shard_name(shard.seq, is_open=False))
    except FileNotFoundError:
        # At the end of a run an open shard without records is removed.
        if shard.size_bytes:
            raise
        return b""


def last_report(files: Files, folder: Path) -> dict[str, Any]:
    """What the run said last of itself; empty where it said nothing that can be read."""
    try:
        return report_of(files.read(folder / PROGRESS))
    except OSError:
        return {}


def report_of(data: bytes) -> dict[str, Any]:
    """What ``progress.json`` says; empty where it is not to be understood."""
    try:
        report = json.loads(data)
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


def total_of(report: dict[str, Any]) -> int | None:
    """Prompts of the run, as far as that report knows."""
    total = report.get("total")
    return total if isinstance(total, int) else None


def in_turn(work: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """What ``work`` makes of each item, in order; it is ahead by so many items, and by no more.

    Raises:
        Exception: what ``work`` raised, at that item's turn.
    """
    ahead: deque[Future[R]] = deque()
    for item in items:
        if len(ahead) >= threads:
            yield ahead.popleft().result()
        ahead.append(_begin(work, item))
    while ahead:
        yield ahead.popleft().result()


def _begin(work: Callable[[T], R], item: T) -> "Future[R]":
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(work(item))
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    # A pool's threads are waited for at the end of the process: minutes, if a store does not answer.
    Thread(target=run, name="genpipe-read", daemon=True).start()
    return future


def driver_at_work(folder: Path) -> bool:
    """Whether a driver owns the folder just now, as far as can be told without claiming it."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Held for an instant where nobody else holds it; a driver that starts just then tries once more.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return _has_heartbeat(folder)
    finally:
        os.close(handle)
    return _has_heartbeat(folder)


def _has_heartbeat(folder: Path) -> bool:
    try:
        owner = json.loads((folder / HEARTBEAT).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(owner, dict) and standing(owner) is not Standing.GONE
