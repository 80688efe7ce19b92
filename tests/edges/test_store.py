"""Committing, sealing, and what a crash at any step leaves."""

import asyncio
import errno
import hashlib
import json
import threading
from pathlib import Path
from random import Random

import pytest

from genpipe.core.errors import DiskFull, Fenced, StoreError
from genpipe.core.values import Group, Sums
from genpipe.edges import lines
from genpipe.edges.files import OsFiles
from genpipe.edges.store import Store, StoreThread
from tests.edges import audit
from tests.edges.audit import FOLDER
from tests.edges.memory_files import MemoryFiles, PowerLoss
from tests.edges.samples import WALL, answer, finished, given_up, group

SHARDS = FOLDER / "shards"


def disk() -> MemoryFiles:
    return MemoryFiles([FOLDER])


def open_store(files, folder=FOLDER, *, warnings=None, **options) -> Store:
    def warn(line):
        if warnings is None:
            pytest.fail(f"unexpected warning: {line}")
        warnings.append(line)

    return Store.open(folder, files, **{"shard_records": 4, "wall": WALL, "warn": warn, **options})


def test_a_commit_leaves_lines_and_then_their_indices():
    files = disk()
    store = open_store(files)
    store.commit(group(3, 0, 7))
    store.close()

    assert [r["index"] for r in audit.records(files)["part-000000.jsonl.open"]] == [3, 0, 7]
    assert files.read(FOLDER / ".done_indices") == b"3\n0\n7\n"
    assert list(store.done) == [0, 3, 7]
    assert (store.sums.records, store.sums.output_tokens) == (3, 10 + 13 + 17)
    assert files.open_count == 0


def test_a_group_costs_one_sync_and_its_indices_come_after_it():
    files = disk()
    store = open_store(files)
    begin = len(files.log)
    store.commit(group(0, 1, 2))

    shard, indices = "part-000000.jsonl.open", ".done_indices"
    assert files.log[begin:] == [("write", shard), ("sync", shard), ("write", indices)]
    store.close()


def test_failures_are_durable_before_they_count_and_are_not_done():
    files = disk()
    store = open_store(files)
    store.commit(group(0, failures=[given_up(1), given_up(2, for_good=False)]))
    store.close()

    after = open_store(files.crash(), warnings=[])
    assert [
        (e["index"], e["for_good"]) for e in audit.whole_lines(files.crash().read(FOLDER / "failed.jsonl"))
    ] == [
        (1, True),
        (2, False),
    ]
    for seen in (store, after):
        assert list(seen.done) == [0]
        assert (seen.failed_now_count, seen.failed_for_good_count) == (2, 1)
    assert list(after.skip) == [0, 1]
    after.close()


def test_failures_for_good_are_offered_again_when_asked_for():
    files = disk()
    store = open_store(files)
    store.commit(group(0, failures=[given_up(1), given_up(2, for_good=False)]))
    store.close()
    store = open_store(files, retry_failed=True)

    assert list(store.skip) == [0]
    store.commit(group(1, failures=[given_up(2, for_good=True)]))
    assert (store.failed_now_count, store.failed_for_good_count) == (1, 1)
    assert list(store.skip) == [0]
    store.close()
    store = open_store(files)
    assert list(store.skip) == [0, 1, 2]
    assert (store.failed_now_count, store.failed_for_good_count) == (1, 1)
    store.close()


