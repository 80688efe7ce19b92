"""A small run in a folder, and the same run in an object store, put there by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from genpipe.core.errors import ObjectStoreError, TroubleKind
from genpipe.edges import lines
from genpipe.edges.files import OsFiles
from genpipe.edges.s3 import layout
from genpipe.edges.s3.commits import UPLOADS, Commit, decode_all, encode_all
from genpipe.edges.s3.packing import pack
from genpipe.edges.shards import Manifest, shard_name
from genpipe.edges.store import Store
from tests.edges.s3.memory_objects import MemoryObjects
from tests.edges.samples import WALL, group

RUN = {
    "format": 1,
    "run_id": "r",
    "created_at": "t",
    "inputs": [],
    "settings": {},
    "digest": "44136fa355b3678a",
    "shard_records": 4,
}
ORDER = (9, 3, 7, 0, 1, 10, 2, 8, 5, 6, 4)
"""Eleven prompts in the order in which they ended: two sealed shards of four, and three in the open one."""


def make(folder: Path, *indices: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(RUN))
    store = Store.open(folder, OsFiles(), shard_records=4, wall=WALL, warn=pytest.fail)
    store.commit(group(*(indices or ORDER)))
    store.close()
    segment = {"segment": 1, "started_at": "t", "epoch": 1}
    (folder / "segments.jsonl").write_bytes(lines.encode(json.dumps(segment).encode()[:-1]))
    for sealed in (folder / "shards").glob("*.jsonl"):
        sealed.chmod(0o644)
    return folder


def send(folder: Path, *, seqs=None, noted=True, objects=None, epoch=1):
    """Put a folder's run into a store as an uploader does: shards, then their commits, then snapshots."""
    objects = MemoryObjects() if objects is None else objects
    objects.put(layout.RUN, (folder / "run.json").read_bytes())
    manifest = Manifest.decode((folder / "manifest.jsonl").read_bytes()).listed
    commits = list(log_of(objects).values())
    for seq in manifest if seqs is None else seqs:
        data = (folder / "shards" / shard_name(seq, is_open=False)).read_bytes()
        key, packed = layout.shard_key(seq, epoch, "abcd"), pack(data)
        objects.put(key, packed, metadata={"sha256": manifest[seq].digest})
        commit = Commit(
            number=len(commits),
            run_id="r",
            entry=manifest[seq],
            key=key,
            object_bytes=len(packed),
            epoch=epoch,
            nonce="abcd",
        )
        commits.append(commit)
        objects.put(layout.commit_key(commit.number), commit.encode(), if_none_match=True)
    if noted:
        (folder / UPLOADS).write_bytes(encode_all(commits))
    for kind, file in {"failed": "failed.jsonl", "segments": "segments.jsonl"}.items():
        objects.put(layout.snapshot_key(kind, epoch, 1), pack((folder / file).read_bytes()))
    for shard in (folder / "shards").glob("*.open"):
        objects.put(layout.snapshot_key("tail", epoch, 1), pack(shard.read_bytes()))
    return objects


def log_of(objects) -> dict[int, Commit]:
    return decode_all(b"".join(objects.get(key).data for key in objects.keys(layout.COMMITS)))


def put_batch(objects, batch=0, numbers=(0, 1)):
    """An index object; to be used with two commits an object."""
    log = log_of(objects)
    objects.put(layout.index_key(batch), pack(encode_all(log[number] for number in numbers)))


def recommit(objects, number, **changes):
    """Change a commit object."""
    commit = replace(log_of(objects)[number], **changes)
    objects.put(layout.commit_key(number), commit.encode())


def lose_here(folder: Path, *seqs: int) -> None:
    """Shards that are in S3 only."""
    for seq in seqs:
        (folder / "shards" / shard_name(seq, is_open=False)).unlink()


def unreachable(*_: object):
    raise ObjectStoreError("s3://memory/run cannot be reached", kind=TroubleKind.UNREACHABLE)
