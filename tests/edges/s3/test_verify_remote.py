"""What ``genpipe verify`` finds in an object store, each kind once: in a prefix, and beside a folder."""

import json
from dataclasses import replace

import pytest

from genpipe.core.errors import ConfigError, ObjectStoreError, TroubleKind
from genpipe.edges import lines
from genpipe.edges.files import OsFiles
from genpipe.edges.folder_shelf import Prefix
from genpipe.edges.lock import FolderLock
from genpipe.edges.s3 import layout
from genpipe.edges.s3.commits import UPLOADS, encode_all
from genpipe.edges.s3.packing import pack, unpack
from genpipe.edges.s3.verify_remote import verify_remote
from genpipe.edges.shards import Tally
from genpipe.edges.store import Store
from genpipe.edges.verify import verify
from tests.edges.s3 import sent
from tests.edges.s3.memory_objects import MemoryObjects
from tests.edges.samples import WALL, group

URI = "s3://memory/run"


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(layout, "INDEX_COMMITS", 2)


@pytest.fixture
def folder(tmp_path):
    return sent.make(tmp_path / "run")


@pytest.fixture
def objects(folder):
    """Two commits, told again in one object, and three records in a tail."""
    objects = sent.send(folder)
    sent.put_batch(objects)
    return objects


def look(objects, **options):
    return verify_remote(objects, progress=lambda *_: None, **options)


def told(report):
    """Problems and notes, as "file: what"."""
    problems: list[str] = []
    notes: list[str] = []
    for finding in report.findings:
        told = f"{finding.file.removeprefix(URI + '/')}: {finding.what}"
        (problems if finding.is_problem else notes).append(told)
    return problems, notes


SHARD0, SHARD1 = (layout.shard_key(n, 1, "abcd") for n in (0, 1))
COMMIT0, COMMIT1 = (layout.commit_key(n) for n in (0, 1))
BATCH = layout.index_key(0)
TAIL, SEGMENTS, FAILED = (layout.snapshot_key(kind, 1, 1) for kind in ("tail", "segments", "failed"))
TAIL_NOTE = f"{TAIL}: has 3 records that no commit has yet"


def contents_of(objects):
    keys = objects.keys()
    return {key: objects.get(key) for key in keys}


def plain(objects, key):
    data = unpack(objects.get(key).data)
    assert data is not None
    return data


def put_shard(objects, key, data):
    """The same object with other lines in it, and a commit that knows its length."""
    packed = pack(data)
    objects.put(key, packed, metadata=objects.get(key).metadata)
    number = [SHARD0, SHARD1].index(key)
    sent.recommit(objects, number, object_bytes=len(packed))
    sent.put_batch(objects)


