"""A stop keeps all that was received, waits for the rest no longer than it says, and begins nothing new.

A stop while uploads are slow is among the tests of runs with S3, in ``tests/e2e/test_offsite.py``.
"""

import json
import signal
import time

import pytest

from tests.e2e.harness import (
    audit,
    failures,
    genpipe,
    listed,
    progress,
    row_of,
    run_command,
    running,
    saved,
    servers,
    shard_paths,
    wait_for,
    write_prompts,
)
from tests.edges.audit import whole_lines

ROWS, LIMIT = 400, 16
LONG = (4, 57, 113, 161)
OPTIONS = ("--set", "output.shard_records=100", "--set", "start.ramp_s=0")


def text_of(place):
    delay = 40 if place in LONG else 0.20 + 0.05 * (place % 6)
    return f"Tail {place:03d}. <<tokens={40 + place % 20} delay={delay:.2f}>>"


TEXTS = [text_of(place) for place in range(ROWS)]


def answered(visits):
    """Rows whose answer went out to a client that was still there."""
    return {visit["row"] for visit in visits if visit["status"] == 200 and not visit["client_gone"]}


def rows_of(records):
    return {row_of(TEXTS[index]) for index in records}


def assert_whole(out):
    """No half line, no half file, no failure; whether the short shard is sealed or still open."""
    for path in shard_paths(out):
        data = path.read_bytes()
        assert data.count(b"\n") == len(whole_lines(data)), path
        assert data.endswith(b"\n") or not data, path
    assert failures(out) == {}
    assert sorted(listed(out)) == sorted(saved(out))
    assert not list(out.rglob("*.tmp"))


def assert_resumes(tmp_path, source, out):
    """The same command asks just what has no record."""
    before = saved(out)
    (tmp_path / "again").mkdir()
    with servers(tmp_path / "again", 2, orders=False) as fleet:
        again = genpipe(*run_command(fleet, source, out, LIMIT, *OPTIONS))
        fleet.stop()
        asked = [visit["row"] for visit in fleet.visits()]

    assert again.code == 0, again.err
    assert "warning" not in again.err
    assert sorted(asked) == sorted(rows_of(set(range(ROWS)) - set(before)))
    records = audit(out, TEXTS)
    assert {index: records[index] for index in before} == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_stop_waits_for_short_rows_cancels_long_ones_and_ends_within_its_grace(tmp_path, number):
    grace_s = 1.5
    source, out = write_prompts(tmp_path / "in.jsonl", TEXTS), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        command = run_command(fleet, source, out, LIMIT, *OPTIONS, "--set", f"request.grace_s={grace_s}")
        with running(*command, err=tmp_path / "1.err") as run:
            wait_for(lambda: len(saved(out)) >= 180, "all of the first shard and a part of the second")
            run.send(number)
            stopped_s = time.monotonic()
            code = run.wait()
            took_s = time.monotonic() - stopped_s
        fleet.stop()
        visits = fleet.visits()
    at_stop, state = saved(out), progress(out)
    long_rows = rows_of(LONG)
    gone = [visit for visit in visits if visit["client_gone"]]

    assert code == 128 + number
    assert grace_s - 0.1 < took_s < grace_s + 1.0
    assert max(visit["arrival_s"] for visit in visits) < stopped_s + 0.2
    assert rows_of(at_stop) == answered(visits)
    # What was short and in flight was waited for: only the long ones were left to be cancelled.
    assert {visit["row"] for visit in gone} == long_rows
    assert all(visit["gone_s"] > stopped_s + grace_s - 0.1 for visit in gone)
    assert_whole(out)
    assert state is not None
    assert (state["state"], state["completed"]) == ("interrupted", len(at_stop))
    assert (state["failed"], state["in_flight"]) == (0, 0)
    segments = [json.loads(line) for line in (out / "segments.jsonl").read_text().splitlines()]
    assert [segment.get("why") for segment in segments] == [None, "interrupted"]
    assert segments[1]["sums"]["records"] == len(at_stop)
    assert run.err.count(f"{number.name}: ") == 2
    assert run.err.splitlines()[-1].startswith(
        f"genpipe: stopped by {number.name}: {len(at_stop)} of {ROWS} prompts done"
    )
    assert_resumes(tmp_path, source, out)


def test_a_second_signal_two_seconds_later_ends_at_once_and_leaves_whole_files(tmp_path):
    source, out = write_prompts(tmp_path / "in.jsonl", TEXTS), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        with running(*run_command(fleet, source, out, LIMIT, *OPTIONS), err=tmp_path / "1.err") as run:
            wait_for(lambda: len(saved(out)) >= 180, "a full shard and a part of one")
            run.send(signal.SIGTERM)
            first_s = time.monotonic()
            time.sleep(2)
            assert not run.over
            received = saved(out)
            run.send(signal.SIGTERM)
            second_s = time.monotonic()
            code = run.wait()
            took_s = time.monotonic() - second_s
        fleet.stop()
        visits = fleet.visits()
    at_stop, state = saved(out), progress(out)

    assert code == 143
    assert took_s < 1.0
    assert max(visit["arrival_s"] for visit in visits) < first_s + 0.2
    assert at_stop == received
    assert rows_of(at_stop) == answered(visits)
    assert {visit["row"] for visit in visits if visit["client_gone"]} == rows_of(LONG)
    assert_whole(out)
    assert state is not None
    assert (state["state"], state["completed"], state["failed"]) == ("interrupted", len(at_stop), 0)
    assert_resumes(tmp_path, source, out)


