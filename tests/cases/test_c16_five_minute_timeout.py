"""No default of any library cuts a long answer, and a row's time limit begins when it is sent."""

from collections import Counter

import pytest

from tests.e2e.fast_clock import hurried
from tests.e2e.harness import (
    GENPIPE,
    assert_within_limit,
    audit,
    failures,
    genpipe,
    row_of,
    run_command,
    running,
    servers,
    without_probes,
    write_prompts,
)
from tests.faults.soak import SOAK

LONG = (5, 20, 35, 50)
LONG_S = 330
HASTE = 1 if SOAK > 1 else 100
"""How many times as fast the client's time passes: its seconds are those of the case."""


@pytest.mark.timeout(60 + 5 * LONG_S if SOAK > 1 else 60)
def test_answers_of_more_than_five_minutes_come_at_the_first_attempt_though_they_queue(tmp_path):
    texts = [
        f"Long {place}. <<tokens=500 delay={LONG_S / HASTE}>>" if place in LONG else f"Short {place}."
        for place in range(64)
    ]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    command = GENPIPE if HASTE == 1 else hurried(HASTE)
    with servers(tmp_path, 1, "--max-running", 1) as fleet:
        with running(
            *run_command(fleet, source, out, 2), "--quiet", err=tmp_path / "run.err", command=command
        ) as run:
            code = run.wait(5 * LONG_S)
        fleet.stop()
        visits = without_probes(fleet.visits())
    records = audit(out, texts)
    queued_s = max(visit["start_s"] - visit["arrival_s"] for visit in visits)

    assert code == 0, run.err
    assert Counter(visit["row"] for visit in visits) == Counter(row_of(text) for text in texts)
    assert [visit for visit in visits if visit["client_gone"]] == []
    assert {record["attempts"] for record in records.values()} == {1}
    assert all(records[place]["latency_s"] >= LONG_S for place in LONG)
    # One of them waited in the server's queue for longer than another took.
    assert queued_s > 0.9 * LONG_S / HASTE
    assert_within_limit(fleet, 2)


def test_a_limit_can_be_set_and_waiting_for_a_slot_of_ours_does_not_count(tmp_path):
    """Sixty rows, two at a time, need far longer than the limit of one; the one that is too long says so."""
    texts = [f"Row {place}. <<delay={4 if place == 7 else 0.08}>>" for place in range(60)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        ended = genpipe(*run_command(fleet, source, out, 2, "--set=request.timeout_s=1"))
        fleet.stop()
        visits = without_probes(fleet.visits())
    failed = failures(out)

    assert ended.code == 1, ended.err
    audit(out, texts, but=[7])
    assert sorted(failed) == [7]
    assert "no answer within request.timeout_s = 1 s" in failed[7]["message"]
    assert Counter(visit["row"] for visit in visits) == Counter(row_of(text) for text in texts)
    assert max(visit["end_s"] for visit in visits) - visits[0]["arrival_s"] > 2
