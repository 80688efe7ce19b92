"""What ``progress.json`` says of a core."""

import json
import math
from typing import Any

import pytest

from genpipe.core.errors import FaultKind
from genpipe.core.flow import FlowSettings
from genpipe.core.progress import Progress, Restored
from genpipe.core.sums import Sums
from genpipe.core.values import Chunk
from genpipe.sim.engine import Engine
from genpipe.sim.world import ServerLaw, World, from_seed
from tests.core.build import answer, bad, bench, commit, fail, make_core, prompts, refuse, starts

KEYS = {
    "state", "total", "completed", "failed", "in_flight", "percent", "rate_per_sec", "rate_per_sec_segment",
    "eta_hours", "eta_hours_low", "eta_hours_high", "total_output_tokens", "avg_output_tokens",
    "usage_unknown", "output_tokens_per_sec", "output_tokens_per_sec_whole", "elapsed_s", "slot_time",
    "dispatch_gap_ms", "loop_lag_ms", "verdict", "quality", "servers", "s3", "last_error",
}  # fmt: skip
"""What the core knows of the keys that users rely on; the report adds the run's own facts."""


def restored(done=0, failed=0, tokens=0):
    sums = Sums()
    for _ in range(done):
        sums.add(tokens, ())
    return Restored(done=done, failed=failed, sums=sums)


def snapshot(core, now_s, *, total=None, before=None):
    return Progress(before or restored(), began_s=0.0).snapshot(core, total, now_s)


def after_answers(count, *, total, now_s=10.0, **fields):
    core = make_core(total, slots=(total,))
    for start in starts(core, 0.0)[:count]:
        answer(core, start, now_s, **fields)
    commit(core, now_s)
    return core


def test_the_keys_are_there_from_the_first_moment_and_it_is_json():
    progress = snapshot(make_core(5), 0.0)

    assert set(progress) >= KEYS
    assert json.loads(json.dumps(progress, allow_nan=False)) == progress
    assert all("url" in server and "slot_time" in server for server in progress["servers"])


def test_what_is_not_known_is_null_and_not_zero():
    progress = snapshot(make_core(5), 0.0)

    unknown = (
        "total", "percent", "rate_per_sec", "rate_per_sec_segment", "eta_hours", "eta_hours_low",
        "eta_hours_high", "avg_output_tokens", "output_tokens_per_sec", "dispatch_gap_ms", "last_error",
    )  # fmt: skip
    assert {key: progress[key] for key in unknown} == dict.fromkeys(unknown)
    assert progress["slot_time"] == {"whole": None, "recent": None}


def test_counts_and_rates():
    core = after_answers(40, total=100)
    progress = snapshot(core, 10.0, total=100)

    assert (progress["completed"], progress["failed"], progress["in_flight"]) == (40, 0, 60)
    assert progress["percent"] == 40.0
    assert progress["rate_per_sec"] == progress["rate_per_sec_segment"] == 4.0
    assert progress["total_output_tokens"] == 400
    assert progress["avg_output_tokens"] == 10.0
    assert progress["output_tokens_per_sec"] == 40.0
    assert progress["elapsed_s"] == 10.0


def test_restored_work_is_completed_and_in_no_rate():
    core = after_answers(40, total=100)
    progress = snapshot(core, 10.0, total=1150, before=restored(done=1000, failed=50, tokens=30))

    assert (progress["completed"], progress["failed"]) == (1040, 50)
    assert progress["rate_per_sec"] == progress["rate_per_sec_segment"] == 4.0
    assert progress["output_tokens_per_sec_whole"] == 40.0
    assert progress["total_output_tokens"] == 1000 * 30 + 400


def test_failed_are_those_given_up_and_bad_lines():
    core = make_core(3, slots=(3,), exhausted=False)
    refuse(core, starts(core, 0.0)[0], 1.0)
    core.offered(Chunk(prompts=(), bad=bad(3, 4), exhausted=True), 1.0)
    commit(core, 1.0)

    assert snapshot(core, 1.0, total=5)["failed"] == 3


def test_more_ended_than_there_are_is_a_bug():
    core = after_answers(5, total=10)

    with pytest.raises(AssertionError):
        snapshot(core, 10.0, total=4)


def test_the_average_is_over_answers_whose_usage_is_known():
    core = make_core(2, slots=(2,))
    first, second = starts(core, 0.0)
    answer(core, first, 1.0, output_tokens=None)
    answer(core, second, 1.0, output_tokens=30)
    commit(core, 1.0)
    progress = snapshot(core, 1.0, total=2)

    assert (progress["avg_output_tokens"], progress["usage_unknown"]) == (30.0, 1)


def test_all_done_is_a_hundred_per_cent_and_no_time_left():
    progress = snapshot(after_answers(10, total=10), 10.0, total=10)

    assert (progress["percent"], progress["eta_hours"]) == (100.0, 0.0)


def test_an_empty_input_is_done():
    assert snapshot(make_core(0), 1.0, total=0)["percent"] == 100.0


def test_with_work_left_it_is_never_a_hundred_per_cent():
    core = after_answers(5, total=6)
    before = Restored(done=9_999_994, sums=Sums())

    assert snapshot(core, 10.0, total=10_000_000, before=before)["percent"] == 99.999


def test_the_eta_is_null_before_there_is_ground_for_one():
    assert snapshot(after_answers(4, total=100), 10.0, total=100)["eta_hours"] is None
    assert snapshot(after_answers(5, total=100), 10.0, total=100)["eta_hours"] is not None
    assert snapshot(after_answers(40, total=100), 10.0, total=None)["eta_hours"] is None


