"""After a resume the totals are the whole run's, and the rate and the ETA are this process's alone."""

import signal
import time
from datetime import datetime
from typing import Any

import pytest

from tests.e2e.harness import (
    audit,
    failures,
    genpipe,
    progress,
    run_command,
    running,
    saved,
    servers,
    wait_for,
    write_prompts,
)

ROWS, LIMIT, DELAY_S = 400, 8, 0.5
REFUSED = (10, 60, 250)


def text_of(place):
    if place in REFUSED:
        return f"Row {place}. <<status=400 why=too_long>>"
    return f"Row {place}. <<tokens={20 + place % 30} delay={DELAY_S}>>"


def watch(run, out, *, until):
    """Each snapshot once, from the first on, until the process has ended or ``until`` says so."""
    seen: dict[str, dict[str, Any]] = {}
    deadline_s = time.monotonic() + 60
    over = False
    while not over and time.monotonic() < deadline_s:
        over = run.over
        now = progress(out)
        if now is not None:
            seen[now["updated_at"]] = now
            if until(now):
                break
        time.sleep(0.05)
    return [seen[moment] for moment in sorted(seen)]


def seconds_between(earlier, later):
    begin, end = (datetime.fromisoformat(each["updated_at"]) for each in (earlier, later))
    return (end - begin).total_seconds()


def average_on_disk(out):
    tokens = [record["usage"]["completion_tokens"] for record in saved(out).values()]
    return sum(tokens) / len(tokens)


