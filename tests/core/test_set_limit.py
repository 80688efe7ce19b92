"""A live fleet is changed: limits go up and down, servers join, leave and come back."""

import random

import pytest

from genpipe.core.books import Books
from genpipe.core.errors import FaultKind
from genpipe.core.server import ServerState
from genpipe.core.values import Cancel, Checkup, Chunk, Commit, Probe, Read, Start
from tests.core.build import (
    answer,
    commit,
    due,
    fail,
    make_core,
    probes,
    prompts,
    started,
    starts,
    well,
)


def change(core, server, limit, now_s):
    position = core.set_limit(f"http://s{server}", limit, now_s)
    core.check()
    return position


def grown(core, from_s, to_s):
    """Slot-seconds by owner that one stretch of time had."""
    core.books.tick(from_s)
    before = core.books.owned_by_all_s()
    core.books.tick(to_s)
    core.books.check()
    after = core.books.owned_by_all_s()
    return {owner: round(after[owner] - before[owner], 6) for owner in after if after[owner] > before[owner]}


# ---- limits ----


def test_a_limit_that_is_raised_is_filled_at_once():
    core = make_core(50, (2,))
    starts(core, 0.0)
    assert change(core, 0, 5, 1.0) == 0

    assert len(starts(core, 1.0)) == 3
    assert starts(core, 2.0) == []
    assert grown(core, 2.0, 4.0) == {"wire": 10.0}


def test_a_limit_that_is_lowered_cancels_nothing_and_is_reached_as_requests_end():
    core = make_core(50, (5,))
    found = starts(core, 0.0)
    change(core, 0, 2, 1.0)
    assert due(core, 1.0, Cancel) == []
    for start in found[:3]:
        answer(core, start, 2.0)
        assert starts(core, 2.0) == []
    answer(core, found[3], 3.0)

    assert len(starts(core, 3.0)) == 1
    assert core.in_flight == 2


def test_slots_beyond_a_lowered_limit_are_booked_until_they_are_free():
    core = make_core(50, (5,))
    found = starts(core, 0.0)
    change(core, 0, 2, 1.0)
    assert grown(core, 1.0, 3.0) == {"wire": 10.0}
    for start in found[:2]:
        answer(core, start, 3.0)
    core.due(3.0)

    assert grown(core, 3.0, 5.0) == {"wire": 6.0}


def test_a_limit_that_is_lowered_and_raised_again_while_requests_are_in_flight():
    core = make_core(50, (5,))
    found = starts(core, 0.0)
    change(core, 0, 2, 1.0)
    change(core, 0, 4, 2.0)
    assert starts(core, 2.0) == []
    answer(core, found[0], 3.0)
    assert starts(core, 3.0) == []
    answer(core, found[1], 3.0)

    assert len(starts(core, 3.0)) == 1
    assert core.in_flight == 4


def test_a_cut_that_is_in_force_keeps_its_share_of_the_new_limit():
    """A busy server has half of its slots: of twice the limit it has half too."""
    core = make_core(100, (8,))
    found = starts(core, 0.0)
    fail(core, found[0], 0.0, FaultKind.BUSY)
    for start in found[1:]:
        answer(core, start, 0.5, last_s=0.5)
    allowed = core.fleet.servers[0].limiter.allowed(2.0)
    change(core, 0, 16, 2.0)

    assert allowed == 4
    assert 8 <= core.fleet.servers[0].limiter.allowed(2.0) <= 10


def test_a_cut_server_has_at_least_one_slot_of_a_lowered_limit():
    core = make_core(100, (8,))
    fail(core, starts(core, 0.0)[0], 0.0, FaultKind.BUSY)
    change(core, 0, 1, 2.0)

    assert core.fleet.servers[0].limiter.allowed(2.0) == 1


def test_a_limit_that_is_raised_during_the_ramp_is_opened_by_the_ramp():
    core = make_core(500, (50,), ramp_s=1.0, ready_spare=500)
    core.due(0.5)
    assert core.in_flight == 25
    change(core, 0, 100, 0.5)
    assert starts(core, 0.5) == []
    core.due(0.76)
    assert core.in_flight == 76
    core.due(1.0)

    assert core.in_flight == 100


def test_more_is_read_ahead_for_more_slots():
    core = make_core(0, (2,), exhausted=False, ready_spare=6)
    core.due(0.0)
    core.offered(Chunk(prompts=prompts(*range(10))), 0.0)
    assert due(core, 0.0, Read) == []
    change(core, 0, 10, 1.0)

    (read,) = due(core, 1.0, Read)
    assert read.count == 16


