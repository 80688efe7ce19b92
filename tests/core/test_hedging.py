"""The tail: what is late, or sits on a server in doubt, is sent to a second server as well."""

import pytest

from genpipe.core.errors import FaultKind, PromptFault
from genpipe.core.hedging import ANSWERS_MIN, HEDGES_MAX, LOOK_EVERY_S
from genpipe.core.server import PROBATION_S, ServerState
from genpipe.core.values import Cancel, Chunk, Commit, Space
from tests.core.build import (
    REFUSED,
    answer,
    cancel,
    cancels,
    commit,
    fail,
    fault,
    inquired,
    make_core,
    probed,
    probes,
    refuse,
    started,
    starts,
    well,
)


def make(count=1, slots=(2, 2), *, p95_s=10.0, answers=ANSWERS_MIN, **settings):
    """A core that has seen answers of one length, with all its prompts in flight."""
    core = make_core(
        count, slots, **{"hedge": True, "backoff_s": 0.01, "backoff_max_s": 0.01, "silent_s": 1e6, **settings}
    )
    for _ in range(answers):
        core.pace.answered(p95_s, 0.0)
    starts(core, 0.0)
    return core


def pair(core, now_s=20.0):
    """A prompt that is late at 20 s, and its second attempt."""
    (first,) = started(core)
    (second,) = starts(core, now_s)
    assert second.prompt == first.prompt
    return first, second


# ---- what is hedged, and when ----


def test_what_is_twice_as_old_as_the_95th_percentile_is_sent_to_another_server_too():
    core = make()
    (first,) = started(core)
    assert starts(core, 19.5) == []
    (second,) = starts(core, 20.1)

    assert (second.prompt, second.server, second.tries) == (first.prompt, 1, 2)
    assert first.server == 0
    assert core.hedging.count == 1


def test_the_tail_is_looked_over_twice_a_second_and_not_more():
    core = make()

    assert core.next_timer_s() == LOOK_EVERY_S == 0.5
    assert starts(core, 19.8) == []
    assert starts(core, 20.2) == []
    assert len(starts(core, 20.3)) == 1


def test_nothing_is_late_before_there_are_enough_answers():
    core = make(answers=ANSWERS_MIN - 1)

    assert starts(core, 500.0) == []


def test_what_sits_on_a_server_in_doubt_is_sent_elsewhere_however_young_it_is():
    core = make(3, (3, 3), answers=0)
    faulty, *_ = started(core, 0)
    fail(core, faulty, 0.1, FaultKind.UNREACHABLE)
    found = starts(core, 0.6)

    left = [start.prompt for start in started(core, 0)]
    assert left
    assert {start.server for start in found} == {1}
    assert set(left) <= {start.prompt for start in found}


def test_all_that_sits_on_a_server_which_had_lived_with_it_and_was_benched_is_sent_elsewhere_at_once():
    core = make(8, (5, 9), answers=0)
    here = started(core, 0)
    refuse(core, here[0], PROBATION_S)
    fail(core, here[1], PROBATION_S + 0.1, FaultKind.MISROUTED)
    found = starts(core, PROBATION_S + 0.6)

    assert len(here) == 3
    assert here[2].prompt in [start.prompt for start in found]
    assert {start.server for start in found} == {1}


def test_of_what_sits_on_a_server_that_shows_no_life_one_at_a_time_goes_to_each_other_server():
    """One of them may be what ends it: the others are not to be where it ends the next server too."""
    core = make(30, (8, 20, 20), answers=0)
    here = started(core, 0)
    assert len(here) >= 4
    fail(core, here[0], 0.1, FaultKind.MISROUTED)
    found = starts(core, 0.6)
    second = [start for start in found if start.prompt in [each.prompt for each in here[1:]]]
    assert sorted(start.server for start in second) == [1, 2]
    assert starts(core, 5.0) == []
    answer(core, second[0], 6.0)

    assert [start.server for start in starts(core, 6.0)] == [second[0].server]


def test_of_what_is_late_at_a_server_that_has_lived_with_it_all_goes_elsewhere_at_once():
    core = make(6, (6, 12), p95_s=10.0)
    here = started(core, 0)
    core.fleet.servers[0].heard_s = PROBATION_S
    found = [start for start in starts(core, 20.5) if start.server == 1]

    assert {start.prompt for start in found} == {start.prompt for start in here}


