"""The lock on a run folder between processes: forks, kills, suspensions, and file systems without locks."""

import errno
import fcntl
import gc
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from genpipe.core.errors import DiskFull, Fenced, StoreError
from genpipe.edges import heartbeat, owner
from genpipe.edges import lock as lock_module
from genpipe.edges.heartbeat import HEARTBEAT, Heartbeat
from genpipe.edges.lock import FolderLock

pytestmark = pytest.mark.slow  # real processes and real waits

NOW = "2026-01-02T03:04:05.678Z"
ANSWER_TIMEOUT_S = 20.0
QUICK = {"BEAT_S": 0.1, "TTL_S": 1.0, "LOOK_S": 0.02, "SETTLE_S": 0.1}


class Claimer:
    """A process that claims a folder, and what it says."""

    def __init__(self, process):
        self.process = process
        self.pid = process.pid
        self._rest = b""

    def next(self):
        """The next thing that it says."""
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        while b"\n" not in self._rest:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, "waited in vain"
            if select.select([self.process.stdout], [], [], left_s)[0]:
                data = os.read(self.process.stdout.fileno(), 65536)
                assert data, "ended without a word"
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def said(self, word):
        """The next thing that it says, which must be ``word``."""
        found = self.next()
        assert found["word"] == word, found
        return found

    def claimed(self):
        self.said("ready")
        return self.said("claimed")

    def refused(self):
        self.said("ready")
        return self.said("refused")

    def told(self, order):
        self.process.stdin.write(f"{order}\n".encode())
        self.process.stdin.flush()
        return self.said("done")

    def kill(self):
        self.process.kill()
        self.process.wait(10)


