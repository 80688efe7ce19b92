"""What stands in a prefix, read by somebody who is not its writer: what is wrong is told, the rest read."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from genpipe.core.bitmap import Bitmap
from genpipe.core.errors import ConfigError
from genpipe.core.progress import OVER
from genpipe.core.wording import number as with_commas
from genpipe.edges.reading import in_turn, report_of
from genpipe.edges.run_folder import parse_run
from genpipe.edges.s3 import layout
from genpipe.edges.s3.commits import Commit, decode_all
from genpipe.edges.s3.fetching import fetch, fetch_whole
from genpipe.edges.s3.objects import Objects
from genpipe.edges.shards import Scan, scan

UPLOAD_THEM = "they were never uploaded: the same command on the same machine does it, and asks no model"
"""What is to be done about records that S3 never got."""

_THREADS = 16
_LOOKS_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The commits of a prefix.

    Attributes:
        commits: those that count, in order.
        bad: what is wrong with others: the object's key, and what it is.
        mended: likewise, where the index tells what a damaged one said, so that it counts.
    """

    commits: list[Commit]
    bad: list[tuple[str, str]]
    mended: list[tuple[str, str]]

    def committed(self) -> Bitmap:
        """The prompts that have a record in a committed shard."""
        done = Bitmap()
        for commit in self.commits:
            done.add_ranges(commit.entry.ranges)
        return done


def report_at(objects: Objects) -> dict[str, Any]:
    """The last report of the run at a prefix; empty where there is none.

    Raises:
        ObjectStoreError: the store does not serve it.
    """
    fetched = objects.get(layout.PROGRESS)
    return report_of(fetched.data) if fetched is not None else {}


def never_uploaded(report: dict[str, Any], records: int) -> str | None:
    """What a run that is over tells of and S3 lacks, in words; None where nothing is known to be lacking.

    Args:
        report: its last report, read before the records were counted.
        records: how many S3 has.
    """
    completed = report.get("completed")
    if report.get("state") not in OVER or not isinstance(completed, int) or completed <= records:
        return None
    lacking, told = with_commas(completed - records), with_commas(completed)
    return f"lacks {lacking} records of the {told} that the last report of the run tells of"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """A snapshot of an open shard.

    Attributes:
        key: the object.
        found: its lines.
    """

    key: str
    found: Scan


def run_id_of(objects: Objects) -> str:
    """The run that a prefix holds; raises as :func:`run_at` does."""
    return str(run_at(objects)["run_id"])


def run_at(objects: Objects) -> dict[str, Any]:
    """What ``run.json`` says of the run that a prefix holds.

    Raises:
        ConfigError: it holds none, or ``run.json`` is not to be understood.
        ObjectStoreError: the store does not serve it.
    """
    name = f"{objects.name}/{layout.RUN}"
    fetched = objects.get(layout.RUN)
    if fetched is None:
        raise ConfigError(
            f"{objects.name} holds no run: there is no {layout.RUN}. Give the prefix that `--s3` named"
        )
    return parse_run(fetched.data, name)


def numbers_of(objects: Objects) -> list[int]:
    """The places of the log that are taken.

    Raises:
        ObjectStoreError: they cannot be listed.
    """
    found = (layout.number_of_commit(listed.key) for listed in objects.list(layout.COMMITS))
    return sorted(number for number in found if number is not None)