def test_a_server_with_a_marked_prompt_takes_what_is_late_at_a_server_that_has_lived_with_it():
    """That one is as harmless as any, so that it has not to wait, and keeps no marked one waiting."""
    core = make(12, (6, 12, 1))
    here = {start.prompt for start in started(core, 0)}
    (lost,) = started(core, 2)
    for start in started(core, 1)[:4]:
        answer(core, start, 0.5)
    core.fleet.servers[0].heard_s = PROBATION_S
    fail(core, lost, 19.0, FaultKind.LOST)
    core.due(19.1)
    (marked,) = [start for start in started(core) if start.prompt == lost.prompt]
    assert marked.server == 1
    found = starts(core, 20.5)

    assert here <= {start.prompt for start in found if start.server == 1}
    assert list(core.fleet.servers[1].marked) == [marked.attempt]


def test_slots_go_to_prompts_that_wait_before_they_go_to_second_attempts():
    core = make(5, (2, 2))
    for start in started(core)[1:3]:
        answer(core, start, 1.0)

    assert [(start.prompt.index, start.tries) for start in starts(core, 1.0)] == [(4, 1)]
    assert [start.tries for start in starts(core, 20.5)] == [2]


def test_nothing_is_hedged_before_the_input_has_ended():
    core = make_core(1, (2, 2), exhausted=False, hedge=True, ready_spare=0)
    for _ in range(ANSWERS_MIN):
        core.pace.answered(1.0, 0.0)
    starts(core, 0.0)
    assert starts(core, 100.0) == []
    core.offered(Chunk(prompts=(), exhausted=True), 100.0)

    assert [start.tries for start in starts(core, 100.0)] == [2]


def test_nothing_is_hedged_where_it_is_off():
    core = make(hedge=False)

    assert starts(core, 500.0) == []


def test_nothing_is_hedged_while_nothing_may_be_sent_and_no_timer_runs_for_it():
    core = make()
    core.due(0.6)
    core.measured(Space(free_bytes=0, total_bytes=1 << 40), 0.7)

    assert starts(core, 100.0) == []
    assert core.next_timer_s() > 100.0


def test_once_the_tail_is_over_no_timer_runs_for_it():
    core = make()
    answer(core, started(core)[0], 1.0)
    commit(core, 1.0)

    assert core.next_timer_s() is None


def test_after_a_stop_nothing_is_hedged():
    core = make()
    core.stop(1.0, grace_s=100.0)

    assert starts(core, 50.0) == []


# ---- where ----


def test_the_second_attempt_is_not_made_at_the_server_of_the_first():
    core = make(1, (4,))

    assert starts(core, 100.0) == []


def test_no_second_attempt_is_made_at_a_server_in_doubt():
    core = make(2, (2, 2))
    first, other = started(core)
    fail(core, other, 0.5, FaultKind.UNREACHABLE)
    (again,) = starts(core, 0.6)
    assert core.fleet.servers[other.server].state is ServerState.SUSPECT
    assert again.server == first.server

    assert starts(core, 19.0) == []
    assert starts(core, 100.0) == []


def test_no_second_attempt_is_made_where_there_is_no_slot():
    core = make(2, (1, 1))

    assert starts(core, 100.0) == []
    answer(core, started(core, 1)[0], 101.0)
    assert [start.server for start in starts(core, 101.0)] == [1]


def test_the_slot_of_the_attempt_that_lost_stays_shut_until_its_server_has_noticed():
    core = make(1, (1, 1))
    first, second = pair(core)
    answer(core, second, 21.0)
    cancel(core, first, 21.0)

    assert core.fleet.room(24.9) == 1
    core.due(25.0)
    assert core.fleet.room(25.0) == 2


# ---- how it ends ----


def test_the_first_answer_wins_and_the_other_attempt_is_cancelled():
    core = make()
    first, second = pair(core)
    answer(core, second, 21.0)
    called_off, commit_it = sorted(core.due(21.0), key=lambda action: type(action).__name__)
    assert not core.finished
    cancel(core, first, 21.1)
    core.committed(commit_it.group.number, 21.2)

    assert called_off == Cancel(attempt=first.attempt)
    (finished,) = commit_it.group.finished
    assert (finished.server, finished.tries, finished.latency_s) == ("http://s1", 2, 1.0)
    assert (core.done, core.late, core.returned) == (1, 0, 0)
    assert core.complete


