"""Slow is not dead: which servers are asked what they do, and which requests are given up for it."""

import pytest

from genpipe.core.errors import FaultKind, PromptFault
from genpipe.core.server import ServerState
from genpipe.core.values import Inquire, Probe
from genpipe.core.vigil import ANSWERS_MIN
from tests.core.build import (
    answer,
    cancel,
    cancels,
    commit,
    due,
    fail,
    inquired,
    inquiries,
    make_core,
    started,
    starts,
    well,
)


def server(core, number=0):
    return core.fleet.servers[number]


def watched(count=2, slots=(2,), **settings):
    """A core with requests in flight since 0 s; a server is looked at every 10 s and silent after 60."""
    core = make_core(count, slots, **{"silent_s": 60.0, "backoff_s": 0.01, "backoff_max_s": 0.01, **settings})
    starts(core, 0.0)
    return core


def learn(core, longest_s, count=ANSWERS_MIN):
    """So many answers have come, and the longest took so long."""
    for _ in range(count - 1):
        core.pace.answered(1.0, 0.0)
    core.pace.answered(longest_s, 0.0)


def numbers(core, server_number=None):
    return [start.attempt for start in started(core, server_number)]


def look(core, now_s, server_number=0, **vitals):
    """The server was to be asked, and said this; attempts that are to be cancelled."""
    assert server_number in inquiries(core, now_s)
    return inquired(core, now_s, server_number, **vitals)


def given_up(core, now_s):
    """The faults for which attempts were called off, and their ends."""
    faults = [flight.fault for flight in core.flights() if flight.fault is not None]
    for flight in list(core.flights()):
        if flight.fault is not None:
            cancel(core, flight.start, now_s)
    return faults


# ---- who is asked ----


def test_a_server_is_asked_once_it_has_been_silent_for_a_sixth_of_the_bound():
    core = watched()

    assert inquiries(core, 9.9) == []
    assert core.next_timer_s() == 10.0
    assert due(core, 10.0, Inquire) == [Inquire(server=0, timeout_s=10.0)]


def test_a_server_is_asked_one_question_at_a_time():
    core = watched()
    assert inquiries(core, 10.0) == [0]

    assert inquiries(core, 20.0) == []
    inquired(core, 25.0, known=2, mark="a")
    assert inquiries(core, 30.0) == [0]


def test_a_server_that_answers_others_is_not_asked():
    core = watched(50, (4, 4))
    for now_s in (9.0, 19.0, 29.0):
        answer(core, started(core, 0)[-1], now_s)
        assert 0 not in inquiries(core, now_s + 1.0)


def test_an_error_that_it_says_itself_is_a_sign_of_life_and_a_broken_connection_is_none():
    core = watched(50, (4, 4))
    core.failed(started(core, 0)[0], PromptFault("no", status=400, wire_s=0.0), 5.0)
    fail(core, started(core, 1)[0], 5.0, FaultKind.LOST)

    assert inquiries(core, 10.0) == [1]


def test_a_server_with_nothing_in_flight_is_not_asked():
    core = watched(1, (1, 1))

    assert inquiries(core, 10.0) == [0]
    assert inquiries(core, 100.0) == []


# ---- silence ----


def test_a_server_that_says_nothing_for_the_whole_time_has_stalled_with_all_it_has():
    core = watched(4, (2, 2))
    for now_s in (10.0, 20.0, 30.0, 40.0, 50.0):
        assert look(core, now_s, trouble="said nothing within 10 s") == []
    lost = numbers(core, 0)

    assert look(core, 60.0, trouble="said nothing within 10 s") == lost
    assert server(core).state is ServerState.BENCHED
    assert server(core, 1).state is ServerState.UP
    (first, second) = given_up(core, 60.0)
    assert first.kind is second.kind is FaultKind.STALLED
    assert str(first) == "given up: silent for 1 min 00 s, and no sign of work: said nothing within 10 s"


def test_a_server_that_says_the_same_numbers_again_and_again_has_stalled():
    """A hung scheduler's metrics still come with status 200, in milliseconds."""
    core = watched()
    for now_s in (10.0, 20.0, 30.0, 40.0, 50.0):
        assert look(core, now_s, known=2, mark="1700") == []

    assert look(core, 60.0, known=2, mark="1700") == numbers(core)
    assert "the same old numbers" in str(given_up(core, 60.0)[0])


def test_the_first_mark_proves_nothing_for_it_may_be_of_a_server_that_hangs():
    core = watched()
    for now_s in (10.0, 20.0, 30.0, 40.0):
        look(core, now_s, trouble="reset")
    assert look(core, 50.0, known=2, mark="1700") == []

    assert len(look(core, 60.0, known=2, mark="1700")) == 2


