"""Exports of runs whose shards are in an object store, all of them or some."""

import io
import json
import threading
import time

import pytest

from genpipe.core.errors import ConfigError, ObjectStoreError, TroubleKind
from genpipe.edges import lines
from genpipe.edges.export.export import Records, export_to_file, export_to_stream
from genpipe.edges.files import OsFiles
from genpipe.edges.folder_shelf import FolderShelf, Prefix
from genpipe.edges.lock import FolderLock
from genpipe.edges.s3 import layout
from genpipe.edges.s3.fetching import THREADS
from genpipe.edges.s3.packing import pack, unpack
from genpipe.edges.s3.shelf import S3Shelf
from tests.edges.s3 import sent
from tests.edges.s3.memory_objects import MemoryObjects
from tests.edges.test_export import state_of

URI = "s3://memory/run"


@pytest.fixture
def folder(tmp_path):
    return sent.make(tmp_path / "run")


@pytest.fixture
def objects(folder):
    return sent.send(folder)


def bytes_of(shelf, *, warnings=None):
    """What is exported, and how it ended; the same into a file as into a stream."""
    told: list[str] = []
    stream = io.BytesIO()
    exported = export_to_stream(
        shelf, stream, OsFiles(), force=False, warn=told.append, progress=lambda *_: None
    )
    assert told == [] if warnings is None else warnings.extend(told) is None
    return stream.getvalue(), exported


def here(folder, objects=None):
    remote = Prefix(uri=URI, open=lambda: objects) if objects is not None else None
    return FolderShelf(folder, OsFiles(), remote)


def indices_in(data):
    return [json.loads(line)["index"] for line in data.split(b"\n")[:-1]]


def test_an_export_from_s3_is_the_one_from_the_folder_byte_for_byte(folder, objects, tmp_path):
    data, exported = bytes_of(S3Shelf(objects))

    assert data == bytes_of(here(folder))[0]
    assert indices_in(data) == list(range(11))
    assert (exported.records, exported.doubled, exported.is_whole) == (11, 0, True)
    out = tmp_path / "out.jsonl"
    export_to_file(S3Shelf(objects), OsFiles(), out, force=False, warn=pytest.fail, progress=lambda *_: None)
    assert out.read_bytes() == data


def test_the_total_is_that_of_the_last_report_in_s3(objects):
    assert bytes_of(S3Shelf(objects))[1].as_text() == "11 records exported"
    objects.put(layout.PROGRESS, b'{"total": 2000}')
    assert bytes_of(S3Shelf(objects))[1].as_text() == "11 of 2,000 records exported"
    objects.put(layout.PROGRESS, b"{")
    assert bytes_of(S3Shelf(objects))[1].total is None


def test_progress_counts_the_shards_lines_up_to_all_of_them(folder, objects):
    steps: list[tuple[int, int]] = []
    export_to_stream(
        S3Shelf(objects),
        io.BytesIO(),
        OsFiles(),
        force=False,
        warn=pytest.fail,
        progress=lambda *step: steps.append(step),
    )
    size_bytes = sum(path.stat().st_size for path in (folder / "shards").iterdir())

    assert steps[-1] == (size_bytes, size_bytes)
    assert len(steps) == 3
    assert steps == sorted(steps)


# What only tails hold.


def test_a_record_in_a_commit_is_not_taken_from_a_tail_and_is_not_doubled(folder, objects):
    first = (folder / "shards" / "part-000000.jsonl").read_bytes()
    changed = first.replace(b"answer to", b"ANSWER TO")
    assert changed != first
    objects.put(layout.snapshot_key("tail", 2, 1), pack(first))
    data, exported = bytes_of(S3Shelf(objects))

    assert data == bytes_of(here(folder))[0]
    assert exported.doubled == 0


