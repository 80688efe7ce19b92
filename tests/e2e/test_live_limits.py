"""``genpipe limit`` on a run that goes on: by the servers' own log."""

import json
import os

import pytest

from tests.e2e.harness import (
    audit,
    genpipe,
    in_flight,
    report,
    run_command,
    running,
    servers,
    wait_for,
    wait_for_records,
    write_prompts,
)

pytestmark = pytest.mark.slow


def most_at_once(visits, port, begin_s, end_s):
    counts = in_flight([visit for visit in visits if visit["port"] == port])
    return max((count for moment_s, count in counts if begin_s <= moment_s <= end_s), default=0)


def test_limits_of_a_live_run_are_raised_and_lowered_and_servers_join_and_leave(tmp_path):
    texts = [f"Row {place}. <<tokens=5 delay=0.3>>" for place in range(700)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 3) as fleet:
        first, second, third = fleet.urls
        command = ["run", "--prompts", source, "--servers", first, "--servers", second, "--out", out]
        with running(*command, "--concurrency", 8, err=tmp_path / "run.err") as run:
            wait_for_records(run, out, 40)
            ended = genpipe("limit", out, f"127.0.0.1:{fleet.ports[0]}=16", f"{second}=2", f"{third}=6")
            assert ended.code == 0, ended.err
            assert all(url in ended.out for url in fleet.urls)
            joined = wait_for(
                lambda: (row := report(out)["servers"][2])["state"] == "up" and row, "the new one to be up"
            )
            before = len(report(out)["servers"])
            wait_for(lambda: report(out)["completed"] >= 250, "work with the new limits")
            gone = genpipe("limit", out, f"{first}=0")
            assert gone.code == 0, gone.err
            wait_for(lambda: report(out)["servers"][0]["in_flight"] == 0, "the removed one to be empty")
            left = report(out)
            (out / "limits.json").unlink()
            wait_for(lambda: report(out)["servers"][0]["state"] == "up", "the configured fleet to be back")
            assert run.wait() == 0, run.err
        fleet.stop()
        visits = fleet.visits()
    audit(out, texts)
    last = report(out)

    assert joined["limit"] == 6
    assert before == 3
    assert left["servers"][0]["state"] == "gone"
    assert last["servers"][2]["state"] == "gone"
    assert [row["limit"] for row in last["servers"][:2]] == [8, 8]
    assert most_at_once(visits, fleet.ports[0], 0, float("inf")) == 16
    assert most_at_once(visits, fleet.ports[1], 0, float("inf")) == 8
    assert most_at_once(visits, fleet.ports[2], 0, float("inf")) == 6
    assert "limits changed" in run.err


def test_the_next_segment_begins_with_the_servers_as_configured_and_says_so(tmp_path):
    texts = [f"Row {place}. <<delay=0.1>>" for place in range(120)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 1) as fleet:
        command = run_command(fleet, source, out, 4)
        with running(*command, err=tmp_path / "run.err") as run:
            wait_for_records(run, out, 10)
            assert genpipe("limit", out, "*=2").code == 0
            run.kill()
        again = genpipe(*command)
    audit(out, texts)

    assert again.code == 0, again.err
    assert "hold no more" in again.err
    assert report(out)["servers"][0]["limit"] == 4
    assert not (out / "limits.json").exists()


def test_a_limit_that_the_machine_has_no_room_for_changes_nothing_and_is_told(tmp_path):
    texts = [f"Row {place}. <<delay=0.2>>" for place in range(60)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with (
        servers(tmp_path, 1) as fleet,
        running(*run_command(fleet, source, out, 4), err=tmp_path / "run.err") as run,
    ):
        wait_for_records(run, out, 5)
        (out / "limits.json").write_text(json.dumps({fleet.urls[0]: 60_000}))
        wait_for(lambda: "stay as they are" in run.err, "a word about it")
        limit = report(out)["servers"][0]["limit"]
        assert run.wait() == 0

    assert limit == 4
    audit(out, texts)


def test_limits_that_come_while_servers_are_waited_for_hold_once_they_are_there(tmp_path):
    texts = [f"Row {place}. <<delay=0.1>>" for place in range(60)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 1) as fleet:
        command = run_command(fleet, source, out, 4)
        with running(*command, err=tmp_path / "first.err") as first:
            wait_for_records(first, out, 5)
            first.kill()
        fleet.stop()
        with running(*command, err=tmp_path / "run.err") as run:
            wait_for(lambda: report(out)["segment"] == 2, "the second segment, which waits for the server")
            handed = genpipe("limit", out, "*=2")
            fleet.start()
            assert run.wait() == 0, run.err
    audit(out, texts)

    assert handed.code == 0, handed.err
    assert "hold no more" not in run.err
    assert report(out)["servers"][0]["limit"] == 2


def test_what_is_no_file_in_the_place_of_the_limits_holds_nobody_up(tmp_path):
    texts = [f"Row {place}. <<delay=0.1>>" for place in range(120)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 1) as fleet:
        command = run_command(fleet, source, out, 4)
        with running(*command, err=tmp_path / "run.err") as run:
            wait_for_records(run, out, 5)
            os.mkfifo(out / "limits.json")
            assert run.wait() == 0, run.err
        again = genpipe(*command)
    audit(out, texts)

    assert "is no file" in run.err
    assert again.code == 0, again.err
