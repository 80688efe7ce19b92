"""A run folder as others than its driver look at it: nothing is claimed or changed, whoever is at work."""

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from genpipe.core.errors import ConfigError
from genpipe.edges.files import Files, blaming
from genpipe.edges.heartbeat import HEARTBEAT
from genpipe.edges.lock import LOCK
from genpipe.edges.owner import Standing, standing
from genpipe.edges.run_folder import recorded_run
from genpipe.edges.shards import MANIFEST, SHARDS, Entry, Manifest, ShardFile, shard_files, shard_name

_LOOKS_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The shards of a run and what the manifest says of them.

    The manifest was read first: whatever it lists had its sealed name before the names were looked up.

    Attributes:
        manifest_data: the manifest's bytes, or None where there is none.
        manifest: what they say.
        shards: the shards, by number; None where the folder for them is gone.
    """

    manifest_data: bytes | None
    manifest: Manifest
    shards: list[ShardFile] | None

    def pairs(self) -> Iterator[tuple[ShardFile, Entry | None]]:
        """Each shard, and what the manifest says of it if it is a sealed one."""
        for shard in self.shards or ():
            yield shard, None if shard.is_open else self.manifest.listed.get(shard.seq)


def shard_records_of(files: Files, folder: Path) -> int:
    """Lines of a full shard of the run in ``folder``.

    Raises:
        ConfigError: there is no run in it, or its ``run.json`` is not to be understood.
        StoreError: it cannot be read.
    """
    run = recorded_run(files, folder)
    if run is None:
        raise ConfigError(f"{folder} holds no run: give a run folder, the one that `--out` named")
    return int(run["shard_records"])


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
