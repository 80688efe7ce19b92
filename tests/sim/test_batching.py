"""The batch as a fluid: held against a plain loop that ticks every token, and against sums made by hand."""

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genpipe.core.errors import ConfigError
from genpipe.sim.batching import Batch, Job, Phase
from genpipe.sim.config import LengthLaw, SimConfig, step_times_s


def make_batch(**changes) -> Batch:
    return Batch(**{"running_max": 8, "fixed_s": 0.01, "per_request_s": 0.0, **changes})


def run_out(batch: Batch, until_s: float = 1e9) -> list[Job]:
    over = []
    while (due_s := batch.next_s()) is not None and due_s <= until_s:
        over += batch.advance(due_s)
        batch.check()
    return over + batch.advance(min(until_s, 1e9))


def test_a_request_alone_takes_a_step_for_each_token():
    batch = make_batch(fixed_s=0.01, per_request_s=0.002)
    job = Job(tokens=100)
    batch.submit(job, 5.0)

    assert batch.next_s() == pytest.approx(5.0 + 100 * 0.012)
    assert batch.advance(6.19) == []
    assert batch.advance(6.21) == [job]
    assert job.ended_s == pytest.approx(6.2)
    assert (job.started_s, job.made_tokens) == (5.0, 100)


def test_steps_slow_down_with_the_batch():
    """Ten tokens alone at 20 ms a step, sixty beside another at 30 ms, then the rest alone again."""
    batch = make_batch(fixed_s=0.01, per_request_s=0.01)
    first, second = Job(tokens=100), Job(tokens=60)
    batch.submit(first, 0.0)
    batch.submit(second, 0.2)
    run_out(batch)

    assert second.ended_s == pytest.approx(0.2 + 60 * 0.03)
    assert first.ended_s == pytest.approx(0.2 + 60 * 0.03 + 30 * 0.02)


def test_the_queue_is_first_come_first_served_and_a_slot_is_refilled_at_once():
    batch = make_batch(running_max=1)
    jobs = [Job(tokens=10) for _ in range(3)]
    for job in jobs:
        batch.submit(job, 0.0)

    assert (batch.running, batch.queued) == (1, 2)
    # Nobody looks at the batch for a while; the slots are refilled in the past all the same.
    assert batch.advance(10.0) == jobs
    assert [job.started_s for job in jobs] == pytest.approx([0.0, 0.1, 0.2])
    assert batch.running_integral_s == pytest.approx(0.3)
    assert batch.queued_integral_s == pytest.approx(0.1 * 2 + 0.1)


def test_a_full_queue_refuses():
    batch = make_batch(running_max=1, queued_max=1)

    assert [batch.submit(Job(tokens=10), 0.0) for _ in range(3)] == [True, True, False]
    assert (batch.running, batch.queued) == (1, 1)


def test_a_job_that_was_refused_can_be_aborted_without_effect():
    batch = make_batch(running_max=1, queued_max=0)
    batch.submit(Job(tokens=10), 0.0)
    refused = Job(tokens=10)

    assert not batch.submit(refused, 0.0)
    batch.abort(refused, 0.0)
    batch.check()
    assert batch.queued == 0


def test_aborted_while_running_keeps_what_it_made_and_frees_its_slot():
    batch = make_batch(running_max=1)
    job, waiting = Job(tokens=100), Job(tokens=5)
    batch.submit(job, 0.0)
    batch.submit(waiting, 0.0)
    batch.abort(job, 0.355)

    assert (job.phase, job.made_tokens, job.was_queued) == (Phase.ABORTED, 35, False)
    assert waiting.started_s == 0.355
    assert batch.advance(0.355) == [job]


def test_aborted_while_queued_never_ran():
    batch = make_batch(running_max=1)
    batch.submit(Job(tokens=100), 0.0)
    job = Job(tokens=100)
    batch.submit(job, 0.0)
    batch.abort(job, 0.1)

    assert (job.aborted, job.was_queued, job.made_tokens, job.started_s) == (True, True, 0, None)
    assert batch.queued == 0
    batch.check()


