"""The records of a run as one file."""

import errno
import io
import json
import os
import random
from pathlib import Path

import pytest

from genpipe.core.errors import ConfigError, DiskFull, StoreError
from genpipe.core.values import Group
from genpipe.edges import lines
from genpipe.edges.export import export as exporting
from genpipe.edges.export.export import export_to_file, export_to_stream
from genpipe.edges.files import OsFiles
from genpipe.edges.folder_shelf import FolderShelf
from genpipe.edges.lock import FolderLock
from genpipe.edges.store import Store
from tests.edges.samples import WALL, answer, finished, group

RUN = {
    "format": 1,
    "run_id": "r",
    "created_at": "t",
    "inputs": [],
    "settings": {},
    "digest": "44136fa355b3678a",
    "shard_records": 4,
}


def begin(folder: Path) -> Store:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(RUN))
    return Store.open(folder, OsFiles(), shard_records=4, wall=WALL, warn=pytest.fail)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Eleven records in no order, in two sealed shards and an open one."""
    folder: Path = tmp_path / "run"
    store = begin(folder)
    store.commit(group(9, 3, 7, 0, 1, 10, 2, 8, 5, 6, 4))
    store.close()
    return folder


def state_of(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()
    }


def export(folder, out=None, *, warnings=None, force=False, files=None, **sizes):
    """Export to a file beside the folder; nothing else may be left beside it, and the run is not touched."""
    before = state_of(folder)
    out = folder.parent / "out.jsonl" if out is None else out
    told: list[str] = []
    try:
        return export_to_file(
            FolderShelf(folder, files or OsFiles()),
            OsFiles(),
            out,
            force=force,
            warn=told.append,
            progress=lambda *_: None,
            **sizes,
        )
    finally:
        assert told == [] if warnings is None else warnings.extend(told) is None
        assert state_of(folder) == before
        assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".genpipe")] == []


def exported_indices(folder) -> list[int]:
    return [
        json.loads(line)["index"] for line in (folder.parent / "out.jsonl").read_bytes().split(b"\n")[:-1]
    ]


@pytest.mark.parametrize("bucket_indices", [1, 2, 3, 1 << 16])
@pytest.mark.parametrize("buffer_bytes", [1, 1000, 1 << 25])
def test_records_stand_in_the_order_of_the_input_whatever_the_buckets(folder, bucket_indices, buffer_bytes):
    exported = export(folder, bucket_indices=bucket_indices, buffer_bytes=buffer_bytes)

    assert exported_indices(folder) == list(range(11))
    assert (exported.records, exported.doubled, exported.is_whole) == (11, 0, True)


def test_a_line_is_the_records_bytes_without_the_checksum(folder):
    export(folder)
    shards = sorted((folder / "shards").iterdir())
    stored = b"".join(path.read_bytes() for path in shards).splitlines(keepends=True)
    wanted = [
        lines.body_of(line) + b"\n" for line in sorted(stored, key=lambda line: lines.index_of(line) or 0)
    ]

    assert (folder.parent / "out.jsonl").read_bytes() == b"".join(wanted)
    assert b'"_c"' not in b"".join(wanted)


def test_odd_text_stays_byte_for_byte(tmp_path):
    odd = '\u2028 \u2029 \x85 \x0b \x0c é 😀 \\ud800 ,"_c":"00000000"} \r\n'
    folder = tmp_path / "run"
    store = begin(folder)
    given = Group(
        number=1,
        finished=(
            finished(1, answer(odd), id_json=b'"\\ud800\\u2028"', keep_json=b'"x":1.0e3'),
            finished(0, answer("")),
        ),
        given_up=(),
    )
    store.commit(given)
    store.close()
    export(folder)
    data = (tmp_path / "out.jsonl").read_bytes()

    assert data.count(b"\n") == 2
    line = data.split(b"\n")[1]
    assert b'"id":"\\ud800\\u2028"' in line
    assert b'"x":1.0e3' in line
    assert json.loads(line)["response"]["content"] == odd
    assert line + b"\n" in (folder / "shards" / "part-000000.jsonl.open").read_bytes().replace(
        lines.encode(line[:-1])[len(line) - 1 :], b"}\n"
    )


def test_of_doubled_records_the_one_in_the_lower_shard_is_taken(folder):
    again = lines.encode(b'{"index":9,"response":"later"')
    path = folder / "shards" / "part-000002.jsonl.open"
    path.write_bytes(again + path.read_bytes() + again)
    exported = export(folder)

    assert exported_indices(folder) == list(range(11))
    assert b"later" not in (folder.parent / "out.jsonl").read_bytes()
    assert exported.doubled == 2
    assert exported.as_text() == "11 records exported, 2 doubled ones left out"


def test_many_records_in_random_order_are_sorted_with_small_buckets(tmp_path):
    folder = tmp_path / "run"
    (folder / "shards").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(RUN))
    rng = random.Random(5)
    indices = rng.sample(range(1 << 40), 3000)
    for seq in range(6):
        part = indices[seq * 500 : seq * 500 + 500]
        # Indices are spread widely, and a bitmap of them would be: so they are folded.
        data = [
            lines.encode(b'{"index":%d,"x":"%b"' % (i % 100_003, b"y" * rng.randrange(300))) for i in part
        ]
        (folder / "shards" / f"part-{seq:06d}.jsonl").write_bytes(b"".join(data))
    exported = export(folder, bucket_indices=1000, buffer_bytes=10_000)

    wanted = sorted({index % 100_003 for index in indices})
    assert exported_indices(folder) == wanted
    assert exported.records + exported.doubled == 3000


# What may be missing is told.


def flip(folder):
    path = folder / "shards" / "part-000000.jsonl"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"answer to 3", b"answer to 4"))


def cut_between_lines(folder):
    path = folder / "shards" / "part-000001.jsonl"
    path.chmod(0o644)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def lose(folder):
    (folder / "shards" / "part-000001.jsonl").unlink()


def tear(folder):
    path = folder / "shards" / "part-000002.jsonl.open"
    path.write_bytes(path.read_bytes()[:-5])


def spoil_the_manifest(folder):
    path = folder / "manifest.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"bytes":', b'"bytes":1'))


@pytest.mark.parametrize(
    ("damage", "file", "left"),
    [
        (flip, "part-000000.jsonl holds", 10),
        (cut_between_lines, "part-000001.jsonl has", 10),
        (lose, "part-000001.jsonl is gone, with 4 records", 7),
        (tear, "part-000002.jsonl.open holds", 10),
        (spoil_the_manifest, "manifest.jsonl is damaged", 11),
    ],
)
def test_what_may_be_missing_is_named_with_the_next_step(folder, damage, file, left):
    damage(folder)
    warnings: list[str] = []
    exported = export(folder, warnings=warnings)

    assert exported.records == left
    assert not exported.is_whole
    assert len(warnings) == 1
    assert file in warnings[0]
    assert f"genpipe verify {folder} --repair" in warnings[0]


def test_lost_shards_are_told_even_if_nothing_else_is_left(folder):
    for path in (folder / "shards").iterdir():
        path.unlink()
    (folder / "manifest.jsonl").unlink()
    warnings: list[str] = []

    assert not export(folder, warnings=warnings).is_whole
    assert ".done_indices tells of records" in warnings[0]


def test_beside_a_driver_the_end_of_the_open_shard_is_just_being_written(folder):
    tear(folder)
    lock = FolderLock.take(folder, started_at="t", warn=pytest.fail)
    exported = export(folder)
    lock.release()

    assert (exported.records, exported.is_whole) == (10, True)


@pytest.mark.parametrize(
    ("report", "text"),
    [
        ({"total": 2000}, "11 of 2,000 records exported"),
        ({"total": None}, "11 records exported"),
        ({"total": 5}, "11 records exported"),
        ({}, "11 records exported"),
        ([], "11 records exported"),
    ],
)
def test_the_total_is_told_where_the_last_report_has_one(folder, report, text):
    (folder / "progress.json").write_text(json.dumps(report))

    assert export(folder).as_text() == text


# Where it is written.


def test_an_existing_file_is_replaced_only_when_that_is_asked_for(folder):
    out = folder.parent / "out.jsonl"
    out.write_bytes(b"precious")
    with pytest.raises(ConfigError, match="--force"):
        export(folder)
    assert out.read_bytes() == b"precious"
    export(folder, force=True)

    assert exported_indices(folder) == list(range(11))


def test_places_that_cannot_be_right_are_refused(folder, tmp_path):
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "into").symlink_to(folder)
    for out, what in {
        folder / "out.jsonl": "in the run folder",
        folder / "shards" / "out.jsonl": "in the run folder",
        tmp_path / "into" / "out.jsonl": "in the run folder",
        tmp_path / "nowhere" / "out.jsonl": "is no folder",
        tmp_path / "pipe": "is no file",
        tmp_path / "fifo": "is no file",
    }.items():
        with pytest.raises(ConfigError, match=what):
            export(folder, out, force=True)


def test_a_link_is_followed(folder, tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    export(folder, tmp_path / "link", force=True)

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes().count(b"\n") == 11


def test_what_is_no_run_folder_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()

    with pytest.raises(ConfigError, match="holds no run"):
        export(tmp_path / "empty")


@pytest.mark.parametrize("where", ["bucket", "whole", "sync", "rename"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(folder, monkeypatch, where):
    out = folder.parent / "out.jsonl"
    out.write_bytes(b"precious")

    def full(*_: object, **__: object):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_or_full(path, mode="r", *args, **kwargs):
        if path.name.startswith(where) and mode != "rb":
            full()
        return open(path, mode, *args, **kwargs)

    monkeypatch.setattr(exporting, "open", open_or_full, raising=False)
    if where == "sync":
        monkeypatch.setattr(os, "fsync", full)
    if where == "rename":
        monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(DiskFull, match="No space left"):
        export(folder, force=True)
    monkeypatch.undo()

    assert out.read_bytes() == b"precious"


def test_an_interrupted_export_leaves_nothing(folder, monkeypatch):
    def interrupted(*_: object):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pread", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(folder)
    monkeypatch.undo()

    assert not (folder.parent / "out.jsonl").exists()


def test_a_stream_gets_the_same_bytes_and_its_temporary_files_are_removed(folder, tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    stream = io.BytesIO()
    exported = export_to_stream(
        FolderShelf(folder, OsFiles()),
        stream,
        OsFiles(),
        force=False,
        warn=pytest.fail,
        progress=lambda *_: None,
    )
    export(folder)

    assert exported.records == 11
    assert stream.getvalue() == (tmp_path / "out.jsonl").read_bytes()
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(("code", "kind"), [(errno.EPIPE, BrokenPipeError), (errno.ENOSPC, DiskFull)])
def test_a_stream_that_refuses_ends_the_export(folder, code, kind):
    class Refusing(io.BytesIO):
        def write(self, _: object) -> int:
            raise OSError(code, os.strerror(code))

    with pytest.raises((BrokenPipeError, StoreError)) as caught:
        export_to_stream(
            FolderShelf(folder, OsFiles()),
            Refusing(),
            OsFiles(),
            force=False,
            warn=pytest.fail,
            progress=lambda *_: None,
        )

    assert type(caught.value) is kind


def test_buckets_are_removed_as_soon_as_they_were_taken_from(folder, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    records = exporting.Records(FolderShelf(folder, OsFiles()), place, warn=pytest.fail, bucket_indices=2)
    records.gather(lambda *_: None)
    left = [len(list(place.iterdir())) for _ in records.in_order()]

    assert left == [6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1]
    assert list(place.iterdir()) == []


def test_few_records_are_in_memory_on_their_way_to_the_buckets(folder, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    waiting: list[int] = []
    records = exporting.Records(
        FolderShelf(folder, OsFiles()), place, warn=pytest.fail, bucket_indices=1 << 16, buffer_bytes=2000
    )
    records.gather(lambda *_: waiting.append(records._waiting_bytes))

    assert max(waiting) <= 2000
    assert len(waiting) == 3


def test_a_file_that_comes_to_be_there_meanwhile_is_not_replaced(folder, tmp_path):
    out = tmp_path / "mine.jsonl"

    def progress(done_bytes, total_bytes):
        out.write_text("mine")

    shelf = FolderShelf(folder, OsFiles())
    with pytest.raises(ConfigError, match="exists"):
        export_to_file(shelf, OsFiles(), out, force=False, warn=pytest.fail, progress=progress)

    assert out.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.jsonl", "run"]