def gaps(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The places below the last that are not among these, as runs (first, last)."""
    expected = 0
    for number in sorted(numbers):
        if number > expected:
            yield expected, number - 1
        expected = number + 1


def of_gap(first: int, last: int) -> tuple[str, str]:
    """The first object of a gap, and what is wrong."""
    also = f", and so are those up to {last}" if last > first else ""
    return layout.commit_key(first), f"is gone{also}, although later ones are there"


def read_commit(objects: Objects, run_id: str, number: int) -> Commit:
    """The commit at one place of the log.

    Raises:
        ValueError: it is not there, is damaged, or is another; says what is wrong.
        ObjectStoreError: the store does not serve it, or anything.
    """
    commit = Commit.decode(fetch_whole(objects, layout.commit_key(number)).data)
    if commit is None:
        raise ValueError("is damaged, or no commit")
    if commit.number != number:
        raise ValueError(f"says that it is commit {commit.number}")
    if commit.run_id != run_id:
        raise ValueError(f"is of another run ({commit.run_id})")
    return commit


def read_commits(
    objects: Objects, run_id: str, numbers: Iterable[int]
) -> tuple[list[Commit], list[tuple[str, str]]]:
    """The commits at these places, and what is wrong with others.

    Raises:
        ObjectStoreError: the store serves nothing.
    """
    commits, bad = [], []
    for number, commit in in_turn(partial(_try_commit, objects, run_id), numbers, _THREADS):
        if isinstance(commit, Commit):
            commits.append(commit)
        else:
            bad.append((layout.commit_key(number), commit))
    return commits, bad


def read_log(objects: Objects, run_id: str) -> Log:
    """All commits of a prefix, each read by itself.

    Raises:
        ObjectStoreError: the store serves nothing.
    """
    numbers = numbers_of(objects)
    commits, bad = read_commits(objects, run_id, numbers)
    told = _told_by_index(objects, run_id, numbers, bad)
    return Log(
        commits=sorted([*commits, *told.values()], key=lambda commit: commit.number),
        bad=[one for one in bad if one[0] not in told] + [of_gap(*gap) for gap in gaps(numbers)],
        mended=[one for one in bad if one[0] in told],
    )


def _told_by_index(
    objects: Objects, run_id: str, numbers: list[int], bad: list[tuple[str, str]]
) -> dict[str, Commit]:
    """What the index says of commits whose own objects are bad, by their keys; a start goes by it too."""
    keys = {key for key, _ in bad}
    wanted = [number for number in numbers if layout.commit_key(number) in keys]
    told: dict[str, Commit] = {}
    for batch in sorted({number // layout.INDEX_COMMITS for number in wanted}):
        try:
            found = decode_all(fetch(objects, layout.index_key(batch)).data)
        except ValueError:
            # There is none yet, or it is damaged too.
            continue
        for number in found.keys() & set(wanted):
            if found[number].run_id == run_id and number // layout.INDEX_COMMITS == batch:
                told[layout.commit_key(number)] = found[number]
    return told


def read_tails(objects: Objects) -> tuple[list[Tail], list[tuple[str, str]]]:
    """The snapshots of open shards, the newest first, and what is wrong with others.

    To be read before the log: a record leaves the last tail only once it is committed.

    Raises:
        ObjectStoreError: the store serves nothing.
    """
    tails: list[Tail] = []
    bad: list[tuple[str, str]] = []
    for _ in range(_LOOKS_MAX):
        tails, bad = [], []
        keys = snapshots(objects, "tail")
        for key in keys:
            try:
                tails.append(Tail(key=key, found=scan(fetch(objects, key).data)))
            except ValueError as error:
                bad.append((key, str(error)))
        # A driver at work removes one once it has put the next.
        if not bad or snapshots(objects, "tail") == keys:
            break
    return tails, bad


def snapshots(objects: Objects, kind: str) -> list[str]:
    """The snapshots of one kind, the newest first.

    Raises:
        ObjectStoreError: they cannot be listed.
    """
    found = (listed.key for listed in objects.list(f"{layout.SNAPSHOTS}{kind}/"))
    ordered = [(order, key) for key in found if (order := layout.order_of_snapshot(key)) is not None]
    return [key for _, key in sorted(ordered, reverse=True)]


def only_in_tails(tails: list[Tail], committed: Bitmap) -> bytes:
    """The lines of records that only tails have, each prompt's newest one."""
    seen, kept = Bitmap(), []
    for tail in tails:
        for index, line in zip(tail.found.indices, tail.found.good, strict=True):
            if index not in committed and seen.add(index):
                kept.append(line)
    return b"".join(kept)


def _try_commit(objects: Objects, run_id: str, number: int) -> tuple[int, Commit | str]:
    try:
        return number, read_commit(objects, run_id, number)
    except ValueError as error:
        return number, str(error)
