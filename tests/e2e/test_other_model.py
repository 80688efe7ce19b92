"""Servers of another model: refused at the start, and when they join."""

import pytest

from tests.e2e.harness import (
    assert_one_error,
    audit,
    genpipe,
    report,
    run_command,
    running,
    servers,
    wait_for,
    wait_for_records,
    write_prompts,
)

pytestmark = pytest.mark.slow


def two_fleets(tmp_path, *, other="org/other"):
    """Two servers of one model, and one of another, each fleet with a folder of its own."""
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
    return servers(tmp_path / "right", 2), servers(tmp_path / "wrong", 1, "--model", other)


def test_servers_of_two_models_are_refused_at_the_start_and_both_are_named(tmp_path):
    source, out = write_prompts(tmp_path / "in.jsonl", ["One."]), tmp_path / "out"
    right, wrong = two_fleets(tmp_path)
    with right as fleet, wrong as others:
        command = ["run", "--prompts", source, "--out", out]
        both = ("--servers", fleet.urls[0], "--servers", others.urls[0])
        refused = genpipe(*command, *both)
        taken = genpipe(*command, *both, "--set", "start.any_model=true")

    assert_one_error(refused, 2, fleet.urls[0], others.urls[0], "org/other")
    assert taken.code == 0, taken.err


def test_a_server_of_another_model_that_joins_a_live_run_is_named_and_gets_no_prompt(
    tmp_path,
):
    texts = [f"Row {place}. <<delay=0.2>>" for place in range(400)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    right, wrong = two_fleets(tmp_path)
    with right as fleet, wrong as others:
        options = ("--set", "retry.pause_max_s=0.5")
        with running(*run_command(fleet, source, out, 4, *options), err=tmp_path / "run.err") as run:
            wait_for_records(run, out, 10)
            joined = genpipe("limit", out, f"{others.urls[0]}=4")
            row = wait_for(
                lambda: (row := report(out)["servers"][2])["last_error"] and row, "the refusal of the other"
            )
            wait_for(lambda: "serves org/other" in run.err, "a word about it")
            text = genpipe("status", out).out
            assert run.wait() == 0, run.err
        others.stop()
        visits = others.visits()
    audit(out, texts)

    assert joined.code == 0, joined.err
    assert row["state"] == "starting"
    assert "org/other" in row["last_error"]
    assert "org/other" in text
    assert visits == []