def test_less_is_read_ahead_for_fewer_slots():
    core = make_core(0, (10,), exhausted=False, ready_spare=6)
    (first,) = due(core, 0.0, Read)
    assert first.count == 16
    change(core, 0, 2, 1.0)
    core.offered(Chunk(prompts=prompts(*range(4))), 1.0)

    (read,) = due(core, 1.0, Read)
    assert read.count == 2 + 6 - 2


# ---- servers that join ----


def test_a_server_that_joins_is_looked_at_first_then_tried_and_then_used():
    core = make_core(50, (1,))
    starts(core, 0.0)
    assert change(core, 7, 3, 1.0) == 1
    assert core.fleet.servers[1].state is ServerState.STARTING

    assert due(core, 1.0, Probe) == [Probe(server=1, ask=False)]
    assert started(core, 1) == []
    well(core, 2.0, 1)
    (trial,) = starts(core, 2.0)
    answer(core, trial, 3.0)
    assert [start.server for start in starts(core, 3.0)] == [1, 1, 1]
    assert core.fleet.servers[1].spec.url == "http://s7"


def test_a_server_that_joins_has_its_slots_in_the_books_from_then_on():
    core = make_core(50, (1,))
    core.due(0.0)
    core.due(10.0)
    change(core, 1, 3, 10.0)
    core.due(10.0)

    assert grown(core, 10.0, 12.0) == {"wire": 2.0, "down": 6.0}
    assert sum(core.books.owned_by_all_s().values()) == pytest.approx(12.0 + 3 * 2.0)


def test_a_server_that_serves_another_model_joins_and_is_given_nothing():
    core = make_core(50, (1,))
    starts(core, 0.0)
    change(core, 1, 3, 1.0)
    core.due(1.0)
    core.probed(1, Checkup(trouble="serves another model", alien=True), 2.0)
    core.check()

    assert core.fleet.servers[1].state is ServerState.STARTING
    assert starts(core, 2.0) == []


# ---- servers that leave ----


def test_a_server_that_leaves_gets_no_prompt_and_what_is_in_flight_there_may_end():
    core = make_core(50, (2, 2))
    starts(core, 0.0)
    assert change(core, 0, 0, 1.0) == 0
    assert due(core, 1.0, Cancel) == []
    first, second = started(core, 0)
    answer(core, first, 2.0)
    assert [len(group.finished) for group in commit(core, 2.0)] == [1]
    fail(core, second, 2.0, FaultKind.UNREACHABLE)

    assert starts(core, 9.0) == []
    assert core.fleet.servers[0].state is ServerState.GONE


def test_a_server_that_leaves_has_only_the_slots_that_it_still_holds():
    core = make_core(50, (2, 1))
    starts(core, 0.0)
    answer(core, started(core, 0)[0], 1.0)
    change(core, 0, 0, 1.0)
    core.due(1.0)
    assert grown(core, 1.0, 3.0) == {"wire": 4.0}
    answer(core, started(core, 0)[0], 3.0)
    core.due(3.0)

    assert grown(core, 3.0, 5.0) == {"wire": 2.0}
    assert core.fleet.slots == 1


@pytest.mark.parametrize("moment", ["benched", "probing", "trial", "in use"])
def test_a_server_that_left_is_not_looked_at_and_takes_no_part_whatever_it_was_doing(moment):
    core = make_core(90, (3, 1), backoff_s=0.1, silent_s=1e6)
    found = [start for start in starts(core, 0.0) if start.server == 0]
    if moment != "in use":
        for start in found:
            fail(core, start, 0.0, FaultKind.UNREACHABLE)
    if moment in ("probing", "trial"):
        assert len(probes(core, 0.5)) == 1
    if moment == "trial":
        well(core, 0.6)
        (found,) = [[start] for start in starts(core, 0.6) if start.server == 0]
    change(core, 0, 0, 0.7)
    if moment == "probing":
        core.probed(0, Checkup(), 0.8)
        core.check()
    if moment in ("trial", "in use"):
        for start in found:
            answer(core, start, 0.8)

    assert core.fleet.servers[0].state is ServerState.GONE
    for now_s in (1.0, 5.0, 20.0):
        assert due(core, now_s, Probe) == []
        assert started(core, 0) == []


def test_without_any_server_the_run_waits_and_says_what_to_do():
    core = make_core(9, (1,))
    answer(core, starts(core, 0.0)[0], 0.5)
    core.due(0.5)
    for start in started(core):
        answer(core, start, 0.6)
    change(core, 0, 0, 0.7)
    core.due(0.7)

    assert core.outage.text(9.0) == "no server is left in the run: add one with genpipe limit"
    assert not core.finished
    change(core, 1, 1, 10.0)
    assert len(probes(core, 10.0)) == 1


