"""Sealed shards come to stand in the log, each once, whatever the store does meanwhile."""

import json
import random
import threading
import time
from contextlib import contextmanager

import pytest

from genpipe.core.errors import Fenced, ObjectStoreError, StoreError, TroubleKind
from genpipe.edges.files import OsFiles
from genpipe.edges.record import encode_finished
from genpipe.edges.s3 import backlog as backlog_module
from genpipe.edges.s3 import housekeeping, layout
from genpipe.edges.s3.commits import UPLOADS, Commit, decode_all
from genpipe.edges.s3.lease import Lease
from genpipe.edges.s3.packing import pack, unpack
from genpipe.edges.s3.troubles import Troubles
from genpipe.edges.s3.uploader import Uploader, UploadSettings
from genpipe.edges.shards import Tally, shard_name
from tests.edges.s3.memory_objects import MemoryObjects
from tests.edges.samples import WALL, finished

NEVER_S = 1000.0


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(backlog_module, "PAUSE_S", 0.02)
    monkeypatch.setattr(backlog_module, "PAUSE_MAX_S", 0.05)


def away(text="away"):
    return ObjectStoreError(text, kind=TroubleKind.UNREACHABLE)


def lines_of(*indices):
    return [encode_finished(finished(index), WALL, None) for index in indices]


def texts(log):
    return {number: commit.encode() for number, commit in log.items()}


def until(condition, timeout_s=5.0):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it did not come about"
        time.sleep(0.005)


class Driver:
    """One claim of a prefix, with a run folder."""

    def __init__(
        self,
        folder,
        objects,
        *,
        nonce="aa",
        previous_nonce=None,
        seqs=(),
        commits=None,
        orphans=(),
        next_number=None,
        **changes,
    ):
        self.folder = folder
        (folder / "shards").mkdir(parents=True, exist_ok=True)
        self.objects = objects
        self.troubles = Troubles()
        self.fenced: list[Fenced] = []
        self.lease = Lease.claim(
            objects,
            owner={"host": nonce, "pid": 1},
            nonce=nonce,
            previous_nonce=previous_nonce,
            epoch_min=1,
            ttl_s=0.3,
            pause=lambda seconds: None,
            warn=lambda text: None,
        )
        self.entries = [self.seal(seq) for seq in seqs]
        fields = {"tail_s": NEVER_S, "progress_s": NEVER_S, "lease_s": NEVER_S, **changes}
        self.uploader = Uploader(
            folder,
            OsFiles(),
            objects,
            self.lease,
            run_id="run-1",
            commits=commits or {},
            backlog=self.entries,
            orphans=orphans,
            troubles=self.troubles,
            settings=UploadSettings(**fields),
            on_fenced=self.fenced.append,
            next_number=next_number,
        )

    def seal(self, seq, indices=None):
        """A sealed shard, as the store leaves it."""
        good = lines_of(*(indices or (10 * seq, 10 * seq + 1)))
        (self.folder / "shards" / shard_name(seq, is_open=False)).write_bytes(b"".join(good))
        return Tally.of(good).entry(seq, 1)

    def commit(self, number, entry, *, nonce="old", epoch=0, key=None):
        return Commit(
            number=number,
            run_id="run-1",
            entry=entry,
            key=key or layout.shard_key(entry.seq, epoch, nonce),
            object_bytes=7,
            epoch=epoch,
            nonce=nonce,
        )

    @property
    def uploads(self):
        return texts(decode_all((self.folder / UPLOADS).read_bytes()))


@pytest.fixture
def objects():
    return MemoryObjects()


@pytest.fixture
def weak():
    return MemoryObjects(is_conditional=False)


@contextmanager
def started(*drivers, close_s=2.0):
    for driver in drivers:
        driver.uploader.start()
    try:
        yield drivers[0].uploader
    finally:
        for driver in drivers:
            driver.uploader.close(close_s)


def lease_of(objects):
    """The lease, read behind the port's back."""
    return json.loads(objects._objects[layout.LEASE].data)


def log_of(objects):
    """The commits in the store, by number; every one of them counts, and there is no gap."""
    found = {}
    for key in objects.keys(layout.COMMITS):
        number = layout.number_of_commit(key)
        commit = Commit.decode(objects.get(key).data)
        assert commit is not None
        assert commit.number == number
        found[number] = commit
    assert sorted(found) == list(range(len(found)))
    return found


def check_whole(objects, entries):
    """Each of these shards is committed exactly once, and its object holds its bytes."""
    log = log_of(objects)
    assert sorted(commit.entry.seq for commit in log.values()) == sorted(entry.seq for entry in entries)
    by_seq = {commit.entry.seq: commit for commit in log.values()}
    for entry in entries:
        commit = by_seq[entry.seq]
        fetched = objects.get(commit.key)
        assert entry.covers(unpack(fetched.data))
        assert commit.entry.says_the_same(entry)
        assert commit.object_bytes == len(fetched.data)
    return log