class Damage:
    """Changes to what is in the store, by name."""

    def __init__(self, objects):
        self.objects = objects

    def a_lost_shard(self):
        self.objects.delete(SHARD0)

    def a_shard_half_uploaded(self):
        self.objects.put(
            SHARD0, self.objects.get(SHARD0).data[:50], metadata=self.objects.get(SHARD0).metadata
        )

    def swapped_shards(self):
        first, second = self.objects.get(SHARD0), self.objects.get(SHARD1)
        self.objects.put(SHARD0, second.data, metadata=second.metadata)
        self.objects.put(SHARD1, first.data, metadata=first.metadata)

    def a_flipped_byte_in_a_shard(self):
        put_shard(self.objects, SHARD0, plain(self.objects, SHARD0).replace(b"answer to 3", b"answer to 4"))

    def a_shard_without_its_last_line(self):
        rows = plain(self.objects, SHARD0).splitlines(keepends=True)
        put_shard(self.objects, SHARD0, b"".join(rows[:-1]))

    def another_length(self):
        sent.recommit(self.objects, 0, object_bytes=7)
        sent.put_batch(self.objects)

    def another_digest_beside_it(self):
        self.objects.put(SHARD0, self.objects.get(SHARD0).data, metadata={"sha256": "00"})

    def a_commit_that_lists_other_indices(self):
        commit = sent.log_of(self.objects)[0]
        sent.recommit(self.objects, 0, entry=replace(commit.entry, ranges=[(100, 103)]))
        sent.put_batch(self.objects)

    def a_gap_in_the_log(self):
        self.objects.delete(COMMIT0)

    def a_damaged_commit(self):
        self.objects.put(COMMIT0, self.objects.get(COMMIT0).data.replace(b'"epoch":', b'"epoch":1', 1))

    def half_a_commit(self):
        self.objects.put(COMMIT0, self.objects.get(COMMIT0).data[:-30])

    def a_commit_of_another_run(self):
        sent.recommit(self.objects, 0, run_id="q")

    def a_commit_at_the_wrong_place(self):
        self.objects.put(layout.commit_key(2), self.objects.get(COMMIT0).data)

    def the_same_shard_committed_twice(self):
        commit = sent.log_of(self.objects)[0]
        self.objects.put(layout.commit_key(2), replace(commit, number=2).encode())

    def an_index_in_two_commits(self):
        data = plain(self.objects, SHARD0).splitlines(keepends=True)[0]
        tally = Tally.of([data])
        key, packed = layout.shard_key(2, 1, "abcd"), pack(data)
        entry = tally.entry(2, 1)
        self.objects.put(key, packed, metadata={"sha256": entry.digest})
        commit = sent.log_of(self.objects)[0]
        commit = replace(commit, number=2, entry=entry, key=key, object_bytes=len(packed))
        self.objects.put(layout.commit_key(2), commit.encode())

    def an_index_object_that_lies(self):
        log = sent.log_of(self.objects)
        self.objects.put(BATCH, pack(encode_all([replace(log[0], key="w00/shards/other"), log[1]])))

    def an_index_object_in_the_wrong_order(self):
        sent.put_batch(self.objects, numbers=(1, 0))

    def an_index_object_that_lacks_a_commit(self):
        sent.put_batch(self.objects, numbers=(0,))

    def an_index_object_that_tells_too_much(self):
        sent.put_batch(self.objects, numbers=(0, 1, 1))

    def a_damaged_index_object(self):
        self.objects.put(BATCH, b"rubbish")

    def the_end_of_the_log_lost(self):
        self.objects.delete(COMMIT1)

    def a_damaged_tail(self):
        self.objects.put(TAIL, pack(plain(self.objects, TAIL)[:-5]))

    def a_tail_that_cannot_be_unpacked(self):
        self.objects.put(TAIL, b"rubbish")

    def a_damaged_copy_of_the_segments(self):
        self.objects.put(SEGMENTS, pack(plain(self.objects, SEGMENTS).replace(b'"epoch":', b'"epoch":1')))

    def a_copy_of_the_failures_that_cannot_be_unpacked(self):
        self.objects.put(FAILED, b"")