@pytest.mark.slow
def test_totals_go_on_and_rates_begin_anew(tmp_path):
    texts = [text_of(place) for place in range(ROWS)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        command = run_command(fleet, source, out, LIMIT)
        with running(*command, err=tmp_path / "1.err") as first:
            began = watch(first, out, until=lambda now: now["completed"] >= 150)
            first.send(signal.SIGTERM)
            code = first.wait()
        stopped = progress(out)
        assert stopped is not None
        average_at_stop = average_on_disk(out)
        time.sleep(4)
        with running(*command, err=tmp_path / "2.err") as second:
            wait_for(lambda: progress(out) != stopped, "the second process's first snapshot")
            resumed = watch(second, out, until=lambda now: now["state"] == "done")
            second_code = second.wait()
    last = resumed[-1]

    assert (code, second_code) == (143, 1)
    assert (stopped["state"], last["state"]) == ("interrupted", "done")
    audit(out, texts, but=REFUSED)
    assert sorted(failures(out)) == list(REFUSED)

    # Totals: where the first process ended, the second goes on.
    assert 150 <= stopped["completed"] == resumed[0]["completed"] < 300
    assert stopped["failed"] == resumed[0]["failed"] == 2
    assert (last["completed"], last["failed"], last["total"]) == (ROWS - 3, 3, ROWS)
    assert stopped["avg_output_tokens"] == pytest.approx(average_at_stop, abs=0.001)
    assert last["avg_output_tokens"] == pytest.approx(average_on_disk(out), abs=0.001)
    assert (stopped["segment"], last["segment"]) == (1, 2)
    note = f"resuming run {stopped['run_id'][:8]} in {out}: {stopped['completed']} done, 2 failed for good"
    assert note in second.err
    assert f" {stopped['completed']}/{ROWS} done" in second.err
    for snapshots in (began, resumed):
        for now in snapshots:
            assert now["completed"] + now["failed"] <= ROWS
            assert now["percent"] <= 100

    # Rates: two servers of 8 slots make 32 rows a second at the very most.
    fastest = 2 * LIMIT / DELAY_S
    for now in began + resumed:
        assert (now["rate_per_sec"] or 0) <= 1.05 * fastest
        assert (now["rate_per_sec_segment"] or 0) <= 1.05 * fastest
    assert last["elapsed_s"] < seconds_between(stopped, last) - 4

    # ETA and rates: none before there is ground for one, then near the truth.
    for first_of in (began[0], resumed[0]):
        assert first_of["eta_hours"] is None
        assert first_of["rate_per_sec"] is None
    judged = [
        now
        for now in resumed
        if now["completed"] >= resumed[0]["completed"] + 10 and now["state"] == "running"
    ]
    assert len(judged) >= 3
    for now in judged:
        truth_s = seconds_between(now, last)
        assert now["eta_hours"] is not None, now
        assert abs(3600 * now["eta_hours"] - truth_s) < 0.3 * truth_s + 0.5, (now, truth_s)


@pytest.mark.slow
def test_after_kills_and_pauses_the_totals_are_those_on_disk_and_the_dead_are_in_no_rate(tmp_path):
    texts = [f"Row {place}. <<tokens={20 + place % 30} delay=0.2>>" for place in range(240)]
    texts[7] = "Row 7. <<status=400 why=too_long>>"
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    stops = []
    with servers(tmp_path) as fleet:
        command = run_command(fleet, source, out, LIMIT, "--set", "output.shard_records=50")
        for least in (60, 120):
            with running(*command, err=tmp_path / "run.err") as run:
                snapshots = watch(run, out, until=lambda now, least=least: now["completed"] >= least)
                run.kill()
            stops.append((len(saved(out)), snapshots))
            time.sleep(1.5)
        dead = genpipe("status", out)
        with running(*command, err=tmp_path / "run.err") as run:
            before = progress(out)
            wait_for(lambda: progress(out) != before, "the last process's first snapshot")
            resumed = watch(run, out, until=lambda now: now["state"] == "done")
            code = run.wait()
    last = resumed[-1]

    assert code == 1
    audit(out, texts, but=[7])
    assert "not running" in dead.out
    # The file may lag behind the disk at a kill; the next process counts what is on the disk.
    for (on_disk, snapshots), following in zip(stops, (stops[1][1], resumed), strict=True):
        assert snapshots[-1]["completed"] <= on_disk
        mine = [now for now in following if now["segment"] == snapshots[-1]["segment"] + 1]
        assert mine[0]["completed"] == on_disk
        assert mine[0]["failed"] == 1
        assert mine[0]["rate_per_sec"] is None
        assert mine[0]["elapsed_s"] < 1.5
    assert [last["segment"], last["completed"], last["failed"], last["total"]] == [3, 239, 1, 240]
    assert last["avg_output_tokens"] == pytest.approx(average_on_disk(out), abs=0.001)
    # One server of 8 slots makes 40 rows a second at the very most.
    for now in [*stops[0][1], *stops[1][1], *resumed]:
        assert (now["rate_per_sec"] or 0) <= 1.05 * LIMIT / 0.2
        assert (now["rate_per_sec_segment"] or 0) <= 1.05 * LIMIT / 0.2
        assert now["completed"] + now["failed"] <= 240


def test_a_finished_run_that_is_started_again_keeps_its_totals_and_has_no_rate(tmp_path):
    texts = [f"Row {place}. <<tokens={20 + place % 30}>>" for place in range(60)]
    texts[7] = "Row 7. <<status=400 why=too_long>>"
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    seen = []
    with servers(tmp_path) as fleet:
        for _ in range(3):
            assert genpipe(*run_command(fleet, source, out, LIMIT)).code == 1
            state = progress(out)
            assert state is not None
            seen.append(state)
    same = ("completed", "failed", "total", "percent", "avg_output_tokens", "total_output_tokens", "state")

    assert {key: seen[0][key] for key in ("completed", "failed", "total", "state")} == {
        "completed": 59,
        "failed": 1,
        "total": 60,
        "state": "done",
    }
    for key in same:
        assert seen[1][key] == seen[2][key] == seen[0][key], key
    assert [state["segment"] for state in seen] == [1, 2, 3]
    assert seen[0]["rate_per_sec_segment"] > 0
    for again in seen[1:]:
        assert not again["rate_per_sec_segment"]
        assert again["rate_per_sec"] is None
        assert again["eta_hours"] is None
