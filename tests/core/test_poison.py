"""Prompts that servers may have died of: marked, tried with care, and given up after two deaths."""

import pytest

from genpipe.core.errors import FaultKind, PromptFault, ServerFault
from genpipe.core.poison import LAST_WAIT_S, TOGETHER_S
from genpipe.core.server import PROBATION_S
from genpipe.core.values import Checkup, Chunk, Commit, GivenUp, Probe, Start
from genpipe.core.waiting import DEATHS_SEEN_MAX, LOSSES_MAX
from tests.core.build import (
    REFUSED,
    answer,
    bench,
    cancel,
    commit,
    fail,
    inquired,
    make_core,
    probed,
    probes,
    prompts,
    refuse,
    started,
    starts,
)

UNWELL = Checkup(trouble="/health said nothing within 20 s")


def make(count=1, slots=(4, 4), **settings):
    """A core whose prompts wake at once after a fault."""
    return make_core(count, slots, **{"backoff_s": 0.01, "backoff_max_s": 0.01, **settings})


def look_at(core, server, checkup, now_s):
    """The server is looked at, if it is not already, and this is found."""
    if not core.fleet.servers[server].probing:
        found = [probe.server for probe in probes(core, now_s)]
        assert server in found, found
    probed(core, server, checkup, now_s)


def lose(core, server, now_s, kind=FaultKind.LOST):
    """Everything in flight at the server is lost."""
    lost = started(core, server)
    for start in lost:
        fail(core, start, now_s, kind)
    return lost


def kill(core, server, now_s):
    """The server dies with all it has, which a look finds; until a second later."""
    lost = lose(core, server, now_s)
    look_at(core, server, REFUSED, now_s + 0.5)
    return lost


def bench_all_but(core, position, now_s):
    for server in core.fleet.servers:
        if server.position != position and server.in_use:
            core.fleet.bench(server, now_s)


def works(core):
    """All prompts that have not ended, by index."""
    waiting = core._waiting
    found = [*waiting.ready, *waiting.marked, *(work for _, _, work in waiting._sleeping)]
    found += [flight.work for flight in core._flights._flights.values()]
    return {work.prompt.index: work for work in found if not work.ended}


def given_up(core, now_s):
    return [each for group in commit(core, now_s) for each in group.given_up]


def go_on(core, now_s, until_s, checkup):
    """Time passes and all looks find this: what was sent, and who was given up when."""
    sent, ends = [], []
    while True:
        for action in core.due(now_s):
            match action:
                case Probe(server=server):
                    probed(core, server, checkup, now_s)
                case Start():
                    sent.append(action)
                case Commit(group=group):
                    ends += [(now_s, each) for each in group.given_up]
                    core.committed(group.number, now_s)
        core.check()
        next_s = core.next_timer_s()
        if next_s is None or next_s > until_s:
            return sent, ends
        assert next_s > now_s or core.unsaved, "a timer in the past"
        now_s = next_s


# ---- marks ----


@pytest.mark.parametrize("kind", FaultKind)
def test_a_broken_connection_and_a_stall_mark_a_prompt_and_no_other_fault_does(kind):
    core = make()
    (start,) = starts(core, 0.0)
    fail(core, start, 1.0, kind)

    assert works(core)[0].marked == (kind in (FaultKind.LOST, FaultKind.STALLED))


def test_a_look_that_finds_the_server_well_clears_what_was_lost_there():
    core = make(3, (1, 3))
    starts(core, 0.0)
    (start,) = lose(core, 0, 1.0)
    look_at(core, 0, Checkup(), 1.5)

    assert not works(core)[start.prompt.index].marked


def test_an_answer_to_what_was_sent_after_the_loss_clears_what_was_lost_there():
    """It lives, whatever its health says."""
    core = make(3, (1, 1))
    starts(core, 0.0)
    (lost,) = lose(core, 0, 1.0)
    core.due(1.0)
    (after,) = started(core, 0)
    answer(core, after, 2.0)

    assert after.prompt != lost.prompt
    assert not works(core)[lost.prompt.index].marked