# ---- all is well ----


@pytest.mark.parametrize("is_conditional", [True, False])
def test_what_waits_and_what_is_sealed_later_comes_to_stand_in_the_log(tmp_path, is_conditional):
    objects = MemoryObjects(is_conditional=is_conditional)
    driver = Driver(tmp_path, objects, seqs=range(3))
    with started(driver) as uploader:
        assert uploader.drain(5)
        later = driver.seal(3)
        uploader.sealed(later)
        assert uploader.drain(5)

    log = check_whole(objects, [*driver.entries, later])
    assert driver.uploads == texts(log)
    assert uploader.waiting == 0
    assert uploader.missing() == []
    assert driver.fenced == []


def test_an_object_tells_whose_bytes_it_holds(tmp_path, objects):
    driver = Driver(tmp_path, objects, seqs=[4])
    with started(driver) as uploader:
        assert uploader.drain(5)

    fetched = objects.get("w00/shards/part-000004-e0001-aa.jsonl.zst")
    assert fetched.metadata == {"sha256": driver.entries[0].digest, "run-id": "run-1"}


def test_one_shard_after_the_other_goes_by_its_number(tmp_path, objects):
    driver = Driver(tmp_path, objects)
    with started(driver) as uploader:
        for seq in range(5):
            uploader.sealed(driver.seal(seq))
            assert uploader.drain(5)

    assert [commit.entry.seq for _, commit in sorted(log_of(objects).items())] == list(range(5))


@pytest.mark.parametrize("seed", range(5))
def test_commits_are_put_one_after_the_other_whatever_the_shards_do(tmp_path, objects, seed):
    rng = random.Random(seed)
    under_way, most, numbers, lock = 0, 0, [], threading.Lock()
    shards_at_once, shards_most = 0, 0

    def trouble(step, key):
        nonlocal under_way, most, shards_at_once, shards_most
        if step == "put" and key.startswith(layout.COMMITS):
            with lock:
                under_way += 1
                most = max(most, under_way)
                numbers.append(layout.number_of_commit(key))
        if step == "put" and key.startswith(layout.SHARDS):
            with lock:
                shards_at_once += 1
                shards_most = max(shards_most, shards_at_once)
        time.sleep(rng.uniform(0, 0.01))

    def after(step, key):
        nonlocal under_way, shards_at_once
        time.sleep(rng.uniform(0, 0.003))
        if step == "put":
            with lock:
                under_way -= key.startswith(layout.COMMITS)
                shards_at_once -= key.startswith(layout.SHARDS)

    objects.trouble, objects.after = trouble, after
    driver = Driver(tmp_path, objects, seqs=range(25))
    with started(driver) as uploader:
        assert uploader.drain(10)

    objects.trouble = objects.after = lambda step, key: None
    check_whole(objects, driver.entries)
    assert most == 1
    assert numbers == list(range(25))
    assert 1 < shards_most <= 4


def test_a_run_goes_on_behind_the_commits_that_are_there(tmp_path, objects):
    first = Driver(tmp_path, objects, seqs=range(2))
    with started(first) as uploader:
        assert uploader.drain(5)
    second = Driver(tmp_path, objects, nonce="bb", seqs=[2], commits=log_of(objects))
    with started(second) as uploader:
        uploader.sealed(first.entries[0])
        assert uploader.missing() in ([2], [])
        assert uploader.drain(5)
        assert uploader.state()["uploaded"] == 3

    check_whole(objects, [*first.entries, *second.entries])
    assert log_of(objects)[2].epoch == 2
    assert len(second.uploads) == 3


def test_a_full_batch_of_commits_is_told_in_one_object(tmp_path, objects, monkeypatch):
    monkeypatch.setattr(layout, "INDEX_COMMITS", 10)
    driver = Driver(tmp_path, objects)
    known = {number: driver.commit(number, driver.seal(number)) for number in range(15)}
    for number, commit in known.items():
        objects.put(layout.commit_key(number), commit.encode())
    second = Driver(tmp_path, objects, nonce="bb", previous_nonce="aa", commits=known, seqs=range(15, 42))
    refusals = [1]

    def trouble(step, key):
        if step == "put" and key.startswith(layout.INDEX) and refusals:
            refusals.pop()
            raise away()

    objects.trouble = trouble
    with started(second) as uploader:
        assert uploader.drain(10)
        uploader.snapshot()
        until(lambda: len(objects.keys(layout.INDEX)) == 3)

    log = log_of(objects)
    assert objects.keys(layout.INDEX) == [f"w00/index/{first:06d}.jsonl.zst" for first in (10, 20, 30)]
    for first in (10, 20, 30):
        told = decode_all(unpack(objects.get(f"w00/index/{first:06d}.jsonl.zst").data) or b"")
        assert texts(told) == texts({number: log[number] for number in range(first, first + 10)})


