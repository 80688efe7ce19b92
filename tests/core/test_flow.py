"""The scheduler's rules, one at a time, with time as a number."""

import pytest

from genpipe.core.errors import FaultKind, PromptFault, ServerFault
from genpipe.core.flow import Core, FlowSettings
from genpipe.core.settings import GuardSettings
from genpipe.core.values import Checkup, Chunk, Commit, GivenUp, Probe, Read, ServerSpec, Start
from tests.core.build import (
    Steady,
    an_answer,
    answer,
    bad,
    cancels,
    commit,
    commits,
    due,
    fail,
    fault,
    make_core,
    prompts,
    reads,
    refuse,
    started,
    starts,
)

NEVER_CHARGED = [FaultKind.UNREACHABLE, FaultKind.BUSY, FaultKind.MISROUTED]


def indices(found):
    return [start.prompt.index for start in found]


# ---- slots and limits ----


def test_backoff_frees_the_slot():
    """While prompt 0 waits out its backoff, its slot carries prompt 1."""
    core = make_core(2, backoff_s=100.0, backoff_max_s=100.0)
    (first,) = starts(core, 0.0)
    fail(core, first, 5.0)
    (second,) = starts(core, 5.0)
    answer(core, second, 6.0)

    assert second.prompt.index == 1
    assert starts(core, 104.9) == []
    assert [(start.prompt.index, start.tries) for start in starts(core, 105.0)] == [(0, 2)]


def test_no_server_gets_more_than_its_limit():
    core = make_core(50, slots=(3, 1, 5))

    assert sorted(start.server for start in starts(core, 0.0)) == [0, 0, 0, 1, 2, 2, 2, 2, 2]
    assert starts(core, 1.0) == []


def test_attempts_have_numbers_of_their_own_and_count_the_tries_of_their_prompt():
    core = make_core(1, slots=(1, 1))
    (first,) = starts(core, 0.0)
    fail(core, first, 1.0)
    (second,) = starts(core, 2.0)

    assert (first.attempt, first.tries, second.attempt, second.tries) == (1, 1, 2, 2)
    assert second.server != first.server


def test_a_prompt_goes_back_to_the_server_that_failed_it_only_where_there_is_no_other():
    core = make_core(1, slots=(4,))
    (first,) = starts(core, 0.0)
    fail(core, first, 1.0)

    assert [start.server for start in starts(core, 2.0)] == [0]


def test_the_emptiest_server_by_share_of_its_limit_is_next():
    core = make_core(9, slots=(2, 8))
    found = starts(core, 0.0)

    assert [start.server for start in found][:2] == [0, 1]
    assert [start.server for start in found].count(1) == 7


def test_a_slot_is_free_when_its_reply_has_landed_and_before_anybody_looks_at_it():
    core = make_core(2)
    (first,) = starts(core, 0.0)
    core.landed(first, 0.0, 1.0, 1.0)

    assert indices(starts(core, 1.0)) == [1]
    assert core.in_flight == 1
    assert not core.finished


def test_ready_prompts_go_in_order_and_older_ones_go_first():
    core = make_core(4, slots=(1,), backoff_s=1.0)
    (first,) = starts(core, 0.0)
    fail(core, first, 0.0, FaultKind.UNREACHABLE)
    (second,) = starts(core, 0.0)
    answer(core, second, 2.0)
    (third,) = starts(core, 2.0)
    answer(core, third, 3.0)

    assert indices([second, third, *starts(core, 3.0)]) == [1, 0, 2]


def test_backoff_doubles_to_its_bound():
    core = make_core(1, slots=(1, 1, 1, 1, 1, 1, 1), backoff_s=1.0, backoff_max_s=5.0)
    now_s, pauses_s = 0.0, []
    for _ in range(6):
        (start,) = starts(core, now_s)
        fail(core, start, now_s, FaultKind.UNREACHABLE)
        next_s = core.next_timer_s()
        pauses_s.append(next_s - now_s)
        now_s = next_s

    assert pauses_s == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0]


# ---- charging ----


@pytest.mark.parametrize("kind", NEVER_CHARGED)
def test_what_no_prompt_can_help_is_never_charged(kind):
    """Server 1 answers others all the while; prompt 0 fails a hundred times and is still asked."""
    core = make_core(400, slots=(1, 1), backoff_s=0.001, backoff_max_s=0.001, backlog_records_max=10_000)
    now_s, tries = 0.0, 0
    while tries < 100:
        now_s += 10.0
        assert now_s < 10_000.0
        for action in core.due(now_s):
            match action:
                case Probe(server=server):
                    core.probed(server, Checkup(), now_s)
                case Start(prompt=prompt) if prompt.index == 0:
                    fail(core, action, now_s, kind)
                    tries = action.tries
                case Start():
                    answer(core, action, now_s)
                case Commit(group=group):
                    assert group.given_up == ()
                    core.committed(group.number, now_s)

    assert core.done > 90