def test_an_answer_to_what_was_sent_before_the_loss_clears_nothing():
    core = make(4, (2, 2))
    starts(core, 0.0)
    first, second = started(core, 0)
    fail(core, first, 1.0, FaultKind.LOST)
    answer(core, second, 1.1)

    assert works(core)[first.prompt.index].marked


def test_an_answer_to_what_was_sent_between_two_losses_clears_only_the_first():
    core = make(9, (3, 1), silent_s=1e6)
    starts(core, 0.0)
    fail(core, started(core, 0)[0], 1.0, FaultKind.LOST)
    look_at(core, 0, Checkup(), 1.5)
    core.due(2.0)
    between = started(core, 0)[-1]
    assert between.started_s >= 1.0
    (lost, *_) = started(core, 0)
    fail(core, lost, 10.0, FaultKind.LOST)
    answer(core, between, 11.0)

    assert works(core)[lost.prompt.index].marked


def test_a_look_that_fails_otherwise_decides_nothing():
    core = make(2, (1, 1))
    starts(core, 0.0)
    (start,) = lose(core, 0, 1.0)
    look_at(core, 0, UNWELL, 1.5)

    work = works(core)[start.prompt.index]
    assert (work.doubts, work.killed) == ((0,), ())


def test_a_look_that_finds_nobody_listening_makes_it_a_death():
    core = make(2, (1, 1))
    starts(core, 0.0)
    (start,) = kill(core, 0, 1.0)

    work = works(core)[start.prompt.index]
    assert (work.doubts, work.killed) == ((), (0,))


def test_a_death_counts_once_however_often_the_prompt_was_lost_there_before_it_was_found():
    core = make(1, (1,))
    starts(core, 0.0)
    lose(core, 0, 1.0)
    core.due(1.1)
    lose(core, 0, 1.2)
    look_at(core, 0, REFUSED, 1.6)

    assert works(core)[0].killed == (0,)
    assert given_up(core, 1.7) == []


def test_a_stall_that_ends_with_a_restart_is_a_death():
    core = make(2, (1, 1))
    starts(core, 0.0)
    core.due(10.0)
    inquired(core, 60.0, 0, trouble="reset")
    (start,) = started(core, 0)
    cancel(core, start, 60.0)
    look_at(core, 0, UNWELL, 60.5)
    assert works(core)[start.prompt.index].doubts == (0,)
    look_at(core, 0, REFUSED, 61.5)

    assert works(core)[start.prompt.index].killed == (0,)


def test_the_only_server_of_a_run_dies_of_its_prompts():
    core = make(1, (1,))
    starts(core, 0.0)
    kill(core, 0, 1.0)

    assert works(core)[0].killed == (0,)


def test_where_all_servers_go_together_it_is_no_prompts_doing():
    core = make(6, (3, 3))
    starts(core, 0.0)
    lose(core, 0, 1.0)
    lose(core, 1, 2.0)
    look_at(core, 0, REFUSED, 2.5)
    look_at(core, 1, REFUSED, 2.5)

    assert {work.killed for work in works(core).values()} == {()}


def test_a_server_that_dies_long_after_all_others_have_gone_dies_for_itself():
    core = make(20, (3, 3))
    bench(core, 1, 0.0)
    now_s = TOGETHER_S + 1.0
    for start in started(core, 0):
        answer(core, start, now_s)
    core.due(now_s)
    (lost, *_) = kill(core, 0, now_s + 1.0)

    assert works(core)[lost.prompt.index].killed == (0,)


def test_a_second_death_counts_though_the_first_server_is_still_away():
    """With two servers the one that it killed is away when it kills the other."""
    core = make(1, (1, 1))
    starts(core, 0.0)
    kill(core, 0, 1.0)
    core.due(2.0)
    kill(core, 1, 3.0)

    assert [each.index for each in given_up(core, 4.0)] == [0]