def test_nothing_is_held_of_a_shard_that_waits(tmp_path, objects):
    """At most as many shards as there are workers are read before the store takes one."""
    go_on, read = threading.Event(), []

    class Counting(OsFiles):
        def read(self, path):
            read.append(path.name)
            return super().read(path)

    objects.trouble = lambda step, key: go_on.wait(5) if key.startswith(layout.SHARDS) else None
    driver = Driver(tmp_path, objects, seqs=range(12), uploads=3)
    driver.uploader._files = Counting()
    with started(driver) as uploader:
        until(lambda: len(read) == 3)
        time.sleep(0.05)
        assert len(read) == 3
        go_on.set()
        assert uploader.drain(5)


# ---- the store is away, or loses replies ----


def test_an_outage_lets_the_backlog_grow_and_all_of_it_arrives_once(tmp_path, objects):
    driver = Driver(tmp_path, objects, seqs=range(3))
    is_away = True

    def trouble(step, key):
        if is_away:
            driver.troubles.note(away())
            raise away()

    objects.trouble = trouble
    entries = list(driver.entries)
    with started(driver) as uploader:
        for seq in range(3, 9):
            entries.append(driver.seal(seq))
            uploader.sealed(entries[-1])
        until(lambda: uploader.state()["failed"] == 9)
        assert uploader.waiting == 9
        assert uploader.missing() == list(range(9))
        assert not uploader.drain(0.05)
        state = uploader.state()
        assert state["last_error"] == "away"
        assert state["last_error_age_s"] < 1
        assert state["troubles"] == {"unreachable": state["retries"]}
        assert state["uploaded"] == 0
        is_away = False
        assert uploader.drain(5)
        state = uploader.state()
        assert (state["waiting"], state["failed"], state["uploaded"]) == (0, 0, 9)

    check_whole(objects, entries)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_conditional", [True, False])
def test_replies_that_are_lost_and_requests_that_are_refused_double_nothing(tmp_path, seed, is_conditional):
    objects = MemoryObjects(is_conditional=is_conditional)
    rng = random.Random(seed)

    def sometimes(step, key):
        if rng.random() < 0.3:
            raise away()

    driver = Driver(tmp_path, objects, seqs=range(12))
    objects.trouble = objects.after = sometimes
    with started(driver) as uploader:
        assert uploader.drain(10)
        objects.trouble = objects.after = lambda step, key: None

    check_whole(objects, driver.entries)
    assert driver.fenced == []
    assert driver.uploads == texts(log_of(objects))


def test_a_commit_whose_reply_is_lost_is_not_followed_by_another_shard_in_its_place(tmp_path, objects):
    """The put lands only later: until then the very same bytes are tried for the place, and no others."""
    tried: list[bytes] = []
    landed: list[str] = []
    is_away = True
    real = objects.put

    def put(key, data, **conditions):
        if key == layout.commit_key(0) and not landed:
            tried.append(data)
            if is_away:
                raise away("no reply")
            real(key, tried[0], if_none_match=True)
            landed.append(key)
        return real(key, data, **conditions)

    objects.put = put
    driver = Driver(tmp_path, objects, seqs=[7])
    with started(driver) as uploader:
        until(lambda: uploader.state()["failed"] == 1)
        driver.entries.append(driver.seal(0))
        uploader.sealed(driver.entries[1])
        until(lambda: 0 in uploader._backlog._uploaded)
        assert not landed
        is_away = False
        assert uploader.drain(5)

    assert len(tried) >= 2
    assert len(set(tried)) == 1
    check_whole(objects, driver.entries)
    assert driver.fenced == []


def test_a_commit_that_vanishes_or_is_damaged_is_put_again(tmp_path, objects):
    driver = Driver(tmp_path, objects, seqs=[0, 1])
    objects.put(layout.commit_key(0), driver.commit(0, driver.entries[0]).encode()[:-9])

    def vanish(step, key):
        if step == "get" and key == layout.commit_key(1):
            objects.delete(key)

    objects.put(layout.commit_key(1), b"somebody's, for a moment")
    objects.trouble = vanish
    with started(driver) as uploader:
        assert uploader.drain(5)
        objects.trouble = lambda step, key: None

    check_whole(objects, driver.entries)


