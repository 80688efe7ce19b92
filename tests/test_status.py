"""A look at run folders from outside: live, dead, stuck, over, and none at all."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from genpipe import status
from genpipe.core.errors import ConfigError
from genpipe.edges.files import OsFiles
from genpipe.edges.run_folder import RunFolder, RunIdentity
from tests.edges.s3.memory_objects import MemoryObjects
from tests.ui.samples import progress


def text_of(age_s):
    moment = datetime.now(UTC) - timedelta(seconds=age_s)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


@pytest.fixture
def folder(tmp_path):
    """A run folder whose driver is this very process."""
    identity = RunIdentity(inputs=("a.jsonl",), settings={"request": {}}, shard_records=500, version="0.1.0")
    place = tmp_path / "run"
    claimed = RunFolder.open(
        place, identity, OsFiles(), allow_changed=False, now_text=text_of(0), warn=pytest.fail
    )
    yield place
    claimed.close()


def report(folder, *, age_s=0.0, **changes):
    snapshot = progress(updated_at=text_of(age_s), **changes)
    (folder / "progress.json").write_text(json.dumps(snapshot))
    written_s = time.time() - age_s
    os.utime(folder / "progress.json", (written_s, written_s))
    return snapshot


def test_a_report_whose_clock_was_set_since_is_as_old_as_its_file(folder):
    report(folder, age_s=0)
    snapshot = progress(updated_at=text_of(86_400))
    (folder / "progress.json").write_text(json.dumps(snapshot))

    assert status.look(folder).note is None


def sign(folder, **changes):
    """Put another owner's name on the lock."""
    owner = json.loads((folder / ".lock").read_bytes())
    (folder / ".lock").write_text(json.dumps({**owner, **changes}))


def owner_of(pid):
    """How a process of that number would have signed."""
    text = (Path("/proc") / str(pid) / "stat").read_text()
    return {"pid": pid, "pid_start": int(text.rpartition(")")[2].split()[19])}