def test_a_server_that_was_taken_out_leaves_no_marks_whatever_becomes_of_it():
    core = make(4, (2, 2))
    starts(core, 0.0)
    first, second = started(core, 0)
    fail(core, first, 1.0, FaultKind.LOST)
    assert works(core)[first.prompt.index].marked
    core.set_limit("http://s0", 0, 1.1)
    fail(core, second, 1.2, FaultKind.LOST)

    assert not works(core)[first.prompt.index].marked
    assert not works(core)[second.prompt.index].marked


def test_a_server_that_left_does_not_count_among_those_that_went_together():
    core = make(2, (1, 1))
    core.set_limit("http://s1", 0, 0.0)
    starts(core, 0.0)
    kill(core, 0, 1.0)

    assert works(core)[0].killed == (0,)


def test_a_prompt_that_is_there_whenever_all_servers_go_is_given_up_for_now_in_the_end():
    core = make(1, (1,) * 5, silent_s=1e6)
    now_s, deaths = 0.0, 0
    while not core.unsaved:
        go_on(core, now_s, now_s + 19.0, Checkup())
        now_s += 20.0
        (start,) = started(core)
        bench_all_but(core, start.server, now_s)
        kill(core, start.server, now_s)
        deaths += 1
        now_s += 0.5
        for again in started(core):
            fail(core, again, now_s, FaultKind.UNREACHABLE)
        for server in core.fleet.servers:
            if server.probing:
                probed(core, server.position, UNWELL, now_s)
        now_s += 0.1
        core.due(now_s)
        assert now_s < 1000.0
    (group,) = core.unsaved_groups()
    (end,) = group.given_up

    assert deaths == DEATHS_SEEN_MAX
    assert not end.for_good
    assert end.message == f"servers died {deaths} times with this prompt in flight, with all others"


@pytest.mark.parametrize("servers", [1, LOSSES_MAX + 1])
@pytest.mark.parametrize("kind", [FaultKind.LOST, FaultKind.STALLED])
def test_a_prompt_that_is_lost_eight_times_is_given_up_for_now_though_all_servers_live(kind, servers):
    """A proxy may cut what takes long, for ever: no server dies of it, and nobody is left to be asked."""
    settings = {"backoff_s": 5.0, "backoff_max_s": 5.0, "prompt_attempts": 100, "silent_s": 1e6}
    core = make(1, (1,) * servers, **settings)
    ends: list[GivenUp] = []
    now_s = 0.0
    while not core.finished:
        for action in core.due(now_s):
            match action:
                case Probe(server=server):
                    probed(core, server, Checkup(), now_s)
                case Start():
                    fail(core, action, now_s, kind)
                case Commit(group=group):
                    ends += group.given_up
                    core.committed(group.number, now_s)
        core.check()
        now_s = max(now_s + 0.01, core.next_timer_s() or 0.0)
        assert now_s < 600.0
    (end,) = ends

    assert (end.error_class, end.for_good, end.tries) == ("Poison", False, LOSSES_MAX)
    assert end.message == f"its connection broke, or its server fell silent, {LOSSES_MAX} times"


# ---- where marked prompts go ----


def test_a_marked_prompt_goes_to_another_server():
    core = make(2, (4, 4))
    starts(core, 0.0)
    (lost,) = lose(core, 0, 1.0)
    again = starts(core, 1.1)

    assert [(start.prompt, start.server) for start in again] == [(lost.prompt, 1)]


def test_a_marked_prompt_goes_back_to_a_server_in_doubt_only_where_there_is_no_other():
    core = make(1, (4,))
    starts(core, 0.0)
    lose(core, 0, 1.0)

    assert [start.server for start in starts(core, 1.1)] == [0]


def test_a_marked_prompt_goes_to_the_emptiest_by_share_of_the_limit():
    core = make(11, (4, 2, 8), ready_spare=0)
    starts(core, 0.0)
    for start in [started(core, 1)[0], *started(core, 2)[:4]]:
        answer(core, start, 0.5)
    (lost, *_) = lose(core, 0, 1.0)
    again = starts(core, 1.1)

    assert next(start.server for start in again if start.prompt == lost.prompt) == 2


