"""Committing, sealing, and what a crash at any step leaves."""

import asyncio
import errno
import hashlib
import itertools
import json
import threading
from pathlib import Path
from random import Random

import pytest

from genpipe.core.errors import DiskFull, Fenced, StoreError
from genpipe.core.sums import Sums
from genpipe.core.values import Group
from genpipe.edges import lines, record
from genpipe.edges import store as store_module
from genpipe.edges.files import OsFiles
from genpipe.edges.shards import Entry
from genpipe.edges.store import Store
from genpipe.edges.store_thread import StoreThread
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
        assert seen.failed_for_good_count == 1
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
    assert store.failed_for_good_count == 1
    assert list(store.skip) == [0]
    store.close()
    store = open_store(files)
    assert list(store.skip) == [0, 1, 2]
    assert store.failed_for_good_count == 1
    store.close()


def test_a_full_shard_is_sealed_in_the_order_of_the_format():
    files = disk()
    sealed: list[Entry] = []
    store = open_store(files, on_sealed=sealed.append, epoch=3)
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
    [told] = sealed
    line = told.encode()
    assert line == files.read(FOLDER / "manifest.jsonl")
    entry = json.loads(lines.decode(line) or b"")
    assert (entry["seq"], entry["file"], entry["epoch"]) == (0, "part-000000.jsonl", 3)
    assert (entry["bytes"], entry["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert (entry["count"], entry["indices"]) == (4, [[0, 2], [9, 9]])
    assert entry["sums"]["output_tokens"] == 10 + 11 + 12 + 19
    with pytest.raises(PermissionError):
        files.open_append(SHARDS / "part-000000.jsonl", new=False)
    store.close()


def test_a_store_knows_what_was_sealed_and_not_sent_when_it_began():
    files = disk()
    sealed: list[Entry] = []
    store = open_store(files, on_sealed=sealed.append)
    store.commit(group(*range(9)))
    assert store.unsent == []
    store.seal_last()
    store.close()
    assert [entry.seq for entry in sealed] == [0, 1, 2]
    again = open_store(files, on_sealed=sealed.append)
    again.close()

    assert [entry.encode() for entry in again.unsent] == [entry.encode() for entry in sealed]
    assert len(sealed) == 3


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
    store.commit(group(6))
    assert "part-000002.jsonl.open" in after.sizes(SHARDS)
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


FIRST, SECOND = "part-000000.jsonl.open", "part-000001.jsonl.open"
LATER = group(2, 3, 4, failures=[given_up(5)], number=2)
"""A group that fills the first shard after two records, and goes on in the second."""


def check_after(files, *, acked, maybe=()):
    """What a kill and a power loss at this moment leave, after a start."""
    for after in (files.kill(), files.crash()):
        store = open_store(after, warnings=[])
        audit.check(after, acked, maybe=maybe)
        audit.check_at_rest(after)
        assert set(store.done) == set(audit.counts(after))
        store.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(
    ("step", "name"),
    [
        ("write", FIRST),
        ("sync", FIRST),
        ("rename", FIRST),
        ("create", SECOND),
        ("write", SECOND),
        ("sync", SECOND),
        ("write", "failed.jsonl"),
        ("sync", "failed.jsonl"),
    ],
)
def test_a_group_that_met_a_full_disk_may_come_again_and_stands_there_once(step, name, code):
    files = disk()
    store = open_store(files)
    store.commit(group(0, 1))
    # A shard whose sync failed is left for the next one, which must meet the full disk too.
    names = (
        [f"part-00000{seq}.jsonl.open" for seq in range(6)]
        if (step, name[:4]) == ("sync", "part")
        else [name]
    )
    files.refuse = {(step, one): code for one in names}

    for _ in range(3):
        with pytest.raises(DiskFull, match=r"[Ss]pace|[Qq]uota"):
            store.commit(LATER)
        check_after(files, acked=[0, 1], maybe=[2, 3, 4])
    files.refuse.clear()
    store.commit(LATER)
    check_after(files, acked=range(5))
    store.commit(group(6, 7, 8, number=3))
    store.seal_last()
    store.close()

    check_after(files, acked=[*range(5), 6, 7, 8])
    assert {line["index"] for line in audit.whole_lines(files.read(FOLDER / "failed.jsonl"))} == {5}
    assert list(store.done) == [*range(5), 6, 7, 8]
    assert files.open_count == 0


def test_two_groups_that_met_a_full_disk_half_way_go_on_where_they_were():
    files = disk()
    store = open_store(files)
    store.commit(group(0, 1))
    files.refuse["write", SECOND] = errno.ENOSPC
    first, second = group(*range(2, 12), number=2), group(*range(12, 22), number=3)
    for part in (first, second, first, second):
        with pytest.raises(DiskFull):
            store.commit(part)
    files.refuse.clear()
    store.commit(second)
    store.commit(first)
    store.close()

    check_after(files, acked=range(22))


@pytest.mark.parametrize(("step", "name"), [("write", ".done_indices"), ("write", "manifest.jsonl")])
def test_a_list_that_finds_no_room_lags_and_stops_nobody(step, name):
    files = disk()
    store = open_store(files)
    files.refuse[step, name] = errno.ENOSPC
    for number in range(5):
        store.commit(group(2 * number, 2 * number + 1, number=number + 1))
    check_after(files, acked=range(10))
    files.refuse.clear()
    for number in range(5, 7):
        store.commit(group(2 * number, 2 * number + 1, number=number + 1))
    store.seal_last()
    store.close()

    audit.check_at_rest(files)


def test_a_run_is_not_sealed_while_the_manifest_finds_no_room():
    files = disk()
    store = open_store(files)
    store.commit(group(*range(5)))
    files.refuse["write", "manifest.jsonl"] = errno.ENOSPC

    with pytest.raises(DiskFull, match="manifest"):
        store.seal_last()
    store.close()
    check_after(files, acked=range(5))


@pytest.mark.parametrize(
    ("step", "name"),
    [
        ("write", FIRST),
        ("sync", FIRST),
        ("write", SECOND),
        ("sync", SECOND),
        ("write", ".done_indices"),
        ("sync", ".done_indices"),
        ("write", "manifest.jsonl"),
        ("sync", "manifest.jsonl"),
        ("write", "failed.jsonl"),
        ("sync", "failed.jsonl"),
    ],
)
def test_where_the_disk_errs_once_a_new_file_is_begun_and_nothing_is_synced_again(step, name):
    files = disk()
    store = open_store(files)
    store.commit(group(0, 1))
    files.refuse_once[step, name] = errno.EIO
    store.commit(LATER)
    check_after(files, acked=range(5))
    store.commit(group(6, 7, 8, 9, 10, number=3))
    store.seal_last()
    store.close()

    assert not files.refuse_once, "the step was never taken"
    check_after(files, acked=[*range(5), *range(6, 11)])
    audit.check_at_rest(files)
    if name in (FIRST, SECOND):
        assert len(audit.records(files).get(name.removesuffix(".open"), ())) < 4
        failed_at = max(n for n, entry in enumerate(files.log) if entry == (step, name))
        assert not [entry for entry in files.log[failed_at + 1 :] if entry == ("sync", name)]


def test_nothing_is_written_anew_while_the_manifest_finds_no_room_for_the_shard_that_was_cut():
    files = disk()
    store = open_store(files)
    store.commit(group(0, 1))
    files.refuse_once["sync", FIRST] = errno.EIO
    files.refuse["write", "manifest.jsonl"] = errno.ENOSPC
    for _ in range(2):
        with pytest.raises(DiskFull, match="manifest"):
            store.commit(group(2, number=2))
        assert files.read(SHARDS / SECOND) == b""
    files.refuse.clear()
    store.commit(group(2, number=2))
    store.close()

    check_after(files, acked=[0, 1, 2])


def test_a_shard_without_a_durable_record_is_removed_where_the_disk_errs():
    files = disk()
    store = open_store(files)
    files.refuse_once["sync", FIRST] = errno.EIO
    store.commit(group(0, 1))
    store.close()

    assert list(files.sizes(SHARDS)) == [SECOND]
    check_after(files, acked=[0, 1])


@pytest.mark.parametrize("power_goes_after", [("sync", "manifest.jsonl"), ("sync", SECOND)])
def test_the_cut_of_a_shard_holds_though_the_power_goes_before_it_is_on_disk(power_goes_after):
    """The bytes whose sync failed may be on disk all the same, and the cut may not."""
    files = disk()
    store = open_store(files)
    store.commit(group(0, 1))
    before = files.read(SHARDS / FIRST)
    files.refuse_once["sync", FIRST] = errno.EIO
    store.commit(group(2, number=2))
    store.close()
    written = files.read(SHARDS / SECOND)
    after = files.crash()
    sealed = SHARDS / FIRST.removesuffix(".open")
    assert after.read(sealed) == before
    after.put(sealed, before + written)
    if power_goes_after[1] != SECOND:
        after.put(SHARDS / SECOND, b"")

    warnings: list[str] = []
    store = open_store(after, warnings=warnings)
    store.close()
    audit.check(after, [0, 1], maybe=[2])
    audit.check_at_rest(after)
    assert after.read(sealed) == before
    assert len(warnings) >= 1


@pytest.mark.parametrize(
    ("step", "name"),
    [
        ("write", "part"),
        ("sync", "part"),
        ("rename", FIRST),
        ("create", SECOND),
        ("sync_folder", "shards"),
        ("truncate", FIRST),
        ("sync", ".done_indices"),
        ("write", "manifest.jsonl"),
        ("sync", "manifest.jsonl"),
        ("sync", "failed.jsonl"),
    ],
)
def test_a_disk_that_goes_on_to_err_ends_the_store_and_costs_nothing_that_was_acknowledged(step, name):
    files = disk()
    store = open_store(files)
    store.commit(group(0, 1))
    names = [FIRST, SECOND] if name == "part" else [name, f"{name}.tmp"]
    files.refuse = {(step, one): errno.EIO for one in names}
    if step == "truncate":
        files.refuse_once["sync", FIRST] = errno.EIO

    def commit_both():
        store.commit(LATER)
        # What befalls the lists of a sealed shard, beside the commits, is met by the next one.
        store.commit(group(6, number=3))

    with pytest.raises(StoreError) as caught:
        commit_both()
    assert type(caught.value) is StoreError
    for one in names:
        assert files.log.count(("sync", one)) <= 2, "a sync that failed must not be tried again"
    begin = len(files.log)
    with pytest.raises(StoreError, match="takes no more"):
        store.commit(group(7, number=4))
    assert len(files.log) == begin
    store.close()
    assert files.open_count == 0
    files.refuse.clear()
    check_after(files, acked=[0, 1], maybe=[2, 3, 4, 6])


def taken_over_after(calls_before):
    """The guard of a folder that is somebody else's after so many looks."""
    calls = itertools.count()

    def guard():
        if next(calls) >= calls_before:
            raise Fenced("theirs")

    return guard


@pytest.mark.parametrize("calls_before", [0, 1])
def test_a_folder_that_was_taken_over_is_not_written_to_and_nothing_counts_in_it(calls_before):
    files = disk()
    store = open_store(files, guard=taken_over_after(calls_before))
    with pytest.raises(Fenced):
        store.commit(group(0, 1))
    assert list(store.done) == []
    assert files.read(FOLDER / ".done_indices") == b""
    assert bool(files.read(SHARDS / FIRST)) == bool(calls_before)
    store.close()


def test_a_folder_that_was_taken_over_is_not_sealed():
    files = disk()
    store = open_store(files, guard=taken_over_after(0))
    with pytest.raises(Fenced):
        store.commit(group(*range(4)))
    store.close()

    assert list(files.sizes(SHARDS)) == ["part-000000.jsonl.open"]


@pytest.mark.parametrize("calls_before", [0, 1])
def test_failures_alone_are_not_written_or_do_not_count_in_a_folder_that_was_taken_over(calls_before):
    files = disk()
    store = open_store(files, guard=taken_over_after(calls_before))
    with pytest.raises(Fenced):
        store.commit(group(failures=[given_up(5)]))
    assert store.failed_for_good_count == 0
    assert bool(files.read(FOLDER / "failed.jsonl")) == bool(calls_before)
    store.close()


def test_a_sync_that_meets_a_full_disk_again_and_again_is_waited_for_in_the_lists_too():
    files = disk()
    store = open_store(files)
    for number in range(1, 4):
        files.refuse_once["sync", "failed.jsonl"] = errno.ENOSPC
        files.refuse_once["create", "failed.jsonl.tmp"] = errno.ENOSPC
        with pytest.raises(DiskFull):
            store.commit(group(failures=[given_up(number)], number=number))
        store.commit(group(failures=[given_up(number)], number=number))
    store.close()

    assert {line["index"] for line in audit.whole_lines(files.crash().read(FOLDER / "failed.jsonl"))} == {
        1,
        2,
        3,
    }


def test_what_is_added_while_a_list_is_synced_is_written_once_where_the_next_sync_fails():
    files = disk()
    store = open_store(files)
    real = files.sync
    meanwhile = [group(5, number=2)]

    def sync(handle):
        if files._open[handle][0].name == ".done_indices" and meanwhile:
            store._done_indices._appender.append(b"")
            store._done_indices.add(b"4\n")
            meanwhile.clear()
        real(handle)

    files.sync = sync  # type: ignore[method-assign]
    store._done_indices.add(b"1\n2\n")
    store._done_indices.sync()
    files.refuse_once["sync", ".done_indices"] = errno.EIO
    store._done_indices.sync()
    store.close()

    assert files.read(FOLDER / ".done_indices") == b"1\n2\n4\n"


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


@pytest.mark.slow
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
            open_store(OsFiles(), tmp_path, on_sealed=lambda _: threads.add(threading.current_thread().name))
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


class WatchedFiles:
    """The machine's files, with a note of the threads that touched them."""

    def __init__(self) -> None:
        self.threads: dict[str, set[int]] = {}

    def __getattr__(self, name):
        step = getattr(OsFiles(), name)

        def watched(*args, **kwargs):
            self.threads.setdefault(name, set()).add(threading.get_ident())
            return step(*args, **kwargs)

        return watched


def test_no_step_of_a_commit_is_done_on_the_thread_of_the_event_loop(tmp_path: Path, monkeypatch):
    encoders = set()
    real = record.encode_finished

    def encode_finished(*args):
        encoders.add(threading.get_ident())
        return real(*args)

    monkeypatch.setattr(store_module, "encode_finished", encode_finished)
    files = WatchedFiles()

    async def scenario():
        pool = StoreThread.make_pool()
        store = StoreThread(await asyncio.to_thread(open_store, files, tmp_path, pool=pool))
        commits = [
            store.commit(group(*range(start, start + 3), failures=[given_up(100 + start)], number=start + 1))
            for start in range(0, 20, 3)
        ]
        await asyncio.gather(*commits)
        await store.space()
        await store.seal_last()
        await store.close()
        pool.shutdown()
        return threading.get_ident()

    loop_thread = asyncio.run(scenario())

    assert {"write", "sync", "rename", "sync_folder", "space", "make_read_only", "close"} <= set(
        files.threads
    )
    assert loop_thread not in set().union(*files.threads.values(), encoders)
    # The next group is encoded, and a full shard's lists are synced, beside the writer.
    [writer] = files.threads["write"] & files.threads["rename"]
    assert encoders - {writer}
    assert files.threads["make_read_only"].isdisjoint({writer})
    audit.check_at_rest(OsFiles(), tmp_path)


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
