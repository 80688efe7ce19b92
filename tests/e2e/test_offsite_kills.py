"""A run whose driver and store are killed again and again, on two machines with folders of their own."""

import os
import random
import threading
import time

import pytest

from tests.e2e.harness import (
    genpipe,
    row_of,
    run_command,
    running,
    saved,
    servers,
    wait_for,
    write_prompts,
)
from tests.e2e.offsite import Stored, connection, environment, options
from tests.e2e.test_random_kills import seeded
from tests.faults.audits import PROPERTY
from tests.s3.servers import Weed, missing

SOAK = int(os.environ.get("GENPIPE_SOAK", "1"))
ROWS = 20_000 if SOAK > 1 else 6_000
LIMIT = 64
KILLS = 6 if SOAK > 1 else 4
SHARD = 500
BEGIN_S = 90.0
"""The store may take long to come back (seconds)."""
MACHINES = ("a", "a", "b", "b", "a", "b") if SOAK > 1 else ("a", "a", "b", "a")
"""On which machine each driver runs that is to be killed; the last one of all is on the second."""


class StoreKiller:
    """Kills the store at random moments and starts it again, until it has done so often enough."""

    def __init__(self, server, rng, kills):
        self.server, self.rng, self.kills = server, rng, kills
        self.done = 0
        self.is_through, self.may_end = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)

    def work(self):
        while self.done < self.kills:
            time.sleep(self.rng.uniform(1.0, 3.5))
            self.server.kill()
            time.sleep(self.rng.uniform(0.0, 1.0))
            self.server.start()
            self.done += 1
        self.is_through.set()
        # The store is a child of this thread, and ends with it.
        self.may_end.wait()


def wait_for_more(run, out, least):
    """Wait until there are more records than before, or the run is over."""
    wait_for(lambda: run.over or len(saved(out)) > least, "its first records")


@pytest.mark.skipif(missing("weed") is not None, reason=str(missing("weed")))
@pytest.mark.timeout(600)
def test_records_survive_kills_of_the_store_and_of_the_driver(tmp_path, record_property):
    rng = seeded()
    texts = [f"Row {place} of the run that is killed." for place in range(ROWS)]
    source = write_prompts(tmp_path / "in.jsonl", texts)
    speed = ("--tokens-per-s", "80", "--tokens-per-s-full", str(80 * LIMIT), "--max-running", str(LIMIT))
    ends: list[int] = []
    with Weed(tmp_path / "weed") as store, servers(tmp_path, 4, *speed, orders=False) as fleet:
        env, place = environment(store), store.place("killed")
        killer = StoreKiller(store, random.Random(rng.random()), KILLS)

        def command(machine):
            where = run_command(fleet, source, tmp_path / machine, LIMIT, *options(place))
            return [*where, f"--set=output.shard_records={SHARD}"]

        def begin(machine):
            """Until one is under way: the store may just be down, or this folder be behind the other."""
            until_s = time.monotonic() + BEGIN_S
            while time.monotonic() < until_s:
                least = len(saved(tmp_path / machine))
                run = running(*command(machine), err=tmp_path / "run.err", env=env)
                started = run.__enter__()
                wait_for_more(started, tmp_path / machine, least)
                if not started.over:
                    return run, started
                code = started.wait()
                run.__exit__(None, None, None)
                if code == 0:
                    return run, started
                ends.append(code)
                assert code in (2, 74, 75), started.err[-2000:]
                if code == 75 and "--repair" in started.err.splitlines()[-1]:
                    mended = genpipe("verify", tmp_path / machine, "--repair", env=env)
                    assert mended.code in (0, 1), mended.err
            raise AssertionError((tmp_path / "run.err").read_text()[-3000:])

        killer.thread.start()
        kills, acked = 0, 0
        for machine in MACHINES:
            run, started = begin(machine)
            time.sleep(rng.uniform(0.3, 2.0))
            if not started.over:
                started.kill()
                kills += 1
            run.__exit__(None, None, None)
            acked += len(saved(tmp_path / machine))
        assert killer.is_through.wait(120)
        code = None
        for _ in range(5):
            run, started = begin("b")
            code = started.wait(200)
            run.__exit__(None, None, None)
            if code == 0:
                break
        err = (tmp_path / "run.err").read_text()
        stored = Stored(store, place)
        assert stored.records
        looked = genpipe("verify", place.uri, *connection(place), env=env, timeout_s=120)
        out = tmp_path / "all.jsonl"
        exported = genpipe("export", place.uri, out, *connection(place), env=env, timeout_s=120)
        killer.may_end.set()
        fleet.stop()
        asked = [visit["row"] for visit in fleet.visits()]
    missing_rows = set(range(ROWS)) - stored.indices
    record_property(
        PROPERTY,
        [
            "driver and S3 store killed, two machines",
            kills + killer.done,
            acked,
            len(missing_rows),
            len(stored.doubled),
            "",
        ],
    )
    print(
        f"kills of the driver {kills}, of the store {killer.done}; starts refused {ends}; records in S3 "
        f"{len(stored.records)}, missing {len(missing_rows)}, doubled {len(stored.doubled)}; requests "
        f"{len(asked)}, commits {len(stored.commits)}"
    )

    assert code == 0, err[-3000:]
    assert "Traceback" not in err
    assert (kills, killer.done) == (KILLS, KILLS)
    stored.assert_whole(texts)
    assert looked.code == 0, looked.out + looked.err
    assert exported.code == 0, exported.err
    assert out.read_bytes().count(b"\n") == ROWS
    assert {row_of(text) for text in texts} <= set(asked)
