"""A data set in which 87 % of the answers hold six tokens: found out at once, and not after days."""

import json
import random
from collections import Counter

import pytest

from tests.e2e.harness import (
    audit,
    genpipe,
    progress,
    report,
    row_of,
    run_command,
    running,
    saved,
    servers,
    wait_for,
    write_prompts,
)

COUNT = 1_500


def texts_of(delay_s=0.0):
    rng = random.Random(87)
    return [
        f"Row {place}. <<tokens={6 if rng.random() < 0.87 else 300} delay={delay_s}>>"
        for place in range(COUNT)
    ]


def warnings_in(err):
    """What was said as it began: the last line, which says it again, is left out."""
    return [line.partition(" warning: ")[2] for line in err.splitlines()[:-1] if " warning: " in line]


def test_the_run_is_warned_of_within_its_first_thousand_answers_and_goes_on_by_default(tmp_path):
    texts = texts_of(0.05)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        command = run_command(fleet, source, out, 8)
        with running(*command, err=tmp_path / "1.err") as run:
            seen = wait_for(lambda: (state := progress(out)) and state["warnings"] and state, "the warning")
            wait_for(lambda: " warning: " in run.err, "the warning on stderr")
            status = genpipe("status", out)
            code = run.wait()
    records = audit(out, texts)
    quality = report(out)["quality"]
    short = Counter(tuple(record["flags"]) for record in records.values())

    assert code == 0, run.err
    assert 200 <= seen["completed"] + seen["in_flight"] < 1_000
    (warning,) = seen["warnings"]
    assert warning.startswith("guards.short_share: ")
    assert "answers hold fewer than 8 tokens (bound 50 %): look at max_tokens" in warning
    assert warning.endswith("or set guards.short_tokens = 0 where such answers are right")
    # It is told once, when it begins, and is the first thing that is said at the end.
    (told,) = warnings_in(run.err)
    assert told.startswith("guards.short_share: ")
    assert run.err.splitlines()[-1].startswith("genpipe: warning: guards.short_share: ")
    assert "\nwarning: guards.short_share: " in status.out
    assert short == {
        ("short",): sum("tokens=6 " in text for text in texts),
        (): sum("tokens=300 " in text for text in texts),
    }
    assert quality["short"] == short["short",]
    assert quality["shares"]["whole"]["short"] == pytest.approx(quality["short"] / COUNT, abs=1e-4)


def test_the_run_is_stopped_where_that_is_wanted_and_every_answer_in_flight_is_saved(tmp_path):
    texts = texts_of(0.05)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        command = run_command(fleet, source, out, 16, "--set", "guards.on_short=stop")
        ended = genpipe(*command)
        status = genpipe("status", out)
        as_json = json.loads(genpipe("status", out, "--json").out)
        stopped = saved(out)
        asked = {visit["row"] for visit in fleet.visits_until_now()}
        again = genpipe(*command, "--set", "guards.on_short=warn")
    last = ended.err.splitlines()[-1]

    assert ended.code == 3, ended.err
    assert last.startswith("genpipe: stopped by guards.short_share: ")
    assert (
        f"; {len(stopped):,} of 1,500 prompts done and on disk; the same command goes on from there" in last
    )
    assert 200 <= len(stopped) < 300
    # What was asked for was waited for.
    assert {row_of(texts[index]) for index in stopped} == asked
    assert status.out.splitlines()[1].startswith("stopped by guards.short_share: ")
    assert (as_json["state"], as_json["stop_reason"]) == (
        "stopped",
        last.split("; ")[0][len("genpipe: stopped by ") :],
    )
    assert again.code == 0, again.err
    audit(out, texts)
    assert report(out)["quality"]["short"] == sum("tokens=6 " in text for text in texts)


def test_one_server_of_a_fleet_whose_answers_are_far_shorter_than_the_others_is_named(tmp_path):
    """The same prompts are answered at length by two servers, and in a few words by the third."""
    texts = [f"Row {place}." for place in range(900)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    long, short = tmp_path / "long", tmp_path / "short"
    long.mkdir()
    short.mkdir()
    with servers(long, 2, "--lengths", "fixed:400") as good, servers(short, 1, "--lengths", "fixed:9") as bad:
        command = run_command(good, source, out, 8, "--servers", bad.address)
        ended = genpipe(*command)
        status = genpipe("status", out)

    assert ended.code == 0, ended.err
    last = ended.err.splitlines()[-1]
    warning = f"{bad.address}: answers hold 9 tokens at the median, the fleet's hold 400: look at its log"
    assert last.startswith(f"genpipe: warning: {warning}")
    assert "guards." not in last
    assert f"\nwarning: {bad.address}: answers hold 9 tokens" in status.out