def test_a_place_that_is_damaged_is_not_taken_from_whoever_mended_it_first(tmp_path, objects):
    driver = Driver(tmp_path / "a", objects, seqs=[0])
    other = Driver(tmp_path / "b", objects, nonce="bb", previous_nonce="aa")
    theirs = other.commit(0, other.seal(0, [7]), nonce="bb", epoch=2)
    objects.put(layout.commit_key(0), b"{")

    def mend(step, key):
        if (
            objects.calls.count(("get", layout.commit_key(0)))
            and step == "put"
            and key.startswith(layout.COMMITS)
        ):
            objects.trouble = lambda step, key: None
            objects.put(key, theirs.encode())

    objects.trouble = mend
    with started(driver):
        until(lambda: driver.fenced)

    assert texts(log_of(objects)) == texts({0: theirs})


def test_where_conditions_are_ignored_a_commit_that_was_overwritten_is_seen(tmp_path, weak):
    driver = Driver(tmp_path / "a", weak, seqs=[0])
    other = Driver(tmp_path / "b", MemoryObjects(), nonce="bb")
    theirs = other.commit(0, other.seal(0, [7]), nonce="bb", epoch=2)

    def overwrite(step, key):
        if step == "put" and key == layout.commit_key(0):
            weak.after = lambda step, key: None
            weak.put(key, theirs.encode())

    weak.after = overwrite
    with started(driver):
        until(lambda: driver.fenced)

    assert texts(log_of(weak)) == texts({0: theirs})


def test_a_hung_store_holds_up_nobody(tmp_path, objects):
    go_on = threading.Event()
    objects_hang = {"on": False}

    def hang(step, key):
        if objects_hang["on"] and not go_on.wait(10):
            raise away()

    driver = Driver(tmp_path, objects, seqs=range(3))
    (tmp_path / "progress.json").write_text("{}")
    objects_hang["on"] = True
    objects.trouble = hang
    uploader = driver.uploader
    uploader.start()
    try:
        began_s = time.monotonic()
        uploader.sealed(driver.seal(3))
        uploader.snapshot()
        assert uploader.state()["waiting"] == 4
        assert time.monotonic() - began_s < 0.2
        assert not uploader.drain(0.1)
        assert time.monotonic() - began_s < 0.5
        began_s = time.monotonic()
        uploader.close(0.2)
        assert time.monotonic() - began_s < 0.6
        uploader.close(0.01)
    finally:
        go_on.set()

    # It could still write: so the lease was not given back.
    time.sleep(0.1)
    assert lease_of(objects)["released"] is False
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("genpipe-s3"))


def test_the_lease_stays_while_a_commit_may_still_land(tmp_path, objects):
    go_on, hung = threading.Event(), threading.Event()

    def hang(step, key):
        if step == "put" and key.startswith(layout.COMMITS):
            hung.set()
            assert go_on.wait(10)

    driver = Driver(tmp_path, objects, seqs=[0])
    objects.trouble = hang
    driver.uploader.start()
    assert hung.wait(5)
    driver.uploader.close(0.2)
    released = lease_of(objects)["released"]
    go_on.set()

    assert released is False


def test_a_hung_upload_of_a_shard_does_not_keep_the_lease_from_being_given_back(tmp_path, objects):
    go_on, hung = threading.Event(), threading.Event()

    def hang(step, key):
        if step == "put" and key.startswith(layout.SHARDS):
            hung.set()
            assert go_on.wait(10)

    driver = Driver(tmp_path, objects, seqs=[0])
    objects.trouble = hang
    driver.uploader.start()
    assert hung.wait(5)
    closing = threading.Thread(target=driver.uploader.close, args=(4,))
    closing.start()
    until(lambda: lease_of(objects)["released"], 2)
    assert closing.is_alive()
    go_on.set()
    closing.join(5)

    assert not closing.is_alive()


def test_nothing_is_committed_after_the_end_by_a_thread_that_hung(tmp_path, objects):
    go_on, hung = threading.Event(), threading.Event()

    def hang(step, key):
        if step == "put" and key == layout.LEASE:
            hung.set()
            assert go_on.wait(10)

    driver = Driver(tmp_path, objects, seqs=[0])
    driver.lease._good_s -= 2 * NEVER_S
    objects.trouble = hang
    driver.uploader.start()
    assert hung.wait(5)
    driver.uploader.close(0.1)
    go_on.set()
    driver.uploader._writers[0].join(5)

    assert objects.keys(layout.COMMITS) == []


