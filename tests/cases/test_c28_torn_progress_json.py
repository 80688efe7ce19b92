"""``progress.json`` is whole at every read, and trouble with it is not the run's trouble."""

import contextlib
import json
import time
from typing import Any

import pytest

from tests.e2e.harness import (
    audit,
    genpipe,
    polled,
    progress,
    run_command,
    running,
    saved,
    servers,
    wait_for,
    write_prompts,
)
from tests.faults.mounts import CannotMountError, in_memory

LIMIT = 8


def rows(count):
    return [f"Row {place}. <<tokens=9 delay=0.2>>" for place in range(count)]


@pytest.mark.slow
def test_every_read_in_a_tight_loop_is_whole_and_never_older(tmp_path):
    texts = rows(160)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet, polled(out) as seen:
        with running(*run_command(fleet, source, out, LIMIT), err=tmp_path / "run.err") as run:
            code = run.wait()
        found = seen()

    assert code == 0
    assert found["wrong"] is None
    assert found["states"][-1] == "done"
    assert found["reads"] > 5_000
    assert found["snapshots"] >= 4
    audit(out, texts)


@pytest.mark.slow
def test_a_read_only_file_and_a_reader_that_holds_it_open_hinder_nobody(tmp_path):
    texts = rows(160)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with (
        servers(tmp_path) as fleet,
        running(*run_command(fleet, source, out, LIMIT), err=tmp_path / "run.err") as run,
    ):
        before = wait_for(lambda: progress(out), "a first snapshot")
        (out / "progress.json").chmod(0o444)
        with open(out / "progress.json", "rb") as held:
            code = run.wait()
            held_text = held.read()
    after = progress(out)

    assert code == 0
    assert held_text.endswith(b"}\n")
    assert after is not None
    assert after["state"] == "done"
    assert after["updated_at"] > before["updated_at"]
    assert "warning" not in run.err
    audit(out, texts)


