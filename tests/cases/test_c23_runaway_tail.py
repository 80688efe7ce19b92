"""Some rows run away to their limit: all others are saved before, and it can be seen where those are."""

from collections import Counter

from tests.e2e.harness import (
    assert_within_limit,
    audit,
    failures,
    genpipe,
    report,
    row_of,
    run_command,
    running,
    saved,
    servers,
    wait_for,
    without_probes,
    write_prompts,
)
from tests.faults.soak import SOAK

FULL = SOAK > 1
ROWS, LIMIT = 400, 16
RUNAWAYS = (37, 211, 305, 398)
RUNAWAY_S = 40.0 if FULL else 8.0
ROW_LIMIT_S = 10 if FULL else 2
TEXTS = [
    f"Tail {place:03d}. <<tokens=8000 delay={RUNAWAY_S} finish=length loop=1>>"
    if place in RUNAWAYS
    else f"Tail {place:03d}. <<tokens={40 + place % 7} delay={0.2 + 0.05 * (place % 5):.2f}>>"
    for place in range(ROWS)
]
CHECKPOINT = "--set=output.shard_records=100"
SHORT = ROWS - len(RUNAWAYS)


def indices(tail):
    return {entry["index"] for entry in tail}


def test_short_rows_are_saved_long_before_the_runaways_end_and_status_names_those(tmp_path):
    source, out = write_prompts(tmp_path / "in.jsonl", TEXTS), tmp_path / "out"
    with servers(tmp_path, 4) as fleet:
        with running(*run_command(fleet, source, out, LIMIT, CHECKPOINT), err=tmp_path / "run.err") as run:
            saved_then = wait_for(
                lambda: len(found := saved(out)) == SHORT and found, "the short rows on disk"
            )
            first = wait_for(
                lambda: (found := report(out)["tail"] or []) and indices(found) == set(RUNAWAYS) and found,
                "the tail to be just the runaways",
            )
            shown = genpipe("status", out).out
            later = wait_for(
                lambda: (
                    (found := report(out)["tail"]) and found[0]["age_s"] > first[0]["age_s"] + 1 and found
                ),
                "the tail to grow older",
            )
            code = run.wait()
        fleet.stop()
        visits = without_probes(fleet.visits())
    asked = Counter(visit["row"] for visit in visits)

    assert code == 0, run.err
    audit(out, TEXTS)
    assert_within_limit(fleet, LIMIT)
    for tail in (first, later):
        assert indices(tail) <= set(RUNAWAYS)
        assert {entry["server"] for entry in tail} <= set(fleet.urls)
    for entry in first:
        assert f" {entry['index']} " in shown
        assert entry["server"] in shown
    assert sorted(saved_then) == [place for place in range(ROWS) if place not in RUNAWAYS]
    # The last checkpoint was not full, and did not wait either.
    assert SHORT % 100
    assert {asked[row_of(text)] for place, text in enumerate(TEXTS) if place not in RUNAWAYS} == {1}
    # Late rows are tried elsewhere as well: a known number of times.
    assert all(1 <= asked[row_of(TEXTS[place])] <= 3 for place in RUNAWAYS)
    assert [entry for entry in later if entry["hedged"]] != []
    assert max(asked.values()) > 1
    assert report(out)["tail"] in (None, [])


def test_with_a_limit_on_rows_the_runaways_fail_for_that_reason_and_the_run_ends(tmp_path):
    source, out = write_prompts(tmp_path / "in.jsonl", TEXTS), tmp_path / "out"
    with servers(tmp_path, 4) as fleet:
        limit = f"--set=request.timeout_s={ROW_LIMIT_S}"
        ended = genpipe(*run_command(fleet, source, out, LIMIT, CHECKPOINT, limit))
        again = genpipe(*run_command(fleet, source, out, LIMIT, CHECKPOINT, limit))
        fleet.stop()
        visits = without_probes(fleet.visits())
    asked, failed = Counter(visit["row"] for visit in visits), failures(out)

    assert ended.code == 1, ended.err
    audit(out, TEXTS, but=RUNAWAYS)
    assert sorted(failed) == list(RUNAWAYS)
    for place in RUNAWAYS:
        assert f"no answer within request.timeout_s = {ROW_LIMIT_S} s" in failed[place]["message"]
    # Two seconds of short rows, one of opening slots, the limit, and a margin: about 15 s in full.
    assert ended.took_s < ROW_LIMIT_S + 6
    # They are not asked again without end: not in this run, and by the same command after it not at all.
    assert all(1 <= asked[row_of(TEXTS[place])] <= 3 for place in RUNAWAYS)
    assert again.code == 1
    assert again.took_s < 4