def test_at_most_one_marked_prompt_is_sent_to_a_server():
    core = make(9, (6, 6, 6), ready_spare=500)
    starts(core, 0.0)
    lost = kill(core, 0, 1.0)
    core.due(2.0)
    again = [start for start in started(core) if start.prompt in [each.prompt for each in lost]]

    assert len(lost) == 3
    assert sorted(start.server for start in again) == [1, 2]
    assert len(core._waiting.marked) == 1


def test_the_next_marked_prompt_is_sent_once_the_first_has_ended():
    core = make(7, (6, 1))
    starts(core, 0.0)
    lost = kill(core, 0, 1.0)
    assert len(lost) == 6
    assert started(core, 1)[0].prompt not in [start.prompt for start in lost]
    answer(core, started(core, 1)[0], 2.0)
    order = []
    for number in range(6):
        (start,) = starts(core, 3.0 + number)
        order.append(start.prompt.index)
        answer(core, start, 3.5 + number)

    assert sorted(order) == sorted(start.prompt.index for start in lost)


def test_a_second_marked_prompt_joins_once_the_server_has_lived_with_the_first_for_long_enough():
    core = make(12, (4, 12))
    starts(core, 0.0)
    lost = [start.prompt for start in kill(core, 0, 1.0)]
    assert len(lost) == 3
    (marked,) = [start for start in started(core, 1) if start.prompt in lost]
    others = [start for start in started(core, 1) if start.prompt not in lost]
    answer(core, others[0], marked.started_s + PROBATION_S - 0.1)
    assert starts(core, marked.started_s + PROBATION_S) == []
    answer(core, others[1], marked.started_s + PROBATION_S)

    assert len(starts(core, marked.started_s + PROBATION_S)) == 1
    assert starts(core, marked.started_s + PROBATION_S + 0.1) == []


def test_prompts_that_nobody_suspects_go_on_beside_a_marked_one():
    core = make(30, (4, 4))
    starts(core, 0.0)
    kill(core, 0, 1.0)
    for start in started(core, 1):
        answer(core, start, 2.0)
    found = starts(core, 2.0)

    assert len(found) == 4
    assert sum(works(core)[start.prompt.index].marked for start in found) == 1


def test_marked_prompts_that_wait_are_booked_to_the_backoff():
    core = make(8, (3, 6))
    starts(core, 0.0)
    kill(core, 0, 1.0)
    for start in started(core, 1):
        answer(core, start, 2.0)
    core.due(2.0)
    assert len(core._waiting.marked) == 1
    before = core.books.owned_by_all_s()["backoff"]
    core.books.tick(12.0)

    assert core.books.owned_by_all_s()["backoff"] - before == pytest.approx(10.0)


def test_a_prompt_in_doubt_at_two_servers_waits_until_one_of_them_is_looked_at():
    core = make(1, (1, 1, 1))
    starts(core, 0.0)
    lose(core, 0, 1.0)
    core.due(1.1)
    (second,) = started(core)
    lose(core, second.server, 1.2)
    assert starts(core, 1.3) == []
    look_at(core, 0, UNWELL, 1.5)
    assert starts(core, 1.6) == []
    look_at(core, second.server, Checkup(), 1.8)

    assert len(starts(core, 1.8)) == 1


def test_a_marked_prompt_that_breaks_answers_too_is_no_trial_while_others_wait():
    """It would be the server's only trial each time, and keep it benched for ever."""
    core = make(9, (3, 1), silent_s=1e6)
    starts(core, 0.0)
    first, second, third = started(core, 0)
    core.failed(first, ServerFault("broke off", kind=FaultKind.LOST, status=200, wire_s=0.0), 1.0)
    for start in (second, third):
        fail(core, start, 1.0, FaultKind.MISROUTED)
    assert works(core)[first.prompt.index].pending
    bench_all_but(core, 0, 1.0)
    core.due(1.4)
    probes(core, 1.5)
    probed(core, 0, UNWELL, 1.6)
    assert works(core)[first.prompt.index].marked
    now_s = core.next_timer_s()
    while not core.fleet.servers[0].probing:
        now_s = core.next_timer_s()
        core.due(now_s)
    core.fleet.probed(0, Checkup(), now_s)
    (trial,) = [start for start in starts(core, now_s) if start.server == 0]

    assert works(core)[first.prompt.index].marked
    assert trial.prompt != first.prompt


