"""Reading the log of a run, its index and its snapshots, whatever of that is late, damaged or gone."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest

from genpipe.core.errors import ObjectStoreError, ResumeMismatch, TroubleKind
from genpipe.edges.run_folder import encode_run
from genpipe.edges.s3 import history, layout
from genpipe.edges.s3.commits import encode_all
from genpipe.edges.s3.packing import pack
from genpipe.edges.shards import Entry
from genpipe.edges.store import Store
from tests.edges.audit import FOLDER
from tests.edges.memory_files import MemoryFiles
from tests.edges.s3.machines import Machine, identity, put
from tests.edges.s3.memory_objects import MemoryObjects
from tests.edges.samples import WALL, group

PARTS, SHARD = 1_250, 5
RUN_ID = "r" * 32


def put_index(objects, commits, batch):
    first = batch * layout.INDEX_COMMITS
    told = [commit for commit in commits if first <= commit.number < first + layout.INDEX_COMMITS]
    objects.put(layout.index_key(batch), pack(encode_all(told)))


@pytest.fixture(scope="module")
def whole():
    """1,250 parts of five rows in S3, with the index objects that were due, and the store that made them."""
    files, objects = MemoryFiles([FOLDER]), MemoryObjects()
    sealed: list[Entry] = []
    store = Store.open(
        FOLDER, files, shard_records=SHARD, wall=WALL, warn=pytest.fail, on_sealed=sealed.append
    )
    rows = list(range(PARTS * SHARD))
    # Rows come in an order of their own, so that a shard holds more than one run of them.
    rows[10::20], rows[11::20] = rows[11::20], rows[10::20]
    for start in range(0, len(rows), 50):
        store.commit(group(*rows[start : start + 50], number=start))
    store.seal_last()
    store.close()
    lease = SimpleNamespace(epoch=1, nonce="ab")
    commits = [
        put(
            objects,
            number,
            entry,
            files.read(FOLDER / "shards" / f"part-{entry.seq:06d}.jsonl"),
            RUN_ID,
            lease,
        )
        for number, entry in enumerate(sealed)
    ]
    for batch in range(PARTS // layout.INDEX_COMMITS):
        put_index(objects, commits, batch)
    return SimpleNamespace(objects=objects, commits=commits, store=store)


@pytest.fixture
def objects(whole):
    fresh = MemoryObjects()
    fresh._objects = copy.copy(whole.objects._objects)
    return fresh


def read(objects, known=(), *, warnings=None, **options):
    warn = pytest.fail if warnings is None else warnings.append
    return history.read_commits(
        objects, {commit.number: commit for commit in known}, run_id=RUN_ID, warn=warn, **options
    )


def told_by(log):
    return encode_all(log.commits[number] for number in sorted(log.commits))


def got(objects, prefix):
    return [key for step, key in objects.calls if step == "get" and key.startswith(prefix)]


def test_the_whole_log_is_read_from_its_index_and_the_commits_after_it(whole, objects):
    log = read(objects)

    assert told_by(log) == encode_all(whole.commits)
    assert (log.next_number, log.lost, log.unknown, log.unnamed) == (PARTS, [], [], [])
    assert len(got(objects, layout.INDEX)) == 12
    assert sorted(got(objects, layout.COMMITS)) == [layout.commit_key(n) for n in range(1_200, PARTS)]


def test_what_the_folder_knows_is_not_read_again(whole, objects):
    log = read(objects, whole.commits)

    assert told_by(log) == encode_all(whole.commits)
    assert got(objects, "") == []
    assert ("list", layout.INDEX) not in objects.calls


def test_of_a_batch_that_is_known_no_index_is_read(whole, objects):
    log = read(objects, [*whole.commits[:1_000], *whole.commits[1_200:]])

    assert len(log.commits) == PARTS
    assert got(objects, "") == [layout.index_key(10), layout.index_key(11)]


@pytest.mark.slow
def test_without_an_index_each_commit_is_read_a_few_at_once(whole, objects):
    for key in objects.keys(layout.INDEX):
        objects.delete(key)
    beats = []
    log = read(objects, threads=3, beat=lambda: beats.append(1))

    assert told_by(log) == encode_all(whole.commits)
    assert len(beats) >= PARTS


@pytest.mark.parametrize("how", ["older", "not zstd", "half", "nothing", "another batch", "another run"])
def test_an_index_that_is_old_damaged_or_wrong_costs_time_and_nothing_else(whole, objects, how):
    key = layout.index_key(11)
    data = objects.get(key).data
    others = [replace(commit, run_id="q" * 32) for commit in whole.commits[1_100:1_200]]
    objects.put(
        key,
        {
            "older": pack(encode_all(whole.commits[1_100:1_197])),
            "not zstd": b"what?",
            "half": data[: len(data) // 2],
            "nothing": pack(b""),
            "another batch": objects.get(layout.index_key(3)).data,
            "another run": pack(encode_all(others)),
        }[how],
    )
    warnings: list[str] = []
    log = read(objects, warnings=warnings)

    assert told_by(log) == encode_all(whole.commits)
    assert [key in warning for warning in warnings] == [True] * (how in ("not zstd", "half"))


@pytest.mark.parametrize("are_shards_there", [True, False])
def test_an_index_that_names_commits_that_are_not_there_is_not_believed_for_them(
    whole, objects, are_shards_there
):
    put_index(objects, whole.commits, 12)
    for commit in whole.commits[-3:]:
        objects.delete(layout.commit_key(commit.number))
        if not are_shards_there:
            objects.delete(commit.key)
    warnings: list[str] = []
    log = read(objects, warnings=warnings)

    assert sorted(log.commits) == list(range(PARTS - 3))
    assert (log.next_number, log.lost) == (PARTS - 3, [])
    assert ["3 commits" in warning and "ARE GONE from the end" in warning for warning in warnings] == [True]


def test_what_the_folder_knows_of_commits_that_are_not_there_is_not_believed_either(whole, objects):
    for commit in whole.commits[-3:]:
        objects.delete(layout.commit_key(commit.number))
    warnings: list[str] = []
    log = read(objects, whole.commits, warnings=warnings)

    assert sorted(log.commits) == list(range(PARTS - 3))
    assert len(warnings) == 1
    # They were deleted by hand, and what they named is not ours to remove.
    assert log.unnamed == []


def test_a_shard_that_is_gone_is_lost_whoever_tells_of_it(whole, objects):
    objects.delete(whole.commits[7].key)
    objects.put(whole.commits[1_210].key, b"shorter")
    for known in ((), whole.commits):
        log = read(objects, known)

        assert sorted(commit.number for commit in log.lost) == [7, 1_210]
        assert not {7, 1_210} & log.commits.keys()
        assert (log.next_number, log.lost_records()) == (PARTS, 10)
        # What is left of it is somebody's to look at, and not rubbish.
        assert log.unnamed == []


def test_another_commit_at_a_place_that_the_folder_knows_otherwise_counts(whole, objects):
    # The folder comes from another prefix, whose objects are not here.
    others = [replace(commit, key=commit.key.replace("-ab.", "-cd.")) for commit in whole.commits[:3]]
    log = read(objects, others)

    assert told_by(log) == encode_all(whole.commits)


@pytest.mark.parametrize("number", [42, 1_249])
@pytest.mark.parametrize("told_by", ["index", "folder", "nothing"])
def test_a_damaged_commit_counts_where_something_else_tells_of_it(whole, objects, number, told_by):
    if told_by == "index" and number == 1_249:
        put_index(objects, whole.commits, 12)
    if told_by != "index":
        objects.delete(layout.index_key(0))
    data = objects.get(layout.commit_key(number)).data
    objects.put(layout.commit_key(number), data.replace(b'"epoch":1', b'"epoch":2'))
    warnings: list[str] = []
    log = read(objects, whole.commits if told_by == "folder" else (), warnings=warnings)

    assert log.next_number == PARTS
    if told_by == "nothing":
        assert sorted(log.commits) == [n for n in range(PARTS) if n != number]
        assert log.unknown == [number]
        assert [
            "ARE DAMAGED" in warning and layout.commit_key(number) in warning for warning in warnings
        ] == [True]
        # Who knows what it named.
        assert log.unnamed == []
    else:
        assert sorted(log.commits) == list(range(PARTS))


def test_a_commit_that_is_damaged_is_told_of_though_the_folder_knows_it_once_it_is_read(whole, objects):
    # Its shard's object is another than the folder knows, so that it is read.
    objects.put(layout.commit_key(5), b"{}")
    objects.put(whole.commits[5].key, b"another length")
    warnings: list[str] = []
    log = read(objects, whole.commits, warnings=warnings)

    assert [commit.number for commit in log.lost] == [5]
    assert ["are damaged" in warning for warning in warnings] == [True]


def test_a_commit_at_another_place_than_its_own_is_damaged(whole, objects):
    objects.delete(layout.index_key(0))
    objects.put(layout.commit_key(3), whole.commits[4].encode())
    warnings: list[str] = []
    log = read(objects, warnings=warnings)

    assert log.unknown == [3]
    assert len(warnings) == 1


@pytest.mark.parametrize("has_index", [True, False])
def test_a_gap_in_the_log_is_told_of_and_its_place_is_not_given_again(whole, objects, has_index):
    if not has_index:
        objects.delete(layout.index_key(0))
    objects.delete(layout.commit_key(42))
    warnings: list[str] = []
    log = read(objects, whole.commits, warnings=warnings)

    assert 42 not in log.commits
    assert (log.next_number, log.unknown, log.unnamed) == (PARTS, [42], [])
    assert ["ARE GONE" in warning for warning in warnings] == [True]


def test_a_listing_that_lags_makes_no_gap(whole, objects):
    class Lagging(MemoryObjects):
        def list(self, prefix, **options):
            return (one for one in super().list(prefix, **options) if one.key != layout.commit_key(42))

    lagging = Lagging()
    lagging._objects = objects._objects
    log = read(lagging)

    assert sorted(log.commits) == list(range(PARTS))


def test_many_bad_commits_are_told_of_in_one_line(whole, objects):
    for batch in range(12):
        objects.delete(layout.index_key(batch))
    for number in range(0, 900, 2):
        objects.put(layout.commit_key(number), b"x")
    warnings: list[str] = []
    read(objects, warnings=warnings)

    [warning] = warnings
    assert "450 commits" in warning
    assert "and 445 more" in warning
    assert len(warning) < 700


def test_a_commit_of_another_run_ends_the_reading(whole, objects):
    other = replace(whole.commits[0], number=PARTS, run_id="q" * 32)
    objects.put(layout.commit_key(PARTS), other.encode())

    with pytest.raises(ResumeMismatch, match="q" * 32):
        read(objects)


def test_a_store_that_fails_ends_the_reading(objects):
    def trouble(step, key):
        if (step, key) == ("get", layout.commit_key(1_230)):
            raise ObjectStoreError("down", kind=TroubleKind.BROKEN)

    objects.trouble = trouble
    with pytest.raises(ObjectStoreError, match="down"):
        read(objects)


def test_an_empty_prefix_has_an_empty_log():
    log = read(MemoryObjects())

    assert (log.commits, log.next_number) == ({}, 0)
    assert history.highest_epoch(MemoryObjects()) == 0


def test_objects_of_shards_that_no_commit_names_are_known(whole, objects):
    keys = [layout.shard_key(1_250, 1, "ab"), layout.shard_key(3, 2, "cd")]
    for key in keys:
        objects.put(key, b"x")

    assert read(objects).unnamed == sorted(keys)
    assert history.highest_epoch(objects) == 2


def test_a_new_machine_resumes_over_1250_commits_as_the_old_folder_would(tmp_path, whole, objects):
    """No matter what the index says."""
    put_index(objects, whole.commits, 12)
    machine = resumed(tmp_path / "a", objects)

    assert machine.store.done == whole.store.done
    assert machine.store.sums.as_json() == whole.store.sums.as_json()
    assert machine.warnings == []
    machine.commit(*range(PARTS * SHARD, PARTS * SHARD + SHARD)).commit(PARTS * SHARD + SHARD)
    machine.send().stop()
    assert objects.keys(layout.COMMITS)[-1] == layout.commit_key(PARTS)
    assert layout.epoch_of_shard(objects.keys(layout.SHARDS)[-1]) == machine.lease.epoch > 1

    again = resumed(tmp_path / "a", objects)
    again.stop()
    assert len(again.store.done) == (PARTS + 1) * SHARD + 1
    assert again.warnings == again.notes == []


def test_a_new_machine_asks_again_just_for_what_the_index_tells_of_and_is_not_there(tmp_path, whole, objects):
    put_index(objects, whole.commits, 12)
    gone = whole.commits[-3:]
    for commit in gone:
        objects.delete(layout.commit_key(commit.number))
        objects.delete(commit.key)
    machine = resumed(tmp_path / "a", objects)
    machine.stop()

    lost = {index for commit in gone for index in commit.entry.indices()}
    assert set(range(PARTS * SHARD)) - set(machine.store.done) == lost
    assert machine.next_number == PARTS - 3


def resumed(folder, objects):
    """A machine in a prefix whose commits are of the run that ``RUN_ID`` names."""
    given = identity(shard_records=SHARD)
    objects.put(
        layout.RUN,
        encode_run(
            {
                "format": 1,
                "run_id": RUN_ID,
                "created_at": "2026-01-01T00:00:00Z",
                "genpipe": "0.1.0",
                "inputs": [{"path": path} for path in given.inputs],
                "settings": dict(given.settings),
                "digest": given.digest,
                "shard_records": SHARD,
            }
        ),
    )
    return Machine(folder, objects, shard_records=SHARD)


def test_snapshots_are_taken_the_newest_that_is_whole():
    objects = MemoryObjects()
    warnings: list[str] = []
    assert history.newest(objects, "failed", warn=pytest.fail) is None
    for epoch, number, data in (
        (2, 9, pack(b"old\n")),
        (10, 0, pack(b"new\nhalf")),
        (10, 11, pack(b"newest\n")[:-1]),
        (2, 10, b"?"),
    ):
        objects.put(layout.snapshot_key("failed", epoch, number), data)

    assert history.newest(objects, "failed", warn=warnings.append) == b"new\n"
    assert len(warnings) == 1
    assert history.newest(objects, "input", warn=pytest.fail) is None


def test_a_snapshot_that_vanishes_while_it_is_read_is_no_matter():
    objects = MemoryObjects()
    for number in (1, 2):
        objects.put(layout.snapshot_key("tail", 1, number), pack(b""))

    def trouble(step, key):
        if step == "get":
            objects.trouble = lambda step, key: None
            objects.delete(layout.snapshot_key("tail", 1, 2))

    objects.trouble = trouble
    assert history.read_tail(objects, warn=pytest.fail) == []
