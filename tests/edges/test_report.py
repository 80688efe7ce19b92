"""``progress.json`` as others read it, and the thread that writes it."""

import contextlib
import json
import os
import threading
import time
from typing import Any, cast

import pytest

from genpipe.core.flow import Core
from genpipe.core.progress import Progress
from genpipe.edges.record import Wall
from genpipe.edges.report import Report
from tests.ui.samples import progress

NOBODY = cast("Core", None)
FACTS = {"run_id": "r1", "segment": 3, "started_at": "2023-11-14T22:13:20.000Z"}


class Snapshots:
    """Stands for what looks at the core: each snapshot is numbered."""

    def __init__(self, **changes):
        self.count = 0
        self.changes = changes

    def snapshot(self, core, total, now_s) -> dict[str, Any]:
        self.count += 1
        facts = ("eta_at", "run_id", "segment", "started_at", "updated_at")
        known = {key: value for key, value in progress(**self.changes).items() if key not in facts}
        return {**known, "total": total, "completed": self.count, "elapsed_s": now_s - 100.0}


class Screen:
    """A display that remembers, and fails or waits where a test wants it to."""

    def __init__(self, error=None):
        self.error = error
        self.shown: list[int] = []
        self.notes: list[str] = []
        self.closed = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.began = threading.Event()

    def show(self, progress):
        self.began.set()
        assert self.may_go_on.wait(10)
        self.shown.append(progress["completed"])
        if self.error is not None:
            raise self.error

    def note(self, text):
        self.notes.append(text)
        if self.error is not None:
            raise self.error

    def close(self):
        self.closed += 1


@contextlib.contextmanager
def reporting(folder, screen=None, **changes):
    report = Report(
        folder,
        cast("Progress", Snapshots(**changes)),
        total=lambda: 1000,
        facts=FACTS,
        wall=Wall(wall_s=1_700_000_000.0, run_s=100.0),
        display=screen or Screen(),
    )
    try:
        yield report
    finally:
        if report._thread.is_alive():
            report.close(NOBODY, 200.0, state="failed")
        assert not report._thread.is_alive()


def read(folder):
    return json.loads((folder / "progress.json").read_bytes())


def until(condition, timeout_s=10.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.mark.slow
def test_a_reader_in_a_tight_loop_always_finds_one_whole_document_and_never_an_older_one(tmp_path):
    seen: list[int] = []
    over = threading.Event()

    def poll():
        while not over.is_set():
            with contextlib.suppress(FileNotFoundError):
                seen.append(read(tmp_path)["completed"])

    reader = threading.Thread(target=poll)
    reader.start()
    try:
        with reporting(tmp_path, servers=[progress()["servers"][0]] * 50) as report:
            for n in range(100):
                report.publish(NOBODY, 100.0 + n)
                time.sleep(0.02)
            last = report.close(NOBODY, 500.0, state="done")
    finally:
        over.set()
        reader.join()

    assert seen == sorted(seen)
    assert len(set(seen)) > 20
    assert read(tmp_path) == last
    assert last["completed"] == 101


def test_nothing_but_the_file_is_left(tmp_path):
    with reporting(tmp_path) as report:
        for n in range(20):
            report.publish(NOBODY, 100.0 + n)
            time.sleep(0.002)
        report.close(NOBODY, 200.0, state="done")

    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]


def test_of_snapshots_that_pile_up_only_the_newest_is_written(tmp_path):
    screen = Screen()
    screen.may_go_on.clear()
    with reporting(tmp_path, screen) as report:
        report.publish(NOBODY, 100.0)
        assert screen.began.wait(10)
        for n in range(50):
            report.publish(NOBODY, 101.0 + n)
        screen.may_go_on.set()
        until(lambda: len(screen.shown) == 2)
        report.close(NOBODY, 200.0, state="done")

    assert screen.shown == [1, 51, 52]


def test_a_snapshot_says_when_it_was_taken_when_the_end_comes_and_whose_it_is(tmp_path):
    with reporting(tmp_path, eta_hours=0.5) as report:
        report.publish(NOBODY, 110.0)
        until((tmp_path / "progress.json").exists)
        snapshot = read(tmp_path)
        report.close(NOBODY, 120.0, state="done")

    assert snapshot["updated_at"] == "2023-11-14T22:13:30.000Z"
    assert snapshot["eta_at"] == "2023-11-14T22:43:30.000Z"
    assert {key: snapshot[key] for key in FACTS} == FACTS
    assert snapshot["total"] == 1000


def test_without_an_eta_there_is_no_moment_of_it(tmp_path):
    with reporting(tmp_path, eta_hours=None) as report:
        report.publish(NOBODY, 110.0)
        until((tmp_path / "progress.json").exists)
        snapshot = read(tmp_path)
        report.close(NOBODY, 120.0, state="done")

    assert snapshot["eta_at"] is None


@pytest.mark.parametrize("state", ["done", "stopped", "failed", "interrupted"])
def test_the_last_snapshot_says_how_it_ended_and_expects_nothing_more(tmp_path, state):
    screen = Screen()
    with reporting(tmp_path, screen, eta_hours=0.5) as report:
        last = report.close(NOBODY, 120.0, state=state, last_error="disk full")

    assert read(tmp_path) == last
    assert last["state"] == state
    assert last["last_error"] == "disk full"
    assert [last[key] for key in ("eta_hours", "eta_hours_low", "eta_hours_high", "eta_at")] == [None] * 4
    assert screen.closed == 1


