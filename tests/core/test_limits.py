"""The limit of one server: cut in half, and given back in eighths."""

import pytest

from genpipe.core.limits import BUSY_PAUSE_S, RETRY_AFTER_MAX_S, Limiter


def test_the_configured_limit_holds_until_a_server_complains():
    limiter = Limiter(8)

    assert limiter.allowed(0.0) == 8
    assert not limiter.answered()


def test_a_complaint_halves_what_was_in_flight_after_a_rest():
    limiter = Limiter(64)

    assert limiter.busy(15, None, 10.0) == BUSY_PAUSE_S
    assert limiter.allowed(10.5) == 0
    assert limiter.allowed(11.0) == 8


def test_complaints_during_the_rest_cut_nothing_more():
    limiter = Limiter(64)
    limiter.busy(63, 4.0, 0.0)

    assert limiter.busy(62, 9.0, 1.0) == 3.0
    assert limiter.allowed(4.0) == 32


def test_one_request_is_always_allowed_after_a_rest():
    limiter = Limiter(2)
    now_s = 0.0
    for _ in range(5):
        now_s += limiter.busy(0, None, now_s)

    assert limiter.allowed(now_s) == 1


@pytest.mark.parametrize(("wish_s", "pause_s"), [(-5.0, 0.0), (3.0, 3.0), (1e9, RETRY_AFTER_MAX_S)])
def test_a_wish_is_followed_within_bounds(wish_s, pause_s):
    assert Limiter(4).busy(3, wish_s, 0.0) == pause_s


def test_eight_answers_give_a_slot_back_and_none_beyond_the_limit():
    limiter = Limiter(4)
    limiter.busy(3, None, 0.0)
    opened = [limiter.answered() for _ in range(40)]

    assert [number for number, slot in enumerate(opened, 1) if slot] == [8, 16]
    assert limiter.allowed(1.0) == 4
