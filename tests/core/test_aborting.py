"""The slots of requests that were given up stay shut until their server has noticed that nobody waits."""

import pytest

from genpipe.core.errors import FaultKind, PromptFault
from genpipe.core.server import ServerState
from genpipe.core.values import Commit, Probe
from tests.core.build import (
    answer,
    cancel,
    commit,
    fail,
    inquired,
    make_core,
    probes,
    started,
    starts,
    well,
)


def make(count=9, slots=(2,), **settings):
    core = make_core(count, slots, **{"stall_s": 10.0, "silent_s": 1e6, **settings})
    starts(core, 0.0)
    return core


def give_up(core, now_s=10.0, count=1):
    """So many of the oldest were called off, and their connections are closed now."""
    core.due(now_s)
    called_off = [flight.start for flight in core.flights() if flight.fault is not None][:count]
    for start in called_off:
        cancel(core, start, now_s)
    return called_off


def test_the_slot_of_a_request_that_was_given_up_is_held_back_for_four_seconds():
    core = make()
    assert len(give_up(core)) == 1
    assert core.in_flight == 1

    assert starts(core, 13.9) == []
    assert core.next_timer_s() == 14.0
    assert len(starts(core, 14.0)) == 1


def test_slots_come_back_one_by_one_each_in_its_time():
    core = make(20, (3,))
    first, second, third = started(core)
    core.due(10.0)
    cancel(core, first, 10.0)
    cancel(core, second, 11.0)
    assert starts(core, 13.9) == []
    assert len(starts(core, 14.0)) == 1
    assert starts(core, 14.9) == []

    assert len(starts(core, 15.0)) == 1
    assert started(core)[0] is third


def test_how_long_is_a_setting():
    core = make(abort_s=0.5)
    give_up(core)

    assert starts(core, 10.4) == []
    assert len(starts(core, 10.5)) == 1


def test_a_slot_that_is_held_back_has_an_owner_of_its_own_in_the_books():
    core = make(20, (4,))
    assert len(give_up(core, count=2)) == 2
    core.due(10.0)
    before = core.books.owned_by_all_s()
    core.due(14.0)
    after = core.books.owned_by_all_s()
    core.books.check()

    grown = {
        owner: round(after[owner] - before[owner], 6) for owner in after if after[owner] != before[owner]
    }
    assert grown == {"aborting": 2 * 4.0, "wire": 2 * 4.0}
    core.books.tick(20.0)
    assert core.books.owned_by_all_s()["aborting"] == after["aborting"]


def test_slots_held_back_at_a_benched_server_are_booked_so_and_the_others_to_the_bench():
    core = make(20, (4,))
    core.due(5.0)
    inquired(core, 5.0, known=4)
    for start in started(core)[:3]:
        fail(core, start, 5.0, FaultKind.UNREACHABLE)
    (left,) = started(core)
    core.due(10.0)
    cancel(core, left, 10.0)
    before = core.books.owned_by_all_s()
    core.books.tick(12.0)
    after = core.books.owned_by_all_s()

    assert core.fleet.servers[0].state is ServerState.BENCHED
    assert after["aborting"] - before["aborting"] == pytest.approx(2.0)
    assert after["down"] - before["down"] == pytest.approx(3 * 2.0)


def test_a_slot_that_is_held_back_is_no_room_for_a_trial():
    """A server of one slot is benched, and still works on what was given up there."""
    core = make(9, (1, 1), abort_s=30.0, silent_s=12.0)
    core.due(2.0)
    (start,) = started(core, 0)
    for now_s in (4.0, 6.0, 8.0):
        core.due(now_s)
    inquired(core, 12.0, 0, trouble="reset")
    cancel(core, start, 12.0)
    assert core.fleet.servers[0].state is ServerState.BENCHED
    assert 0 in [probe.server for probe in probes(core, 12.5)]
    well(core, 13.0, 0)

    assert [each.server for each in starts(core, 41.9)].count(0) == 0
    assert [each.server for each in starts(core, 42.0)].count(0) == 1