def ended_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def names(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_live_run_is_alive_and_needs_no_remark(folder):
    snapshot = report(folder)
    seen = status.look(folder)

    assert seen.alive
    assert seen.note is None
    assert seen.progress == snapshot
    assert seen.as_text().startswith("running  run 01234567")


def test_a_run_whose_driver_was_killed_says_so_and_what_to_do(folder):
    report(folder, age_s=125)
    sign(folder, pid=ended_pid())
    seen = status.look(folder)

    assert not seen.alive
    assert seen.note == (
        "not running: its driver ended without a word, 2 min 05 s ago. "
        "The same command as before goes on from here"
    )
    assert seen.as_text().startswith("dead  run 01234567, segment 1\nnot running: ")


@pytest.mark.parametrize("age_s", [11, 3600])
def test_a_live_driver_that_reports_nothing_is_stuck(folder, age_s):
    report(folder, age_s=age_s)
    seen = status.look(folder)

    assert seen.alive
    assert seen.note is not None
    assert seen.note.startswith("the last report is ")
    assert "stuck" in seen.note


def test_a_run_that_was_interrupted_goes_on_with_the_same_command(folder):
    report(folder, state="interrupted", age_s=100)
    sign(folder, pid=ended_pid())

    assert status.look(folder).note == "not running: the same command as before goes on from here"


@pytest.mark.parametrize("state", ["done", "stopped", "failed"])
def test_a_run_that_is_over_needs_no_remark(folder, state):
    report(folder, state=state, age_s=100_000)
    sign(folder, pid=ended_pid())
    seen = status.look(folder)

    assert not seen.alive
    assert seen.note is None
    assert seen.as_text().startswith(f"{state}  run")


@pytest.mark.parametrize(("age_s", "alive"), [(2, True), (60, False)])
def test_of_a_run_on_another_machine_the_reports_are_the_sign_of_life(folder, age_s, alive):
    report(folder, age_s=age_s)
    sign(folder, host="elsewhere", pid=os.getpid())

    assert status.look(folder).alive is alive


def test_a_process_of_the_same_number_after_a_restart_of_the_machine_is_not_the_driver(folder):
    report(folder, age_s=3600)
    sign(folder, boot_id="00000000-0000-0000-0000-000000000000")

    assert not status.look(folder).alive


def test_another_process_that_was_given_the_dead_drivers_number_is_not_the_driver(folder):
    report(folder, age_s=2)
    before = status.look(folder)
    owner = json.loads((folder / ".lock").read_bytes())
    sign(folder, pid_start=owner["pid_start"] - 1)

    assert before.alive
    assert not status.look(folder).alive


@pytest.mark.parametrize("changes", [{"pid_start": None}, {"pid_namespace": "pid:[1]"}, {"boot_id": None}])
@pytest.mark.parametrize(("age_s", "alive"), [(2, True), (60, False)])
def test_of_a_driver_that_cannot_be_told_from_another_process_the_reports_are_the_sign(
    folder, changes, age_s, alive
):
    report(folder, age_s=age_s)
    sign(folder, **changes)

    assert status.look(folder).alive is alive


def test_a_driver_that_was_killed_and_that_nobody_waited_for_is_dead(folder):
    report(folder)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        sign(folder, **owner_of(process.pid))
        before = status.look(folder)
        os.kill(process.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + 10
        while status.look(folder).alive and time.monotonic() < deadline_s:
            time.sleep(0.01)
        after = status.look(folder)
        assert process.returncode is None

    assert (before.alive, after.alive) == (True, False)


@pytest.mark.parametrize("lock", [b"", b"{", b"[]", b"{}", b'{"pid":"x","host":"y"}', None])
@pytest.mark.parametrize(("age_s", "alive"), [(2, True), (60, False)])
def test_where_the_lock_says_nothing_the_reports_do(folder, lock, age_s, alive):
    report(folder, age_s=age_s)
    if lock is None:
        (folder / ".lock").unlink()
    else:
        (folder / ".lock").write_bytes(lock)

    assert status.look(folder).alive is alive


@pytest.mark.parametrize("pid", [0, -1, 2**70])
def test_a_number_that_no_process_has_is_nobody(folder, pid):
    report(folder, age_s=60)
    sign(folder, pid=pid, host=socket.gethostname())

    assert not status.look(folder).alive


def test_a_clock_that_is_ahead_is_no_trouble(folder):
    report(folder, age_s=-500)

    assert status.look(folder).note is None


def test_looking_touches_nothing(folder):
    report(folder)
    before = names(folder)
    status.look(folder)

    assert names(folder) == before


def test_as_json_it_is_the_snapshot_and_whether_it_lives(folder):
    snapshot = report(folder)

    assert json.loads(status.look(folder).as_json()) == {**snapshot, "alive": True}


def test_a_run_that_has_not_reported_yet_is_told_from_none(folder):
    with pytest.raises(ConfigError, match=r"has not reported yet: try again in a second$"):
        status.look(folder)


def test_what_is_no_run_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("")
    for place, said in (
        ("none", "is no folder"),
        ("file", "is no folder"),
        ("other", "is no run folder: there is no run.json in it"),
        ("", "is no run folder: there is no run.json in it"),
    ):
        with pytest.raises(ConfigError) as caught:
            status.look(tmp_path / place)

        assert str(caught.value) == f"{tmp_path / place} {said}"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"7",
        b"{}",
        b'{"state":"running"}',
        b'{"state":"running","updated_at":7}',
        b'{"state":"running","updated_at":"2026-01-01T00:00:00"}',
        b'{"state":"running","updated_at":"2026-01-01T00:00:00Z"}',
        b'{"state":"running","updated_at":"2026-01-01T00:00:00Z","servers":7,"run_id":null}',
        b"\xff\xfe",
    ],
)
def test_a_report_of_another_make_is_one_line_and_no_traceback(folder, data):
    (folder / "progress.json").write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        status.look(folder)

    assert str(folder / "progress.json") in str(caught.value)
    assert "written anew while a run goes on" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_report_that_cannot_be_read_is_named(folder):
    (folder / "progress.json").mkdir()

    with pytest.raises(ConfigError, match=r"^cannot read .*progress\.json: Is a directory$"):
        status.look(folder)