@pytest.mark.slow
def test_a_snapshot_that_cannot_be_written_is_told_once_and_the_run_goes_on(tmp_path):
    texts = rows(240)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    obstacle = out / "progress.json.tmp"
    with (
        servers(tmp_path) as fleet,
        running(*run_command(fleet, source, out, LIMIT), err=tmp_path / "run.err") as run,
    ):
        before = wait_for(lambda: progress(out), "a first snapshot")

        def made():
            # The file of that name comes and goes, in a moment, about once a second.
            with contextlib.suppress(FileExistsError):
                obstacle.mkdir()
            return obstacle.is_dir()

        wait_for(made, "the obstacle")
        wait_for(lambda: "cannot write" in run.err, "the warning")
        stuck = progress(out)
        assert stuck is not None
        wait_for(lambda: run.over or _done(out) > stuck["completed"] + 80, "two more seconds of the run")
        still_stuck = progress(out)
        obstacle.rmdir()
        code = run.wait()
    after = progress(out)

    assert code == 0
    assert still_stuck == stuck
    assert stuck["updated_at"] >= before["updated_at"]
    assert after is not None
    assert (after["state"], after["completed"]) == ("done", len(texts))
    warnings = [line for line in run.err.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "progress.json" in warnings[0]
    assert "the run goes on" in warnings[0]
    audit(out, texts)


def _done(out):
    return (out / ".done_indices").read_bytes().count(b"\n")


def warnings_in(run):
    return [line for line in run.err.splitlines() if "warning" in line]


def wait_for_news(out, before):
    wait_for(lambda: progress(out) != before, "a snapshot of this process")


def temporary_files(out):
    return [path.name for path in out.rglob("*.tmp")]


@pytest.mark.slow
def test_a_full_disk_under_the_snapshot_alone_is_told_once_and_hinders_no_record(tmp_path):
    texts = rows(200)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    obstacle = out / "progress.json.tmp"
    with (
        servers(tmp_path) as fleet,
        running(*run_command(fleet, source, out, LIMIT), err=tmp_path / "run.err") as run,
    ):
        wait_for(lambda: progress(out), "a first snapshot")

        def led_astray():
            # What is written through it meets a full device, as on a full disk.
            with contextlib.suppress(FileExistsError):
                obstacle.symlink_to("/dev/full")
            return "cannot write" in run.err

        wait_for(led_astray, "the warning")
        at_warning = len(saved(out))
        wait_for(lambda: run.over or len(saved(out)) > at_warning + 60, "more answers")
        heap = temporary_files(out)
        whole = progress(out)
        obstacle.unlink(missing_ok=True)
        code = run.wait()
    after = progress(out)

    assert code == 0, run.err
    assert whole is not None
    assert heap in ([], [obstacle.name])
    assert len(warnings_in(run)) == 1
    assert "progress.json: No space left on device; the run goes on" in warnings_in(run)[0]
    assert after is not None
    assert (after["state"], after["completed"]) == ("done", len(texts))
    audit(out, texts)


@pytest.fixture
def small_disk(tmp_path):
    try:
        with in_memory(tmp_path, "8m") as mounted:
            yield mounted.folder
    except CannotMountError as refusal:
        pytest.skip(f"no small file system: {refusal}")


def fill(path):
    """Take every byte that is left."""
    for size_bytes in (1 << 16, 1 << 12, 1):
        with contextlib.suppress(OSError), open(path, "ab", buffering=0) as ballast:
            ballast.writelines(bytes(size_bytes) for _ in range(1 << 12))


@pytest.mark.slow
def test_a_folder_that_is_full_for_a_while_costs_nothing_but_the_while(tmp_path, small_disk):
    texts = rows(200)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), small_disk / "out"
    with (
        servers(tmp_path) as fleet,
        running(*run_command(fleet, source, out, LIMIT), err=tmp_path / "run.err") as run,
    ):
        wait_for(lambda: len(saved(out)) > 40, "the first answers")
        (out / "progress.json").chmod(0o444)
        fill(small_disk / "ballast")
        wait_for(lambda: "cannot write" in run.err, "the warning")
        time.sleep(2.5)
        assert not run.over
        stuck, heap = progress(out), temporary_files(out)
        status = genpipe("status", out)
        (small_disk / "ballast").unlink()
        code = run.wait()
        fleet.stop()
        visits = fleet.visits()
    after = progress(out)

    assert code == 0, run.err
    assert stuck is not None
    assert stuck["state"] == "running"
    assert heap in ([], ["progress.json.tmp"])
    assert status.code == 0, status.err
    told = [line for line in warnings_in(run) if "progress.json" in line]
    assert len(told) == 1
    assert "No space left on device" in told[0]
    assert after is not None
    assert (after["state"], after["completed"]) == ("done", len(texts))
    assert after["updated_at"] > stuck["updated_at"]
    audit(out, texts)
    assert len(visits) == len(texts)


@pytest.mark.slow
def test_kills_in_the_middle_of_snapshots_leave_a_whole_file_and_no_heap(tmp_path):
    texts = rows(120)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    heaps: list[list[str]] = []
    seen: list[dict[str, Any]] = []
    with servers(tmp_path) as fleet:
        command = run_command(fleet, source, out, LIMIT)
        for _ in range(4):
            before = progress(out)
            with running(*command, err=tmp_path / "run.err") as run:
                wait_for_news(out, before)
                time.sleep(0.2 * len(seen))
                run.kill()
            heaps.append(temporary_files(out))
            seen.append(json.loads((out / "progress.json").read_bytes()))
        ended = genpipe(*command)

    assert ended.code == 0, ended.err
    assert all(len(heap) <= 1 for heap in heaps)
    assert [each["completed"] for each in seen] == sorted(each["completed"] for each in seen)
    assert [each["segment"] for each in seen] == [1, 2, 3, 4]
    audit(out, texts)