KINDS = {
    "a_lost_shard": [f"{SHARD0}: is gone, with 4 records"],
    "a_shard_half_uploaded": [f"{SHARD0}: is damaged"],
    "swapped_shards": [
        *(f"{SHARD0}: has 339 bytes", f"{SHARD0}: has another SHA-256 beside it", f"{SHARD0}: has "),
        f"{SHARD0}: lacks 4 of the 4",
        *(f"{SHARD1}: has 331 bytes", f"{SHARD1}: has another SHA-256 beside it", f"{SHARD1}: has "),
        f"{SHARD1}: lacks 4 of the 4",
    ],
    "a_flipped_byte_in_a_shard": [
        f"{SHARD0}: has another SHA-256 than its commit says",
        f"{SHARD0}: lacks 1 of the 4",
        f"{SHARD0}: IS DAMAGED: 1 places",
    ],
    "a_shard_without_its_last_line": [f"{SHARD0}: has ", f"{SHARD0}: lacks 1 of the 4"],
    "another_length": [f"{SHARD0}: has "],
    "another_digest_beside_it": [f"{SHARD0}: has another SHA-256 beside it"],
    "a_commit_that_lists_other_indices": [f"{SHARD0}: holds other prompts than its commit lists"],
    "a_gap_in_the_log": [
        f"{COMMIT0}: is gone, although later ones are there",
        f"{BATCH}: tells 1 commits that the log does not have",
    ],
    "a_damaged_commit": [f"{COMMIT0}: is damaged"],
    "half_a_commit": [f"{COMMIT0}: is damaged"],
    "a_commit_of_another_run": [f"{COMMIT0}: is of another run (q)"],
    "a_commit_at_the_wrong_place": ["w00/commits/000002.json: says that it is commit 0"],
    "the_same_shard_committed_twice": [
        "w00/commits/000002.json: commits shard 0, as commit 0 does",
        "w00/commits/000002.json: names the object that commit 0 names",
        "w00/commits/000002.json: holds 4 records of prompts that stand before them",
    ],
    "an_index_in_two_commits": ["w00/commits/000002.json: holds 1 records of prompts that stand before"],
    "an_index_object_that_lies": [f"{BATCH}: tells 2 commits of 2, of which 1 are not as in the log"],
    "an_index_object_in_the_wrong_order": [f"{BATCH}: tells 2 commits of 2, of which 2 are not"],
    "an_index_object_that_lacks_a_commit": [f"{BATCH}: tells 1 commits of 2, of which 1 are not"],
    "an_index_object_that_tells_too_much": [f"{BATCH}: tells 3 commits of 2, of which 0 are not"],
    "a_damaged_index_object": [f"{BATCH}: is damaged"],
    "the_end_of_the_log_lost": [f"{BATCH}: tells 1 commits that the log does not have"],
    "a_damaged_tail": [f"{TAIL}: IS DAMAGED"],
    "a_tail_that_cannot_be_unpacked": [f"{TAIL}: is damaged"],
    "a_damaged_copy_of_the_segments": [f"{SEGMENTS}: IS DAMAGED"],
    "a_copy_of_the_failures_that_cannot_be_unpacked": [f"{FAILED}: is damaged"],
}


def test_a_sound_prefix_has_no_problem_and_is_not_touched(folder, objects):
    before = contents_of(objects)
    objects.calls.clear()
    report = look(objects)

    assert {step for step, _ in objects.calls} == {"get", "list"}
    assert told(report) == ([], [TAIL_NOTE])
    assert (report.shards, report.records, report.problem_count) == (3, 11, 0)
    assert report.size_bytes == sum(path.stat().st_size for path in (folder / "shards").iterdir())
    assert report.as_text().endswith(
        f"{URI}: sound, 3 shards, 11 records, {report.size_bytes:,} bytes, 0 problems"
    )
    assert report.as_json()["folder"] == URI
    assert contents_of(objects) == before


def test_every_kind_of_damage_is_in_the_table():
    assert {name for name in vars(Damage) if not name.startswith("_")} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_damage_is_found(objects, name):
    getattr(Damage(objects), name)()
    report = look(objects)
    problems, _ = told(report)

    assert len(problems) == len(KINDS[name]), problems
    assert [p for p, wanted in zip(problems, KINDS[name], strict=True) if not p.startswith(wanted)] == []
    assert all(finding.file.startswith(f"{URI}/w00/") for finding in report.findings)
    assert not any("--repair" in finding.then for finding in report.findings)


def test_a_record_is_counted_once_however_it_is_spoilt(objects):
    assert look(objects).records == 11
    Damage(objects).an_index_in_two_commits()
    assert look(objects).records == 11
    Damage(objects).a_lost_shard()
    assert look(objects).records == 8


def test_a_damaged_commit_that_the_index_tells_of_counts_and_another_does_not(objects):
    Damage(objects).a_damaged_commit()
    assert look(objects).records == 11
    Damage(objects).a_damaged_index_object()
    assert look(objects).records == 7


def test_a_commit_that_the_index_tells_of_keeps_its_place_in_the_log(objects):
    Damage(objects).an_index_in_two_commits()
    Damage(objects).a_damaged_commit()

    assert [problem.split(":")[0] for problem in told(look(objects))[0]] == [
        COMMIT0,
        layout.commit_key(2),
    ]


def test_an_index_is_not_believed_for_another_run_or_another_batch(objects):
    log = sent.log_of(objects)
    Damage(objects).a_damaged_commit()
    objects.put(BATCH, pack(encode_all([replace(log[0], run_id="q"), log[1]])))
    assert look(objects).records == 7
    # It would stand in another object.
    objects.put(layout.commit_key(2), b"rubbish")
    objects.put(BATCH, pack(encode_all([replace(log[0], number=2), log[1]])))
    assert look(objects).records == 7


