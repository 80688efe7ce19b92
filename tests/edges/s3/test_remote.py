"""A run that goes on from S3: on a new machine, on an old one, and on one that another has overtaken."""

import json
import threading

import pytest

from genpipe.core.errors import (
    ConfigError,
    Fenced,
    ObjectStoreError,
    PreconditionFailed,
    ResumeMismatch,
    TroubleKind,
)
from genpipe.edges import verify
from genpipe.edges.files import OsFiles
from genpipe.edges.lock import FolderLock
from genpipe.edges.record import encode_finished
from genpipe.edges.run_folder import RunFolder
from genpipe.edges.s3 import layout
from genpipe.edges.s3.commits import Commit, decode_all
from genpipe.edges.s3.packing import pack
from genpipe.edges.s3.remote import Remote
from genpipe.edges.store import Store
from tests.edges import audit
from tests.edges.s3.machines import NOW, Machine, identity, records_in
from tests.edges.s3.memory_objects import MemoryObjects
from tests.edges.samples import WALL, answer, finished, given_up, group


@pytest.fixture
def objects():
    return MemoryObjects()


def local(folder):
    return audit.counts(OsFiles(), folder)


def sealed(folder):
    return sorted(path.name for path in (folder / "shards").glob("part-*.jsonl"))


def repair(folder):
    told: list[str] = []
    verify.repair(folder, OsFiles(), now_text=NOW, warn=told.append)
    return told


def test_a_new_folder_begins_its_run_in_s3_too(tmp_path, objects):
    machine = Machine(tmp_path / "a", objects)
    machine.stop()

    assert machine.run.is_new
    assert objects.get(layout.RUN).data == (tmp_path / "a" / "run.json").read_bytes()
    assert (machine.remote.lease, machine.lease.epoch, machine.lease.nonce) == (None, 1, machine.run.nonce)
    assert json.loads(objects.get(layout.LEASE).data)["released"]
    assert (machine.warnings, machine.notes) == ([], [])


def test_a_new_empty_folder_adopts_the_run_and_goes_on_with_the_next_number(tmp_path, objects):
    first = Machine(tmp_path / "a", objects).commit(*range(11)).send()
    first.stop()
    second = Machine(tmp_path / "b", objects, shard_records=9)

    assert second.run.run_id == first.run.run_id
    assert not second.run.is_new
    assert second.run.shard_records == 4
    assert [w for w in second.warnings if "shards of 4 records" in w] == second.warnings
    assert list(second.store.done) == list(range(8))
    assert second.store.sums.output_tokens == sum(range(10, 18))
    assert second.lease.epoch == 2
    assert (second.next_number, second.store.unsent) == (2, [])
    assert (tmp_path / "b" / "run.json").read_bytes() == (tmp_path / "a" / "run.json").read_bytes()
    assert (tmp_path / "b" / "uploads.jsonl").read_bytes() == b"".join(
        objects.get(key).data for key in objects.keys(layout.COMMITS)
    )
    assert len(second.notes) == 1
    second.commit(*range(8, 14)).send().stop()
    assert sealed(tmp_path / "b") == ["part-000002.jsonl"]
    assert set(audit.manifest(OsFiles(), tmp_path / "b")) == {0, 1, 2}
    assert sorted(records_in(objects)) == list(range(12))


def test_what_a_start_with_s3_brought_a_start_without_it_knows(tmp_path, objects):
    Machine(tmp_path / "a", objects).commit(*range(9)).send().stop()
    Machine(tmp_path / "b", objects).stop()
    for _ in range(2):
        calls = len(objects.calls)
        store = Store.open(tmp_path / "b", OsFiles(), shard_records=4, wall=WALL, warn=pytest.fail)
        store.seal_last()
        store.close()
        assert list(store.done) == list(range(8))
        assert len(objects.calls) == calls


def test_the_old_folder_just_goes_on_and_learns_of_the_others_commits(tmp_path, objects):
    Machine(tmp_path / "a", objects).commit(*range(8)).send().stop()
    Machine(tmp_path / "b", objects).commit(*range(8, 16)).send().stop()
    first = Machine(tmp_path / "a", objects)

    assert first.warnings == []
    assert list(first.store.done) == list(range(16))
    assert first.store.sums.output_tokens == sum(range(10, 26))
    first.commit(*range(16, 20)).commit(20).send().stop()
    assert sealed(tmp_path / "a") == ["part-000000.jsonl", "part-000001.jsonl", "part-000004.jsonl"]
    assert sorted(records_in(objects)) == list(range(20))


