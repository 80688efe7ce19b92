"""Runs with an object store beside them, and audits of what is in it. Nothing here looks inside genpipe."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import zstandard

from genpipe.edges.s3.place import Place
from tests.e2e.harness import row_of
from tests.edges.audit import whole_lines
from tests.s3.servers import Server

QUICK = {"s3.lease_s": 2, "s3.tail_s": 1, "s3.progress_s": 1, "s3.timeout_s": 3, "s3.stop_s": 5}
"""Times as short as tests want them (seconds)."""


def environment(server: Server) -> dict[str, str]:
    """This process's environment with the server's keys and no other AWS settings."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return {**ours, **server.env}


def options(place: Place, **settings: object) -> list[str]:
    """How ``genpipe run`` is told of a place; settings without their section, over the quick ones."""
    given = {**QUICK, **{f"s3.{name}": value for name, value in settings.items()}}
    return ["--s3", place.uri, *connection(place), *(_set(name, value) for name, value in given.items())]


def connection(place: Place) -> list[str]:
    """How any command is told to speak to the store."""
    names = ("endpoint_url", "region", "checksums")
    return [_set(f"s3.{name}", getattr(place, name)) for name in names]


def _set(name: str, value: object) -> str:
    return f"--set={name}={json.dumps(value)}"


def indices_of(commit: dict[str, Any]) -> list[int]:
    """The prompts of a commit's shard, in order."""
    runs = commit["shard"]["indices"]
    return sorted({index for first, last in runs for index in range(first, last + 1)})


class Stored:
    """What is in S3 of one run when it is first asked for, read by the format's words."""

    def __init__(self, server: Server, place: Place) -> None:
        self._server, self._prefix = server, place.prefix

    @cached_property
    def commits(self) -> list[dict[str, Any]]:
        """The commit objects, in order."""
        return [self.commit(number) for number in range(self.count)]

    @cached_property
    def count(self) -> int:
        """How many there are; the log has no gaps."""
        keys = self.keys("w00/commits/")
        assert keys == [f"w00/commits/{number:06d}.json" for number in range(len(keys))], keys
        return len(keys)

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """All records of the committed shards, in the order of the log."""
        records = []
        for commit in self.commits:
            packed = self.read(commit["key"])
            assert len(packed) == commit["object_bytes"]
            data = zstandard.ZstdDecompressor().decompress(packed, max_output_size=1 << 28)
            found = whole_lines(data)
            assert len(found) == data.count(b"\n"), commit["key"]
            assert indices_of(commit) == sorted(record["index"] for record in found)
            records += found
        return records

    def commit(self, number: int) -> dict[str, Any]:
        """The commit object at this place."""
        (fields,) = whole_lines(self.read(f"w00/commits/{number:06d}.json"))
        return fields

    @property
    def doubled(self) -> list[int]:
        """Indices with more than one record."""
        counts = Counter(record["index"] for record in self.records)
        return sorted(index for index, times in counts.items() if times > 1)

    @property
    def indices(self) -> set[int]:
        """Indices with a record."""
        return {record["index"] for record in self.records}

    def keys(self, prefix: str = "") -> list[str]:
        """Names below the run's prefix."""
        return [key.removeprefix(self._prefix) for key in self._server.keys(self._prefix + prefix)]

    def read(self, key: str) -> bytes:
        """An object's bytes."""
        return self._server.read(self._prefix + key)

    def assert_whole(self, texts: Sequence[str]) -> None:
        """Each prompt once, with its own answer."""
        assert self.doubled == []
        assert self.indices == set(range(len(texts)))
        for record in self.records:
            assert record["messages"][-1]["content"] == texts[record["index"]]
            assert record["response"]["content"].startswith(f"echo {row_of(texts[record['index']])} ")