def test_an_earlier_error_stays_where_none_ended_the_run(tmp_path):
    with reporting(tmp_path, last_error="http://a: 500: oh") as report:
        assert report.close(NOBODY, 120.0, state="done")["last_error"] == "http://a: 500: oh"


def in_the_way(folder):
    """Make the file impossible to write, for root as well."""
    (folder / "progress.json.tmp").mkdir()


def test_a_file_that_cannot_be_written_is_told_once_and_harms_nothing(tmp_path):
    in_the_way(tmp_path)
    screen = Screen()
    with reporting(tmp_path, screen) as report:
        for n in range(5):
            report.publish(NOBODY, 100.0 + n)
            until(lambda wanted=n + 1: len(screen.shown) == wanted)
        last = report.close(NOBODY, 120.0, state="done")

    assert screen.notes == [
        f"warning: cannot write {tmp_path / 'progress.json'}: Is a directory; the run goes on"
    ]
    assert len(screen.shown) == 6
    assert last["state"] == "done"


def test_a_file_that_can_be_written_again_is(tmp_path):
    in_the_way(tmp_path)
    screen = Screen()
    with reporting(tmp_path, screen) as report:
        report.publish(NOBODY, 100.0)
        until(lambda: screen.notes)
        (tmp_path / "progress.json.tmp").rmdir()
        report.close(NOBODY, 120.0, state="done")

    assert read(tmp_path)["state"] == "done"


def test_a_reader_that_holds_the_file_open_keeps_what_it_opened(tmp_path):
    with reporting(tmp_path) as report:
        report.publish(NOBODY, 100.0)
        until((tmp_path / "progress.json").exists)
        with open(tmp_path / "progress.json", "rb") as held:
            report.close(NOBODY, 120.0, state="done")

            assert json.loads(held.read())["state"] == "running"
    assert read(tmp_path)["state"] == "done"


def test_a_folder_that_was_removed_does_not_end_the_run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    screen = Screen()
    with reporting(folder, screen) as report:
        folder.rmdir()
        report.publish(NOBODY, 100.0)
        report.close(NOBODY, 120.0, state="done")

    assert len(screen.notes) == 1
    assert not folder.exists()


def test_a_display_that_cannot_show_anything_does_not_stop_the_file(tmp_path):
    in_the_way(tmp_path)
    screen = Screen(error=OSError("the terminal is gone"))
    with reporting(tmp_path, screen) as report:
        for n in range(3):
            report.publish(NOBODY, 100.0 + n)
            until(lambda wanted=n + 1: len(screen.shown) == wanted)
        (tmp_path / "progress.json.tmp").rmdir()
        report.close(NOBODY, 120.0, state="done")

    assert read(tmp_path)["state"] == "done"
    assert len(screen.notes) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_even_a_bug_in_the_display_leaves_the_end_of_the_run_in_the_file(tmp_path):
    screen = Screen(error=RuntimeError("a bug"))
    with reporting(tmp_path, screen) as report:
        report.publish(NOBODY, 100.0)
        until(lambda: not report._thread.is_alive())
        report.publish(NOBODY, 101.0)
        report.close(NOBODY, 120.0, state="done")

    assert read(tmp_path)["state"] == "done"
    assert screen.closed == 1


@pytest.mark.parametrize("error", ["lone \ud800 surrogate", os.fsdecode(b"in\xff.jsonl: bad")])
def test_text_that_is_none_is_written_as_far_as_it_can_be(tmp_path, error):
    with reporting(
        tmp_path, last_error=error, total_output_tokens=2**70, rate_per_sec=float("nan")
    ) as report:
        report.publish(NOBODY, 100.0)
        report.close(NOBODY, 120.0, state="done")
    snapshot = json.loads((tmp_path / "progress.json").read_text("utf-8"), parse_constant=pytest.fail)

    assert "\N{REPLACEMENT CHARACTER}" in snapshot["last_error"]
    assert snapshot["total_output_tokens"] == 2**70
    assert snapshot["rate_per_sec"] is None


def test_publishing_does_not_wait_for_the_disk_or_the_display(tmp_path):
    screen = Screen()
    screen.may_go_on.clear()
    with reporting(tmp_path, screen) as report:
        began_s = time.monotonic()
        for n in range(100):
            report.publish(NOBODY, 100.0 + n)
        took_s = time.monotonic() - began_s
        screen.may_go_on.set()
        report.close(NOBODY, 300.0, state="done")

    assert took_s < 0.5


def test_the_thread_ends_though_the_last_snapshot_cannot_be_taken(tmp_path):
    """Or else a bug that shows in a snapshot would keep the process, and the folder's lock, for ever."""

    class Broken(Snapshots):
        def snapshot(self, core, total, now_s):
            raise AssertionError("a bug")

    threads = set(threading.enumerate())
    report = Report(
        tmp_path,
        cast("Progress", Broken()),
        total=lambda: 1000,
        facts=FACTS,
        wall=Wall(wall_s=0.0, run_s=0.0),
        display=Screen(),
    )
    with pytest.raises(AssertionError, match="a bug"):
        report.close(NOBODY, 1.0, state="done")
    left = set(threading.enumerate()) - threads

    assert left == set()