def test_a_restart_reads_no_commit_that_it_knows(tmp_path, objects):
    Machine(tmp_path / "a", objects).commit(*range(40)).send().stop()
    begin = len(objects.calls)
    again = Machine(tmp_path / "a", objects)
    again.stop()

    read = [key for step, key in objects.calls[begin:] if step == "get" and key.startswith(layout.COMMITS)]
    # The last one tells of the claims before.
    assert read == [layout.commit_key(9)]
    assert (again.warnings, again.notes) == ([], [])


def test_records_of_a_shard_that_was_open_are_taken_in_from_its_tail(tmp_path, objects):
    first = Machine(tmp_path / "a", objects)
    first.store.commit(group(*range(6), failures=[given_up(90), given_up(91, for_good=False)]))
    first.run.start_segment(NOW, {})
    (tmp_path / "a" / "input.idx").write_bytes(b"known input\nhalf a li")
    first.send().snapshot().die()
    second = Machine(tmp_path / "b", objects)

    assert list(second.store.done) == list(range(6))
    assert local(tmp_path / "b") == {4: 1, 5: 1}
    assert second.store.failed_for_good_count == 1
    assert (tmp_path / "b" / "input.idx").read_bytes() == b"known input\n"
    assert second.run.segment == 2
    assert not (tmp_path / "b" / "restored.jsonl").exists()
    assert [w for w in second.warnings if "waiting" in w or "silent" in w] == second.warnings
    assert "2 records of shards that were open" in second.notes[0]
    second.stop()
    # The tail is still there, and nothing of it is taken in twice.
    again = Machine(tmp_path / "b", objects)
    again.stop()
    assert local(tmp_path / "b") == {4: 1, 5: 1}
    assert (again.warnings, again.notes) == ([], [])
    assert not (tmp_path / "b" / "restored.jsonl").exists()


def test_a_run_of_which_s3_has_only_a_tail_goes_on_too(tmp_path, objects):
    first = Machine(tmp_path / "a", objects).commit(0, 1)
    first.run.start_segment(NOW, {})
    first.snapshot().die()
    second = Machine(tmp_path / "b", objects)
    second.stop()

    assert list(second.store.done) == [0, 1]
    assert local(tmp_path / "b") == {0: 1, 1: 1}


def line(index, words="answer"):
    return encode_finished(
        finished(index, answer(f"{words} to {index}", output_tokens=10 + index)), WALL, None
    )


def test_the_newest_tail_counts_and_an_older_one_fills_the_gaps(tmp_path, objects):
    Machine(tmp_path / "a", objects).stop()
    for epoch, number, held in (
        (1, 2, line(0, "old") + line(1, "old") + line(5, "old")),
        (2, 0, line(1, "older") + line(2)),
        (2, 10, line(1) + line(3) + line(4)[:-7]),
    ):
        objects.put(layout.snapshot_key("tail", epoch, number), pack(held))
    third = Machine(tmp_path / "c", objects, shard_records=4)
    third.stop()

    assert list(third.store.done) == [0, 1, 2, 3, 5]
    told = {
        record["index"]: record["response"]["content"]
        for part in audit.records(OsFiles(), tmp_path / "c").values()
        for record in part
    }
    assert told == {0: "old to 0", 1: "answer to 1", 2: "answer to 2", 3: "answer to 3", 5: "old to 5"}
    assert sealed(tmp_path / "c") == ["part-000000.jsonl"]
    assert [entry.seq for entry in third.store.unsent] == [0]


def test_a_damaged_tail_is_told_of_and_the_one_before_it_counts(tmp_path, objects):
    first = Machine(tmp_path / "a", objects).commit(0, 1).snapshot()
    first.commit(2).snapshot().die()
    newest = objects.keys("w00/tail/")[-1]
    objects.put(newest, objects.get(newest).data[:-3])
    second = Machine(tmp_path / "b", objects)
    second.stop()

    assert list(second.store.done) == [0, 1]
    assert [w for w in second.warnings if newest in w and "damaged" in w]


