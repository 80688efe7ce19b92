"""Whole runs over eight servers: undisturbed, and killed at five random moments."""

import json
import random
import time

import pytest

from tests.e2e.harness import (
    asked_after,
    assert_within_limit,
    audit,
    genpipe,
    polled,
    row_of,
    running,
    saved,
    servers,
    write_prompts,
)

QUESTIONS = 1319
THINGS = ("pears", "nails", "stamps", "buttons", "shells", "tiles", "candles")


def questions(seed):
    """Word problems made up for this test, each of them different."""
    rng = random.Random(seed)
    return [
        f"Problem {place}: Ida has {rng.randint(3, 90)} {rng.choice(THINGS)} and gives away "
        f"{rng.randint(1, 3)} of them every day. How many are left after {rng.randint(2, 9)} days? "
        f"<<tokens={rng.randint(40, 400)} delay={rng.uniform(0.1, 0.6):.3f}>>"
        for place in range(QUESTIONS)
    ]


def command(fleet, source, out, limit):
    return [
        *("run", "--prompts", source, "--servers", fleet.address, "--concurrency", limit, "--out", out),
        *("--set", "input.field=question", "--set", "request.sampling.max_tokens=2048"),
    ]


def test_eight_servers_answer_each_question_once_while_a_dashboard_reads_along(tmp_path):
    texts = questions(seed=1)
    source, out = write_prompts(tmp_path / "in.jsonl", texts, field="question"), tmp_path / "out"
    with servers(tmp_path, 8) as fleet, polled(out) as seen:
        ended = genpipe(*command(fleet, source, out, 32))
        found = seen()
        fleet.stop()
        visits = fleet.visits()
    records = audit(out, texts)
    snapshot = json.loads((out / "progress.json").read_bytes())
    tokens = [record["usage"]["completion_tokens"] for record in records.values()]

    assert ended.code == 0, ended.err
    assert len(visits) == QUESTIONS
    assert_within_limit(fleet, 32)
    assert {visit["port"] for visit in visits} == set(fleet.ports)
    assert found["wrong"] is None
    assert found["reads"] > 1_000
    assert found["states"][-1] == "done"
    assert (snapshot["completed"], snapshot["failed"], snapshot["total"]) == (QUESTIONS, 0, QUESTIONS)
    assert snapshot["total_output_tokens"] == sum(tokens)
    assert sum(server["answers"] for server in snapshot["servers"]) == QUESTIONS
    assert all(record["finish_reason"] == "stop" for record in records.values())


@pytest.mark.slow
def test_five_kills_at_random_moments_change_nothing_of_the_outcome(tmp_path):
    seed = random.SystemRandom().randrange(1_000_000)
    print(f"seed {seed}")
    rng = random.Random(seed)
    texts = questions(seed)
    source, out = write_prompts(tmp_path / "in.jsonl", texts, field="question"), tmp_path / "out"
    kills = []
    with servers(tmp_path, 8) as fleet:
        for _ in range(5):
            with running(*command(fleet, source, out, 8), err=tmp_path / "run.err") as run:
                time.sleep(rng.uniform(0.3, 2.2))
                if run.over:
                    break
                run.kill()
            kills.append((time.monotonic(), {row_of(texts[index]) for index in saved(out)}))
        with running(*command(fleet, source, out, 8), err=tmp_path / "run.err") as run:
            code = run.wait()
        fleet.stop()
        visits = fleet.visits()

    assert code == 0
    audit(out, texts)
    assert len(kills) == 5
    for killed_s, done in kills:
        assert not done & asked_after(visits, killed_s)
        assert done | asked_after(visits, killed_s) == {row_of(text) for text in texts}
