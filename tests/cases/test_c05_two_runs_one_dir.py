"""Two runs on one folder: one of them runs, the other says who has it; also where there are no locks."""

from collections import Counter

import pytest

from tests.e2e.harness import (
    Ended,
    assert_one_error,
    audit,
    genpipe,
    running,
    saved,
    servers,
    wait_for,
    write_prompts,
)
from tests.e2e.two import assert_turned_away, at_one_instant, program, told_apart
from tests.faults.soak import SOAK

NO_LOCKS = ["ENOLCK", "ENOSYS"] if SOAK > 1 else ["ENOLCK"]


def rows(count, delay_s=0.05):
    return [f"Row {place}. <<tokens=5 delay={delay_s}>>" for place in range(count)]


@pytest.mark.parametrize("error", [None, *NO_LOCKS])
def test_of_two_runs_that_begin_at_one_instant_one_runs_and_the_other_names_it(tmp_path, error):
    texts = rows(80)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    logs = [tmp_path / "1.err", tmp_path / "2.err"]
    with servers(tmp_path) as fleet:
        command = ["run", "--prompts", source, "--servers", fleet.address, "--concurrency", 8, "--out", out]
        with at_one_instant(command, logs, error=error) as runs:
            winner, loser = told_apart(runs)
        fleet.stop()
        asked = Counter(visit["row"] for visit in fleet.visits())

    assert_turned_away(loser, out, winner, warnings=0 if error is None else 1)
    assert "Traceback" not in winner.err
    warnings = [line for line in winner.err.splitlines() if "warning" in line]
    assert [("cannot lock" in line, str(out / ".lock") in line) for line in warnings] == (
        [] if error is None else [(True, True)]
    )
    assert set(asked.values()) == {1}
    audit(out, texts)
    assert not (out / ".lock.heartbeat").exists()


@pytest.mark.parametrize("error", [None, *NO_LOCKS])
def test_a_run_that_comes_later_is_turned_away_at_once_and_disturbs_nothing(tmp_path, error):
    texts = rows(60, delay_s=0.4)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        command = ["run", "--prompts", source, "--servers", fleet.address, "--concurrency", 8, "--out", out]
        with running(0, *command, err=tmp_path / "1.err", command=program(error)) as first:
            wait_for(lambda: len(saved(out)) >= 8, "the first answers")
            fleet.pause()  # So that the first is still there, however slow this machine is.
            with running(0, *command, err=tmp_path / "2.err", command=program(error)) as second:
                code = second.wait()
            assert not first.over
            fleet.go_on()
            assert first.wait() == 0, first.err

    assert code == 75
    assert_turned_away(second, out, first, warnings=0 if error is None else 1)
    audit(out, texts)


@pytest.mark.parametrize("error", [None, *NO_LOCKS])
def test_what_a_killed_run_leaves_needs_no_hand_work(tmp_path, error):
    texts = rows(60, delay_s=0.2)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        command = ["run", "--prompts", source, "--servers", fleet.address, "--concurrency", 8, "--out", out]
        with running(0, *command, err=tmp_path / "1.err", command=program(error)) as first:
            wait_for(lambda: len(saved(out)) >= 8, "the first answers")
            first.kill()
        left = (out / ".lock").read_bytes()
        is_beating = (out / ".lock.heartbeat").exists()
        with running(0, *command, err=tmp_path / "2.err", command=program(error)) as second:
            wait_for(lambda: (out / ".lock").read_bytes() != left, "a claim", timeout_s=10)
            assert second.wait() == 0, second.err

    assert is_beating is (error is not None)
    assert "waiting" not in second.err
    assert "Traceback" not in second.err
    audit(out, texts)


@pytest.mark.parametrize("left", [b"", b"\0" * 200, b'{"pid":1,"host":"elsewhere","epoch":4}\n'])
def test_a_lock_file_that_somebody_left_is_no_hindrance(tmp_path, left):
    texts = rows(20, delay_s=0)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    out.mkdir()
    (out / ".lock").write_bytes(left)
    with servers(tmp_path) as fleet:
        ended = genpipe("run", "--prompts", source, "--servers", fleet.address, "--out", out)

    assert ended.code == 0, ended.err
    assert "warning" not in ended.err
    audit(out, texts)


def test_a_lock_that_fails_otherwise_is_one_line_and_no_traceback(tmp_path):
    texts = rows(20, delay_s=0)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        command = ["run", "--prompts", source, "--servers", fleet.address, "--out", out]
        with running(0, *command, err=tmp_path / "1.err", command=program("EIO")) as run:
            code = run.wait()

    assert_one_error(Ended(code=code, out="", err=run.err, took_s=0.0), 74, str(out / ".lock"), "cannot lock")
    assert not (out / "run.json").exists()
