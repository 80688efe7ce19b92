"""A run folder as a shelf: its own shards, and those that only an object store has."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from genpipe.core.errors import ConfigError, ObjectStoreError
from genpipe.edges import reading
from genpipe.edges.files import Files, blaming
from genpipe.edges.reading import Contents, Held, Inventory, Lack, contents_of, read_shard
from genpipe.edges.s3.commits import UPLOADS, Commit, decode_all
from genpipe.edges.s3.fetching import THREADS, fetch_shard
from genpipe.edges.s3.objects import Objects
from genpipe.edges.s3.place import PLACE
from genpipe.edges.shards import DONE_INDICES, MANIFEST, SHARDS, Entry, ShardFile, shard_name

_LOCAL_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The prefix that a run folder is sent to.

    Attributes:
        uri: what is shown of it, such as ``s3://bucket/run1``.
        open: begins to speak to it; raises ``ConfigError`` or ``ObjectStoreError``.
    """

    uri: str
    open: Callable[[], Objects]


class FolderShelf:
    """The shards of a run folder."""

    def __init__(self, folder: Path, files: Files, remote: Prefix | None = None) -> None:
        """Prepare; nothing is read yet.

        Args:
            folder: the run folder, which is only read.
            files: the disk that it is on.
            remote: where shards are that it does not have; it is opened only if there are any.
        """
        self._folder = folder
        self._files = files
        self._remote = remote
        self._is_all_here = True

    @property
    def name(self) -> str:
        """See :class:`Shelf`."""
        return str(self._folder)

    @property
    def folder(self) -> Path | None:
        """See :class:`Shelf`."""
        return self._folder

    @property
    def threads(self) -> int:
        """See :class:`Shelf`; known once it was looked at."""
        return _LOCAL_THREADS if self._is_all_here else THREADS

    def run(self) -> dict[str, Any]:
        """See :class:`Shelf`."""
        return reading.run_of(self._files, self._folder)

    def is_at_work(self) -> bool:
        """See :class:`Shelf`."""
        return reading.driver_at_work(self._folder)

    def total(self) -> int | None:
        """See :class:`Shelf`."""
        return reading.total_of(reading.last_report(self._files, self._folder))

    def inventory(self) -> Inventory:
        """See :class:`Shelf`."""
        at_work = self.is_at_work()
        uploads = self._uploads()
        contents = contents_of(self._files, self._folder)
        held = {(shard.seq, shard.is_open): self._here(shard, entry) for shard, entry in contents.pairs()}
        here = {shard.seq for shard in contents.shards or ()}
        away = elsewhere(contents, uploads)
        self._is_all_here = not away
        if away:
            held |= self._away(away)
        lacks = self._lacks(contents, here | away.keys(), at_work=at_work)
        if not held and self._files.sizes(self._folder).get(DONE_INDICES):
            lacks.insert(0, self._lack(SHARDS, f"holds nothing, although {DONE_INDICES} tells of records"))
        return Inventory(held=[held[place] for place in sorted(held)], lacks=lacks)

    def _uploads(self) -> dict[int, Commit]:
        path = self._folder / UPLOADS
        with blaming(path, "read"):
            return decode_all(self._files.read(path)) if self._files.exists(path) else {}

    def _lacks(self, contents: Contents, found: set[int], *, at_work: bool) -> list[Lack]:
        listed = contents.manifest.listed
        lacks = [
            self._lack(
                f"{SHARDS}/{shard_name(seq, is_open=False)}", f"is gone, with {listed[seq].count} records"
            )
            for seq in sorted(listed.keys() - found)
        ]
        if contents.manifest.bad_count and not at_work:
            lacks.append(self._lack(MANIFEST, "is damaged, so that a lost shard would not be noticed"))
        return lacks

    def _lack(self, file: str, what: str) -> Lack:
        return Lack(file=str(self._folder / file), what=what, then=self._repair)

    @property
    def _repair(self) -> str:
        return f"`genpipe verify {self._folder} --repair` mends it"

    def _here(self, shard: ShardFile, entry: Entry | None) -> Held:
        path = self._folder / SHARDS / shard.name

        def read() -> bytes:
            with blaming(path, "read"):
                return read_shard(self._files, self._folder, shard)

        return Held(
            file=str(path),
            size_bytes=shard.size_bytes,
            entry=entry,
            is_open=shard.is_open,
            read=read,
            then=self._repair,
        )

    def _away(self, away: dict[int, Commit]) -> dict[tuple[int, bool], Held]:
        told = f"{len(away)} shards of {self._folder} are in S3 only"
        if self._remote is None:
            raise ConfigError(
                f"{told}, and {self._folder / PLACE}, which says where, is not there: name the place "
                "(`genpipe export s3://BUCKET/PREFIX OUT`)"
            )
        uri = self._remote.uri
        with _naming_the_way(told, uri):
            objects = self._remote.open()

        def read(commit: Commit) -> bytes:
            with _naming_the_way(told, uri):
                return fetch_shard(objects, commit.key, commit.entry)

        def held(commit: Commit) -> Held:
            return Held(
                file=f"{objects.name}/{commit.key}",
                size_bytes=commit.entry.size_bytes,
                entry=commit.entry,
                is_open=False,
                read=partial(read, commit),
                then=f"`genpipe verify {objects.name}` looks at all that is there",
                noted_in="its commit",
            )

        return {(seq, False): held(commit) for seq, commit in away.items()}


def elsewhere(contents: Contents, uploads: dict[int, Commit]) -> dict[int, Commit]:
    """The commits of the shards that only the object store has, by the shard's number.

    Args:
        contents: what the folder has, and lists.
        uploads: the commits that it knows, by their place in the log.
    """
    listed, sealed = contents.manifest.listed, contents.sealed
    return {
        commit.entry.seq: commit
        for commit in uploads.values()
        if commit.entry.seq not in sealed
        and commit.entry.seq in listed
        and commit.entry.says_the_same(listed[commit.entry.seq])
    }


@contextmanager
def _naming_the_way(told: str, uri: str) -> Iterator[None]:
    """Say, of what the block raises, what it is about and what can be done."""
    try:
        yield
    except (ConfigError, ObjectStoreError) as error:
        text = f"{told}, and cannot be had: {error} (where {uri} is within reach: `genpipe export {uri} OUT`)"
        if isinstance(error, ObjectStoreError):
            raise ObjectStoreError(text, kind=error.kind) from error
        raise ConfigError(text) from error
