"""What of a run is in S3, read by the one who claims its prefix and goes on from there."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from genpipe.core.bitmap import Bitmap
from genpipe.core.errors import ResumeMismatch
from genpipe.edges.committed import overlap
from genpipe.edges.reading import in_turn
from genpipe.edges.s3 import layout, packing
from genpipe.edges.s3.commits import Commit, decode_all
from genpipe.edges.s3.log import numbers_of, snapshots
from genpipe.edges.s3.objects import Objects
from genpipe.edges.s3.snapshots import TAIL
from genpipe.edges.shards import scan

THREADS = 8
"""So many commits are read at once: what is waited for is the way there and back, and not the bytes."""

_NAMED_MAX = 5
_THEN = (
    "the prompts of their shards run again, but for shards that are in this folder, which are sent again. "
    "Put the objects back first if the bucket keeps older versions"
)

Warn = Callable[[str], None]


def _nothing() -> None:
    """Nobody is to be shown that this is alive."""


@dataclass(slots=True, kw_only=True)
class Log:
    """The commits of a run, as far as they count.

    Attributes:
        commits: those whose shard is there, by number.
        next_number: the first place of the log that is free.
        lost: commits whose shard's object is gone, or is not as long as it was; their records do not count.
        unknown: places of which nothing tells what they held.
        unnamed: objects of shards that no commit names; empty where some commit is not known.
    """

    commits: dict[int, Commit] = field(default_factory=dict)
    next_number: int = 0
    lost: list[Commit] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)

    def lost_records(self) -> int:
        """Prompts whose only record was in objects that are gone."""
        have = Bitmap()
        for commit in self.commits.values():
            have.add_ranges(commit.entry.ranges)
        return sum(commit.entry.count - overlap(have, commit.entry) for commit in self.lost)


def read_commits(
    objects: Objects,
    known: Mapping[int, Commit],
    *,
    run_id: str,
    warn: Warn,
    threads: int = THREADS,
    beat: Callable[[], None] = _nothing,
) -> Log:
    """The log of commits, with as little reading as can be.

    Nothing that tells of commits is believed for a place that the listing does not show, nor for a shard
    whose object is not listed as long as it should be: there, the commit object itself is asked.

    Args:
        objects: the prefix.
        known: what the run folder knows of it.
        run_id: the run.
        warn: told, in one line each, what is damaged or gone.
        threads: how many commits are read at once.
        beat: called again and again while this goes on.

    Raises:
        ResumeMismatch: commits of another run are there.
        ObjectStoreError: the store does not serve them.
    """
    return _Reading(objects, known, run_id, warn, threads, beat).run()


class _Reading:
    """One reading of one log."""

    def __init__(
        self,
        objects: Objects,
        known: Mapping[int, Commit],
        run_id: str,
        warn: Warn,
        threads: int,
        beat: Callable[[], None],
    ) -> None:
        self._objects = objects
        self._run_id = run_id
        self._warn = warn
        self._threads = threads
        self._beat = beat
        # What is told of a commit by something else than its own object.
        self._told = {number: commit for number, commit in known.items() if commit.run_id == run_id}
        self._sizes: dict[str, int] = {}
        self._log = Log()

    def run(self) -> Log:
        log = self._log
        # The commits first: whatever they name was there before them.
        listed = set(numbers_of(self._objects))
        for shard in self._objects.list(layout.SHARDS):
            self._sizes[shard.key] = shard.size_bytes
            self._beat()
        log.next_number = max(listed, default=-1) + 1
        self._believe(listed)
        self._read_index(listed)
        # A gap is looked into as well: a listing may lag.
        self._read(number for number in range(log.next_number) if number not in log.commits)
        # Whoever deleted the end of the log did so by hand: what it named is not ours to remove.
        beyond = [commit for number, commit in self._told.items() if number >= log.next_number]
        if beyond:
            numbers = [commit.number for commit in beyond]
            self._warn(f"{_commits(self._objects, numbers)} ARE GONE from the end of the log: {_THEN}")
        named = {commit.key for commit in (*log.commits.values(), *log.lost, *beyond)}
        if not log.unknown:
            log.unnamed = sorted(self._sizes.keys() - named)
        return log

    def _believe(self, numbers: Iterable[int]) -> None:
        """Take what is told of commits whose shards are as long as is told."""
        for number in numbers:
            told = self._told.get(number)
            if told is not None and self._is_there(told):
                self._log.commits[number] = told

    def _is_there(self, commit: Commit) -> bool:
        return self._sizes.get(commit.key) == commit.object_bytes

    def _read_index(self, listed: set[int]) -> None:
        """Of commits that nothing told of yet, see what the index says."""
        wanted = listed - self._log.commits.keys()
        if not wanted:
            return
        there = {found.key for found in self._objects.list(layout.INDEX)}
        batches = sorted({number // layout.INDEX_COMMITS for number in wanted})
        keys = [key for key in map(layout.index_key, batches) if key in there]
        for key, fetched in zip(keys, in_turn(self._objects.get, keys, self._threads), strict=True):
            self._beat()
            data = packing.unpack(fetched.data) if fetched is not None else b""
            if data is None:
                self._warn(f"{self._objects.name}/{key} is damaged: the commits themselves are read")
                continue
            for number, told in decode_all(data).items():
                if told.run_id == self._run_id:
                    self._told[number] = told
        self._believe(wanted)

    def _read(self, numbers: Iterable[int]) -> None:
        """Read commits one by one; of one that is damaged, what is told elsewhere counts."""
        log = self._log
        damaged, gone = [], []
        for number, commit in in_turn(partial(_fetch, self._objects), numbers, self._threads):
            self._beat()
            if commit is None:
                gone.append(number)
                log.unknown.append(number)
                continue
            if isinstance(commit, bytes):
                damaged.append(number)
                told = self._told.get(number)
                if told is None:
                    log.unknown.append(number)
                    continue
                commit = told  # noqa: PLW2901  # what stood there
            if commit.run_id != self._run_id:
                raise ResumeMismatch(
                    f"{self._objects.name}/{layout.commit_key(number)} is of run {commit.run_id}, and this "
                    f"is run {self._run_id}: give this run a prefix of its own with --s3"
                )
            if self._is_there(commit):
                log.commits[number] = commit
            else:
                log.lost.append(commit)
        self._tell(damaged, gone)

    def _tell(self, damaged: list[int], gone: list[int]) -> None:
        """Warn of what is wrong with commit objects."""
        unknown = [number for number in damaged if number in self._log.unknown]
        known = [number for number in damaged if number not in self._log.unknown]
        if gone:
            self._warn(f"{_commits(self._objects, gone)} ARE GONE, although later ones are there: {_THEN}")
        if unknown:
            self._warn(
                f"{_commits(self._objects, unknown)} ARE DAMAGED, and nothing else tells of them: {_THEN}"
            )
        if known:
            self._warn(f"{_commits(self._objects, known)} are damaged; what they said is known, and counts")


def _fetch(objects: Objects, number: int) -> tuple[int, Commit | bytes | None]:
    """A commit, or the bytes that are none, or None where there is no such object."""
    fetched = objects.get(layout.commit_key(number))
    if fetched is None:
        return number, None
    commit = Commit.decode(fetched.data)
    return number, commit if commit is not None and commit.number == number else fetched.data


def _commits(objects: Objects, numbers: list[int]) -> str:
    keys = ", ".join(map(layout.commit_key, numbers[:_NAMED_MAX]))
    more = f" and {len(numbers) - _NAMED_MAX} more" if len(numbers) > _NAMED_MAX else ""
    return f"{len(numbers)} commits in {objects.name} ({keys}{more})"


def highest_epoch(objects: Objects) -> int:
    """The highest number of a claim that left anything in the prefix; 0 where none did.

    Raises:
        ObjectStoreError: the store does not serve it.
    """
    epoch, last_number = 0, -1
    for listed in objects.list(f"{layout.WRITER}/"):
        order = layout.order_of_snapshot(listed.key)
        epoch = max(epoch, layout.epoch_of_shard(listed.key) or 0, order[0] if order is not None else 0)
        number = layout.number_of_commit(listed.key)
        if number is not None:
            last_number = max(last_number, number)
    if last_number >= 0:
        # Claims follow each other in the log, so that its last commit is of the highest.
        _, commit = _fetch(objects, last_number)
        if isinstance(commit, Commit):
            epoch = max(epoch, commit.epoch)
    return epoch


def read_tail(objects: Objects, *, warn: Warn, beat: Callable[[], None] = _nothing) -> list[bytes]:
    """The records that claims before had in open shards: a line for each prompt, the newest one.

    Raises:
        ObjectStoreError: the store does not serve them.
    """
    newest_of: dict[int, bytes] = {}
    for key in snapshots(objects, TAIL):
        beat()
        data = _unpacked(objects, key, warn)
        if data is None:
            continue
        found = scan(data)
        for index, line in zip(found.indices, found.good, strict=True):
            newest_of.setdefault(index, line)
    return list(newest_of.values())


def newest(objects: Objects, kind: str, *, warn: Warn) -> bytes | None:
    """The whole lines of the newest snapshot of a file that is not damaged; None where there is none.

    Args:
        objects: the prefix.
        kind: the kind of snapshot.
        warn: told, in one line each, which are damaged.

    Raises:
        ObjectStoreError: the store does not serve them.
    """
    for key in snapshots(objects, kind):
        data = _unpacked(objects, key, warn)
        if data is not None:
            return data[: data.rfind(b"\n") + 1]
    return None


def _unpacked(objects: Objects, key: str, warn: Warn) -> bytes | None:
    fetched = objects.get(key)
    if fetched is None:
        return None
    data = packing.unpack(fetched.data)
    if data is None:
        warn(f"{objects.name}/{key} is damaged: an older one is taken, where there is one")
    return data
