"""Conversations: an answer may say what is to be asked next, and its prompt has not ended then."""

from dataclasses import replace

import pytest

from genpipe.core.errors import FaultKind, PromptFault
from genpipe.core.outbox import size_bytes_of
from genpipe.core.progress import Progress, Restored
from genpipe.core.server import ServerState
from genpipe.core.settings import GuardSettings
from genpipe.core.sums import Sums
from genpipe.core.values import Chunk, GivenUp, Prompt, Start
from tests.core.build import (
    REFUSED,
    an_answer,
    answer,
    commit,
    commits,
    due,
    fail,
    make_core,
    probed,
    reads,
    refuse,
    started,
    starts,
)


def more_of(start, text=b"[1]"):
    past = start.prompt.conversation or 0
    return replace(start.prompt, payload=text, conversation=past + 1, made=lambda: b'"made":%d' % past)


def step(core, start, now_s, *, last_s=None, text=b"[1]", **fields):
    """An answer comes after which the conversation goes on."""
    last_s = now_s if last_s is None else last_s
    core.landed(start, start.started_s, last_s, now_s)
    core.answered(start, replace(an_answer(**fields), more=more_of(start, text)), now_s)
    core.check()


def turns(found):
    return [(start.prompt.index, start.prompt.conversation or 0) for start in found]


def test_a_conversation_is_one_prompt_from_its_first_turn_to_its_last():
    core = make_core(1)
    (first,) = starts(core, 0.0)
    step(core, first, 1.0)
    assert (core.done, core.unsaved, core.finished) == (0, 0, False)
    (second,) = starts(core, 1.0)
    step(core, second, 3.0)
    (third,) = starts(core, 3.0)
    answer(core, third, 7.0, output_tokens=30)
    (group,) = commit(core, 7.0)
    (finished,) = group.finished

    assert turns([first, second, third]) == [(0, 0), (0, 1), (0, 2)]
    assert finished.prompt is third.prompt
    assert (finished.tries, finished.started_s, finished.latency_s) == (3, 0.0, 7.0)
    assert (core.done, core.sums.records, core.sums.output_tokens) == (1, 1, 30)
    assert core.complete


def test_the_next_turn_goes_before_all_other_prompts():
    core = make_core(3, slots=(1,))
    (first,) = starts(core, 0.0)
    core.landed(first, 0.0, 1.0, 1.0)
    (other,) = starts(core, 1.0)
    core.answered(first, replace(an_answer(), more=more_of(first)), 1.0)
    answer(core, other, 2.0)

    assert turns(starts(core, 2.0)) == [(0, 1)]


def test_the_next_turn_goes_first_also_where_the_longest_goes_first():
    core = make_core(2, slots=(1,), exhausted=False, longest_first=True)
    (first,) = starts(core, 0.0)
    core.landed(first, 0.0, 1.0, 1.0)
    (other,) = starts(core, 1.0)
    core.answered(first, replace(an_answer(), more=more_of(first, b"[]")), 1.0)
    core.offered(Chunk(prompts=(Prompt(index=2, payload=b"[" + b"9" * 50 + b"]"),), exhausted=True), 1.0)
    answer(core, other, 2.0)

    assert turns(starts(core, 2.0)) == [(0, 1)]


def test_servers_are_credited_for_each_turn_and_tokens_count_once():
    core = make_core(1, slots=(1, 1))
    (first,) = starts(core, 0.0)
    step(core, first, 1.0, output_tokens=10)
    (second,) = starts(core, 1.0)
    answer(core, second, 3.0, output_tokens=14)

    here, there = core.fleet.servers[first.server], core.fleet.servers[second.server]
    if here is there:
        assert (here.answers, here.output_tokens) == (2, 14)
    else:
        assert (here.answers, here.output_tokens, there.answers, there.output_tokens) == (1, 10, 1, 4)
    assert core.pace.rates(4.0).tokens_segment == 14 / 4
    commit(core, 4.0)
    assert core.pace.rates(4.0).tokens_segment == 14 / 4


def test_tokens_of_a_turn_show_in_the_rate_before_any_prompt_is_done():
    core = make_core(1)
    (first,) = starts(core, 0.0)
    step(core, first, 2.0, output_tokens=10)
    rates = core.pace.rates(4.0)

    assert (rates.recent, rates.segment, rates.tokens_segment) == (None, None, 2.5)
    assert core.sums.output_tokens == 0