def test_only_the_other_attempt_of_that_prompt_is_cancelled():
    core = make(2, (3, 3))
    assert len(starts(core, 20.5)) == 2
    by_prompt = {index: [each for each in started(core) if each.prompt.index == index] for index in (0, 1)}
    answer(core, by_prompt[0][1], 21.0)

    assert [each.attempt for each in cancels(core, 21.0)] == [by_prompt[0][0].attempt]


def test_the_first_attempt_may_be_the_one_that_wins():
    core = make()
    first, second = pair(core)
    answer(core, first, 21.0)

    assert [each.attempt for each in cancels(core, 21.0)] == [second.attempt]


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_late_answer_is_dropped_and_counted(cancelled):
    """Both answers come in one turn of the loop, or the second one before its cancel acts."""
    core = make()
    first, second = pair(core)
    answer(core, first, 21.0)
    groups = []
    if cancelled:
        groups += commit(core, 21.0)
    answer(core, second, 21.0)
    groups += commit(core, 21.0)

    assert [each.tries for group in groups for each in group.finished] == [1]
    assert (core.done, core.late) == (1, 1)
    assert core.complete


def test_a_late_answer_counts_for_its_server_and_not_among_the_run_s_latencies():
    core = make()
    first, second = pair(core)
    answer(core, first, 21.0)
    latencies = core.pace.latencies_s.count
    answer(core, second, 21.0)

    assert core.pace.latencies_s.count == latencies == ANSWERS_MIN + 1
    assert [server.answers for server in core.fleet.servers] == [1, 1]
    assert [server.output_tokens for server in core.fleet.servers] == [10, 0]


@pytest.mark.parametrize(
    "error", [PromptFault("too long", status=400, wire_s=0.0), fault(FaultKind.BROKEN, wire_s=0.0)]
)
def test_a_late_refusal_and_a_late_fault_of_a_prompt_that_was_answered_change_nothing(error):
    core = make()
    first, second = pair(core)
    core.landed(first, 0.0, 21.0, 21.0)
    answer(core, second, 21.0)
    core.failed(first, error, 21.0)
    core.check()

    assert [len(group.finished) for group in commit(core, 21.0)] == [1]
    assert (core.done, core.gave_up, core.late) == (1, 0, 0)
    assert core.complete


def test_a_prompt_with_one_attempt_left_is_not_sent_again_when_the_other_fails():
    core = make()
    first, second = pair(core)
    fail(core, first, 21.0)

    assert core.sleeping == 0
    assert started(core) == [second]
    answer(core, second, 22.0)
    assert [len(group.finished) for group in commit(core, 22.0)] == [1]


def test_a_prompt_whose_attempts_have_both_failed_waits_and_is_sent_again():
    core = make(backoff_s=3.0, backoff_max_s=3.0)
    first, second = pair(core)
    fail(core, first, 21.0, FaultKind.UNREACHABLE)
    fail(core, second, 22.0, FaultKind.UNREACHABLE)

    assert core.sleeping == 1
    assert starts(core, 24.9) == []
    assert [start.tries for start in starts(core, 25.0)] == [3]


def test_one_attempt_that_is_refused_ends_the_prompt_and_the_other_attempt():
    core = make()
    first, second = pair(core)
    refuse(core, second, 21.0)
    called_off, commit_it = sorted(core.due(21.0), key=lambda action: type(action).__name__)
    cancel(core, first, 21.1)

    assert called_off == Cancel(attempt=first.attempt)
    assert [(each.index, each.for_good) for each in commit_it.group.given_up] == [(0, True)]
    assert starts(core, 30.0) == []


def test_an_attempt_that_was_called_off_gets_no_second_beside_it():
    """Its prompt is sent again in a moment anyway."""
    core = make(stall_s=15.0)
    assert len(cancels(core, 15.0)) == 1

    assert starts(core, 25.0) == []


def test_a_prompt_has_two_attempts_at_a_time_and_no_third():
    core = make(1, (2, 2, 2))
    pair(core)

    assert starts(core, 500.0) == []


def test_a_prompt_has_a_second_attempt_so_many_times_and_not_more():
    """The first hangs; each second attempt fails at a server that is as good as ever by its answers."""
    core = make(1, (9, 9))
    now_s, hedges = 20.0, 0
    for _ in range(HEDGES_MAX + 2):
        now_s += 1.0
        for start in starts(core, now_s):
            hedges += 1
            core.failed(start, fault(FaultKind.BUSY, wire_s=now_s, retry_after_s=0.0), now_s)
            core.check()

    assert hedges == HEDGES_MAX == core.hedging.count


