"""An answer without a count of its tokens is kept, and its tokens are unknown: not 0, and in no average."""

import json

import pytest

from tests.e2e.harness import (
    audit,
    genpipe,
    progress,
    run_command,
    running,
    saved,
    servers,
    wait_for,
    write_prompts,
)
from tests.edges.audit import whole_lines

KINDS = ("none", "null", "zero")
ODD = {17: "none", 19: "null", 21: "zero", 41: "none", 43: "null", 45: "zero"}
ROWS = 48


def text_of(place, delay_s=0.0):
    if place in ODD:
        return f"Error mix {place:02d}. <<usage={ODD[place]} tokens=400 delay={delay_s}>>"
    return f"Error mix {place:02d}. <<tokens=25 delay={delay_s}>>"


def summary_of(out):
    state = progress(out)
    assert state is not None
    return {key: state[key] for key in ("avg_output_tokens", "usage_unknown", "total_output_tokens")}


RIGHT = {
    "avg_output_tokens": 25.0,
    "usage_unknown": len(ODD),
    "total_output_tokens": 25 * (ROWS - len(ODD)),
}


def test_answers_without_usage_are_saved_and_counted_as_unknown(tmp_path):
    texts = [text_of(place) for place in range(ROWS)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        command = run_command(fleet, source, out, 8, "--set", "output.shard_records=20")
        ended = genpipe(*command)
        status = genpipe("status", out)
        again = genpipe(*command)
    records = audit(out, texts)
    sums = [entry["sums"] for entry in whole_lines((out / "manifest.jsonl").read_bytes())]

    assert (ended.code, again.code) == (0, 0), ended.err
    for place, kind in ODD.items():
        usage = records[place]["usage"]
        assert (usage is None) == (kind != "zero"), (kind, usage)
        assert len(records[place]["response"]["content"]) > 400
    # Unknown is not none: they are not short.
    assert all(record["flags"] == [] for record in records.values())
    assert "short" not in status.out
    # The last word is that of the process that only found everything done.
    assert summary_of(out) == RIGHT
    assert sum(each["usage_unknown"] for each in sums) == len(ODD)
    assert sum(each["output_tokens"] for each in sums) == RIGHT["total_output_tokens"]
    assert "25.0 in an answer on average (not counted in 6)" in status.out


def test_unknown_counts_stay_unknown_over_a_kill_and_a_resume(tmp_path):
    texts = [text_of(place, 0.1) for place in range(ROWS)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        command = run_command(fleet, source, out, 4, "--set", "output.shard_records=20")
        with running(*command, err=tmp_path / "1.err") as run:
            wait_for(lambda: {17, 19, 21} <= set(saved(out)), "half of the odd answers")
            run.kill()
        ended = genpipe(*command)

    assert ended.code == 0, ended.err
    audit(out, texts)
    assert summary_of(out) == RIGHT


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_which_no_count_is_known_has_no_average(tmp_path, kind):
    texts = [f"Row {place}. <<usage={kind}>>" for place in range(20)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        ended = genpipe(*run_command(fleet, source, out, 8))
        shown = genpipe("status", out)
        as_json = json.loads(genpipe("status", out, "--json").out)

    assert ended.code == 0, ended.err
    audit(out, texts)
    assert summary_of(out) == {"avg_output_tokens": None, "usage_unknown": 20, "total_output_tokens": 0}
    assert as_json["avg_output_tokens"] is None
    assert shown.code == 0, shown.err
    assert "Traceback" not in shown.err
    assert "(not counted in 20)" in shown.out
