"""Rates and the ETA."""

import random

import pytest

from genpipe.core.eta import ANSWERS_MIN, WINDOW_S, Pace
from genpipe.core.values import Finished, Group, Prompt
from tests.core.build import an_answer


def a_group(count, output_tokens=10):
    finished = tuple(
        Finished(
            prompt=Prompt(index=index, payload=b"[]"),
            answer=an_answer(output_tokens=output_tokens),
            server="http://s0",
            tries=1,
            started_s=0.0,
            latency_s=1.0,
        )
        for index in range(count)
    )
    return Group(number=1, finished=finished, given_up=())


def steady(until_s, per_s=10, latency_s=2.0, began_s=0.0):
    """A run of ``per_s`` answers a second, committed each second."""
    pace = Pace(began_s)
    for second in range(1, until_s + 1):
        for _ in range(per_s):
            pace.answered(latency_s, began_s + second, tokens=10)
        pace.committed(a_group(per_s), began_s + second)
    return pace


def eta_of(pace, remaining, ages_s, in_flight, now_s):
    eta = pace.eta(remaining, ages_s, in_flight, now_s)
    assert eta is not None
    return eta


def test_rates_are_unknown_before_the_first_answer():
    rates = Pace(0.0).rates(10.0)

    assert (rates.recent, rates.segment, rates.tokens_recent, rates.tokens_segment) == (None,) * 4


def test_rates_of_a_steady_run():
    rates = steady(300).rates(300.0)

    assert rates.recent == pytest.approx(10.0, rel=0.02)
    assert rates.segment == pytest.approx(10.0)
    assert rates.tokens_recent == pytest.approx(100.0, rel=0.02)
    assert rates.tokens_segment == pytest.approx(100.0)


def test_the_recent_rate_forgets_and_the_segment_does_not():
    pace = steady(300)
    rates = pace.rates(300.0 + 10 * WINDOW_S)

    assert rates.recent < 1.0
    assert rates.segment == pytest.approx(3000 / 900)


def test_a_young_run_counts_from_its_beginning():
    assert steady(5, began_s=1000.0).rates(1005.0).recent == pytest.approx(10.0)


def test_there_is_no_eta_without_ground():
    pace = Pace(0.0)
    assert pace.eta(100, [1.0], 1, 5.0) is None
    for _ in range(ANSWERS_MIN):
        pace.answered(1.0, 5.0)

    assert pace.eta(100, [1.0], 1, 5.0) is not None
    assert pace.eta(100, [], 0, 5.0) is None


def test_nothing_left_takes_no_time():
    eta = eta_of(Pace(0.0), 0, [], 0, 5.0)

    assert (eta.expected_s, eta.low_s, eta.high_s) == (0.0, 0.0, 0.0)


def test_a_steady_run_ends_when_one_would_reckon():
    pace = steady(300)
    ages_s = [0.1 * number for number in range(20)]
    eta = eta_of(pace, 10_020, ages_s, 20, 300.0)

    assert eta.expected_s == pytest.approx(1002.0, rel=0.02)
    assert eta.low_s <= eta.expected_s <= eta.high_s


def test_work_that_is_left_takes_time():
    pace = steady(300)

    assert eta_of(pace, 1, [1.9], 1, 300.0).expected_s > 0.0
    assert eta_of(pace, 1, [500.0], 1, 800.0).expected_s > 0.0


@pytest.mark.parametrize("seed", range(20))
def test_an_eta_is_a_range_around_its_middle(seed):
    rng = random.Random(seed)
    pace = Pace(0.0)
    for _ in range(rng.randint(ANSWERS_MIN, 300)):
        pace.answered(rng.lognormvariate(0, 1.5), 10.0)
    ages_s = [rng.lognormvariate(0, 2) for _ in range(rng.randint(1, 50))]
    eta = eta_of(pace, len(ages_s) + rng.randint(0, 10_000), ages_s, len(ages_s), 10.0)

    assert 0.0 < eta.low_s <= eta.expected_s <= eta.high_s < float("inf")


def test_requests_in_flight_count_as_at_least_that_old():
    """The short answers come first: without the long ones that still run, an early ETA is too good."""
    young, old = ([0.5] * 50, [30.0] * 50)
    pace = Pace(0.0)
    for _ in range(50):
        pace.answered(1.0, 30.0)

    assert eta_of(pace, 50, old, 50, 30.0).expected_s > 10 * eta_of(pace, 50, young, 50, 30.0).expected_s
    assert eta_of(pace, 5050, old, 50, 30.0).expected_s > 1.1 * eta_of(pace, 5050, young, 50, 30.0).expected_s


def test_the_tail_is_allowed_for():
    """Ten requests are left and none to send: the longest of them decides, not the mean."""
    rng = random.Random(1)
    pace = Pace(0.0)
    for _ in range(2000):
        pace.answered(rng.expovariate(1.0), 100.0)
    eta = eta_of(pace, 10, [0.0] * 10, 10, 100.0)

    assert eta.expected_s == pytest.approx(2.93, rel=0.35)
    assert eta.high_s > eta.expected_s > eta.low_s


def test_a_sample_of_the_ages_stands_for_all():
    pace = steady(300)
    whole = eta_of(pace, 1000, [0.5] * 100, 100, 300.0).expected_s

    assert eta_of(pace, 1000, [0.5] * 10, 100, 300.0).expected_s == pytest.approx(whole, rel=0.01)