def test_a_first_mark_at_the_end_of_the_time_is_no_old_number_and_waits_for_the_next_look():
    """A server that was away for all that time may be back, and well."""
    core = watched()
    for now_s in (10.0, 20.0, 30.0, 40.0, 50.0):
        look(core, now_s, trouble="reset")
    assert look(core, 60.0, known=2, mark="1700") == []

    assert len(look(core, 70.0, known=2, mark="1700")) == 2


def test_marks_that_move_keep_a_request_of_seven_minutes_alive():
    core = watched()
    for number in range(1, 43):
        assert look(core, 10.0 * number, known=2, mark=f"step {number}") == []

    assert server(core).state is ServerState.UP
    for start in started(core):
        answer(core, start, 425.0)
    assert [len(group.finished) for group in commit(core, 425.0)] == [2]


def test_a_server_whose_marks_stand_still_has_stalled_when_that_has_lasted():
    """It worked until 100 s: then it hangs."""
    core = watched()
    for now_s in range(10, 110, 10):
        look(core, float(now_s), known=2, mark=f"step {now_s}")
    for now_s in range(110, 160, 10):
        assert look(core, float(now_s), known=2, mark="step 100") == []

    assert len(look(core, 160.0, known=2, mark="step 100")) == 2


def test_a_server_that_goes_silent_after_an_answer_has_the_whole_time_from_then_on():
    core = watched(20, (2,))
    answer(core, started(core)[0], 45.0)
    starts(core, 45.0)
    for now_s in (55.0, 65.0, 75.0, 85.0, 95.0):
        assert look(core, now_s, trouble="reset") == []

    assert len(look(core, 105.0, trouble="reset")) == 2


def test_silence_before_a_request_was_sent_is_not_held_against_its_server():
    core = make_core(2, (1, 1), silent_s=60.0, backoff_s=500.0, backoff_max_s=500.0)
    first, _ = starts(core, 0.0)
    fail(core, first, 0.0, FaultKind.UNREACHABLE)
    for now_s in (400.0, 500.0):
        core.due(now_s)
    (again,) = started(core, first.server)
    assert again.started_s == 500.0
    assert look(core, 510.0, first.server, trouble="reset") == []

    assert again.attempt in numbers(core)


def test_what_a_stalled_server_had_is_answered_elsewhere():
    core = watched(2, (2, 2), prompt_attempts=1)
    lost = started(core, 0)
    for now_s in (10.0, 20.0, 30.0, 40.0, 50.0, 60.0):
        look(core, now_s, trouble="reset")
    given_up(core, 60.0)
    again = starts(core, 60.1)

    assert [start.server for start in again] == [1]
    assert again[0].prompt in [start.prompt for start in lost]
    assert core.unsaved == 0


def test_a_stall_is_charged_once_its_server_has_answered_another():
    core = watched(1, (1,), prompt_attempts=1)
    for now_s in (10.0, 20.0, 30.0, 40.0, 50.0, 60.0):
        look(core, now_s, trouble="reset")
    given_up(core, 60.0)
    assert core.unsaved == 0
    assert due(core, 60.5, Probe) == [Probe(server=0, ask=True)]
    well(core, 64.0, asked=True)
    (again,) = starts(core, 64.0)
    assert core.unsaved == 0
    for now_s in (74.0, 84.0, 94.0, 104.0, 114.0, 124.0):
        look(core, now_s, trouble="reset")
    cancel(core, again, 124.0)
    (group,) = commit(core, 124.0)

    assert [(each.index, each.for_good) for each in group.given_up] == [(0, False)]


def test_an_answer_that_comes_before_the_cancel_acts_is_kept_though_its_server_was_called_silent():
    core = watched(1, (1, 1))
    (start,) = started(core)
    for now_s in (10.0, 20.0, 30.0, 40.0, 50.0):
        look(core, now_s, trouble="reset")
    assert look(core, 60.0, trouble="reset") == [start.attempt]
    answer(core, start, 60.0)

    assert [len(group.finished) for group in commit(core, 60.0)] == [1]
    assert core.finished


# ---- nothing to do ----


def test_a_request_is_gone_once_its_server_has_said_for_half_the_bound_that_it_has_nothing_to_do():
    core = watched()
    for now_s in (10.0, 20.0, 30.0):
        assert look(core, now_s, known=0, mark=str(now_s)) == []

    assert look(core, 40.0, known=0, mark="d") == numbers(core)
    (fault, _) = given_up(core, 40.0)
    assert fault.kind is FaultKind.OVERDUE
    assert str(fault) == "given up: its server says that it has nothing to do"
    assert server(core).state is not ServerState.BENCHED