def test_what_a_kill_leaves_is_a_note(objects):
    objects.put(layout.shard_key(7, 1, "ab"), b"12345")
    objects.put(layout.shard_key(8, 1, "ab"), b"12")
    objects.put(layout.PROBE + "x", b"")
    problems, notes = told(look(objects))

    assert problems == []
    assert notes == [
        f"{layout.shard_key(7, 1, 'ab')}: is in no commit, as are 1 more: 7 bytes",
        TAIL_NOTE,
        f"{layout.PROBE}x: was left behind by the look at the store at a start",
    ]


def test_a_digest_that_a_copy_has_lost_is_a_note(objects):
    objects.put(SHARD0, objects.get(SHARD0).data)

    assert told(look(objects)) == ([], [f"{SHARD0}: has no SHA-256 beside it", TAIL_NOTE])


def test_a_full_batch_without_an_object_of_its_own_is_no_finding(objects):
    objects.delete(BATCH)

    assert told(look(objects)) == ([], [TAIL_NOTE])


def test_a_run_that_has_only_begun_is_sound():
    objects = MemoryObjects()
    objects.put(layout.RUN, json.dumps(sent.RUN).encode())

    assert look(objects).as_text() == f"{URI}: sound, 0 shards, 0 records, 0 bytes, 0 problems"


def test_a_prefix_without_a_run_is_refused_and_a_store_that_is_away_is_an_error(objects):
    with pytest.raises(ConfigError, match="holds no run"):
        look(MemoryObjects())
    objects.trouble = sent.unreachable
    with pytest.raises(ObjectStoreError, match="cannot be reached"):
        look(objects)


def test_a_shard_that_the_store_cannot_give_is_named_and_the_others_are_looked_at(objects):
    def broken(step, key):
        if key == SHARD0:
            raise ObjectStoreError("500", kind=TroubleKind.BROKEN)

    objects.trouble = broken
    report = look(objects)

    assert told(report)[0] == [f"{SHARD0}: cannot be read: 500, with 4 records"]
    assert report.records == 7


def test_progress_ends_at_all_bytes(objects):
    steps: list[tuple[int, int]] = []
    verify_remote(objects, progress=lambda *step: steps.append(step), threads=2)

    assert steps == sorted(steps)
    assert len(steps) == 2
    assert steps[-1][0] == steps[-1][1]


@pytest.mark.parametrize("after", range(14))
def test_an_uploader_that_goes_on_between_any_two_steps_is_no_problem(tmp_path, after):
    folder = sent.make(tmp_path / "run")
    objects = sent.send(folder, seqs=[0], noted=False)
    objects.put(TAIL, pack((folder / "shards" / "part-000001.jsonl").read_bytes()))
    steps: list[str] = []

    def go_on():
        sent.send(folder, seqs=[1], noted=False, objects=objects)
        sent.put_batch(objects)
        for kind in ("tail", "failed", "segments"):
            objects.put(layout.snapshot_key(kind, 1, 2), objects.get(layout.snapshot_key(kind, 1, 1)).data)
            objects.delete(layout.snapshot_key(kind, 1, 1))

    def trouble(step, key):
        steps.append(step)
        if len(steps) == after + 1:
            objects.trouble = lambda *_: None
            go_on()

    objects.trouble = trouble
    report = look(objects, threads=1)

    assert told(report)[0] == []
    assert report.records in (8, 11)
    assert len(steps) == after + 1


# A folder that is sent to a prefix.


def look_here(folder, objects=None):
    """Problems and notes of a folder; with the store, or without."""
    remote = Prefix(uri=URI, open=lambda: objects) if objects is not None else None
    return verify(folder, OsFiles(), progress=lambda *_: None, remote=remote)


def test_a_folder_and_its_prefix_that_agree_have_no_findings(folder, objects):
    objects.calls.clear()

    assert told(look_here(folder, objects)) == ([], [])
    assert told(look_here(folder)) == ([], [])
    # Names and lengths alone.
    assert sum(step == "list" for step, _ in objects.calls) == 2
    assert [key for step, key in objects.calls if step != "list"] == [layout.RUN]