def test_an_answer_that_lands_before_the_cancel_acts_is_kept_and_its_slot_is_free_at_once():
    core = make()
    core.due(10.0)
    first = next(flight.start for flight in core.flights() if flight.fault is not None)
    answer(core, first, 10.0)

    (group,) = commit(core, 10.0)
    assert [each.prompt for each in group.finished] == [first.prompt]
    assert core.in_flight == 2
    assert core.sleeping == 0


def test_a_reply_that_landed_before_the_cancel_and_is_none_is_a_fault_once():
    core = make(1, (1,), prompt_attempts=9)
    core.due(10.0)
    (first,) = started(core)
    core.landed(first, 0.0, 10.0, 10.0)
    fail(core, first, 10.0, FaultKind.BROKEN)

    assert core.fleet.servers[0].faults[FaultKind.BROKEN] == 1
    assert core.fleet.servers[0].faults[FaultKind.OVERDUE] == 0
    assert core.sleeping == 1


def test_a_prompt_whose_own_time_is_over_leaves_its_slot_shut_too():
    core = make(9, (1,), stall_s=None)
    (first,) = started(core)
    core.failed(first, PromptFault("no answer within 5 s", wire_s=0.1), 5.0)
    core.check()

    assert starts(core, 8.9) == []
    assert len(starts(core, 9.0)) == 1


def test_a_prompt_that_was_never_sent_leaves_no_slot_shut():
    core = make(9, (1,), stall_s=None)
    (first,) = started(core)
    core.failed(first, PromptFault("its time was over before it was sent"), 5.0)
    core.check()

    assert len(starts(core, 5.0)) == 1


def test_a_fault_of_the_server_leaves_no_slot_shut():
    core = make(9, (1,), stall_s=None)
    fail(core, started(core)[0], 5.0, FaultKind.LOST)

    assert len(starts(core, 5.0)) == 1


def test_a_slot_that_is_held_back_is_no_refill_gap_of_ours():
    core = make(9, (1,))
    give_up(core)
    (second,) = starts(core, 14.0)
    answer(core, second, 15.0, wire_s=14.0)

    assert core.fleet.gaps_s.count == 0


def test_a_stop_holds_no_slot_back_for_nothing_comes_after_it():
    core = make(9, (2,))
    core.stop(1.0, grace_s=0.0)
    core.due(1.0)
    for start in started(core):
        cancel(core, start, 1.0)

    assert not core.fleet.servers[0].aborts
    assert core.finished


def test_what_was_given_up_is_sent_to_another_server_at_once():
    core = make(1, (1, 1), backoff_s=0.01)
    (first,) = give_up(core)
    (again,) = starts(core, 10.1)

    assert (again.prompt, again.server) == (first.prompt, 1)


def test_over_a_whole_run_the_books_balance_and_no_slot_is_lost():
    """Every third request is given up, no server has more than its limit, and in the end nothing is held."""
    core = make(60, (3, 2), ready_spare=100, prompt_attempts=99)
    now_s, given_up = 0.0, 0
    while not core.finished:
        now_s += 1.0
        assert now_s < 2000.0
        for action in core.due(now_s):
            match action:
                case Probe(server=server):
                    well(core, now_s, server)
                case Commit(group=group):
                    core.committed(group.number, now_s)
        for flight in list(core.flights()):
            if flight.fault is not None:
                given_up += 1
                cancel(core, flight.start, now_s)
            elif flight.start.attempt % 3:
                answer(core, flight.start, now_s)
        for server in core.fleet.servers:
            assert server.held + len(server.aborts) <= server.spec.limit
    core.due(now_s + 10.0)
    core.check()

    assert given_up >= 20
    assert core.done == 60
    assert [len(server.aborts) for server in core.fleet.servers] == [0, 0]
    assert [server.held for server in core.fleet.servers] == [0, 0]