def test_of_several_tails_each_gives_what_no_newer_one_has(folder, objects):
    open_lines = (folder / "shards" / "part-000002.jsonl.open").read_bytes().splitlines(keepends=True)
    older = lines.encode(lines.body_of(open_lines[1])[:-1].replace(b"answer to", b"older to"))
    assert older != open_lines[1]
    for key in objects.keys("w00/tail/"):
        objects.delete(key)
    objects.put(layout.snapshot_key("tail", 1, 7), pack(open_lines[0] + older))
    objects.put(layout.snapshot_key("tail", 2, 1), pack(b"".join(open_lines[1:])))
    data, exported = bytes_of(S3Shelf(objects))

    assert data == bytes_of(here(folder))[0]
    assert exported.doubled == 0


def test_a_tail_that_a_driver_replaces_meanwhile_is_looked_for_anew(folder, objects):
    (old,) = objects.keys("w00/tail/")
    new = layout.snapshot_key("tail", 1, 2)

    def trouble(step, key):
        if (step, key) == ("get", old) and objects.keys(old):
            objects.put(new, objects.get_now(old).data)
            objects.delete(old)

    objects.get_now = lambda key: objects._objects[key]
    objects.trouble = trouble

    assert bytes_of(S3Shelf(objects))[0] == bytes_of(here(folder))[0]


@pytest.mark.parametrize("after", range(8))
def test_a_shard_that_is_committed_between_any_two_steps_of_the_look_is_not_missed(folder, after):
    objects = sent.send(folder, seqs=[0], noted=False)
    (tail,) = objects.keys("w00/tail/")
    objects.put(tail, pack((folder / "shards" / "part-000001.jsonl").read_bytes()))
    steps: list[str] = []

    def trouble(step, key):
        steps.append(step)
        if len(steps) == after + 1:
            objects.trouble = lambda *_: None
            sent.send(folder, seqs=[1], noted=False, objects=objects)

    objects.trouble = trouble
    data, exported = bytes_of(S3Shelf(objects))

    assert len(steps) == after + 1
    assert set(sent.ORDER[:8]) <= set(indices_in(data))
    assert exported.is_whole


def test_a_damaged_tail_is_told_and_its_good_lines_are_taken(folder, objects):
    (tail,) = objects.keys("w00/tail/")
    data = unpack(objects.get(tail).data)
    assert data is not None
    objects.put(tail, pack(data[:-5]))
    warnings: list[str] = []
    exported = bytes_of(S3Shelf(objects), warnings=warnings)[1]

    assert (exported.records, exported.is_whole) == (10, False)
    assert f"{URI}/{tail} holds " in warnings[0]
    objects.put(tail, b"rubbish")
    exported = bytes_of(S3Shelf(objects), warnings=warnings)[1]
    assert (exported.records, exported.is_whole) == (8, False)
    assert f"{URI}/{tail} is damaged" in warnings[1]


# What may be missing is told.


def shard(objects, number=0):
    return objects.keys(layout.SHARDS)[number]


def lose(objects):
    objects.delete(shard(objects))


def cut(objects):
    objects.put(shard(objects), objects.get(shard(objects)).data[:-9])


def swap(objects):
    objects.put(shard(objects), objects.get(shard(objects, 1)).data)


def put_others(objects):
    data = unpack(objects.get(shard(objects)).data)
    assert data is not None
    objects.put(shard(objects), pack(data.replace(b'"model":"m"', b'"model":"n"')))


def gap(objects):
    objects.delete(layout.commit_key(0))


def spoil_a_commit(objects):
    data = objects.get(layout.commit_key(0)).data
    objects.put(layout.commit_key(0), data.replace(b'"bytes":', b'"bytes":1'))