def converse(core, now_s, count, *, stop_at=4):
    """Conversations of four turns of one second on one slot; the last one is left in turn ``stop_at``."""
    for number in range(count):
        for turn in range(4):
            core.due(now_s)
            if (number, turn) == (count - 1, stop_at):
                return now_s
            (start,) = started(core)
            now_s += 1.0
            if turn < 3:
                step(core, start, now_s)
            else:
                answer(core, start, now_s)
        commit(core, now_s)
    core.due(now_s)
    return now_s


def eta_s(core, total, now_s):
    progress = Progress(Restored(sums=Sums()), began_s=0.0).snapshot(core, total, now_s)
    return progress["eta_hours"] * 3600


def test_the_eta_reckons_with_the_turns_to_come():
    core = make_core(40)
    now_s = converse(core, 0.0, 20)

    assert eta_s(core, 40, now_s) == pytest.approx(80.0, rel=0.1)


def test_the_eta_reckons_with_the_turns_that_are_over():
    """The last conversation is in its last turn, and no other is left."""
    core = make_core(40)
    now_s = converse(core, 0.0, 40, stop_at=3)

    assert eta_s(core, 40, now_s) < 2.0


def test_the_second_attempt_of_a_turn_is_called_off_and_never_answers_the_next_one():
    core = make_core(1, slots=(1, 1), hedge=True)
    (first,) = starts(core, 0.0)
    core.fleet.servers[first.server].state = ServerState.SUSPECT
    (twin,) = starts(core, 1.0)
    step(core, first, 2.0)
    found = due(core, 2.0, object)

    assert twin.prompt is first.prompt
    assert [action.attempt for action in found if not isinstance(action, Start)] == [twin.attempt]
    (second,) = (action for action in found if isinstance(action, Start))
    assert turns([second]) == [(0, 1)]
    # It comes all the same: it is late, and not gone on from.
    step(core, twin, 2.0)
    assert (core.late, turns(started(core))) == (1, [(0, 1)])
    answer(core, second, 3.0)
    (group,) = commit(core, 3.0)
    assert [finished.prompt for finished in group.finished] == [second.prompt]


def fail_charged(core, now_s):
    """Its turn fails twice, and its server answers others after each time: the first fault is charged."""
    for moment_s in (now_s, now_s + 2.0):
        (mine,) = starts(core, moment_s)
        fail(core, mine, moment_s)
        core.fleet.servers[0].answers += 1


def test_each_turn_has_faults_and_attempts_of_its_own():
    core = make_core(1, prompt_attempts=2, backoff_s=1.0, backoff_max_s=1.0)
    for turn in range(3):
        fail_charged(core, 10.0 * turn)
        (mine,) = starts(core, 10.0 * turn + 4.0)
        assert turns([mine]) == [(0, turn)]
        step(core, mine, 10.0 * turn + 5.0)
    (mine,) = starts(core, 35.0)
    answer(core, mine, 35.0)
    commit(core, 35.0)

    assert (core.done, core.gave_up, mine.tries) == (1, 0, 10)


@pytest.mark.parametrize("died", [True, False], ids=["died", "undecided"])
def test_a_death_stays_with_a_conversation_and_what_was_never_known_does_not(died):
    core = make_core(1, slots=(1, 1), backoff_s=0.0)
    (first,) = starts(core, 0.0)
    fail(core, first, 0.0, FaultKind.LOST)
    (again,) = starts(core, 0.0)
    if died:
        core.due(20.0)
        probed(core, first.server, REFUSED, 20.0)
    step(core, again, 20.0)
    assert len(core._waiting.marked) == died
    (second,) = starts(core, 20.0)

    work = next(core.flights()).work
    assert (work.killed, work.doubts, work.losses) == ((first.server,) if died else (), (), 0)
    assert turns([second]) == [(0, 1)]


def test_a_turn_that_is_refused_ends_the_conversation_with_what_was_made():
    core = make_core(1)
    (first,) = starts(core, 0.0)
    step(core, first, 1.0)
    (second,) = starts(core, 1.0)
    refuse(core, second, 2.0)
    (group,) = commit(core, 2.0)
    (gave_up,) = group.given_up

    assert (gave_up.made_json, gave_up.last_status, gave_up.tries) == (b'"made":0', 400, 2)
    assert gave_up.for_good
    assert core.complete


