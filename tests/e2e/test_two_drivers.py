"""Two drivers on one folder: at one instant, again and again, and after somebody removed the lock."""

import signal
import time
from collections import Counter
from functools import partial

import pytest

from tests.e2e.harness import (
    asked_by_process,
    audit,
    genpipe,
    row_of,
    running,
    saved,
    servers,
    wait_for,
    write_prompts,
)
from tests.e2e.two import assert_turned_away, at_one_instant, program, told_apart

ROUNDS = 5

# A driver on another machine, as far as can be seen, and beats that come soon.
ELSEWHERE = "import socket\nsocket.gethostname = lambda: 'far-away'\n"
QUICK = """
from genpipe.edges import heartbeat
heartbeat.BEAT_S, heartbeat.TTL_S, heartbeat.LOOK_S, heartbeat.SETTLE_S = 0.2, 2.0, 0.1, 0.2
"""


def rows(count, delay_s, what="Row"):
    return [f"{what} {place}. <<tokens=5 delay={delay_s}>>" for place in range(count)]


def command_of(fleet, source, out, concurrency=8):
    return [
        *("run", "--prompts", source, "--servers", fleet.address),
        *("--concurrency", concurrency, "--out", out),
    ]


def test_at_one_instant_one_runs_and_one_is_turned_away_round_after_round(tmp_path):
    texts = rows(60, delay_s=0.03)
    source = write_prompts(tmp_path / "in.jsonl", texts)
    with servers(tmp_path) as fleet:
        for number in range(ROUNDS):
            out = tmp_path / f"out-{number}"
            logs = [tmp_path / f"{number}-{which}.err" for which in "ab"]
            with at_one_instant(command_of(fleet, source, out), logs) as runs:
                winner, loser = told_apart(runs)
            assert_turned_away(loser, out, winner)
            audit(out, texts)
        fleet.stop()
        asked = Counter(visit["row"] for visit in fleet.visits())

    assert set(asked.values()) == {ROUNDS}


def any_over(runs):
    return any(run.over for run in runs)


def has_more_than(out, count):
    return len(saved(out)) > count


def test_at_one_instant_after_kills_one_goes_on_and_nothing_is_lost_or_doubled(tmp_path):
    texts = rows(240, delay_s=0.2)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        for number in range(ROUNDS):
            before = len(saved(out))
            logs = [tmp_path / f"{number}-{which}.err" for which in "ab"]
            with at_one_instant(command_of(fleet, source, out), logs) as runs:
                first, second = runs
                wait_for(partial(any_over, runs), "the end of one of them")
                loser, winner = (first, second) if first.over else (second, first)
                assert loser.wait() == 75, loser.err
                assert_turned_away(loser, out, winner)
                wait_for(partial(has_more_than, out, before + 8), "some answers")
                winner.kill()
        ended = genpipe(*command_of(fleet, source, out))

    assert ended.code == 0, ended.err
    audit(out, texts)


def test_a_suspended_driver_still_has_the_folder(tmp_path):
    texts = rows(40, delay_s=0.2)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        command = command_of(fleet, source, out)
        with running(*command, err=tmp_path / "1.err") as first:
            wait_for(lambda: len(saved(out)) >= 8, "the first answers")
            first.send(signal.SIGSTOP)
            with running(*command, err=tmp_path / "2.err") as second:
                code = second.wait()
            first.send(signal.SIGCONT)
            assert first.wait() == 0, first.err

    assert code == 75
    assert_turned_away(second, out, first)
    audit(out, texts)


def end_of_both(first, second):
    """The exit codes, once both have ended by themselves."""
    return first.wait(), second.wait()


@pytest.mark.parametrize("second_starts", ["at once", "after the first has seen it"])
def test_after_the_lock_file_is_removed_the_first_ends_at_its_next_group(tmp_path, second_starts):
    texts = rows(120, delay_s=0.3)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        command = command_of(fleet, source, out)
        with running(*command, err=tmp_path / "1.err") as first:
            wait_for(lambda: len(saved(out)) >= 16, "the first answers")
            (out / ".lock").unlink()
            if second_starts != "at once":
                first.wait(10)
            with running(*command, err=tmp_path / "2.err") as second:
                codes = end_of_both(first, second)
        resumed = genpipe(*command)

    # Far from the end of a shard: it is the group that is refused, and no seal.
    assert len(texts) < 500
    assert codes[0] == 75, first.err
    assert "was removed or replaced" in first.err.splitlines()[-1]
    assert codes[1] in (0, 74, 75), second.err
    assert "Traceback" not in first.err + second.err
    assert resumed.code == 0, resumed.err
    audit(out, texts)


def test_of_two_that_both_believe_to_have_the_folder_only_the_later_writes(tmp_path):
    texts = rows(24, delay_s=0.02) + rows(60, delay_s=3.0, what="Slow row")
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        command = command_of(fleet, source, out, concurrency=64)
        with running(*command, err=tmp_path / "1.err") as first:
            wait_for(lambda: len(saved(out)) >= 24, "all quick answers")
            (out / ".lock").unlink()
            # Nothing comes for the first in the next seconds, so that it cannot have noticed yet.
            with running(*command, err=tmp_path / "2.err") as second:
                wait_for(lambda: b'"epoch": 1' in _read(out / ".lock"), "the second's claim")
                was_over = first.over
                codes = end_of_both(first, second)
        fleet.stop()
        processes = asked_by_process(fleet.visits())

    assert not was_over
    assert codes == (75, 0), first.err + second.err
    audit(out, texts)
    assert len(processes) == 2
    assert {visit["row"] for visit in processes[1]} == {row_of(text) for text in texts[24:]}


def _read(path):
    return path.read_bytes() if path.exists() else b""


def test_without_locks_a_driver_that_slept_too_long_ends_and_the_one_that_took_over_completes(tmp_path):
    texts = rows(120, delay_s=0.3)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        command = command_of(fleet, source, out)
        with running(
            0, *command, err=tmp_path / "1.err", command=program("ENOLCK", before=QUICK + ELSEWHERE)
        ) as first:
            wait_for(lambda: len(saved(out)) >= 16, "the first answers")
            first.send(signal.SIGSTOP)
            began_s = time.monotonic()
            with running(
                0, *command, err=tmp_path / "2.err", command=program("ENOLCK", before=QUICK)
            ) as second:
                wait_for(lambda: "taking" in second.err, "the takeover")
                took_s = time.monotonic() - began_s
                before = len(saved(out))
                wait_for(lambda: len(saved(out)) > before + 8, "the second's answers")
                first.send(signal.SIGCONT)
                codes = end_of_both(first, second)

    assert codes == (75, 0), first.err + second.err
    assert took_s > 2.0
    assert f"pid {second.pid}" in first.err.splitlines()[-1]
    assert "host far-away" in second.err
    assert "Traceback" not in first.err + second.err
    audit(out, texts)
