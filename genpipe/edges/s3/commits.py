"""Commit objects: a shard is in S3 from the moment at which its commit stands in the log."""

from collections.abc import Iterable
from dataclasses import dataclass

import orjson

from genpipe.edges import lines
from genpipe.edges.shards import Entry

UPLOADS = "uploads.jsonl"
"""The file of the run folder that tells which commits are known there, a line each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One place of the log: a shard, and where its bytes are.

    Attributes:
        number: the place, from 0; without gaps, so that two claims always want the same next place.
        run_id: the run.
        entry: the shard, as the manifest has it.
        key: the object that holds its bytes, packed with zstd.
        object_bytes: that object's length.
        epoch: the claim of the prefix that wrote it.
        nonce: that claim's own name.
    """

    number: int
    run_id: str
    entry: Entry
    key: str
    object_bytes: int
    epoch: int
    nonce: str

    def encode(self) -> bytes:
        """As an object, and as a line of ``uploads.jsonl``."""
        fields = {
            "number": self.number,
            "run_id": self.run_id,
            "key": self.key,
            "object_bytes": self.object_bytes,
            "epoch": self.epoch,
            "nonce": self.nonce,
            "shard": self.entry.as_json(),
        }
        return lines.encode(orjson.dumps(fields)[:-1])

    @classmethod
    def decode(cls, line: bytes) -> "Commit | None":
        """From what :meth:`encode` gave; None where it is something else, or does not agree with itself."""
        body = lines.decode(line)
        if body is None:
            return None
        try:
            fields = orjson.loads(body)
            entry = Entry.from_json(fields["shard"])
            if entry is None:
                return None
            return cls(
                number=int(fields["number"]),
                run_id=str(fields["run_id"]),
                entry=entry,
                key=str(fields["key"]),
                object_bytes=int(fields["object_bytes"]),
                epoch=int(fields["epoch"]),
                nonce=str(fields["nonce"]),
            )
        except (KeyError, TypeError, ValueError):
            return None


def decode_all(data: bytes) -> dict[int, Commit]:
    """The commits of many lines, by number; lines that do not count are left out."""
    found = map(Commit.decode, data.splitlines(keepends=True))
    return {commit.number: commit for commit in found if commit is not None}


def encode_all(commits: Iterable[Commit]) -> bytes:
    """The lines of these commits."""
    return b"".join([commit.encode() for commit in commits])