def test_a_hung_snapshot_delays_no_upload_and_no_renewal(tmp_path, objects):
    go_on, hung = threading.Event(), threading.Event()

    def hang(step, key):
        if key.startswith("w00/tail/"):
            hung.set()
            assert go_on.wait(10)

    driver = Driver(tmp_path, objects, seqs=range(3), tail_s=0.01, lease_s=0.15)
    (tmp_path / "shards" / shard_name(3, is_open=True)).write_bytes(b"".join(lines_of(99)))
    objects.trouble = hang
    with started(driver, close_s=0.2) as uploader:
        assert hung.wait(5)
        beat = lease_of(objects)["beat"]
        assert uploader.drain(5)
        until(lambda: lease_of(objects)["beat"] >= beat + 2)
        go_on.set()


# ---- the disk ----


def test_a_damaged_shard_is_told_of_and_left_out(tmp_path, objects):
    driver = Driver(tmp_path, objects, seqs=range(4))
    path = tmp_path / "shards" / shard_name(1, is_open=False)
    path.write_bytes(path.read_bytes().replace(b"answer", b"ANSWER"))
    with started(driver) as uploader:
        until(lambda: uploader.missing() == [1])
        assert not uploader.drain(0.05)
        assert uploader.is_stuck
        state = uploader.state()

    check_whole(objects, [entry for entry in driver.entries if entry.seq != 1])
    assert not any("part-000001" in key for key in objects.keys(layout.SHARDS))
    assert state["failed"] == state["waiting"] == 1
    assert str(path) in state["last_error"]
    assert f"genpipe verify {tmp_path}" in state["last_error"]


@pytest.mark.parametrize("prefix", ["w00/shards/", "w00/commits/"])
def test_a_bug_in_one_try_is_told_and_ends_nothing(tmp_path, objects, prefix):
    left = [MemoryError("no room")]

    def trouble(step, key):
        if step == "put" and key.startswith(prefix) and left:
            raise left.pop()

    objects.trouble = trouble
    driver = Driver(tmp_path, objects, seqs=range(2), uploads=1)
    with started(driver) as uploader:
        assert uploader.drain(5)
        assert uploader.state()["last_error"] == "MemoryError: no room"

    check_whole(objects, driver.entries)


def test_a_shard_that_cannot_be_read_is_tried_again(tmp_path, objects):
    driver = Driver(tmp_path, objects, seqs=[0])
    path = tmp_path / "shards" / shard_name(0, is_open=False)
    aside = path.rename(path.with_name("aside"))
    with started(driver) as uploader:
        until(lambda: uploader.state()["failed"] == 1)
        aside.rename(path)
        assert uploader.drain(5)

    check_whole(objects, driver.entries)


def test_a_list_of_uploads_that_cannot_be_written_stops_no_upload(tmp_path, objects):
    class Refusing(OsFiles):
        def write(self, handle, data):
            raise OSError(5, "Input/output error")

    driver = Driver(tmp_path, objects, seqs=range(3))
    driver.uploader._files = Refusing()
    with started(driver) as uploader:
        assert uploader.drain(5)
        assert UPLOADS in uploader.state()["last_error"]

    check_whole(objects, driver.entries)


def test_a_list_of_uploads_that_cannot_be_opened_ends_the_start(tmp_path, objects):
    driver = Driver(tmp_path, objects)
    (tmp_path / UPLOADS).mkdir()
    with pytest.raises(StoreError, match=UPLOADS):
        driver.uploader.start()
    driver.uploader.close(1)

    assert lease_of(objects)["released"] is True


# ---- others ----


def test_anothers_commit_in_the_next_place_ends_all_writing(tmp_path, objects):
    driver = Driver(tmp_path / "a", objects, seqs=range(4), uploads=2)
    other = Driver(tmp_path / "b", objects, nonce="bb", previous_nonce="aa")
    theirs = other.commit(0, other.seal(0, [0, 7]), nonce="bb", epoch=2)
    objects.put(layout.commit_key(0), theirs.encode())
    with started(driver) as uploader:
        until(lambda: driver.fenced)
        assert not uploader.drain(5)
        assert uploader.is_stuck
        until(lambda: not any(thread.is_alive() for thread in uploader._workers))
        steps = len(objects.calls)
        uploader.sealed(driver.seal(9))
        uploader.snapshot()
        time.sleep(0.05)
        assert uploader.waiting == 5
        uploader.close(1)

    assert [call for call in objects.calls[steps:] if call[0] in ("put", "delete")] == []
    (error,) = driver.fenced
    assert isinstance(error, Fenced)
    for part in ("commits/000000.json", "claim 2", "bb", "the same command says what"):
        assert part in str(error)
    assert texts(log_of(objects)) == texts({0: theirs})
    assert lease_of(objects)["released"] is False


