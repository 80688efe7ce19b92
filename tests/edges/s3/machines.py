"""Machines that take turns at one run in S3, without the uploader: what it does is done step by step."""

import time
from pathlib import Path

from genpipe.edges import lines
from genpipe.edges.files import OsFiles
from genpipe.edges.run_folder import RunFolder, RunIdentity
from genpipe.edges.s3 import layout
from genpipe.edges.s3.commits import UPLOADS, Commit
from genpipe.edges.s3.packing import pack, unpack
from genpipe.edges.s3.remote import Remote
from genpipe.edges.shards import Entry, shard_name
from genpipe.edges.store import Store
from tests.edges.samples import WALL, group

NOW = "2026-01-02T03:04:05.678Z"
TTL_S = 0.05


def identity(*, settings=None, shard_records=4) -> RunIdentity:
    return RunIdentity(
        inputs=("a.jsonl",), settings=settings or {"model": "m"}, shard_records=shard_records, version="0.1.0"
    )


class Machine:
    """One process on one machine, from its start on.

    Attributes:
        warnings: what it warned of.
        notes: what it noted.
        waiting: sealed shards that are not sent.
    """

    def __init__(self, folder: Path, objects, *, files=None, **given) -> None:
        self.folder = folder
        self.objects = objects
        self.files = files or OsFiles()
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.remote = Remote(
            objects,
            owner={"host": folder.name, "pid": 7},
            ttl_s=TTL_S,
            warn=self.warnings.append,
            note=self.notes.append,
            pause=time.sleep,
        )
        self.waiting: list[Entry] = []
        self.run = RunFolder.open(
            folder,
            identity(**given),
            self.files,
            allow_changed=False,
            now_text=NOW,
            warn=self.warnings.append,
            elsewhere=self.remote,
        )
        try:
            self.store = Store.open(
                folder,
                self.files,
                shard_records=self.run.shard_records,
                wall=WALL,
                warn=self.warnings.append,
                epoch=self.run.epoch,
                guard=self.run.check_still_mine,
                on_sealed=self.waiting.append,
            )
        except BaseException:
            self.run.close()
            self.remote.close()
            raise
        assert self.remote.lease is not None
        self.lease = self.remote.lease
        self.next_number = self.remote.next_number
        self.waiting[:0] = self.store.unsent
        self.tails = 0

    def commit(self, *indices) -> "Machine":
        self.store.commit(group(*indices))
        return self

    def send(self) -> "Machine":
        """Upload what is sealed."""
        for entry in self.waiting:
            data = (self.folder / "shards" / shard_name(entry.seq, is_open=False)).read_bytes()
            commit = put(self.objects, self.next_number, entry, data, self.run.run_id, self.lease)
            self.next_number += 1
            with (self.folder / UPLOADS).open("ab") as uploads:
                uploads.write(commit.encode())
        self.waiting.clear()
        return self

    def snapshot(self) -> "Machine":
        """Upload what is not sealed."""
        [growing] = (self.folder / "shards").glob("*.open")
        self._snapshot("tail", growing)
        for kind, name in (
            ("failed", "failed.jsonl"),
            ("segments", "segments.jsonl"),
            ("input", "input.idx"),
        ):
            if (self.folder / name).exists():
                self._snapshot(kind, self.folder / name)
        return self

    def _snapshot(self, kind, path) -> None:
        key = layout.snapshot_key(kind, self.lease.epoch, self.tails)
        self.objects.put(key, pack(path.read_bytes()), if_none_match=True)
        self.tails += 1

    def die(self) -> None:
        """End without giving back the prefix."""
        self.store.close()
        self.run.close()

    def stop(self) -> None:
        """End as one should, but for the shard that grows."""
        self.die()
        self.remote.close()


def put(objects, number, entry, data, run_id, lease) -> Commit:
    """Upload and commit one shard."""
    key = layout.shard_key(entry.seq, lease.epoch, lease.nonce)
    packed = pack(data)
    objects.put(key, packed, if_none_match=True)
    commit = Commit(
        number=number,
        run_id=run_id,
        entry=entry,
        key=key,
        object_bytes=len(packed),
        epoch=lease.epoch,
        nonce=lease.nonce,
    )
    objects.put(layout.commit_key(number), commit.encode(), if_none_match=True)
    return commit


def records_in(objects) -> list[int]:
    """The indices in the shards that commits name, of those that are there."""
    found: list[int] = []
    for key in objects.keys(layout.COMMITS):
        commit = Commit.decode(objects.get(key).data)
        shard = objects.get(commit.key) if commit is not None else None
        if shard is not None:
            found += lines.indices_of(unpack(shard.data) or b"") or []
    return found