def test_run_json_of_another_make_is_named(folder):
    report(folder)
    (folder / "run.json").write_text("{")

    with pytest.raises(ConfigError, match=r"run\.json"):
        status.look(folder)


# ---- the command ----


def command(*args, **options):
    return subprocess.run(
        [sys.executable, "-m", "genpipe", "status", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=30,
        **options,
    )


@pytest.mark.slow
def test_the_command_shows_a_page_or_json_and_exits_with_0(folder):
    snapshot = report(folder)
    page, as_json = command(folder), command(folder, "--json")

    assert (page.returncode, page.stderr) == (0, "")
    assert page.stdout.startswith("running  run 01234567, segment 1\n[####")
    assert (as_json.returncode, as_json.stderr) == (0, "")
    assert json.loads(as_json.stdout) == {**snapshot, "alive": True}


@pytest.mark.slow
def test_watch_looks_again_until_the_run_is_over_and_clears_no_file(folder):
    report(folder, completed=1_000)
    seen: list[str] = []

    def read_until(process, words):
        while not any(words in line for line in seen):
            line = process.stdout.readline()
            assert line, seen
            seen.append(line)

    watching = [sys.executable, "-m", "genpipe", "status", str(folder), "--watch"]
    with subprocess.Popen(watching, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        read_until(process, "1,000 of")
        report(folder, completed=2_000)
        read_until(process, "2,000 of")
        report(folder, completed=10_000, state="done")
        sign(folder, pid=ended_pid())
        rest, said = process.communicate(timeout=30)

    everything = "".join(seen) + rest
    assert (process.returncode, said) == (0, "")
    assert "10,000 of 10" in everything
    assert everything.rstrip().count("done  run ") == 1
    assert "\x1b" not in everything


def test_watch_of_a_run_that_is_over_looks_once(folder):
    report(folder, state="done")
    sign(folder, pid=ended_pid())
    watched = command(folder, "--watch")

    assert watched.returncode == 0
    assert watched.stdout.count("done  run") == 1


def test_ctrl_c_ends_a_watch_with_130_and_no_traceback(folder):
    report(folder)
    watching = [sys.executable, "-m", "genpipe", "status", str(folder), "--watch"]
    # A child inherits that Ctrl-C is ignored, as it is for jobs in the background of a shell.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(watching, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=10)

    assert first.startswith("running  run")
    assert process.returncode == 130
    assert said == ""


def offsite(progress_changes, **lease):
    objects = MemoryObjects()
    objects.put("run.json", b"{}")
    objects.put("w00/progress.json", json.dumps(progress(**progress_changes)).encode())
    if lease:
        objects.put("w00/lease.json", json.dumps({"released": False, "ttl_s": 30.0, **lease}).encode())
    return objects


@pytest.mark.parametrize(
    ("age_s", "lease", "alive"),
    [
        (20, {}, True),
        (120, {}, False),
        (120, {"ttl_s": 400.0}, True),
        (20, {"released": True}, False),
    ],
)
def test_a_driver_elsewhere_lives_as_long_as_its_lease_says(monkeypatch, age_s, lease, alive):
    objects = offsite({"state": "running"}, **(lease or {"ttl_s": 30.0}))
    now_s = time.time()
    monkeypatch.setattr("genpipe.status.time.time", lambda: now_s + age_s)
    seen = status.look_offsite(objects)

    assert seen.alive is alive
    assert ("has not been heard of" in seen.as_text()) is not alive


def test_a_place_without_a_run_or_a_report_is_one_line():
    with pytest.raises(ConfigError, match=r"s3://memory/run holds no run"):
        status.look_offsite(MemoryObjects())
    objects = MemoryObjects()
    objects.put("run.json", b"{}")
    with pytest.raises(ConfigError, match="has not reported yet"):
        status.look_offsite(objects)