def test_nothing_is_read_while_very_many_marked_prompts_wait():
    """Each death marks what was in flight, and they wait for their turn one by one: memory has its bound."""
    core = make_core(0, (10,), exhausted=False, ready_spare=0, backoff_s=0.01, backoff_max_s=0.01)
    core.due(0.0)
    first, now_s, marked = 0, 0.0, []
    for _ in range(12):
        for _ in range(3):
            if core._reading:
                core.offered(Chunk(prompts=prompts(*range(first, first + 10))), now_s)
                first += 10
            commit(core, now_s)
        kill(core, 0, now_s)
        marked.append(sum(work.marked for work in works(core).values()))
        look_at(core, 0, Checkup(asked=True), now_s + 2.0)
        now_s += 3.0
        core.due(now_s)
        answer(core, started(core)[0], now_s)

    assert 40 <= max(marked) <= 60
    assert first <= 100


# ---- the end ----


def test_a_prompt_with_two_deaths_is_given_up_for_now_with_both_addresses():
    """Others were there too, or before it: whose doing it was is known only of one that was alone."""
    core = make(1, (1, 1, 1))
    starts(core, 0.0)
    kill(core, 0, 1.0)
    (second,) = started(core)
    kill(core, second.server, 2.0)
    (end,) = given_up(core, 3.0)

    assert (end.error_class, end.for_good, end.tries) == ("Poison", False, 2)
    assert end.message.startswith("servers died 2 times with this prompt in flight: ")
    assert "http://s0" in end.message
    assert f"http://s{second.server}" in end.message
    assert core.last_error == end.message


def test_a_prompt_that_kills_all_it_meets_takes_two_of_five_servers_down_and_all_others_are_answered():
    core = make(40, (2,) * 5, ready_spare=500)
    now_s, dead, ends = 0.0, set(), []
    while not core.finished:
        for action in core.due(now_s):
            match action:
                case Probe(server=server):
                    probed(core, server, REFUSED if server in dead else Checkup(), now_s)
                case Commit(group=group):
                    ends += [each.index for each in group.given_up]
                    core.committed(group.number, now_s)
        for start in started(core):
            if start.server in dead:
                fail(core, start, now_s, FaultKind.UNREACHABLE)
            elif start.prompt.index == 0:
                dead.add(start.server)
                lose(core, start.server, now_s)
                break
        for start in started(core):
            if start.server not in dead:
                answer(core, start, now_s)
        now_s += 0.25
        assert now_s < 60.0

    assert ends == [0]
    assert len(dead) == 2
    assert core.done == 39


def test_what_was_in_flight_beside_the_marked_one_at_its_second_death_has_one_death():
    core = make(8, (2, 8, 1))
    starts(core, 0.0)
    kill(core, 0, 1.0)
    (marked,) = [start for start in started(core, 1) if works(core)[start.prompt.index].marked]
    beside = [start.prompt.index for start in kill(core, 1, 2.0) if start is not marked]
    found = works(core)

    assert len(beside) >= 4
    assert {found[index].killed for index in beside if index != marked.prompt.index} == {(1,)}
    assert [each.index for each in given_up(core, 3.0)] == [marked.prompt.index]