@pytest.mark.parametrize("is_conditional", [True, False])
@pytest.mark.parametrize("changes", [{"run_id": "run-2"}, {"number": 5}])
def test_a_commit_of_another_run_or_place_is_anothers(tmp_path, changes, is_conditional):
    objects = MemoryObjects(is_conditional=is_conditional)
    driver = Driver(tmp_path, objects, seqs=[0])
    fields = {name: getattr(driver.commit(0, driver.entries[0]), name) for name in Commit.__slots__}
    data = Commit(**{**fields, **changes}).encode()
    objects.put(layout.commit_key(0), data)
    with started(driver):
        until(lambda: driver.fenced)

    assert objects.get(layout.commit_key(0)).data == data


def test_a_lease_that_was_taken_over_ends_all_writing(tmp_path, objects):
    driver = Driver(tmp_path / "a", objects, lease_s=0.06)
    with started(driver):
        Driver(tmp_path / "b", objects, nonce="bb", previous_nonce="aa")
        until(lambda: driver.fenced)
        time.sleep(0.1)
        puts = len(objects.calls)

    assert len(driver.fenced) == 1
    assert len([call for call in objects.calls[puts:] if call[0] != "get"]) == 0
    assert lease_of(objects)["nonce"] == "bb"


def test_the_lease_is_asked_for_before_a_commit_if_its_word_is_old(tmp_path, objects):
    driver = Driver(tmp_path / "a", objects, lease_s=0.2)
    Driver(tmp_path / "b", objects, nonce="bb", previous_nonce="aa")
    driver.lease._good_s -= 0.15
    driver.uploader.sealed(driver.seal(0))
    # The thread that renews the lease is not started: only the committer asks.
    driver.uploader._keeper = threading.Thread()
    with started(driver):
        until(lambda: driver.fenced)

    assert objects.keys(layout.COMMITS) == []


def test_a_commit_of_the_same_shard_by_an_earlier_claim_is_as_good(tmp_path, objects):
    """A killed driver's commit may land after the log was read; its object must stay then."""
    first = Driver(tmp_path, objects, seqs=[0, 1, 2])
    old_key = layout.shard_key(0, 1, "aa")
    with started(first) as uploader:
        assert uploader.drain(5)
    objects.delete(layout.commit_key(1))
    objects.delete(layout.commit_key(2))
    orphans = objects.keys(layout.SHARDS)
    late = {n: c for n, c in log_of(objects).items() if n > 0}
    second = Driver(
        tmp_path, objects, nonce="bb", previous_nonce="aa", seqs=[0, 1, 2], commits=late, orphans=orphans
    )
    with started(second) as uploader:
        assert uploader.drain(5)
        until(lambda: len(objects.keys(layout.SHARDS)) == 3)

    log = check_whole(objects, second.entries)
    assert second.fenced == []
    assert [commit.epoch for _, commit in sorted(log.items())] == [1, 2, 2]
    by_seq = {commit.entry.seq: commit.key for commit in log.values()}
    assert old_key in by_seq.values() or log[0].entry.seq != 0
    assert sorted(by_seq.values()) == objects.keys(layout.SHARDS)


@pytest.mark.parametrize("left", [None, b"short"])
def test_a_commit_whose_object_is_lost_is_passed_over(tmp_path, objects, left):
    driver = Driver(tmp_path, objects, nonce="bb", seqs=[0])
    old = driver.commit(0, driver.entries[0], nonce="aa", epoch=0)
    objects.put(layout.commit_key(0), old.encode())
    if left is not None:
        objects.put(old.key, left)
    with started(driver) as uploader:
        assert uploader.drain(5)
        assert uploader.state()["uploaded"] == 1

    log = log_of(objects)
    assert [log[number].key for number in (0, 1)] == [old.key, layout.shard_key(0, 1, "bb")]
    assert driver.entries[0].covers(unpack(objects.get(log[1].key).data))
    assert list(driver.uploads) == [1]


def test_the_first_free_place_may_be_behind_commits_that_do_not_count(tmp_path, objects):
    driver = Driver(tmp_path, objects, seqs=[0], next_number=3)
    with started(driver) as uploader:
        assert uploader.drain(5)

    assert objects.keys(layout.COMMITS) == [layout.commit_key(3)]


def test_a_late_commit_of_another_shard_that_waits_here_is_taken_for_that_one(tmp_path, objects):
    driver = Driver(tmp_path, objects, nonce="bb", seqs=[0, 1])
    old = driver.commit(0, driver.entries[1], nonce="aa", epoch=0)
    path = tmp_path / "shards" / shard_name(1, is_open=False)
    packed = pack(path.read_bytes())
    objects.put(old.key, packed)
    fields = {name: getattr(old, name) for name in Commit.__slots__}
    objects.put(layout.commit_key(0), Commit(**{**fields, "object_bytes": len(packed)}).encode())
    with started(driver) as uploader:
        assert uploader.drain(5)
        until(lambda: len(objects.keys(layout.SHARDS)) == 2)

    log = check_whole(objects, driver.entries)
    assert [log[number].entry.seq for number in (0, 1)] == [1, 0]
    assert driver.fenced == []