def test_two_signals_while_answers_pour_in_lose_none_that_was_received(tmp_path):
    source, out = write_prompts(tmp_path / "in.jsonl", TEXTS), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        with running(*run_command(fleet, source, out, LIMIT, *OPTIONS), err=tmp_path / "1.err") as run:
            wait_for(lambda: len(saved(out)) >= 40, "the first answers")
            seen = listed(out)
            run.send(signal.SIGTERM)
            time.sleep(0.1)
            # One more than two: whoever is in a hurry presses again and again.
            for _ in range(20):
                run.send(signal.SIGTERM)
            second_s = time.monotonic()
            code = run.wait()
            took_s = time.monotonic() - second_s
        fleet.stop()
        visits = fleet.visits()
    at_stop = saved(out)

    assert code == 143
    assert took_s < 1.0
    assert set(seen) <= set(at_stop)
    # What the servers had sent a little before the second signal had been received.
    early = [visit for visit in visits if visit["end_s"] < second_s - 0.2]
    assert answered(early) <= rows_of(at_stop) <= answered(visits)
    assert any(visit["client_gone"] for visit in visits)
    assert "Traceback" not in run.err
    assert_whole(out)
    assert_resumes(tmp_path, source, out)


def test_a_stop_does_not_wait_for_prompts_that_no_server_takes(tmp_path):
    source, out = write_prompts(tmp_path / "in.jsonl", TEXTS), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        command = run_command(fleet, source, out, LIMIT, *OPTIONS)
        with running(*command, err=tmp_path / "1.err") as run:
            wait_for(lambda: len(saved(out)) >= 40, "the first answers")
            fleet.kill()
            wait_for(lambda: (progress(out) or {}).get("in_flight") == 0, "a word of the servers' death")
            run.send(signal.SIGTERM)
            stopped_s = time.monotonic()
            code = run.wait()
            took_s = time.monotonic() - stopped_s
    state = progress(out)

    assert code == 143
    assert took_s < 2.0
    assert_whole(out)
    assert state is not None
    assert (state["state"], state["completed"]) == ("interrupted", len(saved(out)))
    assert_resumes(tmp_path, source, out)


@pytest.mark.parametrize("where", ["headers", "body"])
def test_a_stop_does_not_wait_for_an_answer_that_hangs(tmp_path, where):
    texts = [f"Row {place}. <<tokens=5>>" for place in range(40)]
    texts[7] = f"Row 7. <<hang={where}>>"
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        command = run_command(fleet, source, out, LIMIT, "--set", "request.grace_s=0.5")
        with running(*command, err=tmp_path / "1.err") as run:
            wait_for(lambda: len(saved(out)) == 39, "all others")
            run.send(signal.SIGTERM)
            stopped_s = time.monotonic()
            code = run.wait()
            took_s = time.monotonic() - stopped_s
        fleet.stop()
        visits = fleet.visits()

    assert code == 143
    assert 0.4 < took_s < 1.5
    assert [visit["row"] for visit in visits if visit["client_gone"]] == [row_of(texts[7])]
    assert sorted(saved(out)) == [place for place in range(40) if place != 7]
    assert_whole(out)


def test_a_stop_at_any_moment_of_the_start_leaves_a_folder_that_goes_on(tmp_path):
    texts = [f"Row {place}. <<tokens=5 delay=0.05>>" for place in range(60)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    codes = []
    with servers(tmp_path) as fleet:
        command = run_command(fleet, source, out, 2, *OPTIONS)
        for wait_s in (0.05, 0.15, 0.2, 0.25, 0.3, 0.4):
            with running(*command, err=tmp_path / "run.err") as run:
                time.sleep(wait_s)
                run.send(signal.SIGTERM)
                codes.append(run.wait(10))
        again = genpipe(*command)
        fleet.stop()
        visits = fleet.visits()

    # Before Python has come to the handlers, the system's own way ends it.
    assert set(codes) <= {143, -signal.SIGTERM}, codes
    assert again.code == 0, again.err
    audit(out, texts)
    assert sorted(visit["row"] for visit in visits) == sorted(map(row_of, texts))
    assert "Traceback" not in (tmp_path / "run.err").read_text()


def test_the_grace_is_well_under_half_a_minute_unless_it_is_set():
    shown = genpipe("run", "--servers", "http://127.0.0.1:9", "--print-config")

    assert json.loads(shown.out)["request"]["grace_s"] == 20