def test_a_turn_that_servers_fail_ends_it_for_now_with_what_was_made():
    core = make_core(1, prompt_attempts=1, backoff_s=1.0, backoff_max_s=1.0)
    (first,) = starts(core, 0.0)
    step(core, first, 1.0)
    fail_charged(core, 2.0)
    (gave_up,) = (each for group in commit(core, 5.0) for each in group.given_up)

    assert (gave_up.index, gave_up.made_json, gave_up.for_good) == (0, b'"made":0', False)


def test_what_a_failed_conversation_made_counts_in_the_backlog():
    made = GivenUp(
        index=0, tries=1, error_class="X", message="abc", last_status=None, for_good=True, made_json=b"12345"
    )

    assert size_bytes_of(made) == 8


# ---- an answer from which nothing follows ----


def stuck(core, start, now_s, status=None):
    error = PromptFault("it cannot go on", status=status, wire_s=start.started_s)
    error.made_json = b'"made":"all"'
    core.landed(start, start.started_s, now_s, now_s)
    core.failed(start, error, now_s)
    core.check()


@pytest.mark.parametrize("status", [None, 200])
def test_a_conversation_that_cannot_go_on_is_given_up_and_its_server_is_not_to_blame(status):
    core = make_core(3, slots=(2,))
    first, second = starts(core, 0.0)
    server = core.fleet.servers[0]
    server.state, server.faults_in_a_row = ServerState.SUSPECT, 2
    stuck(core, first, 1.0, status)

    assert (server.answers, server.faults_in_a_row, server.state) == (1, 0, ServerState.UP)
    assert not server.aborts
    (gave_up,) = commit(core, 1.0)[0].given_up
    assert (gave_up.index, gave_up.made_json, gave_up.for_good) == (0, b'"made":"all"', True)
    assert turns(started(core)) == [(1, 0), (2, 0)]
    assert second.prompt.index == 1


def test_such_an_answer_that_comes_late_ends_nothing():
    core = make_core(1, slots=(1, 1), hedge=True)
    (first,) = starts(core, 0.0)
    core.fleet.servers[first.server].state = ServerState.SUSPECT
    (twin,) = starts(core, 1.0)
    step(core, first, 2.0)
    (second,) = starts(core, 2.0)
    stuck(core, twin, 2.0)
    answer(core, second, 3.0)
    commit(core, 3.0)

    assert (core.done, core.gave_up) == (1, 0)


# ---- stops, pauses and guards ----


def test_a_stop_lets_the_turn_in_flight_land_and_begins_no_other():
    core = make_core(2, slots=(1,))
    (first,) = starts(core, 0.0)
    core.stop(0.5, grace_s=10.0)
    step(core, first, 1.0)

    assert starts(core, 1.0) == []
    assert (core.returned, core.finished, core.complete) == (1, True, False)


def test_next_turns_wait_while_the_writer_is_behind_and_go_on_after_that():
    core = make_core(4, slots=(2,), backlog_records_max=1)
    first, second = starts(core, 0.0)
    answer(core, first, 1.0)
    assert core.paused
    step(core, second, 1.0)
    (now,) = commits(core, 1.0)
    assert started(core) == []
    core.committed(now.group.number, 2.0)

    assert turns(starts(core, 2.0)) == [(1, 1), (2, 0)]


def test_conversations_go_on_while_nothing_can_be_read():
    core = make_core(1, exhausted=False)
    (now,) = starts(core, 0.0)
    reads(core, 0.0)
    for turn in range(1, 5):
        step(core, now, float(turn))
        (now,) = starts(core, float(turn))

    assert turns([now]) == [(0, 4)]


def test_a_finished_conversation_counts_once_in_the_guards():
    core = make_core(3, guards=GuardSettings(after=2, on_empty="stop", empty_share_max=0.4))
    for now_s in (0.0, 1.0):
        (start,) = starts(core, now_s)
        step(core, start, now_s, content="")
    (start,) = starts(core, 2.0)
    answer(core, start, 2.0)
    (start,) = starts(core, 2.0)
    answer(core, start, 3.0)

    assert core.refusal is None
