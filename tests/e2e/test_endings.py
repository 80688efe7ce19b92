"""How a run ends, and what the next one makes of it."""

import signal
import time

import pytest

from tests.e2e.harness import (
    asked_by_process,
    audit,
    failures,
    genpipe,
    progress,
    row_of,
    running,
    saved,
    servers,
    wait_for,
    write_prompts,
)


@pytest.mark.slow
def test_sigterm_waits_for_what_is_in_flight_and_everything_received_is_on_disk(tmp_path):
    texts = [f"Row {place}. <<tokens=5 delay={0.8 + place % 5 / 10}>>" for place in range(60)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        command = ["run", "--prompts", source, "--servers", fleet.address, "--concurrency", 8, "--out", out]
        with running(*command, err=tmp_path / "1.err") as run:
            wait_for(lambda: len(saved(out)) >= 8, "the first answers")
            run.send(signal.SIGTERM)
            stopped_s = time.monotonic()
            code = run.wait()
        at_stop, state = saved(out), progress(out)
        status = genpipe("status", out)
        again = genpipe(*command)
        fleet.stop()
        first, second = asked_by_process(fleet.visits())

    assert code == 143
    assert state is not None
    assert (state["state"], state["completed"], state["in_flight"]) == ("interrupted", len(at_stop), 0)
    assert "interrupted" in status.out
    assert "the same command as before goes on" in status.out
    assert {row_of(texts[index]) for index in at_stop} == {visit["row"] for visit in first}
    assert all(visit["status"] == 200 for visit in first)
    assert max(visit["arrival_s"] for visit in first) < stopped_s + 0.2
    assert "Traceback" not in run.err
    assert run.err.splitlines()[-1].startswith(
        f"genpipe: stopped by SIGTERM: {len(at_stop)} of 60 prompts done"
    )
    assert again.code == 0, again.err
    assert len(second) == len(texts) - len(at_stop)
    audit(out, texts)


def test_a_second_sigterm_ends_at_once_and_keeps_what_was_received(tmp_path):
    texts = [f"Row {place}. <<tokens=5 delay={0.05 if place < 20 else 2.5}>>" for place in range(24)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        command = ["run", "--prompts", source, "--servers", fleet.address, "--out", out]
        with running(*command, err=tmp_path / "1.err") as run:
            wait_for(lambda: len(saved(out)) >= 20, "all quick answers")
            run.send(signal.SIGTERM)
            wait_for(lambda: "SIGTERM" in run.err, "a word about the signal")
            stopped_s = time.monotonic()
            run.send(signal.SIGTERM)
            code = run.wait()
            took_s = time.monotonic() - stopped_s
        at_stop, state = saved(out), progress(out)
        again = genpipe(*command)

    assert code == 143
    assert took_s < 1.5
    assert sorted(at_stop) == list(range(20))
    assert state is not None
    assert (state["state"], state["completed"]) == ("interrupted", 20)
    assert again.code == 0, again.err
    audit(out, texts)


def test_a_closed_terminal_loses_nothing_that_was_in_flight(tmp_path):
    texts = [f"Row {place}. <<tokens=5 delay=0.6>>" for place in range(60)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        command = ["run", "--prompts", source, "--servers", fleet.address, "--concurrency", 8, "--out", out]
        # A child inherits that SIGHUP is ignored, as it is under nohup.
        before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
        try:
            with running(*command, err=tmp_path / "1.err") as run:
                wait_for(lambda: len(saved(out)) >= 8, "the first answers")
                run.send(signal.SIGHUP)
                code = run.wait()
        finally:
            signal.signal(signal.SIGHUP, before)
        at_stop, state = saved(out), progress(out)
        fleet.stop()
        visits = fleet.visits()

    assert code == 129
    assert state is not None
    assert state["state"] == "interrupted"
    assert {row_of(texts[index]) for index in at_stop} == {visit["row"] for visit in visits}
    assert "Traceback" not in run.err


def test_a_run_does_not_go_on_with_servers_of_another_model(tmp_path):
    texts = [f"Row {place}. <<tokens=5 delay=0.3>>" for place in range(40)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    command = ["run", "--prompts", source, "--concurrency", 4, "--out", out]
    with (
        servers(tmp_path) as fleet,
        running(*command, "--servers", fleet.address, err=tmp_path / "1.err") as run,
    ):
        wait_for(lambda: len(saved(out)) >= 4, "the first answers")
        run.kill()
    before = saved(out)
    (tmp_path / "other").mkdir()
    with servers(tmp_path / "other", 1, "--model", "other-model") as fleet:
        again = genpipe(*command, "--servers", fleet.address)
        fleet.stop()
        visits = fleet.visits()

    assert again.code == 2
    assert "'tiny-model'" in again.err
    assert "'other-model'" in again.err
    assert visits == []
    assert saved(out) == before


def test_a_finished_run_needs_no_server_to_say_so_again(tmp_path):
    texts = [f"Row {place}." for place in range(40)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        command = ["run", "--prompts", source, "--servers", fleet.address, "--out", out]
        first = genpipe(*command)
        fleet.stop()
        again = genpipe(*command)
        named = genpipe(*command, "--set", "request.model=tiny-model")
        visits = fleet.visits()

    assert (first.code, again.code, named.code) == (0, 0, 0), again.err + named.err
    assert max(again.took_s, named.took_s) < 3
    assert "done: 40 of 40" in again.err
    assert len(visits) == len(texts)
    audit(out, texts)


def test_what_failed_for_now_is_asked_again_by_the_next_run(tmp_path):
    texts = [f"Row {place}. <<tokens=5 delay=0.02>>" for place in range(60)]
    texts[5] = "Row 5. <<status=500>>"
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    command = ["run", "--prompts", source, "--concurrency", 4, "--out", out]
    with servers(tmp_path) as fleet:
        first = genpipe(*command, "--servers", fleet.address, "--set", "retry.prompt_attempts=1")
    failed, state = failures(out), progress(out)
    (tmp_path / "mended").mkdir()
    with servers(tmp_path / "mended", orders=False) as fleet:
        again = genpipe(*command, "--servers", fleet.address)
        fleet.stop()
        visits = fleet.visits()

    assert first.code == 1, first.err
    assert "1 failed, listed in" in first.err.splitlines()[-1]
    assert {index: line["for_good"] for index, line in failed.items()} == {5: False}
    assert failed[5]["last_status"] == 500
    assert state is not None
    assert (state["state"], state["completed"], state["failed"]) == ("done", 59, 1)
    assert again.code == 0, again.err
    assert [visit["row"] for visit in visits] == [row_of(texts[5])]
    audit(out, texts)


def test_what_failed_for_good_is_asked_again_only_on_demand(tmp_path):
    texts = [f"Row {place}. <<tokens=5>>" for place in range(30)]
    texts[5] = "Row 5. <<status=400 why=too_long times=1>>"
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        command = ["run", "--prompts", source, "--servers", fleet.address, "--out", out]
        first = genpipe(*command)
        failed = failures(out)
        same = genpipe(*command)
        retried = genpipe(*command, "--retry-failed")
        fleet.stop()
        asked = asked_by_process(fleet.visits())
    state = progress(out)

    assert (first.code, same.code, retried.code) == (1, 1, 0), retried.err
    assert {index: line["for_good"] for index, line in failed.items()} == {5: True}
    assert [visit["row"] for visit in asked[1]] == [row_of(texts[5])]
    assert len(asked) == 2
    assert state is not None
    assert (state["completed"], state["failed"]) == (30, 0)
    audit(out, texts)