def test_a_stop_with_two_attempts_leaves_the_prompt_to_a_later_run_once():
    core = make()
    first, second = pair(core)
    core.stop(21.0, grace_s=0.0)
    assert {each.attempt for each in cancels(core, 21.0)} == {first.attempt, second.attempt}
    cancel(core, first, 21.0)
    cancel(core, second, 21.0)

    assert core.returned == 1
    assert core.finished


def test_an_attempt_that_is_called_off_beside_another_does_not_send_its_prompt_again():
    """Memory runs full: both attempts are called off for no fault, and the prompt waits once."""
    core = make()
    first, second = pair(core)
    cancel(core, first, 21.0)
    assert len(core._waiting) == 0
    cancel(core, second, 21.0)

    assert len(core._waiting) == 1


# ---- with deaths ----


def test_a_prompt_that_a_server_may_have_died_of_is_not_hedged():
    core = make(1, (2, 2, 2))
    (first,) = started(core)
    fail(core, first, 1.0, FaultKind.LOST)
    core.due(1.1)
    probes(core, 1.5)
    probed(core, 0, REFUSED, 1.6)
    (second,) = started(core)

    assert starts(core, 500.0) == []
    assert started(core) == [second]


def test_a_second_attempt_is_marked_where_the_first_is_lost():
    """So that no other marked prompt joins it at its server."""
    core = make()
    core.fleet.servers[0].heard_s = PROBATION_S
    first, second = pair(core)
    assert core.fleet.servers[second.server].marked == {}
    fail(core, first, 21.0, FaultKind.LOST)

    assert core.fleet.servers[second.server].marked == {second.attempt: second.started_s}
    answer(core, second, 22.0)
    assert core.fleet.servers[second.server].marked == {}


def test_both_servers_of_a_hedged_prompt_dying_makes_two_deaths():
    core = make(1, (1, 1, 1))
    first, second = pair(core)
    for start in (first, second):
        fail(core, start, 21.0, FaultKind.LOST)
    assert {probe.server for probe in probes(core, 21.5)} == {first.server, second.server}
    for start in (first, second):
        probed(core, start.server, REFUSED, 21.6)
    (group,) = commit(core, 22.0)

    assert [each.error_class for each in group.given_up] == ["Poison"]


def test_the_second_attempt_goes_on_where_the_first_one_s_server_stalls():
    core = make(1, (1, 1), silent_s=60.0)
    first, second = pair(core)
    core.due(60.5)
    assert inquired(core, 60.6, first.server, trouble="reset") == [first.attempt]
    cancel(core, first, 60.7)
    assert core.sleeping == 0
    answer(core, second, 61.0)

    assert [len(group.finished) for group in commit(core, 61.0)] == [1]


def test_a_server_that_is_back_from_the_bench_gets_second_attempts_once_it_has_answered():
    core = make(5, (2, 2))
    fail(core, started(core, 1)[0], 0.1, FaultKind.MISROUTED)
    for start in started(core, 1):
        fail(core, start, 0.1, FaultKind.MISROUTED)
    states = [core.fleet.servers[1].state]
    core.due(0.6)
    well(core, 0.7, 1)
    (trial,) = starts(core, 0.7)
    core.due(6.0)
    states.append(core.fleet.servers[1].state)
    late = {start.prompt.index for start in started(core, 0)}
    assert late.isdisjoint(start.prompt.index for start in starts(core, 50.0))
    for start in [start for start in started(core, 1) if start is not trial]:
        answer(core, start, 50.1)

    states.append(core.fleet.servers[1].state)
    assert states == [ServerState.BENCHED, ServerState.SUSPECT, ServerState.UP]
    assert {start.server for start in starts(core, 50.6)} == {1}


def test_the_prompts_of_a_server_that_hangs_at_the_end_are_each_answered_once_elsewhere():
    core = make(12, (3, 3, 3), p95_s=1.0)
    now_s, finished = 0.0, []
    while not core.finished:
        now_s += 0.5
        for start in started(core):
            if start.server:
                answer(core, start, now_s)
        for action in core.due(now_s):
            match action:
                case Cancel(attempt=attempt):
                    (hung,) = [start for start in started(core) if start.attempt == attempt]
                    cancel(core, hung, now_s)
                case Commit(group=group):
                    finished += [each.prompt.index for each in group.finished]
                    core.committed(group.number, now_s)
        core.check()
        assert now_s < 10.0

    assert sorted(finished) == list(range(12))
    assert core.hedging.count == 3