def test_the_object_of_a_shard_that_was_found_committed_during_its_upload_is_removed(tmp_path, objects):
    driver = Driver(tmp_path, objects, nonce="bb", seqs=[0, 1])
    old = driver.commit(0, driver.entries[1], nonce="aa", epoch=0)
    objects.put(old.key, b"x" * 7)
    objects.put(layout.commit_key(0), old.encode())
    own_key, go_on = layout.shard_key(1, 1, "bb"), threading.Event()
    objects.trouble = lambda step, key: go_on.wait(5) if (step, key) == ("put", own_key) else None
    with started(driver) as uploader:
        assert uploader.drain(5)
        go_on.set()
        until(lambda: ("delete", own_key) in objects.calls)

    assert objects.keys(layout.SHARDS) == [layout.shard_key(0, 1, "bb"), old.key]


def test_orphans_are_removed_only_after_our_own_first_commit(tmp_path, objects):
    orphans = [layout.shard_key(seq, 0, "0f") for seq in (5, 6)]
    for key in orphans:
        objects.put(key, b"x")
    driver = Driver(tmp_path, objects, orphans=orphans)
    refusals = [1]

    def trouble(step, key):
        if step == "delete" and refusals:
            refusals.pop()
            raise away()

    with started(driver) as uploader:
        uploader.snapshot()
        time.sleep(0.05)
        assert set(orphans) <= set(objects.keys())
        objects.trouble = trouble
        uploader.sealed(driver.seal(0))
        assert uploader.drain(5)
        until(lambda: orphans[0] in objects.keys(layout.SHARDS) and not refusals)
        uploader.snapshot()
        until(lambda: not set(orphans) & set(objects.keys(layout.SHARDS)))

    first_delete = next(n for n, call in enumerate(objects.calls) if call[0] == "delete")
    assert ("put", layout.commit_key(0)) in objects.calls[:first_delete]
    check_whole(objects, [driver.seal(0)])


def test_an_adopted_commit_is_not_our_own(tmp_path, objects):
    """Until a commit of ours stands, an old claim may still commit one of its own objects."""
    driver = Driver(tmp_path, objects, nonce="bb", seqs=[0])
    old = driver.commit(0, driver.entries[0], nonce="aa", epoch=0)
    spare = layout.shard_key(1, 0, "aa")
    for key in (old.key, spare):
        objects.put(key, b"x" * 7)
    objects.put(layout.commit_key(0), old.encode())
    driver.uploader._orphans = dict.fromkeys([old.key, spare])
    with started(driver) as uploader:
        assert uploader.drain(5)
        until(lambda: objects.keys(layout.SHARDS) == [old.key, spare])
        uploader.snapshot()
        time.sleep(0.05)

    assert objects.keys(layout.SHARDS) == [old.key, spare]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("same_folder", [False, True])
def test_of_two_uploaders_one_has_each_place_and_nothing_counts_twice(tmp_path, seed, same_folder):
    """Two claims with shards of the same numbers, and other records in them: a log of one."""
    objects = MemoryObjects()
    rng = random.Random(seed)
    one = Driver(tmp_path / "a", objects, nonce="aa", seqs=range(4))
    two = Driver(tmp_path / "b", objects, nonce="bb", previous_nonce="aa")
    for seq in range(4):
        two.uploader.sealed(two.seal(seq, None if same_folder else [1000 + seq]))
    lock = threading.Lock()

    def maybe(step, key):
        with lock:
            pause_s, fails = rng.choice([0, 0, 0.001, 0.003]), rng.random() < 0.1
        time.sleep(pause_s)
        if fails:
            raise away()

    objects.trouble = objects.after = maybe
    with started(one, two):
        for driver in (one, two):
            until(lambda driver=driver: driver.fenced or driver.uploader.waiting == 0)
        objects.trouble = objects.after = lambda step, key: None

    log = log_of(objects)
    assert sorted(commit.entry.seq for commit in log.values()) == [0, 1, 2, 3]
    for commit in log.values():
        assert commit.entry.covers(unpack(objects.get(commit.key).data))
    if not same_folder:
        # Places are contested until one of both has lost one; from then on all are the other's.
        assert len({commit.nonce for commit in log.values()}) == 1
        assert len(one.fenced) + len(two.fenced) == 1
    else:
        assert one.fenced == two.fenced == []


# ---- the lease, snapshots, progress ----