@pytest.mark.parametrize("between", [{"known": 1, "mark": "x"}, {"trouble": "reset"}])
def test_a_look_that_finds_work_or_nothing_begins_the_time_without_work_anew(between):
    core = watched()
    look(core, 10.0, known=0, mark="a")
    look(core, 20.0, known=0, mark="b")
    look(core, 30.0, **between)
    for now_s in (40.0, 50.0, 60.0):
        assert look(core, now_s, known=0, mark=str(now_s)) == []

    assert len(look(core, 70.0, known=0, mark="d")) == 2


def test_an_answer_in_between_begins_the_time_without_work_anew():
    core = watched(20, (2,))
    look(core, 10.0, known=0, mark="a")
    answer(core, started(core)[0], 15.0)
    starts(core, 15.0)
    for now_s in (25.0, 35.0, 45.0):
        assert look(core, now_s, known=0, mark=str(now_s)) == []

    assert len(look(core, 55.0, known=0, mark="d")) == 2


def test_what_a_server_said_before_a_request_was_sent_does_not_take_it_away():
    """A snapshot may be as old as the silence: it is of the time before."""
    core = watched()
    for now_s in (10.0, 20.0, 30.0, 40.0, 50.0):
        assert look(core, now_s, known=0, age_s=now_s - 0.4, mark=str(now_s)) == []

    assert look(core, 60.0, known=0, age_s=5.0, mark="z") == numbers(core)


def test_what_was_sent_while_its_server_said_that_it_has_nothing_to_do_has_the_whole_time_for_itself():
    core = watched(3, (2,))
    first, second = started(core)
    look(core, 10.0, known=0, mark="a")
    look(core, 20.0, known=0, mark="b")
    core.failed(second, PromptFault("its time is over", wire_s=0.0), 26.0)
    core.due(30.0)
    (third,) = [start for start in started(core) if start != first]
    assert third.started_s == 30.0
    inquired(core, 30.0, known=0, mark="c")
    gone: dict[int, float] = {}
    now_s = 30.0
    while len(gone) < 2:
        now_s += 10.0
        assert now_s < 90.0
        assert inquiries(core, now_s) == [0]
        for attempt in inquired(core, now_s, known=0, mark=str(now_s)):
            gone[attempt] = now_s

    assert gone == {first.attempt: 40.0, third.attempt: 60.0}


# ---- too old ----


def old(core, age_s, **vitals):
    """A working server is looked at until its requests have this age; what is given up then."""
    for now_s in range(10, int(age_s), 10):
        assert look(core, float(now_s), known=2, mark=str(now_s)) == []
    return look(core, age_s, mark="last", **vitals)


def test_no_bound_is_learnt_from_few_answers():
    core = watched()
    learn(core, 1.0, ANSWERS_MIN - 1)

    assert old(core, 5000.0, known=1) == []


@pytest.mark.parametrize(("longest_s", "bound_s"), [(1.0, 600.0), (150.0, 600.0), (300.0, 1200.0)])
def test_the_bound_is_four_times_the_longest_answer_and_at_least_ten_minutes(longest_s, bound_s):
    core = watched()
    learn(core, longest_s)
    assert old(core, bound_s - 10.0, known=1) == []

    assert look(core, bound_s, known=1, mark="z") == numbers(core)
    assert {fault.kind for fault in given_up(core, bound_s)} == {FaultKind.OVERDUE}


def test_a_server_that_accounts_for_all_its_requests_keeps_them_however_old():
    core = watched()
    learn(core, 1.0)

    assert old(core, 5000.0, known=2) == []


def test_only_those_that_are_too_old_are_given_up_where_a_server_has_lost_some():
    core = watched(3, (2,))
    learn(core, 1.0)
    first, second = started(core)
    for now_s in range(10, 310, 10):
        look(core, float(now_s), known=2, mark=str(now_s))
    answer(core, second, 305.0)
    for now_s in range(320, 600, 10):
        look(core, float(now_s), known=2, mark=str(now_s))
    learn(core, 1.0)

    assert look(core, 1220.0, known=1, mark="z") == [first.attempt]
    assert len(started(core)) == 2


def test_what_was_called_off_already_is_not_counted_among_what_a_server_should_have():
    core = watched(3, (2,))
    learn(core, 1.0)
    first, second = started(core)
    for now_s in range(10, 310, 10):
        look(core, float(now_s), known=2, mark=str(now_s))
    answer(core, second, 305.0)
    for now_s in range(320, 1220, 10):
        look(core, float(now_s), known=2, mark=str(now_s))
    assert look(core, 1220.0, known=1, mark="y") == [first.attempt]

    assert look(core, 1600.0, known=1, mark="z") == []