def test_shards_that_are_in_s3_only_are_a_note_and_count(folder, objects):
    sent.lose_here(folder, 0, 1)

    for store in (None, objects):
        report = look_here(folder, store)
        assert told(report) == ([], ["shards: lacks 2 shards of 8 records that are in S3 only"])
        assert (report.shards, report.records) == (3, 11)


def test_a_new_machine_that_has_no_shard_of_its_own_yet_is_sound(folder, objects):
    sent.lose_here(folder, 0, 1)
    (folder / "shards" / "part-000002.jsonl.open").unlink()
    (folder / ".done_indices").write_text("".join(f"{index}\n" for index in sent.ORDER[:8]))

    assert told(look_here(folder, objects))[0] == []


def test_without_their_commits_such_shards_are_gone(folder, objects):
    sent.lose_here(folder, 0, 1)
    (folder / UPLOADS).write_bytes(encode_all([sent.log_of(objects)[0]]))
    problems, notes = told(look_here(folder))

    assert problems == [
        "shards/part-000001.jsonl: is gone, with 4 records",
        ".done_indices: has 4 lines without a record",
    ]
    assert notes == ["shards: lacks 1 shards of 4 records that are in S3 only"]


class Here:
    """Changes to the folder or the store, by name."""

    def __init__(self, folder, objects):
        self.folder = folder
        self.objects = objects
        self.uploads = folder / UPLOADS

    def change(self, old, new):
        data = self.uploads.read_bytes()
        assert old in data
        self.uploads.write_bytes(data.replace(old, new, 1))

    def a_damaged_line(self):
        self.change(b'"number":0', b'"number":9')

    def a_line_of_another_run(self):
        log = sent.log_of(self.objects)
        self.uploads.write_bytes(encode_all([replace(log[0], run_id="q"), log[1]]))

    def a_line_too_few(self):
        self.uploads.write_bytes(encode_all([sent.log_of(self.objects)[1]]))

    def a_line_twice(self):
        self.uploads.write_bytes(self.uploads.read_bytes() * 2)

    def a_shard_that_the_manifest_does_not_list(self):
        sent.lose_here(self.folder, 1)
        path = self.folder / "manifest.jsonl"
        path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])

    def a_commit_of_other_records_for_a_number_of_ours(self):
        log = sent.log_of(self.objects)
        other = replace(log[0].entry, digest="0" * 64)
        self.uploads.write_bytes(encode_all([replace(log[0], entry=other), log[1]]))

    def the_same_for_a_shard_that_is_in_s3_only(self):
        self.a_commit_of_other_records_for_a_number_of_ours()
        sent.lose_here(self.folder, 0)

    def an_open_shard_with_a_number_that_is_committed(self):
        log = sent.log_of(self.objects)
        other = replace(log[1].entry, seq=2, ranges=[(100, 103)])
        self.uploads.write_bytes(encode_all([*log.values(), replace(log[1], number=2, entry=other)]))


HERE = {
    "a_damaged_line": [f"{UPLOADS}: holds 1 lines that do not count"],
    "a_line_of_another_run": [f"{UPLOADS}: names 1 commits of another run"],
    "a_line_too_few": [f"{UPLOADS}: lacks 1 commits between others"],
    "a_line_twice": [f"{UPLOADS}: names 2 commits more than once", f"{UPLOADS}: names 2 shards in more"],
    "a_shard_that_the_manifest_does_not_list": [
        "shards/part-000001.jsonl: is in S3 only, and not listed",
        ".done_indices: has 4 lines without a record",
    ],
    "a_commit_of_other_records_for_a_number_of_ours": [
        "shards/part-000000.jsonl: is not the shard that commit 0 in S3 holds under its number",
    ],
    "the_same_for_a_shard_that_is_in_s3_only": [
        "shards/part-000000.jsonl: is gone, with 4 records",
        "shards/part-000000.jsonl: is another in commit 0 in S3 than in the manifest",
        ".done_indices: has 4 lines without a record",
    ],
    "an_open_shard_with_a_number_that_is_committed": [
        "shards/part-000002.jsonl: is in S3 only, and not listed",
        "shards/part-000002.jsonl.open: is not the shard that commit 2 in S3 holds",
    ],
}