def test_a_tail_of_records_that_were_committed_since_restores_nothing(tmp_path, objects):
    first = Machine(tmp_path / "a", objects).commit(0, 1, 2).snapshot()
    first.commit(3, 4).send().die()
    second = Machine(tmp_path / "b", objects)
    second.stop()

    assert list(second.store.done) == [0, 1, 2, 3]
    assert local(tmp_path / "b") == {}


def test_restored_lines_that_a_start_left_are_kept_beside_those_of_the_next(tmp_path, objects, monkeypatch):
    Machine(tmp_path / "a", objects).commit(0, 1).snapshot().die()

    def broken(*args, **options):
        raise ObjectStoreError("gone", kind=TroubleKind.UNREACHABLE)

    with monkeypatch.context() as patched:
        patched.setattr("genpipe.edges.s3.remote.history.newest", broken)
        with pytest.raises(ObjectStoreError):
            Machine(tmp_path / "b", objects)
    assert len(audit.whole_lines((tmp_path / "b" / "restored.jsonl").read_bytes())) == 2
    for key in objects.keys("w00/tail/"):
        objects.delete(key)
    second = Machine(tmp_path / "b", objects)
    second.stop()

    assert list(second.store.done) == [0, 1]


def test_of_restored_lines_and_a_tail_the_tail_is_newer(tmp_path, objects):
    Machine(tmp_path / "a", objects).stop()
    (tmp_path / "a" / "restored.jsonl").write_bytes(line(0, "old") + line(1, "old"))
    objects.put(layout.snapshot_key("tail", 1, 0), pack(line(1) + line(2)))
    again = Machine(tmp_path / "a", objects)
    again.stop()

    [part] = audit.records(OsFiles(), tmp_path / "a").values()
    assert {record["index"]: record["response"]["content"] for record in part} == {
        0: "old to 0",
        1: "answer to 1",
        2: "answer to 2",
    }


def test_the_folder_of_a_killed_driver_has_its_prefix_back_at_once(tmp_path, objects):
    first = Machine(tmp_path / "a", objects)
    first.die()
    again = Machine(tmp_path / "a", objects)
    again.stop()

    assert (again.warnings, again.lease.epoch) == ([], first.lease.epoch + 1)


def test_what_is_there_locally_is_not_replaced_by_snapshots(tmp_path, objects):
    first = Machine(tmp_path / "a", objects)
    first.store.commit(group(0, failures=[given_up(90)]))
    first.snapshot()
    first.store.commit(group(1, failures=[given_up(91)], number=2))
    first.stop()
    again = Machine(tmp_path / "a", objects)
    again.stop()

    assert again.store.failed_for_good_count == 2


def test_a_folder_of_another_run_is_refused_with_both_names(tmp_path, objects):
    first = Machine(tmp_path / "a", objects)
    first.stop()
    other = Machine(tmp_path / "b", MemoryObjects())
    other.stop()
    before = {path: path.read_bytes() for path in (tmp_path / "b").rglob("*") if path.is_file()}

    with pytest.raises(ResumeMismatch) as caught:
        Machine(tmp_path / "b", objects)
    for word in (first.run.run_id, other.run.run_id, objects.name):
        assert word in str(caught.value)
    before.pop(tmp_path / "b" / ".lock")
    assert before == {path: path.read_bytes() for path in before}
    Machine(tmp_path / "b", MemoryObjects()).stop()


def test_an_adopted_run_of_other_settings_is_refused_key_by_key_and_nothing_is_left(tmp_path, objects):
    Machine(tmp_path / "a", objects).stop()

    with pytest.raises(ResumeMismatch, match='model was "m", is "n"') as caught:
        Machine(tmp_path / "b", objects, settings={"model": "n"})
    assert objects.name in str(caught.value)
    assert [path.name for path in (tmp_path / "b").iterdir()] == [".lock"]
    Machine(tmp_path / "b", objects).stop()


@pytest.mark.parametrize(
    ("data", "match"), [(b"", "damaged"), (b'{"format":2}', "format 2"), (b'{"format":1}', "'run_id'")]
)
def test_a_run_json_in_s3_that_is_not_understood_is_never_begun_anew(tmp_path, objects, data, match):
    objects.put(layout.RUN, data)

    with pytest.raises(ConfigError, match=match) as caught:
        Machine(tmp_path / "a", objects)
    assert f"{objects.name}/run.json" in str(caught.value)
    assert objects.get(layout.RUN).data == data
    assert not (tmp_path / "a" / "run.json").exists()


