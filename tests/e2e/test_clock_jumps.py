"""The wall clock jumps in mid-run: nothing that is counted, timed or foretold notices."""

import shutil
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import audit, failures, progress, running, servers, write_prompts
from tests.e2e.two import program
from tests.edges.audit import whole_lines

DAY_S = 86_400
ROWS, DELAY_S, CONCURRENCY = 160, 0.4, 8

NEAR_S = 15.0
"""What a busy machine may put between two looks at one thing: little beside a day (seconds)."""

# With the monotonic clock left alone, the library lets time.sleep fail with EINVAL; other waits are right.
SLEEP = """
import os, threading
time.sleep = lambda seconds: threading.Event().wait(seconds) if seconds > 0 else os.sched_yield()
"""

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))

pytestmark = pytest.mark.skipif(
    not LIBRARIES or shutil.which("faketime") is None, reason="faketime is not here: apt-get install faketime"
)


def with_clock(clock):
    """Before a command: it sees the time of day that ``clock`` says, and the monotonic clock as it is."""
    return (
        "env",
        f"LD_PRELOAD={LIBRARIES[0]}",
        f"FAKETIME_TIMESTAMP_FILE={clock}",
        "FAKETIME_DONT_FAKE_MONOTONIC=1",
        "FAKETIME_NO_CACHE=1",
    )


def set_clock(clock, offset_s):
    """Let the time of day jump, in one step."""
    new = clock.with_name("clock.new")
    new.write_text(f"{offset_s:+d}s\n")
    new.replace(clock)


def watch(run, out, jumps):
    """Each ``progress.json``, with the moment it was seen at; ``jumps`` are acts by counts of answers."""
    seen: list[tuple[float, dict[str, Any]]] = []
    left = dict(jumps)
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s and not run.over:
        now = progress(out)
        if now is not None and (not seen or now != seen[-1][1]):
            seen.append((time.monotonic(), now))
            for count in [count for count in left if now["completed"] >= count]:
                left.pop(count)()
        time.sleep(0.02)
    assert left == {}, "the run was over before the clock jumped"
    return seen


def moment_of(text):
    return datetime.fromisoformat(text).timestamp()


def test_the_time_of_day_jumps_in_a_program_that_runs_and_the_monotonic_clock_does_not(tmp_path):
    clock = tmp_path / "clock"
    set_clock(clock, 0)
    code = "import time\nwhile input(): print(time.time(), time.monotonic(), flush=True)"
    with subprocess.Popen(
        [*with_clock(clock), sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        found = []
        for offset_s in (0, DAY_S, -DAY_S):
            set_clock(clock, offset_s)
            process.stdin.write("look\n")
            process.stdin.flush()
            wall_s, monotonic_s = map(float, process.stdout.readline().split())
            found.append((wall_s - time.time() - offset_s, monotonic_s - time.monotonic()))
        process.stdin.write("\n")

    assert [(abs(wall_s) < 30, abs(monotonic_s) < 30) for wall_s, monotonic_s in found] == [(True, True)] * 3


@pytest.mark.parametrize("offsets_s", [(DAY_S, 0), (-DAY_S, DAY_S)])
def test_jumps_of_a_day_change_no_count_no_rate_and_no_eta(tmp_path, offsets_s):
    texts = [f"Row {place}. <<tokens=9 delay={DELAY_S}>>" for place in range(ROWS)]
    source, out, clock = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out", tmp_path / "clock"
    set_clock(clock, 0)
    jumps = {
        ROWS // 4: lambda: set_clock(clock, offsets_s[0]),
        ROWS * 2 // 3: lambda: set_clock(clock, offsets_s[1]),
    }
    with servers(tmp_path) as fleet:
        command = ["run", "--prompts", source, "--servers", fleet.address]
        command += ["--concurrency", CONCURRENCY, "--out", out]
        began_s = time.time()
        with running(
            0, *command, err=tmp_path / "run.err", command=(*with_clock(clock), *program(before=SLEEP))
        ) as run:
            seen = watch(run, out, jumps)
            code = run.wait()
        ended_s = time.time()
        last = progress(out)
    records = audit(out, texts)

    assert code == 0, run.err
    assert "warning" not in run.err
    assert last is not None
    assert (last["state"], last["completed"], last["failed"]) == ("done", ROWS, 0)
    # A jump that ran out a timeout would do so for all requests in flight; a busy machine may cost one.
    faults = sum(count for server in last["servers"] for count in server["faults"].values())
    assert faults < CONCURRENCY / 2, last["servers"][0]["last_error"]
    assert failures(out) == {}
    assert_steady(seen, last, began_s, ended_s)
    for record in records.values():
        assert began_s - NEAR_S < moment_of(record["started_at"]) < ended_s + NEAR_S
        assert 0 < record["latency_s"] < ended_s - began_s
    segment = whole_lines((out / "segments.jsonl").read_bytes())[-1]
    assert abs(segment["wall_s"] - last["elapsed_s"]) < NEAR_S
    assert began_s - NEAR_S < moment_of(segment["ended_at"]) < ended_s + NEAR_S


def assert_steady(seen, last, began_s, ended_s):
    """What the snapshots say agrees with a clock that did not jump."""
    first_s, first = seen[0]
    assert len(seen) >= 5
    assert abs(last["elapsed_s"] - (ended_s - began_s)) < 2 * NEAR_S
    for seen_s, now in [*seen, (seen[-1][0], last)]:
        assert abs((now["elapsed_s"] - first["elapsed_s"]) - (seen_s - first_s)) < NEAR_S
        updated_s = moment_of(now["updated_at"]) - moment_of(first["updated_at"])
        assert abs(updated_s - (now["elapsed_s"] - first["elapsed_s"])) < 0.5
        assert began_s - NEAR_S < moment_of(now["updated_at"]) < ended_s + NEAR_S
        assert all(0 <= share <= 1 for share in now["slot_time"]["whole"].values())
        assert now["dispatch_gap_ms"] is None or now["dispatch_gap_ms"]["max"] < NEAR_S * 1000
        if now["completed"] < ROWS // 8:
            continue
        own_rate = now["completed"] / now["elapsed_s"]
        assert abs(now["rate_per_sec_segment"] - own_rate) < 0.1 * own_rate
        assert own_rate / 10 < now["rate_per_sec"] < own_rate * 10
        assert 0 < now["output_tokens_per_sec"] < 100 * own_rate
        if now["eta_hours"] is not None:
            eta_s = now["eta_hours"] * 3600
            assert 0 <= eta_s < 10 * last["elapsed_s"]
            assert now["eta_hours_low"] <= now["eta_hours"] <= now["eta_hours_high"]
            assert abs(moment_of(now["eta_at"]) - moment_of(now["updated_at"]) - eta_s) < 1
