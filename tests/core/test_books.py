"""Whose each slot-second was: small worlds, reckoned by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genpipe.core.books import OWNERS, Books, Window, shares
from genpipe.core.errors import FaultKind, PromptFault
from genpipe.core.values import Checkup, Chunk, Commit, Start
from tests.core.build import answer, fail, fault, make_core, prompts, starts


def owned(core_or_books, now_s):
    """Slot-seconds by owner at ``now_s``, those with none left out."""
    books = getattr(core_or_books, "books", core_or_books)
    books.tick(now_s)
    books.check()
    return {owner: round(seconds, 6) for owner, seconds in books.owned_by_all_s().items() if seconds}


# ---- each owner by a world of its own ----


def test_wire_is_from_the_request_to_the_last_byte_and_overhead_is_the_way_there():
    core = make_core(1)
    (start,) = starts(core, 0.0)
    answer(core, start, 10.0, wire_s=0.25)
    core.due(10.0)

    assert owned(core, 10.0) == {"wire": 9.75, "overhead": 0.25}


def test_what_is_in_flight_counts_as_wire():
    core = make_core(2, slots=(2,))
    starts(core, 0.0)

    assert owned(core, 3.0) == {"wire": 6.0}


def test_a_reply_that_is_handled_late_costs_dispatch():
    core = make_core(1)
    (start,) = starts(core, 0.0)
    answer(core, start, 10.0, wire_s=0.5, last_s=8.0)

    assert owned(core, 10.0) == {"wire": 7.5, "overhead": 0.5, "dispatch": 2.0}


def test_a_ready_prompt_and_a_free_slot_cost_dispatch():
    core = make_core(2)
    (start,) = starts(core, 0.0)
    answer(core, start, 1.0)
    core._tell_books()

    assert owned(core, 4.0) == {"wire": 1.0, "dispatch": 3.0}


def test_nothing_ready_and_more_to_come_is_input():
    core = make_core(1, slots=(3,), exhausted=False)
    core.due(0.0)

    assert owned(core, 2.0) == {"wire": 2.0, "input": 4.0}
    core.offered(Chunk(prompts=prompts(1, 2), exhausted=True), 2.0)
    core.due(2.0)
    assert owned(core, 3.0) == {"wire": 5.0, "input": 4.0}


def test_nothing_ready_and_nothing_to_come_is_drain():
    core = make_core(1, slots=(3,))
    core.due(0.0)

    assert owned(core, 2.0) == {"wire": 2.0, "drain": 4.0}


def test_sleeping_prompts_cost_backoff_by_their_number():
    """Two of five slots could carry the two that sleep, the rest has nothing to do."""
    core = make_core(2, slots=(5,), backoff_s=8.0)
    for start in starts(core, 0.0):
        fail(core, start, 1.0, FaultKind.UNREACHABLE)
    core.due(1.0)

    assert owned(core, 4.0) == {"wire": 2.0, "backoff": 6.0, "drain": 12.0}


def test_sleeping_prompts_cost_nothing_while_others_fill_the_slots():
    core = make_core(9, slots=(2,), backoff_s=8.0)
    fail(core, starts(core, 0.0)[0], 1.0, FaultKind.UNREACHABLE)
    core.due(1.0)

    assert owned(core, 4.0) == {"wire": 8.0}


def test_a_writer_too_far_behind_costs_storage():
    core = make_core(9, slots=(2,), backlog_records_max=2)
    for start in starts(core, 0.0):
        answer(core, start, 1.0)
    core.due(1.0)

    assert owned(core, 4.0) == {"wire": 2.0, "storage": 6.0}


def test_storage_goes_before_drain_and_after_backoff():
    """Of four idle slots one could carry the sleeper; what the rest lacks is the writer."""
    core = make_core(3, slots=(4,), backlog_records_max=2, backoff_s=8.0)
    first, second, third = starts(core, 0.0)
    fail(core, first, 0.0, FaultKind.UNREACHABLE)
    answer(core, second, 0.0)
    answer(core, third, 0.0)
    core.due(0.0)

    assert owned(core, 2.0) == {"backoff": 2.0, "storage": 6.0}


def test_an_attempt_that_never_reached_the_wire_was_lost_to_a_server_that_is_down():
    core = make_core(1)
    (start,) = starts(core, 0.0)
    core.failed(start, fault(FaultKind.UNREACHABLE), 10.0)

    assert owned(core, 10.0) == {"down": 10.0}


def test_an_attempt_that_failed_on_the_wire_was_there():
    core = make_core(1)
    (start,) = starts(core, 0.0)
    fail(core, start, 10.0, wire_s=1.0)

    assert owned(core, 10.0) == {"wire": 9.0, "overhead": 1.0}


def test_an_attempt_that_we_cancelled_was_on_the_wire_as_far_as_we_know():
    core = make_core(1)
    (start,) = starts(core, 0.0)
    core.stop(1.0, grace_s=1.0)
    core.cancelled(start, 10.0)

    assert owned(core, 10.0) == {"wire": 10.0}


def test_a_prompt_that_ran_out_of_time_does_not_show_a_server_as_down():
    core = make_core(1)
    (start,) = starts(core, 0.0)
    core.failed(start, PromptFault("no answer within 10 s"), 10.0)

    assert owned(core, 10.0) == {"wire": 10.0}


def test_a_benched_server_is_down_and_the_others_go_on():
    core = make_core(90, slots=(3, 2))
    for start in starts(core, 0.0):
        if start.server == 0:
            fail(core, start, 1.0)
    core.due(1.0)

    assert owned(core, 1.4) == {"wire": 5.0 + 2 * 0.4, "down": pytest.approx(3 * 0.4)}


def test_a_trial_leaves_the_other_slots_down():
    core = make_core(90, slots=(3,))
    for start in starts(core, 0.0):
        fail(core, start, 0.0)
    core.due(0.5)
    core.probed(0, Checkup(), 1.0)
    core.due(1.0)

    assert owned(core, 3.0) == {"down": 3.0 + 4.0, "wire": 2.0}


def test_reasons_of_the_server_go_first_and_in_order():
    """Ten slots: 2 not open yet, 3 more cut, 1 held; of the 4 that are free 1 has a prompt to send."""
    books = Books([10], 0.0)
    books.close(0, (("ramp", 2), ("cut", 3)))
    books.hold(0)
    books.run.ready, books.run.sleeping, books.run.exhausted = 1, 2, True

    assert owned(books, 1.0) == {
        "wire": 1.0,
        "ramp": 2.0,
        "cut": 3.0,
        "dispatch": 1.0,
        "backoff": 2.0,
        "drain": 1.0,
    }


def test_ready_prompts_are_counted_before_sleeping_ones():
    """Of two free slots one has a prompt to send; of the five that sleep only one could use the other."""
    books = Books([2], 0.0)
    books.run.ready, books.run.sleeping = 1, 5

    assert owned(books, 1.0) == {"dispatch": 1.0, "backoff": 1.0}


def test_a_reason_gets_no_more_slots_than_are_idle():
    books = Books([4], 0.0)
    for _ in range(3):
        books.hold(0)
    books.close(0, (("down", 4),))

    assert owned(books, 1.0) == {"wire": 3.0, "down": 1.0}


def test_free_slots_of_several_servers_share_what_the_run_lacks():
    books = Books([1, 3], 0.0)
    books.run.sleeping = 2
    books.run.exhausted = True
    books.tick(2.0)

    assert books.owned_s(0)["backoff"] == pytest.approx(1.0)
    assert books.owned_s(1)["backoff"] == pytest.approx(3.0)
    assert books.owned_s(1)["drain"] == pytest.approx(3.0)


# ---- what always holds ----


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2), st.floats(0.0, 5.0)), max_size=60), st.data())
def test_every_slot_second_has_one_owner_whatever_happens(events, data):
    slots = [1, 3, 7]
    books = Books(slots, 100.0)
    held: dict[int, list[float]] = {server: [] for server in range(3)}
    now_s = 100.0
    for what, server, past_s in events:
        now_s += past_s
        books.tick(now_s)
        match what:
            case 0 | 1 | 2 if len(held[server]) < slots[server]:
                books.hold(server)
                held[server].append(now_s)
            case 3 | 4 if held[server]:
                held_s = now_s - held[server].pop()
                part = data.draw(st.floats(0.0, 1.0))
                late = data.draw(st.floats(0.0, 1.0 - part))
                books.release(
                    server, held_s=held_s, wire_s=part * held_s, late_s=late * held_s, lost=past_s < 1
                )
            case 5:
                books.close(server, (("ramp", 1), ("cut", data.draw(st.integers(0, 7)))))
            case 6:
                books.close(server, ())
            case 7:
                books.run.ready, books.run.sleeping = data.draw(
                    st.tuples(st.integers(0, 9), st.integers(0, 9))
                )
            case 8:
                books.run.paused, books.run.exhausted = past_s < 2, past_s > 1
        books.check()

    by_owner = shares(books.owned_by_all_s())
    assert by_owner is None or sum(by_owner.values()) == pytest.approx(1.0)
    assert tuple(books.owned_by_all_s()) == OWNERS


def test_the_books_balance_with_a_client_that_is_slow_to_look():
    core = make_core(40, slots=(1,))
    now_s = 0.0
    while not core.finished:
        for action in core.due(now_s):
            match action:
                case Start():
                    answer(core, action, now_s + 1.5, wire_s=now_s + 0.25, last_s=now_s + 1.0)
                    now_s += 1.5
                case Commit(group=group):
                    core.committed(group.number, now_s)

    assert owned(core, now_s) == {"wire": 40 * 0.75, "overhead": 40 * 0.25, "dispatch": 40 * 0.5}


def test_the_clock_of_the_books_does_not_go_back():
    books = Books([1], 5.0)
    books.tick(6.0)

    with pytest.raises(AssertionError, match="went back"):
        books.tick(5.5)


def test_shares_of_nothing_are_unknown():
    assert shares({"wire": 0.0}) is None
    assert shares({"wire": 3.0, "input": 1.0}) == {"wire": 0.75, "input": 0.25}


def test_a_window_forgets_what_is_old():
    window = Window(10.0)

    assert window.shares(0.0, {"wire": 0.0, "input": 0.0}) is None
    assert window.shares(5.0, {"wire": 5.0, "input": 0.0}) == {"wire": 1.0, "input": 0.0}
    assert window.shares(10.0, {"wire": 5.0, "input": 5.0}) == {"wire": 0.5, "input": 0.5}
    assert window.shares(20.0, {"wire": 5.0, "input": 15.0}) == {"wire": 0.0, "input": 1.0}


def test_the_first_look_through_a_window_sees_the_whole_run():
    assert Window(10.0).shares(3.0, {"wire": 2.0, "input": 1.0}) == pytest.approx(
        {"wire": 2 / 3, "input": 1 / 3}
    )