def test_every_kind_of_change_is_in_the_table():
    names = {name for name in vars(Here) if not name.startswith("_")} - {"change"}
    assert names == set(HERE)


@pytest.mark.parametrize("name", HERE)
def test_each_kind_of_damage_to_what_the_folder_knows_is_found_without_s3(folder, objects, name):
    getattr(Here(folder, objects), name)()
    problems, _ = told(look_here(folder))

    assert len(problems) == len(HERE[name]), problems
    assert [p for p, wanted in zip(problems, HERE[name], strict=True) if not p.startswith(wanted)] == []


def test_half_a_line_that_a_kill_leaves_is_a_note(folder, objects):
    path = folder / UPLOADS
    path.write_bytes(path.read_bytes() + b'{"number":2')

    assert told(look_here(folder)) == (
        [],
        [f"{UPLOADS}: holds 1 lines that do not count, or do not agree with themselves"],
    )


def test_more_than_half_a_line_is_not_what_a_kill_leaves(folder, objects):
    path = folder / UPLOADS
    path.write_bytes(b"{}\n" + path.read_bytes() + b'{"number":2')

    assert told(look_here(folder))[0] == [
        f"{UPLOADS}: holds 2 lines that do not count, or do not agree with themselves"
    ]


@pytest.mark.parametrize("change", [{}, {"size_bytes": 7}, {"ranges": [(100, 103)]}])
def test_a_shard_that_is_not_listed_is_known_by_its_length_and_its_prompts(folder, objects, change):
    path = folder / "manifest.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    log = sent.log_of(objects)
    (folder / UPLOADS).write_bytes(
        encode_all([log[0], replace(log[1], entry=replace(log[1].entry, **change))])
    )

    assert told(look_here(folder))[0] == (
        ["shards/part-000001.jsonl: is not the shard that commit 1 in S3 holds under its number"]
        if change
        else []
    )


IN_STORE = {
    "a_lost_shard": [f"{SHARD0}: is gone, with 4 records"],
    "a_shard_half_uploaded": [f"{SHARD0}: has 50 bytes where its commit says"],
    "a_gap_in_the_log": [f"{COMMIT0}: is gone"],
    "the_end_of_the_log_lost": [f"{COMMIT1}: is gone"],
    "a_damaged_commit": [f"{COMMIT0}: is not what {UPLOADS} says of it"],
    "half_a_commit": [f"{COMMIT0}: is not what {UPLOADS} says of it"],
    "another_length": [f"{COMMIT0}: is not what"],
    "a_commit_at_the_wrong_place": ["w00/commits/000002.json: says that it is commit 0"],
}


@pytest.mark.parametrize("name", IN_STORE)
def test_each_kind_of_damage_in_the_store_that_a_listing_shows_is_found(folder, objects, name):
    getattr(Damage(objects), name)()
    objects.calls.clear()
    report = look_here(folder, objects)
    problems, _ = told(report)

    assert len(problems) == len(IN_STORE[name]), problems
    assert [p for p, wanted in zip(problems, IN_STORE[name], strict=True) if not p.startswith(wanted)] == []
    assert not any(step == "get" and key.startswith(layout.SHARDS) for step, key in objects.calls)


def test_a_store_whose_etags_are_no_checksums_is_believed_by_its_bytes(folder, objects):
    true_list = objects.list
    objects.list = lambda prefix, **options: (
        replace(listed, etag="opaque") for listed in true_list(prefix, **options)
    )

    assert told(look_here(folder, objects)) == ([], [])
    Damage(objects).a_damaged_commit()
    assert len(told(look_here(folder, objects))[0]) == 1


def test_a_prefix_of_another_run_is_a_problem(folder, objects):
    objects.put(layout.RUN, json.dumps({**sent.RUN, "run_id": "q"}).encode())

    assert told(look_here(folder, objects)) == (["run.json: is of another run (q) than this folder (r)"], [])


