"""Looks at a run folder without the code under test."""

import json
from collections import Counter
from pathlib import Path
from typing import Any
from zlib import crc32

FOLDER = Path("/run")


def whole_lines(data: bytes) -> list[dict[str, Any]]:
    """Lines that count, by the format's words."""
    found = []
    for line in data.split(b"\n")[:-1]:
        members, mark, checksum = line.rpartition(b',"_c":"')
        if mark and checksum == b'%08x"}' % crc32(members):
            found.append(json.loads(line))
    return found


def records(files, folder=FOLDER) -> dict[str, list[dict[str, Any]]]:
    """The records in each shard, by file name."""
    shards = folder / "shards"
    if not files.exists(shards):
        return {}
    return {
        name: whole_lines(files.read(shards / name))
        for name in sorted(files.sizes(shards))
        if name.startswith("part-") and not name.endswith(".tmp")
    }


def counts(files, folder=FOLDER) -> Counter[int]:
    """How often each index stands in the shards."""
    return Counter(record["index"] for part in records(files, folder).values() for record in part)


def listed(files, folder=FOLDER) -> list[int]:
    """The whole lines of .done_indices."""
    if not files.exists(folder / ".done_indices"):
        return []
    return [int(line) for line in files.read(folder / ".done_indices").split(b"\n")[:-1]]


def manifest(files, folder=FOLDER) -> dict[int, dict[str, Any]]:
    """The last line of the manifest about each shard."""
    return {entry["seq"]: entry for entry in whole_lines(files.read(folder / "manifest.jsonl"))}


def check(files, acked, *, maybe=(), folder=FOLDER) -> None:
    """Nothing acknowledged is lost, nothing doubled, and what is derived agrees with the shards."""
    seen = counts(files, folder)
    assert max(seen.values(), default=1) == 1, f"doubled: {seen.most_common(3)}"
    assert set(acked) <= set(seen), f"lost: {sorted(set(acked) - set(seen))}"
    assert set(seen) <= set(acked) | set(maybe), (
        f"from nowhere: {sorted(set(seen) - set(acked) - set(maybe))}"
    )
    for part in records(files, folder).values():
        for record in part:
            assert record["messages"][0]["content"] == f"prompt {record['index']}"
            assert record["response"]["content"] == f"answer to {record['index']}"
    assert set(listed(files, folder)) <= set(seen), "the list of what is done leads"


def check_at_rest(files, folder=FOLDER) -> None:
    """After a start: every derived file says just what the shards say."""
    seen = counts(files, folder)
    assert sorted(listed(files, folder)) == sorted(seen)
    parts = records(files, folder)
    sealed = {name: part for name, part in parts.items() if not name.endswith(".open")}
    entries = manifest(files, folder)
    assert {entry["file"] for entry in entries.values()} == set(sealed)
    for entry in entries.values():
        part = sealed[entry["file"]]
        assert entry["bytes"] == files.sizes(folder / "shards")[entry["file"]]
        assert entry["count"] == entry["sums"]["records"] == len(part)
        listed_there = [i for first, last in entry["indices"] for i in range(first, last + 1)]
        assert listed_there == sorted(record["index"] for record in part)
    assert len(parts) - len(sealed) <= 1
