"""Answers come back out of order, and a killed run must not take "n lines" for "the first n prompts"."""

import time

import pytest

from tests.e2e.harness import (
    asked_after,
    asked_by_process,
    audit,
    row_of,
    running,
    saved,
    servers,
    wait_for,
    write_prompts,
)

SLOW = (0, 1, 17, 30)


def staggered(slow_s, fast_s):
    delays = [slow_s if place in SLOW else fast_s for place in range(60)]
    return [f"Staggered {place:02d}. <<tokens=30 delay={delay}>>" for place, delay in enumerate(delays)]


def command(fleet, source, out, *, limit):
    options = ["--set", "output.shard_records=5", "--set", "start.ramp_s=0"]
    return [
        "run",
        "--prompts",
        source,
        "--servers",
        fleet.address,
        "--concurrency",
        limit,
        "--out",
        out,
        *options,
    ]


def test_a_run_killed_behind_a_slow_first_row_keeps_what_is_done_and_asks_the_rest(tmp_path):
    texts = staggered(3.0, 0.05)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        with running(*command(fleet, source, out, limit=8), err=tmp_path / "1.err") as first:
            wait_for(lambda: len(saved(out)) >= 56, "all fast rows on disk while row 0 is still running")
            first.kill()
        before = saved(out)
        with running(*command(fleet, source, out, limit=8), err=tmp_path / "2.err") as second:
            code = second.wait()
        fleet.stop()
        asked = asked_by_process(fleet.visits())

    assert sorted(before) == [index for index in range(60) if index not in SLOW]
    assert code == 0
    audit(out, texts)
    assert sorted(visit["row"] for visit in asked[1]) == sorted(row_of(texts[index]) for index in SLOW)


@pytest.mark.slow
def test_four_kills_in_one_run_lose_nothing_and_ask_nothing_that_was_done(tmp_path):
    texts = staggered(2.5, 0.3)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    kills = []
    with servers(tmp_path, 2) as fleet:
        for more in (0, 1, 6, 12):
            before = len(saved(out))
            with running(*command(fleet, source, out, limit=3), err=tmp_path / "run.err") as run:
                time.sleep(1)
                wait_for(lambda: len(saved(out)) >= before + more, "more answers")  # noqa: B023
                run.kill()
            kills.append((time.monotonic(), {row_of(texts[index]) for index in saved(out)}))
        with running(*command(fleet, source, out, limit=3), err=tmp_path / "run.err") as run:
            code = run.wait()
        fleet.stop()
        visits = fleet.visits()

    assert code == 0
    audit(out, texts)
    assert 0 < len(kills[-1][1]) < 60
    for killed_s, done in kills:
        assert asked_after(visits, killed_s)
        assert not done & asked_after(visits, killed_s)