@pytest.mark.parametrize("why", ["away", "refused", "empty"])
def test_a_store_that_could_not_be_looked_at_is_a_problem_with_its_reason(folder, objects, why):
    def refuse():
        raise ConfigError("no keys")

    if why == "away":
        objects.trouble = sent.unreachable
    store = MemoryObjects() if why == "empty" else objects
    remote = Prefix(uri=URI, open=refuse if why == "refused" else lambda: store)
    report = verify(folder, OsFiles(), progress=lambda *_: None, remote=remote)
    reason = {"away": "cannot be reached", "refused": "no keys", "empty": "holds no run"}[why]

    assert len(report.findings) == 1
    assert report.problem_count == 1
    assert f"problem: {URI}: S3 was not looked at: " in str(report.findings[0])
    assert reason in str(report.findings[0])


# What is not sent yet.


PENDING = "shards/part-000001.jsonl: is not known to be in S3"


@pytest.mark.parametrize("with_store", [True, False])
def test_a_sealed_shard_that_is_not_sent_is_a_note_until_the_run_is_over(tmp_path, with_store):
    folder = sent.make(tmp_path / "run")
    objects = sent.send(folder, seqs=[0])
    store = objects if with_store else None

    assert told(look_here(folder, store)) == ([], [PENDING])
    (folder / "progress.json").write_text('{"state": "interrupted"}')
    assert told(look_here(folder, store)) == ([], [PENDING])
    (folder / "progress.json").write_text('{"state": "done"}')
    assert told(look_here(folder, store)) == ([PENDING], [])
    lock = FolderLock.take(folder, started_at="t", warn=pytest.fail)
    assert told(look_here(folder, store)) == ([], [])
    lock.release()


def test_more_such_shards_are_told_in_one_line(folder):
    sent.send(folder, seqs=[])

    assert told(look_here(folder)) == (
        [],
        ["shards/part-000000.jsonl: is not known to be in S3, nor are 1 more sealed shards"],
    )


def test_a_folder_that_was_never_sent_anywhere_hears_nothing_of_s3(folder):
    (folder / "progress.json").write_text('{"state": "done"}')

    assert told(look_here(folder)) == ([], [])


def test_own_commits_that_a_kill_left_unnoted_are_a_note(folder, objects):
    note = f"{UPLOADS}: does not name 2 commits of this folder's shards that are in S3"
    (folder / UPLOADS).write_bytes(b"")
    assert told(look_here(folder, objects)) == ([], [note])
    (folder / UPLOADS).unlink()
    assert told(look_here(folder, objects)) == ([], [note])


def test_an_own_commit_of_a_shard_that_is_not_listed_yet_is_known_by_its_records(folder, objects):
    (folder / UPLOADS).write_bytes(b"")
    path = folder / "manifest.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])

    assert told(look_here(folder, objects)) == (
        [],
        [
            "shards/part-000001.jsonl: is not listed in the manifest",
            f"{UPLOADS}: does not name 2 commits of this folder's shards that are in S3",
        ],
    )


# Another machine has gone on.


def gone_on(tmp_path, folder, objects, *indices):
    """Another machine takes the run over, and commits one more shard of these prompts."""
    other = sent.make(tmp_path / "other", *sent.ORDER[:8], *indices)
    sent.send(other, seqs=[2], noted=False, objects=objects, epoch=2)


FURTHER = "w00/commits/000002.json: another machine has gone on: 1 commits of 4 records"


def test_a_folder_that_another_machine_has_left_behind_is_told_so(tmp_path, folder, objects):
    (folder / "shards" / "part-000002.jsonl.open").unlink()
    (folder / ".done_indices").write_text("".join(f"{index}\n" for index in sent.ORDER[:8]))
    gone_on(tmp_path, folder, objects, 20, 21, 22, 23)
    problems, notes = told(look_here(folder, objects))

    assert problems == []
    assert [note.startswith(FURTHER) for note in notes] == [True]


