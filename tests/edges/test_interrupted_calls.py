"""Calls that a signal interrupts are made again, and nothing is lost, doubled or failing for it."""

import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from genpipe.edges.files import OsFiles
from genpipe.edges.store import Store
from tests.edges import audit
from tests.edges.samples import WALL, group

pytestmark = pytest.mark.slow  # real processes and real waits

ROOT = Path(__file__).parents[2]
GROUPS, GROUP_RECORDS, SHARD_RECORDS = 120, 5, 7


def do_step(step, folder):
    """One step of the file port on files that are there; asserts what came of it."""
    files, folder = OsFiles(), Path(folder)
    old, new = folder / "old", folder / "new"
    if step == "rename":
        files.rename(old, new)
        assert new.read_bytes() == b"12345"
        assert not old.exists()
    elif step == "unlink":
        files.unlink(old)
        assert not old.exists()
    elif step == "mkdir":
        files.mkdir(new)
        assert new.is_dir()
    elif step == "make_read_only":
        files.make_read_only(old)
        assert old.stat().st_mode & 0o777 == 0o444
    elif step == "create and append":
        handle = files.open_append(new, new=True)
        assert files.write(handle, b"abc") == 3
        files.sync(handle)
        assert files.length(handle) == 3
        files.truncate(handle, 1)
        files.close(handle)
        assert new.read_bytes() == b"a"
    elif step == "sync":
        files.sync_path(old)
        files.sync_folder(folder)
    else:
        assert step == "look"
        assert files.read(old) == b"12345"
        assert files.read_ends(old, 2) == (b"12", b"45")
        assert files.sizes(folder) == {"old": 5}
        assert files.exists(old)
        assert files.space(folder).free_bytes > 0


def commit_all(folder):
    """Fill a store, while an alarm goes off a thousand times a second."""
    alarms = []
    signal.signal(signal.SIGALRM, lambda number, frame: alarms.append(number))
    signal.signal(signal.SIGUSR1, lambda number, frame: alarms.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    store = Store.open(Path(folder), OsFiles(), shard_records=SHARD_RECORDS, wall=WALL, warn=print)
    for number in range(GROUPS):
        first = number * GROUP_RECORDS
        store.commit(group(*range(first, first + GROUP_RECORDS), number=number))
        print(number, flush=True)
    store.seal_last()
    store.close()
    signal.setitimer(signal.ITIMER_REAL, 0)
    # A late one must not meet an interpreter that has put the default back.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    print("alarms", len(alarms), alarms.count(signal.SIGUSR1), flush=True)


def call(function, *args):
    """The command that calls a function of this module."""
    listed = ", ".join(repr(str(arg)) for arg in args)
    code = f"from tests.edges import test_interrupted_calls as this; this.{function}({listed})"
    return [sys.executable, "-c", code]


CALLS = {
    "rename": ["rename,renameat,renameat2"],
    "unlink": ["unlink,unlinkat"],
    "mkdir": ["mkdir,mkdirat"],
    "make_read_only": ["chmod,fchmodat,fchmod"],
    "create and append": ["openat", "write", "fdatasync", "ftruncate", "fstat,newfstatat", "close"],
    "sync": ["openat", "fdatasync", "fsync", "close"],
    "look": ["openat", "read,pread64", "getdents64", "stat,newfstatat,statx,lstat", "statfs", "close"],
}
"""The system calls behind each step, as strace names them."""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not here: apt-get install strace")
@pytest.mark.parametrize(("step", "calls"), [(step, calls) for step in CALLS for calls in CALLS[step]])
def test_a_step_whose_call_is_interrupted_is_carried_out_all_the_same(tmp_path, step, calls):
    folder, log = tmp_path / "folder", tmp_path / "log"
    folder.mkdir()
    (folder / "old").write_bytes(b"12345")
    # Three, with a good one after each: it gets on, whether a call or a walk of several is made again.
    inject = ("-e", f"trace={calls}", "-e", f"inject={calls}:error=EINTR:when=1..5+2")
    places = ("-P", folder, "-P", folder / "old", "-P", folder / "new")
    ended = subprocess.run(
        ["strace", "-f", "-o", log, *inject, *places, *call("do_step", step, folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    seen = log.read_text() if log.exists() else ""
    if not seen and "not permitted" in ended.stderr:
        pytest.skip("processes may not be traced here")

    assert "(INJECTED)" in seen, ended.stderr
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_a_store_that_is_interrupted_a_thousand_times_a_second_loses_and_doubles_nothing(tmp_path):
    (tmp_path / "run").mkdir()
    with subprocess.Popen(
        call("commit_all", tmp_path / "run"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        deadline_s = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline_s:
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.001)
        said, errors = process.communicate(timeout=20)
    *numbers, word, alarms, sent = (first + said).decode().split()

    assert process.returncode == 0, errors.decode()
    assert errors == b""
    assert numbers == [str(number) for number in range(GROUPS)]
    assert word == "alarms"
    assert int(sent) > 20
    assert int(alarms) > 2 * int(sent) / 3
    assert audit.counts(OsFiles(), tmp_path / "run") == Counter(range(GROUPS * GROUP_RECORDS))