def test_a_fault_is_charged_once_its_server_has_answered_somebody_else():
    core = make_core(1, exhausted=False, prompt_attempts=2, ready_spare=0)
    now_s, tries, fresh = 0.0, [], 0
    while core.gave_up == 0:
        for action in core.due(now_s):
            match action:
                case Read():
                    fresh += 1
                    core.offered(Chunk(prompts=prompts(fresh)), now_s)
                case Start(prompt=prompt) if prompt.index == 0:
                    tries.append(action.tries)
                    fail(core, action, now_s)
                case Start():
                    answer(core, action, now_s)
                case Commit(group=group):
                    core.committed(group.number, now_s)
        now_s += 1.0
        assert now_s < 100.0

    assert tries == [1, 2, 3]
    assert core.done >= 2


def test_a_reply_that_breaks_off_is_charged_as_a_broken_answer_is():
    """Other than a connection that breaks before any of it: the same again may break again, for ever."""
    core = make_core(20, slots=(1,), prompt_attempts=1, backoff_s=0.01, backoff_max_s=0.01)
    now_s, tries = 0.0, 0
    while core.gave_up == 0:
        for action in core.due(now_s):
            match action:
                case Start(prompt=prompt) if prompt.index == 0:
                    tries += 1
                    error = ServerFault("broke off", kind=FaultKind.LOST, status=200, wire_s=now_s)
                    core.failed(action, error, now_s)
                case Start():
                    answer(core, action, now_s)
                case Probe(server=server):
                    core.probed(server, Checkup(), now_s)
                case Commit(group=group):
                    core.committed(group.number, now_s)
        now_s += 0.5
        assert now_s < 60.0

    # Three of them bench the server, and then another prompt is its trial.
    assert tries == 4
    assert core.done >= 1


def test_a_fault_is_not_charged_while_its_server_answers_nobody():
    core = make_core(1, slots=(1,), prompt_attempts=1)
    now_s = 0.0
    for _ in range(3):
        (start,) = starts(core, now_s)
        fail(core, start, now_s)
        now_s = core.next_timer_s()

    assert core.unsaved == 0
    assert core.sleeping == 1


def test_a_token_of_our_own_counts_where_nobody_is_left_to_ask():
    """One prompt is left and breaks everything: the server gives a token, and the prompt is given up."""
    core = make_core(1, slots=(1,), prompt_attempts=2)
    now_s, tries, asked = 0.0, 0, 0
    while not core.finished:
        for action in core.due(now_s):
            match action:
                case Start():
                    tries += 1
                    fail(core, action, now_s)
                case Probe(server=server, ask=ask):
                    asked += ask
                    core.probed(server, Checkup(asked=ask), now_s)
                case Commit(group=group):
                    (gave_up,) = group.given_up
                    core.committed(group.number, now_s)
        now_s = max(now_s + 0.1, core.next_timer_s() or 0.0)
        assert now_s < 60.0

    # Each token opens all slots, so that three tries bench the server and the first one after it is charged.
    assert (tries, asked) == (7, 2)
    assert (gave_up.error_class, gave_up.for_good, gave_up.tries) == ("ServerFault", False, 7)


def test_where_every_prompt_breaks_a_fleet_that_stands_still_ends_by_charges():
    """Healthy servers that answer all with 500: tokens show that they work, and all is given up for now."""
    core = make_core(30, slots=(4, 4), prompt_attempts=4)
    ends: list[GivenUp] = []
    now_s, asked = 0.0, 0
    while not core.finished:
        for action in core.due(now_s):
            match action:
                case Start():
                    error = ServerFault("500", kind=FaultKind.BROKEN, status=500, wire_s=now_s)
                    core.failed(action, error, now_s)
                case Probe(server=server, ask=ask):
                    asked += ask
                    core.probed(server, Checkup(asked=ask), now_s)
                case Commit(group=group):
                    ends += group.given_up
                    core.committed(group.number, now_s)
        core.check()
        now_s = max(now_s + 0.05, core.next_timer_s() or 0.0)
        # Without the tokens each trial would tell of one prompt alone, and it would take more than 90 s.
        assert now_s < 60.0

    assert asked > 0
    assert sorted(end.index for end in ends) == list(range(30))
    assert {(end.error_class, end.last_status, end.for_good) for end in ends} == {("ServerFault", 500, False)}
    assert max(end.tries for end in ends) <= 8