def test_where_two_marked_ones_were_at_a_death_neither_is_given_up_for_good():
    """It cannot be told which of them it was: a later run may ask them again."""
    core = make(12, (4, 12, 1), silent_s=1e6)
    starts(core, 0.0)
    lost = [start.prompt for start in kill(core, 0, 1.0)]
    (marked,) = [start for start in started(core, 1) if start.prompt in lost]
    others = [start for start in started(core, 1) if start.prompt not in lost]
    alive_s = marked.started_s + PROBATION_S
    answer(core, others[0], alive_s)
    commit(core, alive_s)
    assert len([start for start in started(core, 1) if start.prompt in lost]) == 2
    kill(core, 1, alive_s + 1.0)
    ends = given_up(core, alive_s + 2.0)

    assert len(ends) == 2
    assert [end.for_good for end in ends] == [False, False]
    both = "servers died 2 times with this prompt in flight: http://s0, http://s1"
    assert [end.message for end in ends] == [both, both]


def test_an_answer_ends_all_suspicion():
    core = make(1, (1, 1))
    starts(core, 0.0)
    kill(core, 0, 1.0)
    answer(core, started(core)[0], 2.0)

    assert [len(group.finished) for group in commit(core, 2.0)] == [1]
    assert core.finished


def test_a_prompt_in_doubt_is_given_up_at_the_end_when_nobody_has_said_what_became_of_its_servers():
    core = make(1, (1, 1))
    starts(core, 0.0)
    lose(core, 0, 1.0)
    core.due(1.1)
    lose(core, 1, 1.2)
    sent, ends = go_on(core, 1.2, 200.0, UNWELL)
    ((now_s, end),) = ends

    assert sent == []
    assert now_s == pytest.approx(1.2 + LAST_WAIT_S, abs=0.1)
    assert "died or went silent 2 times with this prompt in flight" in end.message
    assert not end.for_good


def test_a_prompt_in_doubt_is_not_given_up_while_others_are_in_flight():
    """One of those may yet show that a server in doubt lives."""
    core = make(3, (1, 1, 1), silent_s=1e6)
    starts(core, 0.0)
    answer(core, started(core, 1)[0], 0.5)
    commit(core, 0.5)
    lose(core, 0, 1.0)
    core.due(1.1)
    lose(core, 1, 1.2)
    sent, ends = go_on(core, 1.3, 400.0, UNWELL)
    assert (sent, ends) == ([], [])
    (other,) = started(core)
    answer(core, other, 401.0)
    sent, ends = go_on(core, 401.0, 600.0, UNWELL)

    assert [now_s for now_s, _ in ends] == [401.0 + LAST_WAIT_S]


def test_a_marked_prompt_waits_for_a_server_as_long_as_it_takes_and_no_timer_lies_in_the_past():
    core = make(1, (1,))
    starts(core, 0.0)
    kill(core, 0, 1.0)
    for start in started(core):
        fail(core, start, 1.6, FaultKind.UNREACHABLE)
    now_s = 1.6
    while now_s < 1000.0:
        for probe in probes(core, now_s):
            probed(core, probe.server, REFUSED, now_s)
        next_s = core.next_timer_s()
        assert next_s > now_s
        now_s = next_s

    look_at(core, 0, Checkup(), now_s)
    assert [start.tries for start in starts(core, now_s)] == [3]


# ---- alone ----


def twice_deadly(core):
    """Prompt 0 has killed servers 0 and 1 by 3 s."""
    (first,) = [start for start in starts(core, 0.0) if start.prompt.index == 0]
    kill(core, first.server, 1.0)
    (second,) = [start for start in started(core) if start.prompt.index == 0]
    kill(core, second.server, 2.0)
    core.due(3.0)
    return first.server, second.server


def test_by_option_a_prompt_with_two_deaths_is_tried_once_more_alone_on_a_server_that_it_has_killed():
    core = make(1, (2, 2, 2), alone=True)
    _, second = twice_deadly(core)
    assert started(core) == []
    assert core.unsaved == 0
    look_at(core, second, Checkup(), 3.5)
    (again,) = starts(core, 3.5)

    assert again.server == second
    assert core.fleet.servers[second].alone
    answer(core, again, 4.0)
    assert [len(group.finished) for group in commit(core, 4.0)] == [1]
    assert not core.fleet.servers[second].alone


