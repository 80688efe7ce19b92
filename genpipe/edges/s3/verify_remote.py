"""Everything below a prefix held against everything else: ``genpipe verify s3://…``."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from genpipe.core.wording import number as with_commas
from genpipe.edges.findings import Finding, Report
from genpipe.edges.looking import Doubles, Seen, look_at, nothing_of
from genpipe.edges.reading import Held, in_turn
from genpipe.edges.s3 import layout
from genpipe.edges.s3.auditing import PUT_BACK
from genpipe.edges.s3.commits import Commit
from genpipe.edges.s3.fetching import THREADS, fetch
from genpipe.edges.s3.log import (
    UPLOAD_THEM,
    Log,
    Tail,
    never_uploaded,
    only_in_tails,
    read_log,
    read_tails,
    report_at,
    run_id_of,
    snapshots,
)
from genpipe.edges.s3.objects import Listed, Objects
from genpipe.edges.shards import scan

Progress = Callable[[int, int], None]
"""Called with the bytes of shards that were read, and all that there are."""

_BY_LINE = {"failed": True, "segments": False}
"""Kinds of snapshots that hold lines with checksums, and whether those begin with an index."""

_DIGEST = "sha256"
"""Name of the metadata that repeats the digest of a shard's lines."""

_UNREADABLE_FOR_GOOD = "a new machine takes an older one, or goes on without"


def verify_remote(objects: Objects, *, progress: Progress, threads: int = THREADS) -> Report:
    """Look at every object of a run, change nothing.

    So many shards are in memory at a time, and a bit per prompt. A driver may be at work: what it puts
    meanwhile may be left out, and is no problem.

    Args:
        objects: the prefix.
        progress: told how far it is.
        threads: how many shards are fetched at once.

    Raises:
        ConfigError: there is no run below the prefix, or its ``run.json`` is not to be understood.
        ObjectStoreError: the store does not serve it.
    """
    return _Look(objects, run_id_of(objects)).report(progress, threads)


