"""A run folder held against what it knows, and sees, of the object store that it is sent to."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import md5

from genpipe.core.bitmap import Bitmap
from genpipe.core.wording import number as with_commas
from genpipe.edges.findings import Finding
from genpipe.edges.looking import Seen
from genpipe.edges.reading import Contents
from genpipe.edges.s3 import layout
from genpipe.edges.s3.commits import UPLOADS, Commit
from genpipe.edges.s3.fetching import fetch_whole
from genpipe.edges.s3.log import gaps, of_gap, read_commits, run_id_of
from genpipe.edges.s3.objects import Listed, Objects
from genpipe.edges.shards import SHARDS, Entry, ShardFile, shard_name

PUT_BACK = "put it back: from older versions that the bucket keeps, or from a folder that still has it"
_RENUMBER = "--repair gives it another number, and moves to quarantine/ what S3 has too"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsent:
    """A shard of the folder that is not known to be committed as it is.

    Attributes:
        shard: its file.
        entry: what the manifest says of it, or None.
        ranges: its indices as runs, or none of them.
        indices: the others.
    """

    shard: ShardFile
    entry: Entry | None
    ranges: Sequence[tuple[int, int]]
    indices: Sequence[int]

    @classmethod
    def of(cls, shard: ShardFile, entry: Entry | None, seen: Seen) -> "Unsent":
        """From what is listed, and was seen, of it."""
        return cls(shard=shard, entry=entry, ranges=seen.ranges, indices=seen.indices)

    @property
    def file(self) -> str:
        """Its name in the run folder."""
        return f"{SHARDS}/{self.shard.name}"

    def is_in(self, commit: Commit) -> bool:
        """Whether that commit is of this very shard: as far as can be told, where the manifest lacks it."""
        entry = commit.entry
        if self.entry is not None:
            return self.entry.says_the_same(entry)
        if self.shard.is_open or self.shard.size_bytes != entry.size_bytes:
            return False
        return list(self.ranges) == entry.ranges or sorted(self.indices) == list(entry.indices())

    def count_in(self, done: Bitmap) -> int:
        """How many of its prompts are among these."""
        return sum(done.count_between(first, last + 1) for first, last in self.ranges) + sum(
            index in done for index in self.indices
        )


@dataclass(slots=True, kw_only=True)
class Audit:
    """What the store was found to hold.

    Attributes:
        findings: what is wrong, or worth a note.
        committed: numbers of the folder's shards that are in its log, which the folder did not know yet.
        stale: files of shards that cannot be sent as they are.
    """

    findings: list[Finding] = field(default_factory=list)
    committed: set[int] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)

    def find(self, file: str, what: str, then: str, **kind: bool) -> None:
        """Add a finding."""
        self.findings.append(Finding(file=file, what=what, then=then, **kind))


def of_uploads(data: bytes, contents: Contents, *, run_id: str) -> list[Finding]:
    """What is wrong with ``uploads.jsonl``, by itself and beside the manifest.

    Args:
        data: its bytes.
        contents: what the folder has and lists.
        run_id: the folder's run.
    """
    audit = Audit()
    then = "a start with S3 makes it again from what is there"
    rows = data.splitlines(keepends=True)
    read = [Commit.decode(row) for row in rows]
    commits = [commit for commit in read if commit is not None]
    if bad_count := len(rows) - len(commits):
        is_torn = bad_count == 1 and not data.endswith(b"\n")
        what = f"holds {bad_count} lines that do not count, or do not agree with themselves"
        audit.find(UPLOADS, what, then, is_problem=not is_torn, in_flight=is_torn)
    numbers = [commit.number for commit in commits]
    if len(set(numbers)) < len(numbers):
        audit.find(UPLOADS, f"names {len(numbers) - len(set(numbers))} commits more than once", then)
    if not bad_count and (missing := sum(last - first + 1 for first, last in gaps(numbers))):
        audit.find(UPLOADS, f"lacks {missing} commits between others", then)
    if foreign := sum(commit.run_id != run_id for commit in commits):
        audit.find(UPLOADS, f"names {foreign} commits of another run", then)
    _check_against_manifest(audit, commits, contents)
    return audit.findings


def _check_against_manifest(audit: Audit, commits: list[Commit], contents: Contents) -> None:
    """Shards that the folder has itself are held against their commits elsewhere: :func:`of_numbers`."""
    listed, sealed = contents.manifest.listed, contents.sealed
    numbers = [commit.entry.seq for commit in commits]
    if twice := len(numbers) - len(set(numbers)):
        audit.find(UPLOADS, f"names {twice} shards in more than one commit", PUT_BACK)
    for commit in commits:
        seq = commit.entry.seq
        file = f"{SHARDS}/{shard_name(seq, is_open=False)}"
        if seq in sealed:
            continue
        if seq not in listed:
            what = "is in S3 only, and not listed in the manifest"
            audit.find(file, what, "a start with S3 lists it", in_flight=True)
        elif not commit.entry.says_the_same(listed[seq]):
            what = f"is another in commit {commit.number} in S3 than in the manifest"
            audit.find(file, what, "a start with S3 lists what is there")


def of_numbers(unsent: Iterable[Unsent], commits: Iterable[Commit]) -> dict[str, Finding]:
    """The shards whose number other records have in S3, by file.

    Args:
        unsent: shards of the folder that are not committed as they are.
        commits: what is committed.
    """
    by_seq = {commit.entry.seq: commit for commit in commits}
    found = {}
    for mine in unsent:
        other = by_seq.get(mine.shard.seq)
        if other is not None and not mine.is_in(other):
            what = f"is not the shard that commit {other.number} in S3 holds under its number"
            found[mine.file] = Finding(file=mine.file, what=what, then=_RENUMBER)
    return found


def against_store(
    objects: Objects,
    *,
    run_id: str,
    uploads: dict[int, Commit],
    manifest: Callable[[], dict[int, Entry]],
    unsent: Sequence[Unsent],
) -> Audit:
    """Hold a folder against the names and lengths in the store; no shard is fetched.

    Args:
        objects: the prefix.
        run_id: the folder's run.
        uploads: the commits that the folder knows, as they were read before this call.
        manifest: reads what the folder lists, anew.
        unsent: its shards that are not in those.

    Raises:
        ConfigError: the prefix holds no run that can be understood.
        ObjectStoreError: it cannot be looked at.
    """
    audit = Audit()
    there = run_id_of(objects)
    if there != run_id:
        file = f"{objects.name}/{layout.RUN}"
        audit.find(file, f"is of another run ({there}) than this folder ({run_id})", "name the right prefix")
        return audit
    # In the order in which a driver at work puts them the other way round.
    in_log = {
        place: listed
        for listed in objects.list(layout.COMMITS)
        if (place := layout.number_of_commit(listed.key)) is not None
    }
    shards = {listed.key: listed.size_bytes for listed in objects.list(layout.SHARDS)}
    for place, commit in sorted(uploads.items()):
        _check_commit(audit, objects, commit, in_log.get(place))
    for first, last in gaps(in_log.keys() | uploads.keys()):
        key, what = of_gap(first, last)
        audit.find(f"{objects.name}/{key}", what, PUT_BACK)
    unknown, bad = read_commits(objects, run_id, sorted(in_log.keys() - uploads.keys()))
    for key, what in bad:
        audit.find(f"{objects.name}/{key}", what, PUT_BACK)
    for commit in [*uploads.values(), *unknown]:
        _check_length(audit, objects, commit, shards.get(commit.key))
    _check_unknown(audit, objects, unknown, manifest() if unknown else {}, unsent)
    return audit


def _check_commit(audit: Audit, objects: Objects, commit: Commit, listed: Listed | None) -> None:
    file = f"{objects.name}/{layout.commit_key(commit.number)}"
    if listed is None:
        audit.find(file, "is gone", PUT_BACK)
        return
    data = commit.encode()
    if listed.size_bytes == len(data) and listed.etag == md5(data, usedforsecurity=False).hexdigest():
        return
    # Not every store makes its ETags so.
    try:
        is_same = fetch_whole(objects, layout.commit_key(commit.number)).data == data
    except ValueError as error:
        audit.find(file, str(error), PUT_BACK)
        return
    if not is_same:
        audit.find(file, f"is not what {UPLOADS} says of it", f"see who else writes to {objects.name}")


def _check_length(audit: Audit, objects: Objects, commit: Commit, size_bytes: int | None) -> None:
    file = f"{objects.name}/{commit.key}"
    if size_bytes is None:
        audit.find(file, f"is gone, with {commit.entry.count} records", PUT_BACK)
    elif size_bytes != commit.object_bytes:
        what = f"has {size_bytes} bytes where its commit says {commit.object_bytes}"
        audit.find(file, what, PUT_BACK)


def _check_unknown(
    audit: Audit,
    objects: Objects,
    unknown: list[Commit],
    listed: dict[int, Entry],
    unsent: Sequence[Unsent],
) -> None:
    """Commits that the folder does not know: its own, of a moment ago, or those of another machine."""
    by_seq = {mine.shard.seq: mine for mine in unsent if not mine.shard.is_open}
    ours: list[Commit] = []
    others: list[Commit] = []
    for commit in unknown:
        seq = commit.entry.seq
        is_listed = seq in listed and commit.entry.says_the_same(listed[seq])
        is_mine = is_listed or (seq not in listed and seq in by_seq and by_seq[seq].is_in(commit))
        (ours if is_mine else others).append(commit)
    audit.committed = {commit.entry.seq for commit in ours}
    if ours:
        audit.find(
            UPLOADS,
            f"does not name {len(ours)} commits of this folder's shards that are in S3",
            "a start notes them",
            is_problem=False,
            in_flight=True,
        )
    if not others:
        return
    records = sum(commit.entry.count for commit in others)
    audit.find(
        f"{objects.name}/{layout.commit_key(others[0].number)}",
        f"another machine has gone on: {len(others)} commits of {with_commas(records)} records "
        "that this folder does not know begin here",
        f"a start with S3 takes them in, and `genpipe export {objects.name}` has them",
        is_problem=False,
    )
    mine = [one for one in unsent if one.shard.seq not in audit.committed]
    stale = of_numbers(mine, others)
    theirs = Bitmap()
    for commit in others:
        theirs.add_ranges(commit.entry.ranges)
    for one in mine:
        if one.file not in stale and (count := one.count_in(theirs)):
            what = f"holds {count} records of prompts that another machine has committed"
            stale[one.file] = Finding(file=one.file, what=what, then=_RENUMBER)
    audit.findings += stale.values()
    audit.stale = set(stale)