def test_one_that_is_tried_alone_has_the_whole_server_to_itself():
    core = make(1, (2, 2), alone=True)
    first, _ = twice_deadly(core)
    look_at(core, first, Checkup(), 4.0)
    (alone,) = starts(core, 4.0)
    core.due(30.0)

    assert alone.server == first
    assert not core.fleet.servers[first].on_trial
    assert core.fleet.servers[first].room(30.0) == 0
    answer(core, alone, 31.0)
    assert core.fleet.servers[first].room(31.0) == 2


@pytest.mark.parametrize(("how", "free_s"), [("answered", 10.0), ("its own time is over", 14.0)])
def test_one_that_is_to_be_tried_alone_waits_until_its_server_works_on_nothing_else(how, free_s):
    core = make(2, (2, 1, 2), alone=True, silent_s=1e6)
    found = {start.prompt.index: start for start in starts(core, 0.0)}
    kill(core, found[0].server, 1.0)
    (second,) = [start for start in started(core) if start is not found[1]]
    kill(core, second.server, 2.0)
    fail(core, found[1], 2.9, FaultKind.MISROUTED)
    look_at(core, second.server, Checkup(), 3.0)
    (other,) = starts(core, 3.0)
    assert other.prompt == found[1].prompt
    core.due(8.0)
    assert core.fleet.servers[second.server].room(8.0) == 1
    assert starts(core, 9.0) == []
    if how == "answered":
        answer(core, other, 10.0)
    else:
        core.failed(other, PromptFault(how, wire_s=3.0), 10.0)
    if free_s > 10.0:
        assert starts(core, free_s - 0.1) == []

    assert [start.server for start in starts(core, free_s)] == [second.server]


def test_one_that_is_tried_alone_waits_until_nothing_else_waits():
    core = make(9, (1, 1, 1), alone=True)
    first, _ = twice_deadly(core)
    look_at(core, first, Checkup(), 4.0)
    found = starts(core, 4.0)

    assert core._waiting.ready
    assert 0 not in [start.prompt.index for start in found]


def test_a_third_death_alone_ends_it_for_good():
    core = make(1, (2, 2, 2), alone=True)
    _, second = twice_deadly(core)
    look_at(core, second, Checkup(), 3.5)
    core.due(3.5)
    lose(core, second, 4.0)
    sent, ends = go_on(core, 4.0, 20.0, REFUSED)
    ((_, end),) = ends

    assert sent == []
    assert (end.error_class, end.for_good, end.tries) == ("Poison", True, 3)


def test_without_a_look_at_the_third_death_it_goes_to_no_other_server_that_it_has_killed():
    core = make(1, (2, 2, 2), alone=True)
    first, second = twice_deadly(core)
    look_at(core, first, Checkup(), 4.0)
    look_at(core, second, Checkup(), 4.0)
    (alone,) = starts(core, 4.0)
    lose(core, alone.server, 5.0)

    assert starts(core, 5.2) == []


def test_one_that_is_to_be_tried_alone_is_given_up_when_no_server_that_it_killed_comes_back():
    core = make(1, (1, 1, 1), alone=True)
    twice_deadly(core)
    sent, ends = go_on(core, 3.0, 200.0, REFUSED)

    assert sent == []
    assert [now_s for now_s, _ in ends] == [pytest.approx(2.0 + LAST_WAIT_S, abs=1.0)]
    assert [end.for_good for _, end in ends] == [False]


def test_one_that_was_tried_alone_is_given_up_for_now_where_nobody_knows_what_became_of_its_server():
    core = make(1, (2, 2, 2), alone=True)
    _, second = twice_deadly(core)
    look_at(core, second, Checkup(), 3.5)
    assert [start.server for start in starts(core, 3.5)] == [second]
    lose(core, second, 4.0)
    sent, ends = go_on(core, 4.0, 300.0, UNWELL)
    ((now_s, end),) = ends

    assert sent == []
    assert now_s == pytest.approx(4.0 + LAST_WAIT_S, abs=0.1)
    assert "died or went silent 3 times with this prompt in flight" in end.message
    assert not end.for_good