def test_a_token_is_asked_for_too_where_all_prompts_in_memory_may_be_at_fault_and_there_are_more():
    """Nothing is read while so many wait: without the token nobody would ever be charged."""
    core = make_core(4, slots=(3,), exhausted=False, ready_spare=0, backoff_s=0.1, backoff_max_s=0.1)
    for start in starts(core, 0.0):
        fail(core, start, 0.0)
    core.offered(Chunk(prompts=()), 0.4) if core._reading else None
    assert [probe.ask for probe in due(core, 0.5, Probe)] == [False]
    core.probed(0, Checkup(), 0.6)
    (fresh,) = starts(core, 0.6)
    fail(core, fresh, 0.7)

    (probe,) = due(core, core.next_timer_s(), Probe) or due(core, core.next_timer_s(), Probe)
    assert probe.ask


def test_no_token_is_asked_for_while_a_prompt_without_a_fault_waits():
    core = make_core(6, slots=(3,))
    for start in starts(core, 0.0):
        fail(core, start, 0.0)

    assert [probe.ask for probe in due(core, 0.5, Probe)] == [False]


def test_a_refused_prompt_ends_at_once_and_for_good():
    core = make_core(2)
    (first,) = starts(core, 0.0)
    refuse(core, first, 1.0)
    (group,) = commit(core, 1.0)

    assert [(g.index, g.tries, g.last_status, g.for_good) for g in group.given_up] == [(0, 1, 400, True)]
    assert core.gave_up == 1


def test_a_reply_that_is_no_answer_is_a_fault_though_it_landed():
    core = make_core(1, slots=(1, 1))
    (first,) = starts(core, 0.0)
    core.landed(first, 0.1, 1.0, 1.0)
    core.failed(first, fault(wire_s=0.1), 1.0)
    core.check()

    assert core.in_flight == 0
    assert core.sleeping == 1
    assert core.fleet.servers[0].faults[FaultKind.BROKEN] == 1


# ---- reading ----


def test_reads_are_bounded_and_one_at_a_time():
    core = make_core(4, slots=(4,), exhausted=False, ready_spare=6)
    (read,) = reads(core, 0.0)

    assert read.count == 10
    assert reads(core, 1.0) == []
    core.offered(Chunk(prompts=prompts(*range(4, 14))), 1.0)
    assert reads(core, 2.0) == []


def test_nothing_is_read_after_the_input_has_ended():
    core = make_core(1)

    assert reads(core, 0.0) == []
    assert reads(core, 9.0) == []


def test_nothing_is_read_while_the_writer_is_too_far_behind():
    """An input of bad lines alone costs no request; it must not fill the memory before the disk."""
    core = make_core(0, exhausted=False, ready_spare=10, backlog_records_max=20)
    first = 0
    for _ in range(10):
        if reads(core, 0.0) or core._reading:
            core.offered(Chunk(prompts=(), bad=bad(*range(first, first + 10))), 0.0)
            first += 10

    assert core.paused
    assert core.unsaved == 20
    assert not core._reading


def test_nothing_is_read_while_more_prompts_sleep_than_there_are_slots():
    core = make_core(4, slots=(4,), exhausted=False, ready_spare=0, backoff_s=50.0, backoff_max_s=50.0)
    core.due(0.0)
    now_s, first = 0.0, 4
    for _ in range(100):
        now_s += 1.0
        if now_s >= 49.0:
            break
        if core._reading:
            core.offered(Chunk(prompts=prompts(*range(first, first + 4))), now_s)
            first += 4
        for start in started(core):
            fail(core, start, now_s, FaultKind.BROKEN if start.attempt % 2 else FaultKind.UNREACHABLE)
        for action in core.due(now_s):
            if isinstance(action, Probe):
                core.probed(action.server, Checkup(), now_s)

    assert len(core._waiting) <= 12


def test_an_empty_input_is_finished_at_once():
    core = make_core(0)

    assert core.finished
    assert core.complete
    assert core.next_timer_s() is None


# ---- groups ----


def hold(core, count, now_s=0.0, **fields):
    for start in starts(core, now_s)[:count]:
        answer(core, start, now_s, **fields)