def test_a_full_shard_is_sealed_in_the_order_of_the_format():
    files = disk()
    sealed = []
    store = open_store(files, on_sealed=lambda path, line: sealed.append((path, line)), epoch=3)
    store.commit(group(0, 1, 2))
    begin = len(files.log)
    store.commit(group(9, 4, 5))

    first, second = "part-000000.jsonl.open", "part-000001.jsonl.open"
    assert files.log[begin:] == [
        ("write", first),
        ("sync", first),
        ("write", ".done_indices"),
        ("rename", first),
        ("create", second),
        ("sync_folder", "shards"),
        ("sync", ".done_indices"),
        ("write", "manifest.jsonl"),
        ("sync", "manifest.jsonl"),
        ("write", second),
        ("sync", second),
        ("write", ".done_indices"),
    ]
    data = files.read(SHARDS / "part-000000.jsonl")
    [(path, line)] = sealed
    assert path == SHARDS / "part-000000.jsonl"
    assert line == files.read(FOLDER / "manifest.jsonl")
    entry = json.loads(lines.decode(line) or b"")
    assert (entry["seq"], entry["file"], entry["epoch"]) == (0, "part-000000.jsonl", 3)
    assert (entry["bytes"], entry["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert (entry["count"], entry["indices"]) == (4, [[0, 2], [9, 9]])
    assert entry["sums"]["output_tokens"] == 10 + 11 + 12 + 19
    assert store.next_seq == 1
    store.close()


def test_a_group_of_several_shards_is_split_where_they_end():
    files = disk()
    store = open_store(files)
    store.commit(group(*range(11)))
    store.close()

    assert {name: len(part) for name, part in audit.records(files).items()} == {
        "part-000000.jsonl": 4,
        "part-000001.jsonl": 4,
        "part-000002.jsonl.open": 3,
    }
    audit.check(files, range(11))
    audit.check_at_rest(files)


@pytest.mark.parametrize("write_max", [1, 7, 100])
def test_short_writes_are_gone_on_with(write_max):
    files = MemoryFiles([FOLDER], write_max=write_max)
    store = open_store(files)
    store.commit(group(*range(6), failures=[given_up(9)]))
    store.close()

    audit.check(files, range(6))
    audit.check_at_rest(files)
    assert len(audit.whole_lines(files.read(FOLDER / "failed.jsonl"))) == 1


def test_the_short_shard_is_sealed_at_the_end():
    files = disk()
    store = open_store(files)
    store.commit(group(*range(6)))
    store.seal_last()
    store.close()

    assert sorted(files.sizes(SHARDS)) == ["part-000000.jsonl", "part-000001.jsonl"]
    after = files.crash()
    audit.check_at_rest(after)
    store = open_store(after)
    assert store.next_seq == 2
    store.commit(group(6))
    audit.check(after, range(7))
    store.close()


def test_no_empty_shard_is_left_at_the_end():
    files = disk()
    store = open_store(files)
    store.commit(group(*range(4)))
    store.seal_last()
    store.close()

    assert sorted(files.crash().sizes(SHARDS)) == ["part-000000.jsonl"]
    with pytest.raises(StoreError, match="takes no more records"):
        store.commit(group(5))


@pytest.mark.parametrize(
    "again", [group(1), group(5, 5), group(failures=[given_up(1)]), group(5, failures=[given_up(5)])]
)
def test_a_prompt_that_ends_twice_is_a_bug_of_which_nothing_reaches_the_disk(again):
    files = disk()
    store = open_store(files)
    store.commit(group(0, 1))
    begin = len(files.log)

    with pytest.raises(AssertionError):
        store.commit(again)
    assert len(files.log) == begin
    store.close()


@pytest.mark.parametrize(
    ("step", "name", "code", "kind"),
    [
        ("write", "part-000000.jsonl.open", errno.ENOSPC, DiskFull),
        ("write", "part-000000.jsonl.open", errno.EDQUOT, DiskFull),
        ("sync", "part-000000.jsonl.open", errno.EIO, StoreError),
        ("rename", "part-000000.jsonl.open", errno.EIO, StoreError),
        ("create", "part-000001.jsonl.open", errno.ENOSPC, DiskFull),
        ("sync_folder", "shards", errno.EIO, StoreError),
        ("sync", ".done_indices", errno.EIO, StoreError),
        ("write", "manifest.jsonl", errno.ENOSPC, DiskFull),
        ("sync", "failed.jsonl", errno.EIO, StoreError),
        ("write", "part-000001.jsonl.open", errno.ENOSPC, DiskFull),
    ],
)
def test_a_refusal_ends_the_store_and_costs_nothing_that_was_acknowledged(step, name, code, kind):
    files = disk()
    store = open_store(files)
    store.commit(group(0, 1))
    files.refuse[step, name] = code

    with pytest.raises(StoreError, match=name) as caught:
        store.commit(group(2, 3, 4, failures=[given_up(5)]))
    assert type(caught.value) is kind
    begin = len(files.log)
    with pytest.raises(StoreError):
        store.commit(group(6))
    assert len(files.log) == begin, "a failed sync must not be tried again"
    store.close()
    assert files.open_count == 0
    files.refuse.clear()
    for after in (files.kill(), files.crash()):
        store = open_store(after, warnings=[])
        audit.check(after, [0, 1], maybe=[2, 3, 4])
        audit.check_at_rest(after)
        assert set(store.done) == set(audit.counts(after))
        store.close()


def test_a_folder_that_was_taken_over_is_not_sealed():
    files = disk()

    def guard():
        raise Fenced("theirs")

    store = open_store(files, guard=guard)
    with pytest.raises(Fenced):
        store.commit(group(*range(4)))
    store.close()

    assert list(files.sizes(SHARDS)) == ["part-000000.jsonl.open"]


def test_settings_go_into_every_record():
    files = disk()
    store = open_store(files, settings="0123456789abcdef")
    store.commit(group(0))
    store.close()

    [record] = audit.records(files)["part-000000.jsonl.open"]
    assert record["settings"] == "0123456789abcdef"


WORKLOAD = [
    group(2, 0, 1),
    group(5, 3, failures=[given_up(20), given_up(21, for_good=False)]),
    group(21, 4),
    group(6),
    group(9, 8, 7, 10),
]


def work(files) -> list[int]:
    """Carry out the workload over as many starts as it takes; what was acknowledged, when the power went."""
    acked: list[int] = []
    try:
        store = open_store(files, shard_records=4, warnings=[])
        for part in WORKLOAD:
            indices = [f.prompt.index for f in part.finished if f.prompt.index not in store.done]
            store.commit(group(*indices, failures=[g for g in part.given_up if g.index not in store.done]))
            acked += indices
        store.seal_last()
        store.close()
    except PowerLoss:
        pass
    return acked


ALL = sorted(f.prompt.index for part in WORKLOAD for f in part.finished)


def crash_everywhere(ways, *, lazy=(), write_max=1 << 30) -> int:
    """Let the power go before each step, and again in the recovery; the number of crashes tried."""
    whole = MemoryFiles([FOLDER], write_max=write_max)
    work(whole)
    assert sorted(audit.counts(whole)) == ALL
    tried = 0
    for step in range(len(whole.log) + 1):
        for way in ways:
            files = MemoryFiles([FOLDER], stop_before=step, write_max=write_max)
            files.lazy = set(lazy)
            acked = work(files)
            after = way(files, step)
            audit.check(after, acked, maybe=ALL)
            for again in (None, step % 11):
                second = after.kill()
                second.stop_before = again
                try:
                    open_store(second, warnings=[]).close()
                except PowerLoss:
                    second = way(second, step)
                    audit.check(second, acked, maybe=ALL)
                second.stop_before = None
                store = open_store(second, warnings=[])
                audit.check(second, acked, maybe=ALL)
                audit.check_at_rest(second)
                assert set(store.done) == set(audit.counts(second))
                assert store.sums.records == len(store.done)
                assert store.sums.output_tokens == sum(10 + index for index in store.done)
                store.close()
            work(second)
            audit.check(second, ALL)
            audit.check_at_rest(second)
            tried += 1
    return tried


def torn(seed):
    return lambda files, step: files.crash(Random(f"{seed}-{step}"))


def test_nothing_is_lost_or_doubled_when_the_power_goes_before_any_step():
    tried = crash_everywhere([lambda files, _: files.crash(), lambda files, _: files.kill()])

    assert tried > 80


@pytest.mark.parametrize("write_max", [1 << 30, 150])
def test_nothing_is_lost_or_doubled_when_any_part_of_what_was_not_synced_survives(write_max):
    crash_everywhere([torn(seed) for seed in range(6)], write_max=write_max)


@pytest.mark.parametrize("lazy", ["sync", "sync_folder"])
def test_the_crashes_would_show_a_sync_that_is_left_out(lazy):
    with pytest.raises(AssertionError, match="lost"):
        crash_everywhere([lambda files, _: files.crash()], lazy=[lazy])


def test_the_books_of_a_resumed_run_are_those_of_a_whole_one():
    given = [
        answer(output_tokens=None),
        answer("", finish_reason="length"),
        answer(output_tokens=9, usage=None),
        answer(output_tokens=100_000),
    ]
    many = [finished(n, given[n % 4]) for n in range(22)]
    files = disk()
    whole = Sums()
    for number, one in enumerate(many):
        store = open_store(files, shard_records=5)
        store.commit(Group(number=number + 1, finished=(one,), given_up=()))
        store.close()
        whole.add(one.answer.output_tokens, one.answer.flags)
    store = open_store(files, shard_records=5)

    assert store.sums.as_json() == whole.as_json()
    store.close()


def test_the_thread_does_the_work_in_order_and_closes_everything(tmp_path: Path):
    threads = set()

    async def scenario():
        store = StoreThread(
            open_store(OsFiles(), tmp_path, on_sealed=lambda *_: threads.add(threading.current_thread().name))
        )
        for start in range(0, 20, 3):
            await store.commit(group(*range(start, start + 3)))
        with pytest.raises(AssertionError):
            await store.commit(group(0))
        await store.close()

    asyncio.run(scenario())
    [name] = threads
    assert name.startswith("genpipe-store")
    assert name not in {thread.name for thread in threading.enumerate()}
    audit.check(OsFiles(), range(21), folder=tmp_path)


def test_a_cancelled_commit_is_carried_out_to_its_end(tmp_path: Path):
    async def scenario():
        inner = open_store(OsFiles(), tmp_path)
        store = StoreThread(inner)
        task = asyncio.ensure_future(store.commit(group(0, 1, 2)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await store.close()
        return list(inner.done)

    assert asyncio.run(scenario()) == [0, 1, 2]
    audit.check(OsFiles(), range(3), folder=tmp_path)