@contextmanager
def claimer(folder, **options):
    """A process that claims ``folder``; it has ended afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.edges.claimer", str(folder), json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    try:
        yield Claimer(process)
    finally:
        process.kill()
        process.wait(10)
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def take(folder, *, warnings=None, error=None, **more):
    """Claim in this process."""
    if error is not None:

        def flock(handle, operation):
            raise OSError(getattr(errno, error), os.strerror(getattr(errno, error)))

        more["flock"] = flock
    warn = pytest.fail if warnings is None else warnings.append
    return FolderLock.take(folder, started_at=NOW, warn=warn, **more)


@pytest.fixture
def quick(monkeypatch):
    """Heartbeats of this process and of those it starts, at a tenth of a second."""
    for name, value in QUICK.items():
        monkeypatch.setattr(heartbeat, name, value)


def signed(folder, **changes):
    """The heartbeat of a driver, changed, as another machine might have left it."""
    text = {**owner.signature(started_at=NOW, nonce="b" * 32), "beat": "000000000007", **changes}
    (folder / HEARTBEAT).write_text(json.dumps(text))
    return (folder / HEARTBEAT).read_bytes()


def ended_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(20)
    return process.pid


# ---- the kernel's lock ----


def test_the_claim_before_is_not_known_from_a_copy_of_the_folder(tmp_path):
    with_locks = FolderLock.take(tmp_path, started_at=NOW, warn=pytest.fail)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / ".lock").write_bytes((tmp_path / ".lock").read_bytes())
    again = FolderLock.take(copy, started_at=NOW, warn=pytest.fail)
    with_locks.release()
    next_one = FolderLock.take(tmp_path, started_at=NOW, warn=pytest.fail)

    # The driver of the folder that was copied may live.
    assert again.previous_nonce is None
    assert next_one.previous_nonce == with_locks.nonce
    again.release()
    next_one.release()


def test_a_forked_child_does_not_keep_the_folder_of_a_killed_driver_locked(tmp_path):
    with claimer(tmp_path) as driver:
        driver.claimed()
        child = driver.told("fork")["child"]
        try:
            with pytest.raises(Fenced, match=f"pid {driver.pid}"):
                take(tmp_path)
            driver.kill()
            os.kill(child, 0)
            lock = take(tmp_path)
            assert lock.epoch == 2
            lock.release()
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("error", [None, "ENOLCK"])
def test_what_a_forked_child_does_with_the_lock_is_not_the_parents_matter(tmp_path, error):
    options = {} if error is None else {"error": error, "module": QUICK}
    with claimer(tmp_path, **options) as driver:
        driver.claimed()
        assert driver.told("fork and release")["code"] == 0
        assert driver.told("check")["error"] is None
        with pytest.raises(Fenced, match=f"pid {driver.pid}"):
            take(tmp_path)


def test_a_lock_that_nobody_has_any_more_is_not_kept_for_a_fork(tmp_path):
    lock = take(tmp_path)
    lock.release()
    before = len(lock_module._held)
    del lock
    gc.collect()

    assert len(lock_module._held) < before


def test_a_suspended_driver_still_has_the_folder_and_a_killed_one_has_not(tmp_path):
    with claimer(tmp_path) as driver:
        driver.claimed()
        driver.process.send_signal(signal.SIGSTOP)
        with pytest.raises(Fenced, match=f"pid {driver.pid}"):
            take(tmp_path)
        driver.process.send_signal(signal.SIGCONT)
        assert driver.told("check")["error"] is None
        driver.process.send_signal(signal.SIGSTOP)
        driver.kill()
        lock = take(tmp_path)
        lock.release()

    assert lock.epoch == 2


def test_who_is_named_is_the_driver_that_has_the_folder_and_not_the_one_before(tmp_path):
    take(tmp_path).release()
    dead = json.loads((tmp_path / ".lock").read_bytes()) | {"pid": ended_pid()}
    (tmp_path / ".lock").write_text(json.dumps(dead))
    handle = os.open(tmp_path / ".lock", os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        signing = threading.Timer(
            0.1, lambda: (tmp_path / ".lock").write_text(json.dumps({**dead, "pid": os.getpid()}))
        )
        signing.start()
        with pytest.raises(Fenced, match=f"pid {os.getpid()}"):
            take(tmp_path)
        signing.join()
    finally:
        os.close(handle)


def test_the_check_for_every_group_costs_one_look_at_a_files_number(tmp_path):
    lock = take(tmp_path)
    began_s = time.process_time()
    for _ in range(1000):
        lock.check_still_mine()
    took_s = time.process_time() - began_s
    lock.release()

    assert took_s / 1000 < 0.000_2


# ---- file systems without locks ----


@pytest.mark.parametrize("error", ["ENOLCK", "ENOSYS", "EOPNOTSUPP", "ENOTSUP"])
def test_without_locks_a_heartbeat_keeps_the_second_out_and_the_user_is_told(tmp_path, quick, error):
    warnings: list[str] = []
    first = take(tmp_path, error=error, warnings=warnings)

    assert len(warnings) == 1
    assert "\n" not in warnings[0]
    for word in (str(tmp_path / ".lock"), HEARTBEAT, os.strerror(getattr(errno, error)), "local disk"):
        assert word in warnings[0]
    with pytest.raises(Fenced) as caught:
        take(tmp_path, error=error, warnings=warnings)
    for word in (str(tmp_path), f"pid {os.getpid()}", socket.gethostname(), NOW):
        assert word in str(caught.value)
    first.check_still_mine()
    first.release()
    first.release()
    assert not (tmp_path / HEARTBEAT).exists()
    second = take(tmp_path, error=error, warnings=[])
    assert second.epoch == 2
    second.release()


def test_other_refusals_of_the_lock_are_errors_and_no_reason_for_a_heartbeat(tmp_path):
    with pytest.raises(StoreError, match=r"cannot lock .*\.lock"):
        take(tmp_path, error="EIO")
    assert not (tmp_path / HEARTBEAT).exists()


def test_the_heartbeat_says_who_has_the_folder_and_moves(tmp_path, quick):
    lock = take(tmp_path, error="ENOLCK", warnings=[])
    seen: set[bytes] = set()
    deadline_s = time.monotonic() + 10
    while len(seen) < 3 and time.monotonic() < deadline_s:
        seen.add((tmp_path / HEARTBEAT).read_bytes())
    lock.release()
    texts = [json.loads(data) for data in seen]

    assert len(seen) >= 3
    assert len({len(data) for data in seen}) == 1
    for text in texts:
        assert (text["pid"], text["host"], text["nonce"]) == (os.getpid(), socket.gethostname(), lock.nonce)
        assert text["boot_id"]


def test_without_locks_a_killed_drivers_folder_is_free_at_once(tmp_path):
    with claimer(tmp_path, error="ENOLCK") as driver:
        driver.claimed()
        child = driver.told("fork")["child"]
        try:
            driver.kill()
            with claimer(tmp_path, error="ENOLCK") as second:
                began_s = time.monotonic()
                assert second.claimed()["epoch"] == 2
                assert time.monotonic() - began_s < heartbeat.TTL_S / 3
                assert second.told("check")["error"] is None
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_killed_driver_whose_parent_has_not_noticed_is_gone_all_the_same(tmp_path):
    with claimer(tmp_path, error="ENOLCK") as driver:
        driver.claimed()
        # Nobody waits for it: a zombie, whose number is still taken.
        os.kill(driver.pid, signal.SIGKILL)
        with claimer(tmp_path, error="ENOLCK") as second:
            assert second.claimed()["epoch"] == 2


def test_without_locks_a_suspended_driver_on_this_machine_still_has_the_folder(tmp_path, quick):
    with claimer(tmp_path, error="ENOLCK", module=QUICK) as driver:
        driver.claimed()
        driver.process.send_signal(signal.SIGSTOP)
        time.sleep(1.5 * QUICK["TTL_S"])
        with pytest.raises(Fenced, match=f"pid {driver.pid}"):
            take(tmp_path, error="ENOLCK", warnings=[])
        driver.process.send_signal(signal.SIGCONT)

        assert driver.told("check")["error"] is None


def test_a_driver_elsewhere_that_beats_keeps_the_folder_and_is_named(tmp_path):
    with claimer(tmp_path, error="ENOLCK", host="far-away", module=QUICK) as driver:
        driver.claimed()
        with claimer(tmp_path, error="ENOLCK", module=QUICK) as second:
            refused = second.refused()

        assert refused["error"] == "Fenced"
        for word in (str(tmp_path), "host far-away", f"pid {driver.pid}"):
            assert word in refused["text"]
        assert len(refused["warnings"]) == 2
        assert "waiting 1 s to see whether" in refused["warnings"][1]
        assert driver.told("check")["error"] is None


def test_a_driver_elsewhere_that_was_suspended_too_long_is_fenced_when_it_wakes(tmp_path):
    with claimer(tmp_path, error="ENOLCK", host="far-away", module=QUICK) as driver:
        driver.claimed()
        driver.process.send_signal(signal.SIGSTOP)
        with claimer(tmp_path, error="ENOLCK", module=QUICK) as second:
            claimed = second.claimed()
            driver.process.send_signal(signal.SIGCONT)
            found = driver.told("check")
            driver.told("release")
            again = second.told("check")
            signed_by = json.loads((tmp_path / HEARTBEAT).read_bytes())["pid"]

    assert claimed["epoch"] == 2
    assert "was not renewed for 1 s: taking" in claimed["warnings"][2]
    assert found["error"] == "Fenced"
    assert f"pid {second.pid}" in found["text"]
    assert again["error"] is None
    assert signed_by == second.pid


def test_a_driver_elsewhere_that_was_suspended_for_less_goes_on_and_beats_first(tmp_path):
    options = {"error": "ENOLCK", "module": {**QUICK, "TTL_S": 60.0}}
    with claimer(tmp_path, host="far-away", **options) as driver:
        driver.claimed()
        driver.process.send_signal(signal.SIGSTOP)
        with claimer(tmp_path, **options) as second:
            second.said("ready")
            time.sleep(0.5)
            driver.process.send_signal(signal.SIGCONT)

            assert driver.told("check")["error"] is None
            assert second.said("refused")["error"] == "Fenced"


@pytest.mark.slow
@pytest.mark.parametrize("left", ["dead", "reused number", "nothing but an empty file"])
@pytest.mark.parametrize("round_number", range(3))
def test_of_many_that_come_at_one_instant_for_a_dead_drivers_folder_one_gets_it(tmp_path, left, round_number):
    if left == "dead":
        signed(tmp_path, pid=ended_pid())
    elif left == "reused number":
        signed(tmp_path, pid_start=1)
    else:
        (tmp_path / HEARTBEAT).write_bytes(b"")
    options = {"error": "ENOLCK", "module": QUICK, "at": time.time() + 1.5}
    with ExitStack() as stack:
        all_of_them = [stack.enter_context(claimer(tmp_path, **options)) for _ in range(4)]
        for one in all_of_them:
            one.said("ready")
        told = [(one, one.next()) for one in all_of_them]
        winners = [one for one, found in told if found["word"] == "claimed"]

        assert len(winners) == 1, told
        assert winners[0].told("check")["error"] is None
        assert list(tmp_path.glob("*.tmp")) == []


def test_a_reused_number_of_a_process_is_not_the_driver(tmp_path, quick):
    signed(tmp_path, pid=os.getpid(), pid_start=owner.signature(started_at=NOW, nonce="")["pid_start"] - 1)
    began_s = time.monotonic()
    take(tmp_path, error="ENOLCK", warnings=[]).release()

    assert time.monotonic() - began_s < QUICK["TTL_S"]


@pytest.mark.parametrize(
    "changes",
    [
        {"host": "elsewhere"},
        {"boot_id": "00000000-0000-0000-0000-000000000000"},
        {"boot_id": None},
        {"pid_namespace": "pid:[1]"},
        {"pid": "x"},
        {"pid": None},
    ],
)
def test_what_cannot_be_looked_at_from_here_is_waited_for_and_then_taken_over(tmp_path, quick, changes):
    signed(tmp_path, **{"pid": ended_pid(), **changes})
    warnings: list[str] = []
    began_s = time.monotonic()
    lock = take(tmp_path, error="ENOLCK", warnings=warnings)

    assert time.monotonic() - began_s > QUICK["TTL_S"]
    assert len(warnings) == 3
    assert ["\n" in warning for warning in warnings] == [False] * 3
    lock.check_still_mine()
    lock.release()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\0" * 300, b"\xff" * 5000, b'{"pid":{}}'])
def test_a_heartbeat_without_sense_belongs_to_nobody_once_it_does_not_move(tmp_path, quick, data):
    (tmp_path / HEARTBEAT).write_bytes(data)
    lock = take(tmp_path, error="ENOLCK", warnings=[])
    lock.check_still_mine()
    lock.release()

    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_folder_that_is_given_back_while_another_waits_is_taken_without_more_waiting(tmp_path, monkeypatch):
    for name, value in {**QUICK, "TTL_S": 60.0}.items():
        monkeypatch.setattr(heartbeat, name, value)
    signed(tmp_path, host="elsewhere")
    giving_back = threading.Timer(0.3, (tmp_path / HEARTBEAT).unlink)
    giving_back.start()
    lock = take(tmp_path, error="ENOLCK", warnings=[])
    giving_back.join()

    lock.check_still_mine()
    lock.release()


def test_the_wait_for_another_driver_can_be_broken_off(tmp_path, quick):
    left = signed(tmp_path, host="elsewhere")
    calls = itertools.count()

    def pause(seconds):
        if next(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take(tmp_path, error="ENOLCK", warnings=[], pause=pause)
    assert (tmp_path / HEARTBEAT).read_bytes() == left


def test_where_there_are_locks_a_heartbeat_of_a_machine_that_has_none_is_heeded(tmp_path):
    with claimer(tmp_path, error="ENOSYS", host="far-away", module=QUICK) as driver:
        driver.claimed()
        with claimer(tmp_path, module=QUICK) as second:
            assert "host far-away" in second.refused()["text"]
        driver.kill()
    with claimer(tmp_path, module=QUICK) as third:
        assert third.claimed()["epoch"] == 2
        third.told("release")

    assert not (tmp_path / HEARTBEAT).exists()


def before_the_first_rename(monkeypatch, act):
    """Do something at the instant before the stale file is renamed."""
    real = Path.rename
    done: list[None] = []

    def rename(self, target):
        if not done:
            done.append(act())
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)


@pytest.mark.parametrize("links", ["hard links", "no hard links"])
def test_a_challenger_that_comes_too_late_puts_the_winners_file_back(tmp_path, quick, monkeypatch, links):
    signed(tmp_path, pid=ended_pid())
    fresh: list[bytes] = []
    before_the_first_rename(
        monkeypatch, lambda: fresh.append(signed(tmp_path, nonce="c" * 32, beat="000000000001"))
    )
    if links == "no hard links":

        def refuse(self, target):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(Path, "hardlink_to", refuse)

    with pytest.raises(Fenced, match=f"pid {os.getpid()}"):
        take(tmp_path, error="ENOLCK", warnings=[])
    assert (tmp_path / HEARTBEAT).read_bytes() == fresh[0]
    assert {path.name for path in tmp_path.iterdir()} == {".lock", HEARTBEAT}


def test_a_file_that_came_while_another_was_put_back_is_left_alone(tmp_path, quick, monkeypatch):
    signed(tmp_path, pid=ended_pid())
    third: list[bytes] = []
    real = Path.rename

    def rename(self, target):
        if third:
            return real(self, target)
        signed(tmp_path, nonce="c" * 32)
        found = real(self, target)
        third.append(signed(tmp_path, nonce="d" * 32))
        return found

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(Fenced):
        take(tmp_path, error="ENOLCK", warnings=[])
    assert (tmp_path / HEARTBEAT).read_bytes() == third[0]
    assert {path.name for path in tmp_path.iterdir()} == {".lock", HEARTBEAT}


def test_a_claim_that_another_wrote_over_in_its_first_moment_does_not_hold(tmp_path, quick):
    def pause(seconds):
        (tmp_path / HEARTBEAT).unlink(missing_ok=True)
        signed(tmp_path, host="elsewhere", pid=4711)

    with pytest.raises(Fenced, match="host elsewhere, pid 4711"):
        take(tmp_path, error="ENOLCK", warnings=[], pause=pause)
    assert json.loads((tmp_path / HEARTBEAT).read_bytes())["pid"] == 4711


@pytest.mark.parametrize("how", ["removed", "replaced", "emptied"])
def test_a_heartbeat_that_is_not_ours_any_more_is_noticed_and_left(tmp_path, quick, monkeypatch, how):
    monkeypatch.setattr(heartbeat, "BEAT_S", 60.0)
    lock = take(tmp_path, error="ENOLCK", warnings=[])
    if how == "emptied":
        (tmp_path / HEARTBEAT).write_bytes(b"")
    else:
        (tmp_path / HEARTBEAT).unlink()
    if how == "replaced":
        signed(tmp_path, host="elsewhere")
    before = (tmp_path / HEARTBEAT).read_bytes() if how != "removed" else None

    with pytest.raises(Fenced, match="another driver may own"):
        lock.check_still_mine()
    lock.release()
    assert ((tmp_path / HEARTBEAT).read_bytes() if how != "removed" else None) == before


def test_a_lock_file_that_is_removed_is_noticed_without_locks_too(tmp_path, quick):
    lock = take(tmp_path, error="ENOLCK", warnings=[])
    (tmp_path / ".lock").unlink()

    with pytest.raises(Fenced, match=r"\.lock was removed or replaced"):
        lock.check_still_mine()
    lock.release()


@pytest.mark.parametrize(("code", "kind"), [("EIO", StoreError), ("ENOSPC", DiskFull)])
def test_a_heartbeat_that_cannot_be_renewed_is_an_error_after_half_its_time(
    tmp_path, quick, monkeypatch, code, kind
):
    lock = take(tmp_path, error="ENOLCK", warnings=[])
    real, failing = os.pwrite, threading.Event()

    def pwrite(handle, data, offset):
        if failing.is_set() and b'"beat"' in data:
            raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))
        return real(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    failing.set()
    began_s = time.monotonic()
    lock.check_still_mine()

    def check_for_ten_seconds():
        while time.monotonic() < began_s + 10:
            lock.check_still_mine()
            time.sleep(0.01)

    with pytest.raises(kind) as caught:
        check_for_ten_seconds()
    took_s = time.monotonic() - began_s

    assert QUICK["TTL_S"] / 2 - 2 * QUICK["BEAT_S"] < took_s < QUICK["TTL_S"]
    assert f"cannot renew {tmp_path / HEARTBEAT}: {os.strerror(getattr(errno, code))}" in str(caught.value)
    # Trouble that has passed is forgotten.
    failing.clear()
    lock.check_still_mine()
    lock.release()


def test_a_disk_that_has_no_room_for_a_heartbeat_is_named_and_leaves_no_riddle(tmp_path, quick, monkeypatch):
    def pwrite(handle, data, offset):
        return 10

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(DiskFull, match=r"cannot write .*\.lock\.heartbeat: No space left"):
        take(tmp_path, error="ENOLCK", warnings=[])
    assert not (tmp_path / HEARTBEAT).exists()


def test_a_heartbeat_leaves_no_thread_and_no_open_file(tmp_path, quick):
    def in_use():
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    before = in_use()
    for _ in range(3):
        take(tmp_path, error="ENOLCK", warnings=[]).release()
    signed(tmp_path)
    with pytest.raises(Fenced):
        take(tmp_path, error="ENOLCK", warnings=[])

    assert in_use() == before


def test_a_folder_that_changes_hands_again_and_again_is_an_error_and_no_endless_loop(
    tmp_path, quick, monkeypatch
):
    monkeypatch.setattr(heartbeat, "_create", lambda path: None)

    with pytest.raises(Fenced, match="again and again"):
        Heartbeat.take(tmp_path, owner.signature(started_at=NOW, nonce="a"), warn=pytest.fail)


def test_a_look_at_the_lock_turns_nobody_away(tmp_path):
    handle = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_SH)
    timer = threading.Timer(0.01, os.close, [handle])
    timer.start()
    FolderLock.take(tmp_path, started_at="now", warn=pytest.fail).release()
    timer.join()


def test_a_claim_knows_how_the_one_before_it_signed(tmp_path):
    first = take(tmp_path)
    first.release()
    second = take(tmp_path)
    second.release()

    assert (first.previous, first.previous_nonce) == ({}, None)
    assert (second.previous["nonce"], second.previous["epoch"]) == (first.nonce, 1)
    assert second.previous_nonce == first.nonce


@pytest.mark.parametrize("text", [b"", b"[]", b'{"nonce":7}', b"\0" * 99])
def test_what_cannot_be_read_of_the_claim_before_names_nobody(tmp_path, text):
    (tmp_path / ".lock").write_bytes(text)
    lock = take(tmp_path)
    lock.release()

    assert lock.previous_nonce is None