class _Look:
    """One look at one prefix."""

    def __init__(self, objects: Objects, run_id: str) -> None:
        self._objects = objects
        self._run_id = run_id
        self._doubles = Doubles()
        self._findings: list[Finding] = []

    def report(self, progress: Progress, threads: int) -> Report:
        # Each before what a driver at work puts before it: so what is named was there before.
        last_report = report_at(self._objects)
        tails, bad_tails = read_tails(self._objects)
        batches = list(self._objects.list(layout.INDEX))
        shards = {listed.key: listed.size_bytes for listed in self._objects.list(layout.SHARDS)}
        log = read_log(self._objects, self._run_id)
        for key, what in log.bad:
            self._find(key, what, PUT_BACK)
        for key, what in log.mended:
            self._find(key, what, f"{layout.INDEX} has what it said, and counts; put it back from there")
        self._check_names(log)
        size_bytes = 0
        total_bytes = sum(commit.entry.size_bytes for commit in log.commits)
        looks = in_turn(partial(_look_at, self._objects), log.commits, threads)
        for commit, seen in zip(log.commits, looks, strict=True):
            self._findings += seen.findings
            self._take(commit, seen)
            size_bytes += seen.size_bytes
            progress(size_bytes, total_bytes)
        for batch in batches:
            self._check_batch(batch, log)
        self._note_orphans(shards, log)
        last_bytes = self._check_tails(tails, bad_tails, log)
        if missing := never_uploaded(last_report, len(self._doubles.done)):
            self._find(layout.PROGRESS, f"tells of more: S3 {missing}", UPLOAD_THEM)
        self._check_snapshots()
        self._note_probes()
        return Report(
            name=self._objects.name,
            driver_at_work=False,
            shards=len(log.commits) + bool(last_bytes),
            records=len(self._doubles.done),
            size_bytes=size_bytes + last_bytes,
            findings=tuple(self._findings),
        )

    def _find(self, key: str, what: str, then: str, *, is_problem: bool = True) -> None:
        file = f"{self._objects.name}/{key}"
        self._findings.append(Finding(file=file, what=what, then=then, is_problem=is_problem))

    def _check_names(self, log: Log) -> None:
        """No shard, and no object, is in the log twice."""
        shards: dict[int, Commit] = {}
        keys: dict[str, Commit] = {}
        for commit in log.commits:
            first = shards.setdefault(commit.entry.seq, commit)
            same = keys.setdefault(commit.key, commit)
            file, then = layout.commit_key(commit.number), "see who else writes to this prefix"
            if first is not commit:
                what = f"commits shard {commit.entry.seq}, as commit {first.number} does"
                self._find(file, what, then)
            if same is not commit:
                self._find(file, f"names the object that commit {same.number} names", then)

    def _take(self, commit: Commit, seen: Seen) -> None:
        if doubled := self._doubles.take(seen.ranges, seen.indices):
            self._find(
                layout.commit_key(commit.number),
                f"holds {doubled} records of prompts that stand before them, in it or in an earlier commit",
                "the first of each counts, and an export has it once",
            )

    def _check_batch(self, batch: Listed, log: Log) -> None:
        """An object that repeats commits must repeat all of them, and as they are."""
        key, then = batch.key, "remove it: without it a new machine reads the commits themselves"
        numbers = _numbers_of_index(key)
        if numbers is None:
            self._find(key, "has no name that an index has", then, is_problem=False)
            return
        try:
            rows = fetch(self._objects, key).data.splitlines(keepends=True)
        except ValueError as error:
            self._find(key, str(error), then)
            return
        there = {commit.number: commit.encode() for commit in log.commits if commit.number in numbers}
        told = dict(zip(numbers, rows, strict=False))
        wrong = sum(told.get(number) != there[number] for number in there)
        if wrong or len(rows) != len(numbers):
            what = f"tells {len(rows)} commits of {len(numbers)}, of which {wrong} are not as in the log"
            self._find(key, what, then)
        if lost := len(told.keys() - there.keys()):
            self._find(
                key, f"tells {lost} commits that the log does not have", "put them back from its lines"
            )

    def _note_orphans(self, shards: dict[str, int], log: Log) -> None:
        orphans = sorted(shards.keys() - {commit.key for commit in log.commits})
        if orphans:
            size_bytes = sum(shards[key] for key in orphans)
            also = f", as are {with_commas(len(orphans) - 1)} more" if len(orphans) > 1 else ""
            self._find(
                orphans[0],
                f"is in no commit{also}: {with_commas(size_bytes)} bytes",
                "put by a driver just now, or left by one that was killed: a start removes it",
                is_problem=False,
            )

    def _check_tails(self, tails: list[Tail], bad: list[tuple[str, str]], log: Log) -> int:
        """What the snapshots of the open shard hold: how many bytes are nowhere else."""
        for key, what in bad:
            self._find(key, what, "its prompts are asked again, unless they are in a run folder")
        for tail in tails:
            if tail.found.bad:
                size_bytes = sum(len(piece) for _, piece in tail.found.bad)
                what = f"IS DAMAGED: {size_bytes} bytes are no line that counts"
                self._find(tail.key, what, "their prompts are asked again, unless they are in a run folder")
        data = only_in_tails(tails, log.committed())
        if data:
            indices = scan(data).indices
            self._doubles.take([], indices)
            self._find(
                tails[0].key,
                f"has {len(indices)} records that no commit has yet",
                "a new machine takes them in",
                is_problem=False,
            )
        return len(data)

    def _check_snapshots(self) -> None:
        """The newest copies of the other files that grow."""
        for kind in ("failed", "input", "segments"):
            for key in snapshots(self._objects, kind)[:1]:
                try:
                    data = fetch(self._objects, key).data
                except ValueError as error:
                    # A driver at work has put a newer one, and removed it.
                    if snapshots(self._objects, kind)[:1] == [key]:
                        self._find(key, str(error), _UNREADABLE_FOR_GOOD)
                    continue
                if kind in _BY_LINE and (bad := scan(data, indexed=_BY_LINE[kind]).bad):
                    what = f"IS DAMAGED: {sum(len(piece) for _, piece in bad)} bytes are no line that counts"
                    self._find(key, what, _UNREADABLE_FOR_GOOD)

    def _note_probes(self) -> None:
        left = list(self._objects.list(layout.PROBE))
        if left:
            also = f", as are {len(left) - 1} more" if len(left) > 1 else ""
            what = f"was left behind by the look at the store at a start{also}"
            self._find(left[0].key, what, "it may be removed", is_problem=False)


def _numbers_of_index(key: str) -> range | None:
    """The commits that an object repeats, by its name; None where the name is no such."""
    digits = key.removeprefix(layout.INDEX).partition(".")[0]
    if not re.fullmatch("[0-9]{6,18}", digits):
        return None
    first = int(digits)
    is_named_so = key == layout.index_key(first // layout.INDEX_COMMITS)
    return range(first, first + layout.INDEX_COMMITS) if is_named_so else None


def _look_at(objects: Objects, commit: Commit) -> Seen:
    """Fetch one shard and hold it against its commit. Runs in a thread, and shares nothing."""
    entry, file = commit.entry, f"{objects.name}/{commit.key}"
    held = Held(
        file=file,
        size_bytes=entry.size_bytes,
        entry=entry,
        is_open=False,
        read=lambda: b"",
        then=PUT_BACK,
        noted_in="its commit",
    )
    try:
        unpacked = fetch(objects, commit.key)
    except ValueError as error:
        return nothing_of(held, f"{error}, with {entry.count} records", PUT_BACK)
    seen = look_at(replace(held, read=lambda: unpacked.data))
    findings = []
    if unpacked.object_bytes != commit.object_bytes:
        what = f"has {unpacked.object_bytes} bytes where its commit says {commit.object_bytes}"
        findings.append(Finding(file=file, what=what, then=PUT_BACK))
    digest = unpacked.metadata.get(_DIGEST)
    if digest != entry.digest:
        what = (
            "has no SHA-256 beside it" if digest is None else "has another SHA-256 beside it than its commit"
        )
        then = "its bytes are what counts; whoever copied it may have lost or changed it"
        findings.append(Finding(file=file, what=what, then=then, is_problem=digest is not None))
    return replace(seen, findings=[*findings, *seen.findings])