# ---- servers that come back ----


def test_a_server_that_left_and_comes_back_is_the_same_one_and_is_looked_at_first():
    core = make_core(90, (2, 1))
    starts(core, 0.0)
    change(core, 0, 0, 1.0)
    core.due(1.0)
    assert change(core, 0, 4, 2.0) == 0
    assert len(core.fleet.servers) == 2
    assert probes(core, 2.0) == [Probe(server=0, ask=False)]
    well(core, 3.0)
    old = started(core, 0)

    (trial,) = starts(core, 3.0)
    assert trial.server == 0
    answer(core, trial, 4.0)
    assert len(starts(core, 4.0)) == 2
    for start in old:
        answer(core, start, 5.0)
    assert len(started(core, 0)) + len(starts(core, 5.0)) == 4


def test_a_server_that_comes_back_while_the_look_at_it_is_still_under_way_is_not_looked_at_twice():
    core = make_core(90, (3, 1))
    for start in starts(core, 0.0):
        if start.server == 0:
            fail(core, start, 0.0, FaultKind.UNREACHABLE)
    assert len(probes(core, 0.5)) == 1
    change(core, 0, 0, 0.6)
    change(core, 0, 3, 0.7)
    assert probes(core, 0.7) == []
    core.probed(0, Checkup(trouble="refused", refused=True), 0.8)
    core.check()

    assert core.fleet.servers[0].state is ServerState.STARTING
    assert len(probes(core, core.next_timer_s())) == 1


# ---- all of it ----


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_changed_and_when_the_books_balance_and_every_prompt_is_answered(seed):
    rng = random.Random(seed)
    core = make_core(0, (3, 5), exhausted=False, ramp_s=rng.choice([0.0, 2.0]), abort_s=1.0)
    now_s, offered, done = 0.0, 0, []
    core._reading = True
    while not core.finished:
        now_s += rng.choice([0.0, 0.01, 0.3])
        assert now_s < 400.0
        if core._reading:
            count = rng.randint(0, 9)
            core.offered(
                Chunk(prompts=prompts(*range(offered, offered + count)), exhausted=offered > 120), now_s
            )
            offered += count
        for action in core.due(now_s):
            match action:
                case Probe(server=server):
                    core.probed(server, Checkup(), now_s)
                case Commit(group=group):
                    done += [each.prompt.index for each in group.finished]
                    core.committed(group.number, now_s)
                case Start(server=server):
                    assert core.fleet.servers[server].state is not ServerState.GONE
        for start in started(core):
            draw = rng.random()
            if draw < 0.4:
                answer(core, start, now_s)
            elif draw < 0.45:
                fail(core, start, now_s, rng.choice([FaultKind.BUSY, FaultKind.UNREACHABLE]))
            elif draw < 0.5:
                core.cancelled(start, now_s)
        if rng.random() < 0.2:
            change(core, rng.randint(0, 3), rng.randint(1, 6), now_s)
        if rng.random() < 0.1 and len(core.fleet.servers) > 2:
            change(core, rng.randint(0, 1), 0, now_s)
        core.check()

    assert sorted(done) == list(range(offered))
    assert core.fleet.slots <= 24


def test_a_server_that_joins_late_has_no_part_in_what_the_run_lacked_before():
    books = Books([1], 0.0)
    books.run.sleeping = 5
    books.tick(4.0)
    books.add(2)
    books.tick(5.0)
    books.check()

    assert books.owned_s(0)["backoff"] == pytest.approx(5.0)
    assert books.owned_s(1)["backoff"] == pytest.approx(2.0)


def test_slots_of_the_books_shrink_as_they_are_given_back():
    books = Books([3], 0.0)
    for _ in range(3):
        books.hold(0)
    books.tick(1.0)
    books.resize(0, 1)
    books.tick(2.0)
    books.release(0, held_s=2.0, wire_s=2.0, late_s=0.0, lost=False)
    books.tick(3.0)
    books.check()
    for _ in range(2):
        books.release(0, held_s=3.0, wire_s=3.0, late_s=0.0, lost=False)
    books.tick(4.0)
    books.check()

    owned_s = books.owned_by_all_s()
    assert owned_s["wire"] == pytest.approx(2.0 + 3.0 + 3.0)
    assert sum(owned_s.values()) == pytest.approx(3 * 2.0 + 2 * 1.0 + 1 * 1.0)