def of_another_run(objects):
    sent.recommit(objects, 0, run_id="q")


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lose, "shards/part-000000-e0001-abcd.jsonl.zst is gone, with 4 records"),
        (cut, "shards/part-000000-e0001-abcd.jsonl.zst is damaged"),
        (swap, "part-000000-e0001-abcd.jsonl.zst is not the shard that was committed, with 4 records"),
        (put_others, "part-000000-e0001-abcd.jsonl.zst is not the shard that was committed"),
        (gap, "commits/000000.json is gone, although later ones are there"),
        (spoil_a_commit, "commits/000000.json is damaged"),
        (of_another_run, "commits/000000.json is of another run (q)"),
    ],
)
def test_what_may_be_missing_is_named_and_the_rest_is_exported(objects, damage, what):
    damage(objects)
    warnings: list[str] = []
    data, exported = bytes_of(S3Shelf(objects), warnings=warnings)

    assert indices_in(data) == [1, 2, 4, 5, 6, 8, 10]
    assert not exported.is_whole
    assert len(warnings) == 1
    assert what in warnings[0]
    assert f"genpipe verify {URI}" in warnings[0]


def test_a_damaged_commit_that_the_index_tells_of_costs_no_record(objects, monkeypatch):
    monkeypatch.setattr(layout, "INDEX_COMMITS", 2)
    sent.put_batch(objects)
    spoil_a_commit(objects)

    assert bytes_of(S3Shelf(objects))[1].records == 11


def test_an_object_that_the_store_cannot_give_is_missing_and_a_store_that_is_away_is_an_error(objects):
    def broken(step, key):
        if key == shard(objects):
            raise ObjectStoreError("500", kind=TroubleKind.BROKEN)

    objects.trouble = broken
    warnings: list[str] = []
    assert bytes_of(S3Shelf(objects), warnings=warnings)[1].records == 7
    assert "cannot be read: 500" in warnings[0]

    def away(step, key):
        if key == shard(objects):
            sent.unreachable()

    objects.trouble = away
    with pytest.raises(ObjectStoreError, match="cannot be reached"):
        bytes_of(S3Shelf(objects))


def test_a_prefix_without_a_run_is_refused():
    objects = MemoryObjects()
    with pytest.raises(ConfigError, match="holds no run"):
        bytes_of(S3Shelf(objects))
    objects.put(layout.RUN, b"{")
    with pytest.raises(ConfigError, match=f"{URI}/run.json is damaged"):
        bytes_of(S3Shelf(objects))


# A folder some of whose shards are in S3 only.


@pytest.mark.parametrize("gone", [[0], [1], [0, 1]])
def test_a_folder_whose_shards_are_in_s3_exports_the_same(folder, objects, gone):
    whole = bytes_of(here(folder))[0]
    sent.lose_here(folder, *gone)
    before = state_of(folder)

    assert bytes_of(here(folder, objects))[0] == whole
    assert state_of(folder) == before
    shards = {key for step, key in objects.calls if step == "get" and key.startswith(layout.SHARDS)}
    assert len(shards) == len(gone)


def test_s3_is_not_opened_for_a_folder_that_has_all_its_shards(folder, objects):
    shelf = FolderShelf(folder, OsFiles(), Prefix(uri=URI, open=pytest.fail))

    assert bytes_of(shelf)[1].records == 11


def test_without_a_way_to_s3_the_error_names_the_way(folder, objects):
    sent.lose_here(folder, 1)
    with pytest.raises(ConfigError, match=r"1 shards of .* are in S3 only.*s3\.json.*genpipe export s3://"):
        bytes_of(here(folder))

    def refuse():
        raise ConfigError("no keys")

    with pytest.raises(ConfigError, match=rf"no keys .*`genpipe export {URI} OUT`"):
        bytes_of(FolderShelf(folder, OsFiles(), Prefix(uri=URI, open=refuse)))
    objects.trouble = sent.unreachable
    with pytest.raises(ObjectStoreError, match=rf"cannot be reached .*`genpipe export {URI} OUT`") as caught:
        bytes_of(here(folder, objects))
    assert caught.value.kind is TroubleKind.UNREACHABLE


@pytest.mark.parametrize("damage", [lose, cut, swap, put_others])
def test_a_shard_that_is_damaged_in_s3_and_not_here_is_named(folder, objects, damage):
    sent.lose_here(folder, 0)
    damage(objects)
    warnings: list[str] = []
    exported = bytes_of(here(folder, objects), warnings=warnings)[1]

    assert (exported.records, exported.is_whole) == (7, False)
    assert len(warnings) == 1
    assert f"{URI}/{shard_of(0)}" in warnings[0]