def test_what_is_lost_of_another_machines_work_is_a_problem(tmp_path, folder, objects):
    gone_on(tmp_path, folder, objects, 20, 21, 22, 23)
    last = sent.log_of(objects)[2]
    objects.put(layout.commit_key(4), replace(last, number=4).encode())
    objects.delete(last.key)
    problems, _ = told(look_here(folder, objects))

    assert problems[0].startswith("w00/commits/000003.json: is gone, although later ones are there")
    assert problems[1].startswith(f"{last.key}: is gone, with 4 records")


def test_a_shard_that_was_committed_as_it_is_does_not_become_stale_by_another_commit(
    tmp_path, folder, objects
):
    (folder / UPLOADS).write_bytes(b"")
    gone_on(tmp_path, folder, objects, 20, 21, 22, 23)
    entry = sent.log_of(objects)[2].entry
    sent.recommit(objects, 2, entry=replace(entry, seq=7, ranges=[(0, 0), (21, 23)]))

    assert told(look_here(folder, objects))[0] == []


@pytest.mark.parametrize(
    ("indices", "what"),
    [
        ((20, 21, 22, 23), "is not the shard that commit 2 in S3 holds under its number"),
        ((5, 6, 20, 21), "is not the shard that commit 2 in S3 holds under its number"),
    ],
)
def test_an_open_shard_whose_number_another_machine_has_used_is_a_problem(
    tmp_path, folder, objects, indices, what
):
    gone_on(tmp_path, folder, objects, *indices)
    problems, notes = told(look_here(folder, objects))

    assert problems == [f"shards/part-000002.jsonl.open: {what}"]
    assert len(notes) == 1


@pytest.mark.parametrize("sealed", [True, False])
def test_a_shard_some_of_whose_prompts_another_machine_has_committed_is_a_problem(
    tmp_path, folder, objects, sealed
):
    shards = folder / "shards"
    if sealed:
        store = Store.open(folder, OsFiles(), shard_records=4, wall=WALL, warn=pytest.fail)
        store.commit(group(30))
        store.seal_last()
        store.close()
        entry = (folder / "manifest.jsonl").read_bytes().splitlines(keepends=True)[2]
        fields = json.loads(entry)
        del fields["_c"]
        fields |= {"seq": 5, "file": "part-000005.jsonl"}
        manifest = (
            (folder / "manifest.jsonl")
            .read_bytes()
            .replace(entry, lines.encode(json.dumps(fields, separators=(",", ":")).encode()[:-1]))
        )
        (folder / "manifest.jsonl").write_bytes(manifest)
        (shards / "part-000002.jsonl").rename(shards / "part-000005.jsonl")
        name = "part-000005.jsonl"
    else:
        (shards / "part-000002.jsonl.open").rename(shards / "part-000005.jsonl.open")
        name = "part-000005.jsonl.open"
    gone_on(tmp_path, folder, objects, 5, 6, 20, 21)
    report = look_here(folder, objects)

    assert told(report)[0] == [
        f"shards/{name}: holds 2 records of prompts that another machine has committed"
    ]
    assert [note.split(":")[0] for note in told(report)[1]] == ["w00/commits/000002.json"]
    assert "--repair" in next(f for f in report.findings if f.is_problem).then


class Busy(MemoryObjects):
    """A store to which a driver sends, and lists, whatever it has, between any two looks at it."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.store = Store.open(folder, OsFiles(), shard_records=4, wall=WALL, warn=pytest.fail)
        self.next = 11
        self.busy = False

    def go_on(self, *_: object):
        if self.busy:
            self.busy = False
            self.store.commit(group(*range(self.next, self.next + 5)))
            self.next += 5
            manifest = (self.folder / "manifest.jsonl").read_bytes().count(b"\n")
            sent.send(
                self.folder,
                seqs=range(len(sent.log_of(self)), manifest),
                noted=self.next % 2 == 0,
                objects=self,
            )
            self.busy = True


def test_a_driver_that_seals_and_sends_between_any_two_steps_is_no_problem(folder):
    objects = Busy(folder)
    sent.send(folder, objects=objects)
    objects.trouble = objects.go_on
    objects.busy = True
    lock = FolderLock.take(folder, started_at="t", warn=pytest.fail)
    for _ in range(5):
        assert told(look_here(folder, objects)) == ([], [])
    lock.release()
    objects.store.close()
    assert objects.next > 40