def test_commits_without_a_run_json_are_not_given_to_a_new_run(tmp_path, objects):
    Machine(tmp_path / "a", objects).commit(*range(4)).send()
    objects.delete(layout.RUN)

    with pytest.raises(ConfigError, match=r"no run\.json"):
        Machine(tmp_path / "b", objects)
    assert objects.get(layout.RUN) is None


def test_the_run_folder_itself_puts_a_lost_run_json_back(tmp_path, objects):
    Machine(tmp_path / "a", objects).commit(*range(4)).send().stop()
    objects.delete(layout.RUN)
    Machine(tmp_path / "a", objects).stop()

    assert objects.get(layout.RUN).data == (tmp_path / "a" / "run.json").read_bytes()


def test_commits_of_another_run_end_the_start(tmp_path, objects):
    first = Machine(tmp_path / "a", objects).commit(*range(4)).send()
    first.stop()
    objects.delete(layout.RUN)
    other = Machine(tmp_path / "b", MemoryObjects())
    other.stop()

    with pytest.raises(ResumeMismatch, match=first.run.run_id):
        Machine(tmp_path / "b", objects)
    assert json.loads(objects.get(layout.LEASE).data)["released"]


@pytest.mark.parametrize("is_conditional", [True, False])
def test_two_new_folders_that_race_have_the_same_run(tmp_path, is_conditional):
    objects = MemoryObjects(is_conditional=is_conditional)
    both = threading.Barrier(2, timeout=20)
    runs = []

    def meet(step, key):
        if (step, key) == ("put", layout.RUN):
            both.wait()

    # Both have found nothing there; where the last put wins, both have put theirs, too.
    objects.trouble = meet
    if not is_conditional:
        objects.after = meet

    class AgreeOnly:
        name = objects.name

        def __init__(self, remote):
            self.agree = remote.agree

        def take_over(self, path, lock):
            """Who may go on is settled later."""

    def begin(folder):
        remote = Remote(objects, owner={}, ttl_s=1, warn=print, note=print, pause=print)
        opened = RunFolder.open(
            folder, identity(), OsFiles(), allow_changed=False, now_text=NOW, warn=print,
            elsewhere=AgreeOnly(remote),
        )  # fmt: skip
        opened.close()
        runs.append(opened)

    threads = [threading.Thread(target=begin, args=(tmp_path / name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert len(runs) == 2
    told = json.loads(objects.get(layout.RUN).data)["run_id"]
    assert {run.run_id for run in runs} == {told}
    assert sorted(run.is_new for run in runs) == [False, True]


def test_a_put_whose_reply_was_lost_is_known_for_ones_own(tmp_path, objects):
    def after(step, key):
        if (step, key) == ("put", layout.RUN):
            objects.after = lambda step, key: None
            raise PreconditionFailed("tried again, and found its own")

    objects.after = after
    machine = Machine(tmp_path / "a", objects)
    machine.stop()

    assert machine.run.is_new
    assert json.loads(objects.get(layout.RUN).data)["run_id"] == machine.run.run_id


def test_a_start_that_s3_ends_gives_everything_back(tmp_path, objects):
    Machine(tmp_path / "a", objects).commit(*range(4)).send().stop()

    def trouble(step, key):
        if (step, key) == ("list", layout.SHARDS):
            raise ObjectStoreError("down", kind=TroubleKind.UNREACHABLE)

    objects.trouble = trouble
    with pytest.raises(ObjectStoreError, match="down"):
        Machine(tmp_path / "b", objects)
    assert json.loads(objects.get(layout.LEASE).data)["released"]
    FolderLock.take(tmp_path / "b", started_at=NOW, warn=pytest.fail).release()
    objects.trouble = lambda step, key: None
    again = Machine(tmp_path / "b", objects)
    again.stop()
    assert list(again.store.done) == list(range(4))


def test_a_claim_is_higher_than_anything_that_was_ever_left_there(tmp_path, objects):
    Machine(tmp_path / "a", objects).commit(*range(4)).send().stop()
    for key in (layout.shard_key(9, 41, "aa"), layout.snapshot_key("failed", 57, 3)):
        objects.put(key, b"x")
    objects.delete(layout.LEASE)
    machine = Machine(tmp_path / "a", objects)
    machine.stop()

    assert machine.lease.epoch == 58
    assert machine.remote.orphans == [layout.shard_key(9, 41, "aa")]


def test_the_last_commit_tells_of_the_claims_before_where_all_else_is_lost(tmp_path, objects):
    for rows in (range(4), range(4, 8), range(8, 12)):
        Machine(tmp_path / "a", objects).commit(*rows).send().stop()
    for key in (layout.LEASE, *objects.keys(layout.SHARDS)):
        objects.delete(key)
    machine = Machine(tmp_path / "a", objects)
    machine.stop()

    assert machine.lease.epoch == 4


def test_commits_of_a_later_claim_end_the_start(tmp_path, objects):
    first = Machine(tmp_path / "a", objects).commit(*range(4)).send()
    first.stop()
    [commit] = decode_all(objects.get(layout.commit_key(0)).data).values()

    def trouble(step, key):
        # Another driver claims the prefix between our claim and our look at the log.
        if (step, key) == ("list", layout.SHARDS):
            objects.trouble = lambda step, key: None
            later = Commit(
                number=1, run_id=commit.run_id, entry=commit.entry, key=commit.key,
                object_bytes=commit.object_bytes, epoch=9, nonce="ff",
            )  # fmt: skip
            objects.put(layout.commit_key(1), later.encode())

    objects.trouble = trouble
    with pytest.raises(Fenced, match="claim 9"):
        Machine(tmp_path / "b", Listing(objects))


class Listing:
    """The same objects; the commits are listed after the shards."""

    def __init__(self, objects):
        self._objects = objects

    def __getattr__(self, name):
        return getattr(self._objects, name)

    def list(self, prefix, **options):
        if prefix == layout.COMMITS:
            self._objects.trouble("list", layout.SHARDS)
        return self._objects.list(prefix, **options)


def test_the_lease_is_renewed_while_the_log_is_read(tmp_path, objects, monkeypatch):
    Machine(tmp_path / "a", objects).commit(*range(80)).send().stop()
    monkeypatch.setattr("genpipe.edges.s3.remote._RENEWALS", 1e9)
    begin = len(objects.calls)
    Machine(tmp_path / "b", objects).stop()

    assert objects.calls[begin:].count(("put", layout.LEASE)) > 10


def test_an_orphan_of_an_earlier_claim_is_known_and_one_of_this_claim_is_not(tmp_path, objects):
    first = Machine(tmp_path / "a", objects).commit(*range(4)).send()
    first.stop()
    old, own = layout.shard_key(7, 1, "aa"), layout.shard_key(8, 2, "bb")
    objects.put(old, b"x")
    objects.put(own, b"x")
    objects.put(layout.SHARDS + "notes.txt", b"mine")
    second = Machine(tmp_path / "a", objects)
    second.stop()

    assert second.lease.epoch == 3
    assert second.remote.orphans == [old, own]


# Shards that are gone from S3.


def without(objects, number):
    [commit] = decode_all(objects.get(layout.commit_key(number)).data).values()
    objects.delete(commit.key)
    return commit


@pytest.mark.parametrize("how", ["gone", "short"])
def test_a_commit_whose_object_is_gone_counts_for_nothing_and_its_prompts_run_again(tmp_path, objects, how):
    Machine(tmp_path / "a", objects).commit(*range(12)).send().stop()
    commit = without(objects, 1)
    if how == "short":
        objects.put(commit.key, b"x")
    second = Machine(tmp_path / "b", objects)

    assert list(second.store.done) == [0, 1, 2, 3, 8, 9, 10, 11]
    [warning] = second.warnings
    assert "HAS LOST 1 shards" in warning
    assert commit.key in warning
    assert "4 records" in warning
    second.commit(4, 5, 6, 7).commit(12).send().stop()
    assert second.next_number == 4
    # Nobody is told again of what was made good.
    third = Machine(tmp_path / "c", objects)
    third.stop()
    assert third.warnings == []
    assert list(third.store.done) == list(range(12))


def test_a_shard_that_s3_lost_is_sent_again_by_the_folder_that_has_it(tmp_path, objects):
    Machine(tmp_path / "a", objects).commit(*range(12)).send().stop()
    without(objects, 2)
    first = Machine(tmp_path / "a", objects)

    assert [w for w in first.warnings if "are uploaded again" in w] == first.warnings
    assert list(first.store.done) == list(range(12))
    assert [entry.seq for entry in first.store.unsent] == [2]
    # The place of the commit is taken for ever.
    assert first.next_number == 3
    first.send().stop()
    assert sorted(records_in(objects)) == list(range(12))
    Machine(tmp_path / "a", objects).stop()


# A folder that another machine has overtaken.


def overtaken(tmp_path, objects, old_rows, new_rows):
    """A folder whose rows S3 does not have, and what another machine has committed since."""
    old = Machine(tmp_path / "a", objects).commit(*range(4)).send()
    old.store.commit(group(*old_rows, number=2))
    old.die()
    Machine(tmp_path / "b", objects).commit(*new_rows).send().stop()


def refused(folder, objects):
    before = {
        path.name: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (".lock", "uploads.jsonl")
    }
    with pytest.raises(Fenced) as caught:
        Machine(folder, objects)
    assert caught.value.exit_code == 75
    assert f"genpipe verify {folder} --repair" in str(caught.value)
    assert json.loads(objects.get(layout.LEASE).data)["released"]
    after = {
        path.name: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (".lock", "uploads.jsonl")
    }
    assert after == before
    return str(caught.value)


SEALED = "000001.jsonl"
CASES = {
    # Rows of the old folder, and rows that the other machine committed; then the shards that fell behind, how
    # many of their records S3 has, and which of its own the old folder keeps.
    "sealed": ([4, 5, 6, 7], [7, 5, 6, 4, 8, 9, 10, 11], [SEALED], (4, 4), []),
    "sealed, some": ([4, 5, 6, 20], [4, 5, 6, 7], [SEALED], (3, 4), [20]),
    "sealed, number": ([20, 21, 22, 23], [4, 5, 6, 7], [SEALED], (0, 4), range(20, 24)),
    "open": ([4, 5], [4, 5, 6, 7], ["000001.jsonl.open"], (2, 2), []),
    "open, some": ([4, 20], [4, 5, 6, 7], ["000001.jsonl.open"], (1, 2), [20]),
    "open, number": ([20, 21], [4, 5, 6, 7], ["000001.jsonl.open"], (0, 2), [20, 21]),
    "sealed, not open": ([4, 5, 6, 7, 8, 20], [7, 5, 6, 4], [SEALED], (4, 4), [8, 20]),
    "sealed, index": ([*range(20, 27), 4], [7, 6, 5, 4], [SEALED, "000002.jsonl"], (1, 8), range(20, 27)),
    "open, index": ([*range(20, 24), 4], [7, 6, 5, 4], [SEALED, "000002.jsonl.open"], (1, 5), range(20, 24)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_overtaken_folder_is_refused_repaired_and_goes_on(tmp_path, objects, case):
    old_rows, new_rows, behind, (in_s3, records), kept = CASES[case]
    overtaken(tmp_path, objects, old_rows, new_rows)
    message = refused(tmp_path / "a", objects)
    assert f"{', '.join(f'shards/part-{name}' for name in behind)} are not what" in message
    assert f"S3 has {in_s3} of their {records} records" in message
    repair(tmp_path / "a")

    assert set(local(tmp_path / "a")) == {*range(4), *kept}
    assert max(local(tmp_path / "a").values()) == 1
    kept_aside = b"".join(path.read_bytes() for path in (tmp_path / "a" / "quarantine").glob("part-*"))
    assert {r["index"] for r in audit.whole_lines(kept_aside)} == {*old_rows} - {*kept}
    again = Machine(tmp_path / "a", objects)
    assert again.warnings == []
    everything = {*range(4), *old_rows, *new_rows}
    assert set(again.store.done) == everything
    assert again.store.sums.output_tokens == sum(10 + index for index in everything)
    again.store.seal_last()
    again.send().stop()
    assert sorted(records_in(objects)) == sorted(everything)
    report = verify.verify(tmp_path / "a", OsFiles(), progress=lambda done, total: None)
    assert report.problem_count == 0, report.as_text()


def test_an_empty_open_shard_is_overtaken_by_nobody(tmp_path, objects):
    old = Machine(tmp_path / "a", objects).commit(*range(4)).commit(4)
    old.store.close()
    open_shard = tmp_path / "a" / "shards" / "part-000001.jsonl.open"
    open_shard.write_bytes(b"")
    old.send().die()
    Machine(tmp_path / "b", objects).commit(*range(4, 8)).send().stop()
    first = Machine(tmp_path / "a", objects)
    first.stop()

    assert list(first.store.done) == list(range(8))
    assert not open_shard.exists()
    assert [path.name for path in open_shard.parent.glob("*.open")] == ["part-000002.jsonl.open"]


def test_an_open_shard_that_nobody_overtook_goes_on_growing(tmp_path, objects):
    Machine(tmp_path / "a", objects).commit(*range(6)).send().stop()
    first = Machine(tmp_path / "a", objects).commit(6)
    first.stop()

    assert len(audit.records(OsFiles(), tmp_path / "a")["part-000001.jsonl.open"]) == 3


def test_a_shard_that_was_damaged_after_it_was_sent_is_refused_and_s3_has_it_after_a_repair(
    tmp_path, objects
):
    Machine(tmp_path / "a", objects).commit(*range(8)).send().stop()
    shard = tmp_path / "a" / "shards" / "part-000000.jsonl"
    data = shard.read_bytes()
    shard.chmod(0o644)
    shard.write_bytes(data.replace(b"answer to 1", b"answer to X") + b"more")
    assert "3 of their 3" in refused(tmp_path / "a", objects)
    repair(tmp_path / "a")
    again = Machine(tmp_path / "a", objects)
    again.stop()

    assert list(again.store.done) == list(range(8))
    assert sealed(tmp_path / "a") == ["part-000001.jsonl"]
    assert again.warnings == []


def test_a_byte_that_changed_in_a_sent_shard_is_found_by_a_repair_alone_which_suffices(tmp_path, objects):
    Machine(tmp_path / "a", objects).commit(*range(8)).send().stop()
    shard = tmp_path / "a" / "shards" / "part-000001.jsonl"
    shard.chmod(0o644)
    shard.write_bytes(shard.read_bytes().replace(b"answer to 5", b"answer to X"))
    repair(tmp_path / "a")
    again = Machine(tmp_path / "a", objects)
    again.stop()

    assert (list(again.store.done), again.warnings) == (list(range(8)), [])
    assert sealed(tmp_path / "a") == ["part-000000.jsonl"]


def test_a_sealed_shard_that_s3_has_as_it_is_is_nothing_to_send_though_the_folder_did_not_know(
    tmp_path, objects
):
    first = Machine(tmp_path / "a", objects).commit(*range(8)).send()
    first.stop()
    (tmp_path / "a" / "uploads.jsonl").unlink()
    again = Machine(tmp_path / "a", objects)
    again.stop()

    assert again.store.unsent == []
    assert again.warnings == []


def test_what_a_crash_left_unsent_is_sent_at_the_next_start_in_order(tmp_path, objects):
    Machine(tmp_path / "a", objects).commit(*range(14)).stop()
    again = Machine(tmp_path / "a", objects)

    assert [entry.seq for entry in again.store.unsent] == [0, 1, 2]
    again.send().stop()
    assert sorted(records_in(objects)) == list(range(12))


def test_the_folders_own_shards_go_to_another_prefix_whole(tmp_path, objects):
    Machine(tmp_path / "a", objects).commit(*range(8)).send().stop()
    other = MemoryObjects()
    again = Machine(tmp_path / "a", other)

    assert [entry.seq for entry in again.store.unsent] == [0, 1]
    assert (tmp_path / "a" / "uploads.jsonl").read_bytes() == b""
    again.send().stop()
    assert sorted(records_in(other)) == list(range(8))


def test_a_snapshot_of_an_unknown_kind_and_one_that_is_empty_do_no_harm(tmp_path, objects):
    Machine(tmp_path / "a", objects).commit(*range(4)).send().stop()
    objects.put("w00/later/e0001-000000.zst", pack(b"?"))
    objects.put(layout.snapshot_key("tail", 1, 3), pack(b""))
    objects.put(layout.snapshot_key("segments", 1, 3), pack(b""))
    second = Machine(tmp_path / "b", objects)
    second.stop()

    assert (list(second.store.done), second.warnings) == (list(range(4)), [])