def test_the_lease_is_renewed_and_given_back_at_the_end(tmp_path, objects):
    driver = Driver(tmp_path, objects, lease_s=0.06)
    with started(driver):
        until(lambda: lease_of(objects)["beat"] >= 3)

    assert lease_of(objects)["released"] is True
    assert not any(thread.name.startswith("genpipe-s3") for thread in threading.enumerate())


def test_a_renewal_that_fails_is_told_and_tried_again(tmp_path, objects):
    driver = Driver(tmp_path, objects, lease_s=0.06)
    refusals = [1, 1]

    def trouble(step, key):
        if key == layout.LEASE and refusals:
            refusals.pop()
            raise away("no lease today")

    objects.trouble = trouble
    with started(driver) as uploader:
        until(lambda: uploader.state()["last_error"] == "no lease today")
        until(lambda: lease_of(objects)["beat"] >= 4)

    assert driver.fenced == []


def test_snapshots_are_taken_in_time_when_asked_and_at_the_end(tmp_path, objects):
    path = tmp_path / "shards" / shard_name(0, is_open=True)
    path.parent.mkdir()
    path.write_bytes(b"".join(lines_of(1)))
    driver = Driver(tmp_path, objects, tail_s=0.05)
    held = lambda: [unpack(objects.get(key).data) for key in objects.keys("w00/tail/")]  # noqa: E731
    assert driver.uploader.state()["tail_age_s"] is None
    with started(driver) as uploader:
        until(lambda: held() == [path.read_bytes()])
        assert 0 <= uploader.state()["tail_age_s"] < 2
    driver = Driver(tmp_path, objects, nonce="bb", previous_nonce="aa")
    with started(driver) as uploader:
        path.write_bytes(b"".join(lines_of(1, 2)))
        time.sleep(0.05)
        assert held() == [b"".join(lines_of(1))]
        uploader.snapshot()
        until(lambda: held() == [path.read_bytes()])
        path.write_bytes(b"".join(lines_of(1, 2, 3)))

    assert held() == [b"".join(lines_of(1, 2, 3))]


def test_progress_is_put_at_once_and_at_the_end_and_never_twice_within_a_second(tmp_path, objects):
    path = tmp_path / "progress.json"
    path.write_text('{"state":"running"}')
    driver = Driver(tmp_path, objects, progress_s=0.01)
    times = []
    objects.after = lambda step, key: times.append(time.monotonic()) if (step, key) == PUT_PROGRESS else None
    with started(driver) as uploader:
        end_s = time.monotonic() + 0.3
        while time.monotonic() < end_s:
            path.write_text(f'{{"at":{time.monotonic()}}}')
            uploader.snapshot()
            time.sleep(0.01)
        assert len(times) == 1
        path.write_text('{"state":"done"}')

    assert objects.get(layout.PROGRESS).data == b'{"state":"done"}'
    assert len(times) == 2
    assert times[1] - times[0] >= 0.95 * housekeeping.PROGRESS_EVERY_S


PUT_PROGRESS = ("put", layout.PROGRESS)


def test_progress_is_put_again_only_if_it_has_changed(tmp_path, objects, monkeypatch):
    monkeypatch.setattr(housekeeping, "PROGRESS_EVERY_S", 0.01)
    (tmp_path / "progress.json").write_text("{}")
    driver = Driver(tmp_path, objects, progress_s=0.01)
    with started(driver):
        until(lambda: PUT_PROGRESS in objects.calls)
        time.sleep(0.1)
        assert objects.calls.count(PUT_PROGRESS) == 1
        (tmp_path / "progress.json").write_text('{"a":1}')
        until(lambda: objects.calls.count(PUT_PROGRESS) == 2)

    assert objects.calls.count(PUT_PROGRESS) == 2


def test_the_state_is_json_and_has_all_its_keys(tmp_path, objects):
    driver = Driver(tmp_path, objects, seqs=[0])
    before = driver.uploader.state()
    with started(driver) as uploader:
        assert uploader.drain(5)
        state = json.loads(json.dumps(uploader.state()))

    assert before["last_error"] is before["last_error_age_s"] is before["tail_age_s"] is None
    assert state == {
        "uri": "s3://memory/run",
        "waiting": 0,
        "uploaded": 1,
        "uploaded_bytes": len(objects.get(log_of(objects)[0].key).data),
        "failed": 0,
        "troubles": {},
        "retries": 0,
        "last_error": None,
        "last_error_age_s": None,
        "tail_age_s": None,
        "epoch": 1,
        "conditional": True,
    }


def test_tries_that_fail_are_told_before_a_round_of_them_ends(tmp_path, objects):
    driver = Driver(tmp_path, objects)
    driver.troubles.note(away("one try"))

    assert driver.uploader.state()["last_error"] == "one try"
    assert driver.uploader.state()["retries"] == 1
