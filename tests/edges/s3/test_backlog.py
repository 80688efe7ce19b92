"""What waits for the store, and what stands between an uploader and a prefix that is another's."""

import threading

import pytest

from genpipe.core.errors import Fenced
from genpipe.edges.record import encode_finished
from genpipe.edges.s3 import backlog as module
from genpipe.edges.s3.backlog import Backlog, Uploaded
from genpipe.edges.s3.fence import Fence
from genpipe.edges.shards import Tally
from tests.edges.s3.memory_objects import MemoryObjects
from tests.edges.samples import WALL, finished


def taken(backlog):
    entry = backlog.take()
    assert entry is not None
    return entry


def entry_of(seq):
    return Tally.of([encode_finished(finished(seq), WALL, None)]).entry(seq, 1)


def test_a_shard_that_failed_comes_back_behind_all_others_and_later_each_time(monkeypatch):
    monkeypatch.setattr(module, "PAUSE_S", 1.0)
    monkeypatch.setattr(module, "PAUSE_MAX_S", 30.0)
    now_s = 100.0
    backlog = Backlog([entry_of(0), entry_of(1)], now_s=lambda: now_s)
    dues: list[float] = []
    for _ in range(9):
        first = taken(backlog)
        assert first.seq == 0
        backlog.put_back(first)
        if not dues:
            assert taken(backlog).seq == 1
        dues.append(backlog._asleep[0][0] - now_s)
        now_s += 31

    for rounds, due_s in enumerate(dues):
        longest_s = min(30.0, 2.0**rounds)
        assert longest_s / 2 <= due_s <= longest_s
    assert len(set(dues)) == len(dues)


def test_a_shard_that_was_committed_from_elsewhere_is_not_uploaded_any_more():
    backlog = Backlog([entry_of(0), entry_of(1)])
    entry = taken(backlog)
    backlog.committed(0)
    backlog.committed(1)

    assert not backlog.uploaded(Uploaded(entry=entry, key="k", object_bytes=1))
    backlog.put_back(entry)
    assert backlog.failed == len(backlog) == 0
    assert backlog.wait_empty(0)
    backlog.add(entry_of(2))
    assert taken(backlog).seq == 2


def test_the_backlog_counts_what_failed_and_gives_the_lowest_number_to_be_committed():
    backlog = Backlog([entry_of(0), entry_of(1)])
    one, two = taken(backlog), taken(backlog)
    backlog.put_back(one)
    assert backlog.failed == 1
    assert taken(backlog) == one
    backlog.uploaded(Uploaded(entry=two, key="k1", object_bytes=1))
    backlog.uploaded(Uploaded(entry=one, key="k0", object_bytes=1))
    assert backlog.failed == 0
    backlog.stumbled(one)
    assert backlog.failed == 1
    first = backlog.next_uploaded()
    assert first is not None
    assert first.entry == one
    assert backlog.committed(0) is first
    assert backlog.failed == 0

    second = backlog.next_uploaded()
    assert second is not None
    assert second.entry == two


def test_a_closed_backlog_lets_nobody_wait():
    backlog = Backlog([])
    threads = [threading.Thread(target=step) for step in (backlog.take, backlog.next_uploaded)]
    for thread in threads:
        thread.start()
    backlog.close()
    for thread in threads:
        thread.join(5)

    assert not any(thread.is_alive() for thread in threads)


def test_behind_a_shut_fence_nothing_is_written_and_everything_can_be_read():
    objects = MemoryObjects()
    told: list[Fenced] = []
    fence = Fence(objects, told.append)
    fence.put("a", b"1")
    was_shut = fence.is_shut
    first = Fenced("first")
    fence.shut(first)
    fence.shut(Fenced("second"))
    for step in (lambda: fence.put("b", b"2"), lambda: fence.delete("a")):
        with pytest.raises(Fenced, match="first"):
            step()

    assert (was_shut, fence.is_shut) == (False, True)
    assert told == [first]
    assert objects.keys() == ["a"]
    assert fence.get("a") == objects.get("a")
    assert [listed.key for listed in fence.list("")] == ["a"]