def test_a_server_that_answers_others_is_asked_about_a_request_that_is_too_old():
    core = watched(200, (2,))
    learn(core, 1.0)
    old_one, other = started(core)
    now_s = 0.0
    asked = []
    while now_s < 605.0:
        now_s += 5.0
        answer(core, other, now_s)
        core_due = core.due(now_s)
        asked += [now_s for action in core_due if isinstance(action, Inquire)]
        commit(core, now_s)
        other = next(start for start in started(core) if start is not old_one)

    assert asked == [600.0]
    assert inquired(core, 606.0, known=1, mark="a") == [old_one.attempt]


def test_a_prompt_that_was_given_up_for_its_age_has_twice_the_time_at_the_next_server():
    core = watched(1, (1, 1), prompt_attempts=9)
    learn(core, 1.0)
    bounds_s, now_s = [], 0.0
    for _ in range(3):
        (start,) = started(core)
        here = start.server
        while not inquired(core, now_s, here, mark=str(now_s)):
            now_s += 10.0
            core.due(now_s)
            assert now_s < 6000.0
        bounds_s.append(now_s - start.started_s)
        cancel(core, start, now_s)
        now_s += 10.0
        core.due(now_s)

    assert bounds_s == pytest.approx([600.0, 1200.0, 2400.0], abs=20.0)


def test_an_age_that_is_set_ends_a_request_though_its_server_works():
    core = watched(2, (2,), stall_s=100.0)
    learn(core, 1.0)
    for now_s in range(10, 100, 10):
        assert look(core, float(now_s), known=2, mark=str(now_s)) == []

    assert due(core, 100.0, Inquire) != []
    assert [flight.fault is not None for flight in core.flights()] == [True, True]
    (fault, _) = given_up(core, 100.0)
    assert str(fault) == "given up: no answer within request.stall_s = 100 s"
    assert fault.kind is FaultKind.OVERDUE


@pytest.mark.parametrize("began_s", [0.0, 1.0])
def test_an_age_that_is_set_ends_a_request_as_stalled_where_nothing_has_come_since_it_was_sent(began_s):
    """Its server may hang because of it; what came in the very instant in which it was sent came before."""
    core = make_core(2, (2,), stall_s=20.0)
    starts(core, began_s)
    core.due(began_s + 20.0)
    (fault, _) = given_up(core, began_s + 20.0)

    assert fault.kind is FaultKind.STALLED
    assert str(fault) == "given up: no answer within request.stall_s = 20 s"


def test_a_server_in_use_at_which_a_request_stalled_is_looked_at():
    """It tells whether the server has died of it."""
    core = make_core(2, (2,), stall_s=20.0)
    starts(core, 1.0)
    core.due(21.0)
    assert len(given_up(core, 21.0)) == 2
    assert server(core).in_use

    assert due(core, 21.4, Probe) == []
    assert due(core, 21.5, Probe) == [Probe(server=0, ask=False)]


def test_an_age_that_is_set_is_looked_at_often_enough_to_be_met_within_a_quarter():
    core = watched(1, (1,), stall_s=8.0)

    assert core.next_timer_s() == 2.0
    assert cancels(core, 7.9) == []
    assert core.next_timer_s() <= 10.0
    assert len(cancels(core, core.next_timer_s())) == 1


def test_an_age_that_is_set_takes_the_place_of_the_bound_that_is_learnt():
    core = watched(2, (2,), stall_s=5000.0)
    learn(core, 1.0)

    assert old(core, 1000.0, known=1) == []


def test_a_prompt_that_was_too_old_is_charged_once_its_server_has_answered_another():
    core = watched(9, (2,), prompt_attempts=1, stall_s=10.0)
    now_s, groups = 0.0, []
    while core.gave_up == 0:
        now_s = max(now_s + 0.01, core.next_timer_s())
        assert now_s < 100.0
        core.due(now_s)
        for start in started(core):
            if start.prompt.index:
                answer(core, start, now_s)
        given_up(core, now_s)
        groups += commit(core, now_s)

    assert [(each.index, each.tries) for group in groups for each in group.given_up] == [(0, 2)]
    assert core.done >= 1


def test_three_requests_in_a_row_that_were_too_old_bench_their_server():
    core = watched(50, (3, 1), stall_s=10.0)
    answer(core, started(core, 1)[0], 1.0)
    core.due(10.0)
    given_up(core, 10.0)

    assert server(core).state is ServerState.BENCHED


def test_a_request_is_called_off_once_and_not_with_every_look():
    core = watched(1, (1,), stall_s=10.0)

    assert len(cancels(core, 10.0)) == 1
    assert cancels(core, 20.0) == []
    assert inquired(core, 70.0, trouble="reset") == []