def test_a_group_has_at_most_so_many_records():
    core = make_core(10, slots=(10,), group_records_max=4)
    hold(core, 10)

    assert [len(group.finished) for group in commit(core, 0.0)] == [4, 4, 2]


def test_a_group_ends_with_the_answer_that_fills_it():
    core = make_core(10, slots=(10,), group_bytes_max=250)
    hold(core, 10, size_bytes=98)

    assert [len(group.finished) for group in commit(core, 0.0)] == [3, 3, 3, 1]


def test_a_full_group_is_begun_beside_the_one_under_way_and_no_third():
    core = make_core(10, slots=(10,), group_records_max=2)
    hold(core, 10)
    first, second = commits(core, 0.0)

    assert commits(core, 9.0) == []
    core.committed(first.group.number, 9.0)
    assert [action.group.number for action in commits(core, 9.0)] == [3]
    core.committed(second.group.number, 9.0)
    assert [action.group.number for action in commits(core, 9.0)] == [4]


def test_a_group_that_is_not_full_waits_for_the_one_under_way():
    core = make_core(5, slots=(5,), group_records_max=4)
    running = starts(core, 0.0)
    for start in running[:3]:
        answer(core, start, 0.0)
    (first,) = commits(core, 0.0)
    for start in running[3:]:
        answer(core, start, 0.0)

    assert commits(core, 9.0) == []
    core.committed(first.group.number, 9.0)
    assert [len(action.group.finished) for action in commits(core, 9.0)] == [2]


def test_a_group_that_is_not_full_waits_out_the_interval_between_commits():
    core = make_core(9, slots=(9,), group_interval_s=0.025, group_records_max=3)
    everything = starts(core, 0.0)
    answer(core, everything[0], 0.0)
    assert len(commit(core, 0.0)) == 1
    answer(core, everything[1], 0.01)

    assert commits(core, 0.01) == []
    assert core.next_timer_s() == 0.025
    assert [len(group.finished) for group in commit(core, 0.025)] == [1]


@pytest.mark.parametrize("full", [{"group_records_max": 3}, {"group_bytes_max": 300}])
def test_a_full_group_does_not_wait(full):
    core = make_core(9, slots=(9,), group_interval_s=0.025, **full)
    everything = starts(core, 0.0)
    answer(core, everything[0], 0.0)
    assert len(commit(core, 0.0)) == 1
    for start in everything[1:4]:
        answer(core, start, 0.01)

    assert [len(group.finished) for group in commit(core, 0.01)] == [3]


def test_answers_are_done_only_when_they_are_durable():
    core = make_core(1)
    (start,) = starts(core, 0.0)
    answer(core, start, 1.0)
    (action,) = commits(core, 1.0)

    assert (core.done, core.unsaved, core.sums.records, core.finished) == (0, 1, 0, False)
    core.committed(action.group.number, 2.0)
    assert (core.done, core.unsaved, core.sums.records, core.finished) == (1, 0, 1, True)
    assert core.sums.output_tokens == 10


def test_what_is_left_at_the_end_comes_in_groups_beginning_with_the_one_in_progress():
    core = make_core(7, slots=(7,), group_records_max=3)
    hold(core, 7)
    under_way = [action.group.number for action in commits(core, 0.0)]
    numbers = []
    for group in core.unsaved_groups():
        numbers.append((group.number, len(group.finished)))
        core.committed(group.number, 0.0)

    assert under_way == [1, 2]
    assert numbers == [(1, 3), (2, 3), (3, 1)]
    assert core.unsaved == 0


@pytest.mark.parametrize("bound", [{"backlog_records_max": 3}, {"backlog_bytes_max": 300}])
def test_a_backlog_stops_sending_until_the_writer_has_caught_up(bound):
    core = make_core(20, slots=(5,), **bound)
    running = starts(core, 0.0)
    for start in running[:3]:
        answer(core, start, 1.0)
    (action,) = commits(core, 1.0)

    assert core.paused
    assert starts(core, 2.0) == []
    core.committed(action.group.number, 3.0)
    assert len(starts(core, 3.0)) == 3


def test_a_backlog_is_booked_as_storage():
    core = make_core(20, slots=(4,), backlog_records_max=4)
    for start in starts(core, 0.0):
        answer(core, start, 10.0)
    (action,) = commits(core, 10.0)
    core.committed(action.group.number, 15.0)
    core.due(15.0)
    core.books.tick(16.0)

    owned_s = core.books.owned_by_all_s()
    assert owned_s["storage"] == pytest.approx(4 * 5.0)
    assert owned_s["wire"] == pytest.approx(4 * 10.0 + 4 * 1.0)
    assert owned_s["dispatch"] == 0.0


