"""After a resume the totals are the whole run's, and the rate and the ETA are this process's alone."""

import signal
import time
from datetime import datetime
from typing import Any

import pytest

from tests.e2e.harness import audit, failures, progress, running, saved, servers, wait_for, write_prompts

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
        command = [
            "run",
            "--prompts",
            source,
            "--servers",
            fleet.address,
            "--concurrency",
            LIMIT,
            "--out",
            out,
        ]
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

    # ETA: none before there is ground for one, then near the truth.
    assert resumed[0]["eta_hours"] is None
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
