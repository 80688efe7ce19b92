"""Servers that are dead, or die: their prompts go elsewhere, and they are used again when back."""

import json
import time

import pytest

from tests.e2e.harness import audit, genpipe, running, saved, servers, wait_for, write_prompts


def states(out):
    """What ``genpipe status`` says of each server: its state and its trouble."""
    ended = genpipe("status", out, "--json")
    if ended.code:
        return []
    return [(server["state"], server["last_error"]) for server in json.loads(ended.out)["servers"]]


@pytest.mark.slow
def test_a_dead_and_a_dying_server_cost_no_prompt_and_are_used_again(tmp_path):
    texts = [f"Row {place}. <<tokens=5 delay=0.25>>" for place in range(900)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 4) as fleet:
        fleet.mode(3, "down", through=0)
        command = ["run", "--prompts", source, "--servers", fleet.address, "--concurrency", 8, "--out", out]
        with running(*command, "--set", "retry.pause_max_s=1", err=tmp_path / "run.err") as run:
            wait_for(lambda: len(saved(out)) > 60, "answers from three servers")
            fleet.mode(2, "down", through=0)
            away = wait_for(
                lambda: (found := states(out)) and found[2][0] != "up" and found[3][0] != "up" and found,
                "both servers to be seen as away",
            )
            text = genpipe("status", out).out
            back_s = time.monotonic()
            fleet.mode(2, "up", through=0)
            fleet.mode(3, "up", through=0)
            wait_for(lambda: all(state == "up" for state, _ in states(out)), "all servers to be up again")
            code = run.wait()
        fleet.stop()
        visits = fleet.visits()
    records = audit(out, texts)

    assert code == 0
    assert (out / "failed.jsonl").read_bytes() == b""
    assert [state for state, _ in away[:2]] == ["up", "up"]
    assert all("cannot connect" in trouble for _, trouble in away[2:])
    assert all(f"{url}  " in text for url in fleet.urls[2:])
    assert text.count("cannot connect") >= 2
    for port in fleet.ports[2:]:
        again = [visit for visit in visits if visit["port"] == port and visit["arrival_s"] > back_s]
        assert len(again) > 8
    # A server that refuses is left alone after three refusals in a row, but for a probe now and then.
    assert sum(record["attempts"] for record in records.values()) < len(texts) + 40


def test_a_run_waits_for_a_fleet_that_comes_later(tmp_path):
    texts = [f"Row {place}." for place in range(10)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        fleet.stop()
        command = ["run", "--prompts", source, "--servers", fleet.address, "--out", out]
        with running(*command, err=tmp_path / "run.err") as run:
            wait_for(lambda: "waiting for one" in run.err, "a word about the wait")
            assert not run.over
            fleet.start()
            code = run.wait()

    assert code == 0, run.err
    audit(out, texts)