def test_a_hold_takes_a_slot_but_not_the_speed():
    """A prompt that is being prefilled keeps others out, and leaves the pace to those that decode."""
    batch = make_batch(running_max=2, fixed_s=0.0, per_request_s=0.01)
    held, job, third = Job(tokens=10, hold_s=0.5), Job(tokens=10), Job(tokens=10)
    for each in (held, job, third):
        batch.submit(each, 0.0)

    assert (batch.running, batch.queued) == (2, 1)
    run_out(batch)
    assert job.ended_s == pytest.approx(0.1)
    assert third.ended_s == pytest.approx(0.2)
    assert held.ended_s == pytest.approx(0.6)


def test_without_time_everything_is_over_at_once():
    batch = make_batch(fixed_s=0.0, running_max=1)
    jobs = [Job(tokens=n) for n in (0, 16, 5000)]
    for job in jobs:
        assert batch.submit(job, 1.0)

    assert [job.ended_s for job in jobs] == [1.0, 1.0, 1.0]
    assert batch.advance(1.0) == jobs
    assert batch.tokens_made == 5016


def test_slow_and_frozen_change_the_pace_from_now_on():
    batch = make_batch(fixed_s=0.01)
    job = Job(tokens=100)
    batch.submit(job, 0.0)
    limits: dict[str, Any] = {"running_max": 8, "queued_max": None}
    batch.change(0.5, slow=2.0, frozen=False, **limits)
    batch.change(0.7, slow=2.0, frozen=True, **limits)

    assert batch.next_s() is None
    batch.change(5.7, slow=1.0, frozen=False, **limits)
    assert batch.next_s() == pytest.approx(5.7 + 40 * 0.01)


def test_nobody_is_let_in_while_frozen():
    batch = make_batch()
    batch.change(0.0, running_max=8, queued_max=None, slow=1.0, frozen=True)
    job = Job(tokens=10)
    batch.submit(job, 0.0)

    assert (batch.running, batch.queued) == (0, 1)
    batch.change(1.0, running_max=8, queued_max=None, slow=1.0, frozen=False)
    assert job.started_s == 1.0


def test_used_tokens_are_prompts_and_what_was_made():
    batch = make_batch(fixed_s=0.01)
    batch.submit(Job(tokens=100, prompt_tokens=7), 0.0)
    batch.submit(Job(tokens=100, prompt_tokens=5), 0.1)
    batch.advance(0.2001)

    assert batch.used_tokens == 12 + 20 + 10
    assert batch.tokens_per_s == pytest.approx(200.0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), running_max=st.integers(1, 6), count=st.integers(1, 25))
def test_fluid_agrees_with_ticking_every_token(seed, running_max, count):
    """Against a loop over steps in which each running request gets a token, to a step's precision each."""
    rng = random.Random(seed)
    fixed_s, per_request_s = 0.01, rng.choice([0.0, 0.001, 0.01])
    arrivals = sorted((rng.uniform(0.0, 1.0), rng.randint(1, 80)) for _ in range(count))
    batch = Batch(running_max=running_max, fixed_s=fixed_s, per_request_s=per_request_s)
    jobs = []
    for at_s, tokens in arrivals:
        jobs.append(Job(tokens=tokens))
        batch.submit(jobs[-1], at_s)
        batch.check()
    run_out(batch)
    ended = tick(arrivals, running_max, fixed_s, per_request_s)

    assert all(job.phase is Phase.ENDED for job in jobs)
    # One arrival shifts what comes after it by less than one step of a full batch.
    slack_s = (fixed_s + per_request_s * running_max) * (count + 1)
    assert [job.ended_s for job in jobs] == pytest.approx(ended, abs=slack_s)
    served_s = sum((job.ended_s or 0.0) - (job.started_s or 0.0) for job in jobs)
    assert batch.running_integral_s == pytest.approx(served_s)


