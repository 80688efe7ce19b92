"""Servers of another model: refused at the start, and when they join."""

import signal

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


def test_where_no_server_was_there_at_the_start_the_first_one_says_which_model_it_is(tmp_path):
    """Though the requests carry a name of the user's own, which any server takes."""
    texts = [f"Row {place}. <<delay=0.1>>" for place in range(120)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    right, wrong = two_fleets(tmp_path)
    with right as fleet, wrong as others:
        fleet.stop()
        others.stop()
        command = ["run", "--prompts", source, "--out", out, "--concurrency", 2]
        command += ["--servers", fleet.urls[0], "--servers", others.urls[0]]
        options = ("--set", 'request.model="mine"', "--set", "retry.pause_max_s=0.5")
        with running(*command, *options, err=tmp_path / "run.err") as run:
            wait_for((out / "progress.json").exists, "the run to begin")
            fleet.start()
            wait_for_records(run, out, 5)
            others.start()
            wait_for(lambda: "serves org/other" in run.err, "a word about the other")
            assert run.wait() == 0, run.err
        others.stop()
        visits = others.visits()
    audit(out, texts)

    assert visits == []


def test_a_resume_onto_another_model_is_refused_though_the_requests_name_is_the_users_own(tmp_path):
    texts = [f"Row {place}. <<delay=0.3>>" for place in range(200)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    right, wrong = two_fleets(tmp_path)
    own = ("--set", 'request.model="mine"', "--out", out, "--prompts", source)
    with right as fleet, wrong as others:
        with running("run", "--servers", fleet.urls[0], *own, err=tmp_path / "run.err") as run:
            wait_for_records(run, out, 10)
            run.send(signal.SIGINT)
            run.wait()
        resumed = genpipe("run", "--servers", others.urls[0], *own)
        overruled = genpipe("run", "--servers", others.urls[0], *own, "--allow-changed")

    assert resumed.code == 2
    assert "org/other" in resumed.err
    assert overruled.code == 0, overruled.err