def test_the_eta_is_null_while_nothing_is_in_flight_and_work_is_left():
    core = make_core(90, slots=(9,))
    found = starts(core, 0.0)
    for start in found[:6]:
        answer(core, start, 10.0)
    for start in found[6:]:
        fail(core, start, 10.0)
    commit(core, 10.0)

    assert snapshot(core, 10.0, total=90)["eta_hours"] is None


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 25))]
)
def test_at_every_moment_of_a_run_its_progress_is_sound(seed):
    world = from_seed(seed)
    reports: list[dict[str, Any]] = []

    def watch(now_s):
        if not reports or now_s >= reports[-1]["elapsed_s"] + 1.0:
            reports.append(progress.snapshot(engine.core, world.prompts, now_s))

    engine = Engine(world, watch=watch)
    progress = Progress(restored(), began_s=0.0)
    outcome = engine.run()
    reports.append(progress.snapshot(engine.core, world.prompts, outcome.makespan_s))

    for earlier, later in zip([reports[0], *reports], reports, strict=False):
        assert later["completed"] + later["failed"] <= world.prompts
        assert (later["completed"], later["failed"]) >= (earlier["completed"], earlier["failed"])
        left = world.prompts - later["completed"] - later["failed"]
        if later["eta_hours"] is None:
            assert later["eta_hours_low"] is later["eta_hours_high"] is None
        else:
            assert later["eta_hours_low"] <= later["eta_hours"] <= later["eta_hours_high"]
            assert (later["eta_hours"] > 0.0) == (left > 0)
        for by_owner in later["slot_time"].values():
            assert by_owner is None or sum(by_owner.values()) == pytest.approx(1.0, abs=1e-4)
        assert 0 <= later["percent"] <= 100.0
        assert math.isfinite(later["elapsed_s"])


def test_the_state_is_running_waiting_or_draining():
    core = make_core(90, slots=(3,))
    assert snapshot(core, 0.0)["state"] == "running"
    bench(core, 0, 0.0)
    assert snapshot(core, 0.0)["state"] == "waiting"
    core.stop(1.0, grace_s=5.0)

    assert snapshot(core, 1.0)["state"] == "draining"


def test_a_run_whose_servers_were_all_taken_out_waits_for_one_and_is_not_starting():
    core = make_core(90, slots=(3, 3))
    for url in ("http://s0", "http://s1"):
        core.set_limit(url, 0, 1.0)
    core.due(1.0)
    told = snapshot(core, 1.0)

    assert told["state"] == "waiting"
    assert told["waiting_for"] == "no server is left in the run: add one with genpipe limit"
    core.set_limit("http://s2", 3, 2.0)
    core.due(2.0)
    assert snapshot(core, 2.0)["state"] == "starting"


def test_a_server_has_its_own_line():
    core = make_core(90, slots=(4, 4))
    for start in starts(core, 0.0)[:2]:
        fail(core, start, 1.0, FaultKind.BUSY)
    server = snapshot(core, 1.0)["servers"][0]

    assert (server["url"], server["state"], server["limit"], server["allowed"]) == ("http://s0", "up", 4, 0)
    assert server["faults"] == {"busy": 1}
    assert server["last_error"] == "it is busy"
    assert server["in_flight"] == 3


def test_gaps_are_in_milliseconds():
    core = make_core(2)
    (first,) = starts(core, 0.0)
    answer(core, first, 1.0)
    (second,) = starts(core, 1.0)
    answer(core, second, 2.0, wire_s=1.02)

    gap_ms = snapshot(core, 2.0)["dispatch_gap_ms"]
    assert gap_ms["max"] == pytest.approx(20.0)
    assert gap_ms["p50"] == pytest.approx(20.0, rel=0.05)


@pytest.mark.parametrize(
    ("cap_s", "sigma", "miss_max"),
    [
        (math.inf, 0.6, 0.15),
        (math.inf, 1.0, 0.15),
        (40.0, 1.6, 0.15),
        (12.0, 1.2, 0.15),
        # Here the one longest answer takes a fifth of the whole run, and nobody can know it beforehand.
        (math.inf, 1.4, 0.3),
    ],
)
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 5))])
def test_the_eta_is_good_from_a_fifth_of_the_run_on(cap_s, sigma, miss_max, seed):
    """Within 15 % of the run's length, in worlds with heavy tails, with and without a cap on length."""
    servers = tuple(ServerLaw(limit=8, median_s=3.0, sigma=sigma, longest_s=cap_s) for _ in range(4))
    world = World(seed=seed, prompts=4000, servers=servers)
    found: list[tuple[float, float | None]] = []

    def watch(now_s):
        if not found or now_s >= found[-1][0] + 5.0:
            found.append((now_s, progress.snapshot(engine.core, world.prompts, now_s)["eta_hours"]))

    # A second attempt has another length here, where a real one would be as long as the first.
    engine = Engine(world, FlowSettings(hedge=False), check=False, watch=watch)
    progress = Progress(restored(), began_s=0.0)
    end_s = engine.run().makespan_s

    late = [(now_s, eta) for now_s, eta in found if now_s >= 0.2 * end_s and eta is not None]
    assert len(late) > 20
    misses = [abs(now_s + 3600 * eta - end_s) / end_s for now_s, eta in late]
    assert max(misses) < miss_max


def test_prompts_that_nobody_read_yet_count_as_left():
    core = make_core(10, slots=(10,), exhausted=False)
    for start in starts(core, 0.0)[:8]:
        answer(core, start, 10.0)
    core.due(10.0)
    core.offered(Chunk(prompts=prompts(*range(10, 20)), exhausted=False), 10.0)
    starts(core, 10.0)
    few = snapshot(core, 10.0, total=20)["eta_hours"]
    many = snapshot(core, 10.0, total=20_000)["eta_hours"]

    assert many > 100 * few