def tick(arrivals, running_max, fixed_s, per_request_s) -> list[float]:
    ended: dict[int, float] = {}
    left: dict[int, int] = {}
    waiting = list(range(len(arrivals)))
    now_s = 0.0
    while len(ended) < len(arrivals):
        while waiting and len(left) < running_max and arrivals[waiting[0]][0] <= now_s:
            left[waiting[0]] = arrivals[waiting[0]][1]
            waiting.pop(0)
        if not left:
            now_s = arrivals[waiting[0]][0]
            continue
        now_s += fixed_s + per_request_s * len(left)
        for each in list(left):
            left[each] -= 1
            if not left[each]:
                del left[each]
                ended[each] = now_s
    return [ended[each] for each in range(len(arrivals))]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_counts_hold_through_any_coming_and_going(seed):
    rng = random.Random(seed)
    batch = Batch(running_max=3, queued_max=5, fixed_s=0.01, per_request_s=0.003)
    now_s, jobs, over = 0.0, [], []
    for _ in range(120):
        now_s += rng.expovariate(20.0)
        match rng.randrange(5):
            case 0 | 1:
                job = Job(tokens=rng.randrange(30), hold_s=rng.choice([0.0, 0.1]), prompt_tokens=3)
                if batch.submit(job, now_s):
                    jobs.append(job)
            case 2 if jobs:
                batch.abort(rng.choice(jobs), now_s)
            case 3:
                over += batch.advance(now_s)
            case _:
                batch.change(
                    now_s,
                    running_max=rng.randint(1, 5),
                    queued_max=5,
                    slow=rng.choice([0.5, 1.0, 3.0]),
                    frozen=rng.random() < 0.2,
                )
        batch.check()
    batch.change(now_s, running_max=3, queued_max=None, slow=1.0, frozen=False)
    over += run_out(batch)

    assert sorted(map(id, over)) == sorted(map(id, jobs))
    assert (batch.running, batch.queued, batch.used_tokens) == (0, 0, 0)
    assert batch.tokens_made == sum(job.made_tokens for job in jobs)


def test_measured_speeds_become_step_times():
    fixed_s, per_request_s = step_times_s(
        alone_tokens_per_s=199.0, full_tokens_per_s=17517.0, max_running=256
    )

    assert 1 / (fixed_s + per_request_s) == pytest.approx(199.0)
    assert 256 / (fixed_s + 256 * per_request_s) == pytest.approx(17517.0)
    with pytest.raises(ConfigError, match="must make between"):
        step_times_s(alone_tokens_per_s=200.0, full_tokens_per_s=100.0, max_running=4)


def test_lengths_are_a_function_of_prompt_and_seed_with_the_asked_mean():
    law = LengthLaw.parse("lognormal:mean=300,sigma=1.0,max=100000")
    drawn = [law.tokens(f"{row:016x}", 7) for row in range(20_000)]

    assert drawn[:50] == [law.tokens(f"{row:016x}", 7) for row in range(50)]
    assert drawn[:50] != [law.tokens(f"{row:016x}", 8) for row in range(50)]
    assert math.fsum(drawn) / len(drawn) == pytest.approx(300, rel=0.05)
    assert sorted(drawn)[len(drawn) // 2] == pytest.approx(300 * math.exp(-0.5), rel=0.05)
    assert (
        max(LengthLaw.parse("lognormal:mean=300,sigma=1,max=400").tokens(f"{r:x}", 0) for r in range(99))
        == 400
    )


@pytest.mark.parametrize(
    "text",
    [
        "16",
        "fixed:",
        "fixed:-1",
        "lognormal:mean=0,sigma=1",
        "lognormal:mean=5",
        "lognormal:mean=5,sigma=1,x=2",
    ],
)
def test_unreadable_lengths_are_refused(text):
    with pytest.raises(ConfigError, match="lengths must be"):
        SimConfig(lengths=text)


@pytest.mark.parametrize("change", [{"max_running": 0}, {"health_delay_s": -1.0}, {"max_queued": -1}])
def test_impossible_configs_name_the_setting(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        SimConfig(**change)
