"""How the objects of a run are called. What they are for stands in ``FORMAT.md``."""

import re

RUN = "run.json"

WRITER = "w00"
"""The folder of the run's one writer; several writers of one run would have a folder each."""

LEASE = f"{WRITER}/lease.json"
PROGRESS = f"{WRITER}/progress.json"
SHARDS = f"{WRITER}/shards/"
COMMITS = f"{WRITER}/commits/"
INDEX = f"{WRITER}/index/"
SNAPSHOTS = f"{WRITER}/"
PROBE = f"{WRITER}/probe/"

INDEX_COMMITS = 100
"""So many commits are also told in one object, so that a new machine need not read each of them."""

_COMMIT = re.compile(re.escape(COMMITS) + r"([0-9]{6,18})\.json")
_SHARD = re.compile(re.escape(SHARDS) + r"part-([0-9]{6,18})-e([0-9]{4,18})-([0-9a-f]+)\.jsonl\.zst")
_SNAPSHOT = re.compile(re.escape(SNAPSHOTS) + r"([a-z]+)/e([0-9]{4,18})-([0-9]{6,18})\.zst")


def shard_key(seq: int, epoch: int, nonce: str) -> str:
    """The object of a shard: written once, by one claim."""
    return f"{SHARDS}part-{seq:06d}-e{epoch:04d}-{nonce}.jsonl.zst"


def epoch_of_shard(key: str) -> int | None:
    """The claim that wrote a shard's object; None where the name is no such."""
    match = _SHARD.fullmatch(key)
    return int(match[2]) if match else None


def commit_key(number: int) -> str:
    """The commit object at one place of the log."""
    return f"{COMMITS}{number:06d}.json"


def number_of_commit(key: str) -> int | None:
    """The place in the log; None where the name is no such."""
    match = _COMMIT.fullmatch(key)
    return int(match[1]) if match and key == commit_key(int(match[1])) else None


def index_key(batch: int) -> str:
    """The object that repeats commits ``batch * INDEX_COMMITS`` and the next ones."""
    return f"{INDEX}{batch * INDEX_COMMITS:06d}.jsonl.zst"


def snapshot_key(kind: str, epoch: int, number: int) -> str:
    """A snapshot of a file that grows: written once, by one claim."""
    return f"{SNAPSHOTS}{kind}/e{epoch:04d}-{number:06d}.zst"


def order_of_snapshot(key: str) -> tuple[int, int] | None:
    """Claim and number of a snapshot, by which they are ordered; None where the name is no such."""
    match = _SNAPSHOT.fullmatch(key)
    return (int(match[2]), int(match[3])) if match else None
