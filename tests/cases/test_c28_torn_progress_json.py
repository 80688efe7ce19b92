"""``progress.json`` is whole at every read, and trouble with it is not the run's trouble."""

import contextlib

import pytest

from tests.e2e.harness import audit, polled, progress, running, servers, wait_for, write_prompts


def command(fleet, source, out):
    return ["run", "--prompts", source, "--servers", fleet.address, "--concurrency", 8, "--out", out]


def rows(count):
    return [f"Row {place}. <<tokens=9 delay=0.2>>" for place in range(count)]


@pytest.mark.slow
def test_every_read_in_a_tight_loop_is_whole_and_never_older(tmp_path):
    texts = rows(160)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet, polled(out) as seen:
        with running(*command(fleet, source, out), err=tmp_path / "run.err") as run:
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
    with servers(tmp_path) as fleet, running(*command(fleet, source, out), err=tmp_path / "run.err") as run:
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
    with servers(tmp_path) as fleet, running(*command(fleet, source, out), err=tmp_path / "run.err") as run:
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
