"""The whole program killed at random moments, of its start too: nothing is lost, doubled, or asked again.

``GENPIPE_SOAK=10`` makes it ten times as many rounds; a seed is printed, and ``GENPIPE_SEED`` plays it again.
"""

import os
import random
import time

import pytest

from genpipe.edges.files import OsFiles
from tests.e2e.harness import (
    asked_after,
    assert_manifest_agrees,
    audit,
    listed,
    progress,
    row_of,
    run_command,
    running,
    saved,
    servers,
    wait_for_records,
    without_probes,
    write_prompts,
)
from tests.edges import audit as audit_of_bytes
from tests.faults.audits import PROPERTY

SOAK = int(os.environ.get("GENPIPE_SOAK", "1"))
KILLS = 12 * SOAK
START_S = 0.35
"""About how long a process takes to its first request: half of the kills fall into that (seconds)."""
LIMIT = 6


def seeded():
    seed = int(os.environ.get("GENPIPE_SEED", random.SystemRandom().randrange(1_000_000)))
    print(f"GENPIPE_SEED={seed}")
    return random.Random(seed)


def texts_for(rng, rows):
    return [
        f"Row {place}. <<tokens={rng.randint(5, 60)} delay={rng.choice((0.02, 0.1, 0.3, 0.8)):.2f}>>"
        for place in range(rows)
    ]


class Kills:
    """What was durable at each kill, to be held against what came after it."""

    def __init__(self, out, texts):
        self.out, self.texts = out, texts
        self.seen = []
        self.in_start = 0

    def note(self):
        """Right after a kill: nothing of the process runs any more."""
        done = saved(self.out)
        in_list = set(listed(self.out))
        # The list may lag behind the shards; where it led, prompts would be lost for good.
        assert in_list <= set(done)
        if self.seen:
            before = self.seen[-1][1]
            assert {index: done.get(index) for index in before} == before
        self.seen.append((time.monotonic(), done))

    def row(self):
        """For the table of faults: what was durable at any kill must stand there once at the end."""
        there = audit_of_bytes.counts(OsFiles(), self.out)
        durable = set().union(*(done for _, done in self.seen))
        doubled = {index for index, times in there.items() if times > 1}
        checked = sum(len(done) for _, done in self.seen)
        return [
            "random kills of the whole program",
            len(self.seen),
            checked,
            len(durable - set(there)),
            len(doubled),
            "",
        ]

    def assert_nothing_was_asked_again(self, visits):
        records = saved(self.out)
        for killed_s, done in self.seen:
            again = {row_of(self.texts[index]) for index in done} & asked_after(visits, killed_s)
            assert again == set()
            assert {index: records[index] for index in done} == done


@pytest.mark.timeout(60 + 60 * SOAK)
def test_kills_at_random_moments_of_start_and_run_change_nothing_of_the_outcome(tmp_path, record_property):
    rng = seeded()
    texts = texts_for(rng, 40 * KILLS)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    kills, over = Kills(out, texts), 0
    with servers(tmp_path, 3) as fleet:
        command = run_command(fleet, source, out, LIMIT, "--set", "output.shard_records=17")
        for _ in range(KILLS):
            in_start = rng.random() < 0.5
            moment_s = rng.uniform(0.1, START_S) if in_start else rng.uniform(START_S, 1.5)
            with running(*command, err=tmp_path / "run.err") as run:
                time.sleep(moment_s)
                over += run.over
                run.kill()
            kills.in_start += in_start
            kills.note()
        with running(*command, err=tmp_path / "run.err") as run:
            code = run.wait(60)
        fleet.stop()
        visits = fleet.visits()
    err = (tmp_path / "run.err").read_text()
    state = progress(out)
    record_property(PROPERTY, kills.row())
    for name, value in (("kills", len(kills.seen)), ("kills_in_start", kills.in_start), ("rows", len(texts))):
        record_property(name, value)
    record_property("kills_too_late", over)
    record_property("rows_done_at_kills", [len(done) for _, done in kills.seen])

    assert code == 0, err
    # A kill of a process that has done its work tries nothing.
    assert over < KILLS // 3
    assert "Traceback" not in err
    audit(out, texts)
    assert_manifest_agrees(out)
    kills.assert_nothing_was_asked_again(visits)
    assert state is not None
    assert (state["completed"], state["failed"], state["total"]) == (len(texts), 0, len(texts))
    # What was paid for twice is what was in flight, or on its way to the disk, at a kill.
    answered = [visit for visit in visits if visit["status"] == 200 and not visit["client_gone"]]
    record_property("answers_lost_at_kills", len(answered) - len(texts))
    assert len(answered) - len(texts) <= KILLS * 2 * 3 * LIMIT


@pytest.mark.timeout(60 + 60 * SOAK)
def test_a_kill_of_the_run_and_of_a_server_at_once_is_survived(tmp_path, record_property):
    rng = seeded()
    texts = texts_for(rng, 300)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    kills = Kills(out, texts)
    with servers(tmp_path / "one", 2) as well, servers(tmp_path / "two") as dying:
        command = [
            *run_command(well, source, out, LIMIT, "--set", "output.shard_records=17"),
            *("--servers", dying.address, "--set", "retry.pause_max_s=1"),
        ]
        for _ in range(3 * SOAK):
            least = min(len(texts) - 60, len(saved(out)) + 40)
            with running(*command, err=tmp_path / "run.err") as run:
                wait_for_records(run, out, least)
                if rng.random() < 0.5:
                    dying.kill()
                    time.sleep(rng.uniform(0.0, 0.3))
                    run.kill()
                else:
                    run.kill()
                    dying.kill()
            kills.note()
            # The next process begins without the server, and meets it later.
            with running(*command, err=tmp_path / "run.err") as run:
                time.sleep(rng.uniform(0.3, 0.9))
                run.kill()
            kills.note()
            dying.start()
        with running(*command, err=tmp_path / "run.err") as run:
            code = run.wait(60)
        well.stop()
        dying.stop()
        visits = sorted(
            without_probes([*well.visits(), *dying.visits()]), key=lambda visit: visit["arrival_s"]
        )
    err = (tmp_path / "run.err").read_text()
    record_property(PROPERTY, kills.row())
    record_property("server_kills", 3 * SOAK)

    assert code == 0, err
    assert "Traceback" not in err
    audit(out, texts)
    assert_manifest_agrees(out)
    kills.assert_nothing_was_asked_again(visits)
    assert (out / "failed.jsonl").read_bytes() == b""
    assert {visit["port"] for visit in visits} == {*well.ports, *dying.ports}