def shard_of(seq):
    return layout.shard_key(seq, 1, "abcd")


def test_a_shard_that_was_never_sent_is_gone_as_without_s3(folder, tmp_path):
    objects = sent.send(folder, seqs=[0])
    sent.lose_here(folder, 0, 1)
    warnings: list[str] = []
    exported = bytes_of(here(folder, objects), warnings=warnings)[1]

    assert exported.records == 7
    assert "part-000001.jsonl is gone, with 4 records" in warnings[0]
    assert f"genpipe verify {folder} --repair" in warnings[0]


def test_a_commit_of_other_records_than_the_manifest_lists_is_not_the_shard(folder, objects, tmp_path):
    sent.recommit(objects, 0, entry=sent.log_of(objects)[1].entry)
    other = sent.make(tmp_path / "other", *range(20, 31))
    theirs = sent.send(other)
    (folder / "uploads.jsonl").write_bytes((other / "uploads.jsonl").read_bytes())
    sent.lose_here(folder, 0)
    warnings: list[str] = []
    exported = bytes_of(here(folder, theirs), warnings=warnings)[1]

    assert exported.records == 7
    assert "part-000000.jsonl is gone" in warnings[0]


def test_beside_an_open_shard_of_the_same_number_the_one_in_s3_is_taken_too(folder, objects):
    sent.lose_here(folder, 1)
    shards = folder / "shards"
    (shards / "part-000002.jsonl.open").rename(shards / "part-000001.jsonl.open")

    assert bytes_of(here(folder, objects))[1].records == 11


def test_a_driver_at_work_does_not_keep_a_folder_from_being_exported(folder, objects):
    sent.lose_here(folder, 0)
    lock = FolderLock.take(folder, started_at="t", warn=pytest.fail)
    assert bytes_of(here(folder, objects))[1].is_whole
    lock.release()


def test_of_doubled_records_the_one_in_the_lower_shard_is_taken_wherever_it_is(folder, objects):
    sent.lose_here(folder, 1)
    path = folder / "shards" / "part-000002.jsonl.open"
    path.write_bytes(path.read_bytes() + lines.encode(b'{"index":2,"response":"later"'))
    data, exported = bytes_of(here(folder, objects))

    assert exported.doubled == 1
    assert b"later" not in data


# Speed and memory.


@pytest.mark.parametrize("from_folder", [True, False])
def test_shards_are_fetched_ahead_in_threads_and_never_more_than_a_few(tmp_path, from_folder):
    folder = sent.make(tmp_path / "run", *range(240))
    objects = sent.send(folder)
    lock = threading.Lock()
    seen = {"now": 0, "most": 0, "fetched": 0, "taken": 0, "ahead": 0}

    class Slow(MemoryObjects):
        def get(self, key, *, tries=5):
            if not key.startswith(layout.SHARDS):
                return objects.get(key)
            with lock:
                seen["now"] += 1
                seen["fetched"] += 1
                seen["most"] = max(seen["most"], seen["now"])
                seen["ahead"] = max(seen["ahead"], seen["fetched"] - seen["taken"])
            time.sleep(0.01)
            with lock:
                seen["now"] -= 1
            return objects.get(key)

        def list(self, prefix, *, after="", tries=5):
            return objects.list(prefix, after=after)

    def progress(*_: object):
        with lock:
            seen["taken"] += 1

    if from_folder:
        sent.lose_here(folder, *range(60))
    shelf = here(folder, Slow()) if from_folder else S3Shelf(Slow())
    (tmp_path / "place").mkdir()
    records = Records(shelf, tmp_path / "place", warn=pytest.fail)
    records.gather(progress)

    assert records.count == 240
    assert seen["fetched"] == 60
    assert 4 <= seen["most"] <= THREADS
    assert seen["ahead"] <= THREADS + 1