# ---- the guard ----


def end_many(core, refused, answered):
    """End prompts one by one, refused ones first, without a look at what is due in between."""
    found = starts(core, 0.0)
    for start in found[:refused]:
        refuse(core, start, 0.0)
    for start in found[refused : refused + answered]:
        answer(core, start, 0.0)


def test_a_run_whose_prompts_are_nearly_all_refused_stops_and_says_so():
    core = make_core(100, slots=(100,), guards=GuardSettings(refused_after=20))
    end_many(core, refused=20, answered=0)

    assert core.stopping
    assert core.refusal == (
        "guards.refused_share: 20 of the first 20 prompts were refused (bound 50 %), 20 with: too long"
    )
    assert len(cancels(core, 0.0)) == 80


def test_a_run_whose_prompts_are_sometimes_refused_goes_on():
    core = make_core(100, slots=(100,), guards=GuardSettings(refused_after=20))
    found = starts(core, 0.0)
    for number, start in enumerate(found):
        if number % 2:
            refuse(core, start, 0.0)
        else:
            answer(core, start, 0.0)

    assert core.refusal is None
    assert not core.stopping


@pytest.mark.parametrize(("on_failed", "stops"), [("warn", False), ("stop", True)])
def test_refusals_after_a_good_beginning_do_not_stop_a_run_unless_the_bound_on_all_failures_does(
    on_failed, stops
):
    core = make_core(400, slots=(400,), guards=GuardSettings(refused_after=20, on_failed=on_failed))
    found = starts(core, 0.0)
    for start in found[:40]:
        answer(core, start, 0.0)
    for start in found[40:]:
        refuse(core, start, 0.0)

    assert core.stopping == stops
    assert (core.refusal or "guards.failed_share").startswith("guards.failed_share")
    assert (core.refusal is not None) == stops


def test_bad_lines_do_not_hide_that_every_prompt_is_refused():
    core = make_core(0, slots=(50,), exhausted=False, guards=GuardSettings(refused_after=20))
    core.due(0.0)
    core.offered(Chunk(prompts=prompts(*range(100, 130)), bad=bad(*range(100)), exhausted=True), 0.0)
    end_many(core, refused=30, answered=0)

    assert core.refusal is not None


# ---- the stop ----


def test_nothing_is_sent_or_read_after_a_stop():
    core = make_core(5, slots=(2,), exhausted=False)
    core.due(0.0)
    core.offered(Chunk(prompts=prompts(*range(5, 9))), 0.0)
    core.stop(1.0, grace_s=5.0)
    for start in started(core):
        answer(core, start, 2.0)

    assert [type(action) for action in core.due(2.0)] == [Commit]
    assert not core.complete


def test_a_stop_waits_for_what_is_in_flight_and_then_cancels_it():
    core = make_core(3, slots=(2,))
    first, second = starts(core, 0.0)
    core.stop(1.0, grace_s=5.0)
    assert cancels(core, 1.0) == []
    assert core.next_timer_s() == 6.0
    answer(core, first, 2.0)
    commit(core, 2.0)
    (cancel,) = cancels(core, 6.0)
    core.cancelled(second, 6.0)
    core.check()

    assert cancel.attempt == second.attempt
    assert core.finished
    assert (core.done, core.gave_up, core.returned) == (1, 0, 1)
    assert core.next_timer_s() is None


def test_a_second_stop_shortens_the_grace_and_never_lengthens_it():
    core = make_core(1)
    starts(core, 0.0)
    core.stop(1.0, grace_s=50.0)
    core.stop(2.0, grace_s=1.0)
    core.stop(2.5, grace_s=90.0)

    assert core.next_timer_s() == 3.0
    assert len(cancels(core, 3.0)) == 1
    assert cancels(core, 4.0) == []


def test_a_prompt_that_fails_after_the_stop_is_left_to_a_later_run():
    core = make_core(1)
    (start,) = starts(core, 0.0)
    core.stop(1.0, grace_s=5.0)
    fail(core, start, 2.0)

    assert (core.returned, core.gave_up, core.sleeping) == (1, 0, 0)
    assert core.finished
    assert not core.complete