def test_one_whose_server_lives_after_it_was_tried_alone_is_tried_alone_again():
    core = make(1, (2, 2, 2), alone=True)
    _, second = twice_deadly(core)
    look_at(core, second, Checkup(), 3.5)
    assert len(starts(core, 3.5)) == 1
    lose(core, second, 4.0)
    assert starts(core, 4.9) == []
    look_at(core, second, Checkup(), 6.0)
    (again,) = starts(core, 6.0)

    assert again.server == second
    assert core.fleet.servers[second].alone


def test_the_prompt_itself_may_still_be_refused_or_charged_like_any_other():
    core = make(1, (1, 1))
    starts(core, 0.0)
    kill(core, 0, 1.0)
    refuse(core, started(core)[0], 2.0)
    (end,) = given_up(core, 2.0)

    assert end.error_class == "PromptFault"


def test_deaths_are_not_counted_among_refused_prompts():
    core = make(1, (1, 1, 1))
    starts(core, 0.0)
    kill(core, 0, 1.0)
    (second,) = started(core)
    kill(core, second.server, 2.0)
    core.due(3.0)

    assert core._outcomes._refusals._refused.total() == 0


def test_marks_and_suspects_are_counted_right_where_a_prompt_has_both():
    core = make(2, (1, 1, 1))
    starts(core, 0.0)
    (first,) = lose(core, 0, 1.0)
    core.due(1.1)
    (again,) = [start for start in started(core) if start.prompt == first.prompt]
    fail(core, again, 1.2, FaultKind.BROKEN)
    core.due(1.3)
    core.check()
    look_at(core, 0, Checkup(), 1.5)
    core.due(1.6)
    core.check()

    assert [work.killed for work in works(core).values()] == [(), ()]


def test_the_other_slots_of_a_server_that_has_one_alone_are_nobodys_delay():
    """Another prompt comes back while one is tried alone on the only server in use: it waits for that."""
    core = make(2, (4, 1, 4), alone=True, silent_s=1e6)
    found = {start.prompt.index: start for start in starts(core, 0.0)}
    other = found[1]
    kill(core, found[0].server, 1.0)
    (second,) = [start for start in started(core) if start is not other]
    kill(core, second.server, 2.0)
    assert started(core) == [other]
    assert other.server not in (found[0].server, second.server)
    look_at(core, second.server, Checkup(), 3.0)
    (alone,) = starts(core, 3.0)
    fail(core, other, 4.0, FaultKind.MISROUTED)
    for now_s in (4.5, 9.0, 20.0):
        core.due(now_s)
        core.check()

    assert core.fleet.servers[alone.server].alone
    assert len(core._waiting.ready) == 1
    assert core.books.owned_by_all_s()["dispatch"] == 0.0


def test_a_prompt_that_may_be_sent_nowhere_does_not_keep_another_from_being_charged():
    """What is left breaks every answer, or has two deaths and waits for the end: a token is asked for."""
    core = make(2, (1, 1, 1), alone=True, prompt_attempts=1)
    deadly, broken = 0, 1
    dead_until_s: dict[int, float] = {}
    ends: list[object] = []
    now_s, asked = 0.0, 0
    while len(ends) < 1:
        for action in core.due(now_s):
            match action:
                case Probe(server=server, ask=ask):
                    asked += ask
                    is_dead = now_s < dead_until_s.get(server, 0.0)
                    probed(core, server, REFUSED if is_dead else Checkup(asked=ask), now_s)
                case Commit(group=group):
                    ends += [each.index for each in group.given_up]
                    core.committed(group.number, now_s)
        for start in started(core):
            if now_s < dead_until_s.get(start.server, 0.0):
                fail(core, start, now_s, FaultKind.UNREACHABLE)
            elif start.prompt.index == deadly:
                dead_until_s[start.server] = now_s + 5.0
                lose(core, start.server, now_s)
            else:
                fail(core, start, now_s, FaultKind.BROKEN)
        now_s += 0.25
        assert now_s < 300.0

    assert ends in ([broken], [deadly])