def test_after_a_stop_the_last_answers_do_not_wait_for_the_interval():
    core = make_core(2, slots=(2,), group_interval_s=10.0)
    first, second = starts(core, 0.0)
    answer(core, first, 0.0)
    commit(core, 0.0)
    core.stop(1.0, grace_s=5.0)
    answer(core, second, 1.0)

    assert len(commits(core, 1.0)) == 1


def test_after_a_stop_idle_slots_are_booked_to_the_drain_and_not_to_us():
    core = make_core(9, slots=(3,))
    (first, *_) = starts(core, 0.0)
    core.stop(1.0, grace_s=50.0)
    core.due(1.0)
    answer(core, first, 2.0)
    core.due(2.0)
    core.books.tick(12.0)

    owned_s = core.books.owned_by_all_s()
    assert owned_s["drain"] == pytest.approx(10.0)
    assert owned_s["dispatch"] == 0.0


def test_a_stop_before_the_first_read_comes_back_ends_with_it():
    core = Core(FlowSettings(), [ServerSpec(url="http://s", limit=1)], Steady(), 0.0)
    assert [type(action) for action in core.due(0.0)] == [Read]
    core.stop(0.5, grace_s=0.0)

    before = core.finished
    core.offered(Chunk(prompts=prompts(0), bad=bad(1)), 1.0)
    commit(core, 1.0)

    assert (before, core.finished) == (False, True)
    assert (core.done, core.gave_up) == (0, 1)


# ---- instants ----


def test_time_does_not_go_back():
    core = make_core(1)
    core.due(5.0)

    with pytest.raises(AssertionError, match="time went back"):
        core.due(4.0)


def test_the_refill_gap_is_from_the_last_byte_to_the_next_request_on_the_wire():
    core = make_core(2)
    (first,) = starts(core, 0.0)
    answer(core, first, 1.1, last_s=1.0)
    (second,) = starts(core, 1.1)
    answer(core, second, 2.0, wire_s=1.2)

    assert core.fleet.gaps_s.count == 1
    assert core.fleet.gaps_s.largest == pytest.approx(0.2)


def test_a_gap_that_somebody_else_owns_is_none_of_ours():
    """The slot stood free because there was nothing to send."""
    core = make_core(1, exhausted=False)
    (first,) = starts(core, 0.0)
    answer(core, first, 1.0)
    core.due(1.0)
    core.offered(Chunk(prompts=prompts(1), exhausted=True), 50.0)
    (second,) = starts(core, 50.0)
    answer(core, second, 51.0)

    assert core.fleet.gaps_s.count == 0


def test_a_gap_while_the_limit_is_cut_is_none_of_ours():
    core = make_core(100, slots=(4,))
    running = starts(core, 0.0)
    fail(core, running[0], 1.0, FaultKind.BUSY)
    answer(core, running[1], 1.0)
    core.due(1.0)
    assert starts(core, 2.0) == []
    answer(core, running[2], 30.0)
    (refill,) = starts(core, 30.0)
    answer(core, refill, 31.0)

    assert core.fleet.gaps_s.count == 1
    assert core.fleet.gaps_s.largest == 0.0


def test_latency_and_origin_are_kept_with_the_answer():
    core = make_core(1, slots=(1, 1))
    (first,) = starts(core, 0.0)
    fail(core, first, 1.0)
    (second,) = starts(core, 2.0)
    answer(core, second, 7.5, last_s=7.0)
    (group,) = commit(core, 7.5)

    (finished,) = group.finished
    assert (finished.prompt.index, finished.tries, finished.started_s) == (0, 2, 2.0)
    assert finished.latency_s == 5.0
    assert finished.server == "http://s1"


@pytest.mark.parametrize("error", [fault(), PromptFault("no", status=422)])
def test_the_last_error_names_the_server(error):
    core = make_core(1)
    (start,) = starts(core, 0.0)
    core.failed(start, error, 1.0)

    assert core.last_error == f"http://s0: {error}"


def test_the_same_group_cannot_be_committed_twice():
    core = make_core(1)
    (start,) = starts(core, 0.0)
    core.landed(start, 0.0, 1.0, 1.0)
    core.answered(start, an_answer(), 1.0)
    (action,) = commits(core, 1.0)
    core.committed(action.group.number, 1.0)

    with pytest.raises(AssertionError):
        core.committed(action.group.number, 1.0)


def test_server_faults_know_their_kind():
    error = ServerFault("x", kind=FaultKind.BUSY, status=503, retry_after_s=2.0)

    assert (error.kind, error.status, error.retry_after_s, error.wire_s) == (FaultKind.BUSY, 503, 2.0, None)
