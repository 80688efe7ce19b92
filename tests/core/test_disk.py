"""What a full disk does to a run: nothing is sent, nothing is lost, and it goes on by itself, or ends."""

import pytest

from genpipe.core.flow import Core, FlowSettings
from genpipe.core.values import Cancel, Chunk, Commit, Measure, Read, ServerSpec, Space, Start
from tests.core.build import Steady, answer, commits, due, make_core, starts

FULL = "cannot append to part-000000.jsonl.open: no space left"
PLENTY = Space(free_bytes=1 << 40, total_bytes=1 << 41)


def refused_core(count=9, slots=(3,), **settings):
    """A core of which one of three answers met a full disk at second 1."""
    core = make_core(count, slots, **{"group_records_max": 4, "disk_wait_s": 60.0, **settings})
    running = starts(core, 0.0)
    answer(core, running[0], 1.0)
    # The slot of the answer is refilled before the disk is heard of.
    actions = core.due(1.0)
    (group,) = [action.group for action in actions if isinstance(action, Commit)]
    running = running[1:] + [action for action in actions if isinstance(action, Start)]
    core.refused(group.number, FULL, 1.0)
    core.check()
    return core, running, group


def kinds(core, now_s):
    actions = core.due(now_s)
    core.check()
    return [type(action) for action in actions]


def test_nothing_is_sent_or_written_between_the_looks_at_a_full_disk():
    core, running, _ = refused_core()
    for start in running:
        answer(core, start, 1.2)

    assert kinds(core, 1.2) == []
    assert core.paused
    assert core.disk_trouble == core.last_error == FULL
    assert core.next_timer_s() == 2.0
    assert kinds(core, 1.9) == []


def test_the_refused_group_comes_again_with_every_look_and_then_all_goes_on():
    core, running, group = refused_core()
    for start in running:
        answer(core, start, 1.2)
    for second in (2.0, 3.0, 4.0):
        (action,) = commits(core, second)
        assert action.group == group
        core.refused(group.number, FULL, second)
    (action,) = commits(core, 5.0)
    core.committed(group.number, 5.5, PLENTY)

    assert core.disk_trouble is None
    actions = core.due(5.5)
    assert [len(a.group.finished) for a in actions if isinstance(a, Commit)] == [3]
    assert len([a for a in actions if isinstance(a, Start)]) == 3
    assert (core.done, core.unsaved) == (1, 3)


def test_two_refused_groups_come_again_one_after_the_other():
    core = make_core(20, (8,), group_records_max=2)
    for start in starts(core, 0.0):
        answer(core, start, 1.0)
    first, second = [action.group for action in commits(core, 1.0)]
    core.refused(first.number, FULL, 1.1)
    core.refused(second.number, FULL, 1.1)

    assert [action.group for action in commits(core, 2.2)] == [first]
    core.committed(first.number, 2.3, PLENTY)
    assert [action.group.number for action in commits(core, 2.3)] == [second.number, 3]


def test_a_full_disk_is_booked_as_storage():
    core, running, group = refused_core(slots=(3,))
    for start in running:
        answer(core, start, 1.0)
    core.due(1.0)
    core.due(2.0)
    core.committed(group.number, 11.0, PLENTY)
    core.books.tick(11.0)

    assert core.books.owned_by_all_s()["storage"] == pytest.approx(30.0)


def test_where_the_answers_fill_the_memory_requests_are_called_off_and_sent_again_once_their_slots_are_free():
    core, running, group = refused_core(slots=(3,), backlog_bytes_max=500)
    answer(core, running[0], 1.2, size_bytes=2000)
    cancels = due(core, 1.2, Cancel)
    assert [cancel.attempt for cancel in cancels] == [start.attempt for start in running[1:]]
    for start in running[1:]:
        core.cancelled(start, 1.3)
    core.check()
    assert core.returned == 0

    commits(core, 2.0)
    core.committed(group.number, 2.0, PLENTY)
    (action,) = commits(core, 2.0)
    core.committed(action.group.number, 2.0, PLENTY)
    again = starts(core, 2.0)
    assert len(again) == 1
    again += starts(core, 5.3)
    assert {start.prompt.index for start in again[:2]} == {start.prompt.index for start in running[1:]}


def test_a_disk_that_stays_full_ends_the_run_with_what_is_unsaved_in_memory():
    core, running, group = refused_core(disk_wait_s=3.0)
    answer(core, running[0], 1.5)
    for second in (2.0, 3.0):
        commits(core, second)
        core.refused(group.number, FULL, second)
    assert not core.finished
    assert core.next_timer_s() == 4.0
    cancels = due(core, 4.0, Cancel)

    assert core.disk_gave_up
    assert core.stopping
    assert len(cancels) == len(running) - 1
    for start in running[1:]:
        core.cancelled(start, 4.0)
    assert core.finished
    assert not core.complete
    assert [len(g.finished) for g in core.unsaved_groups() if core.committed(g.number, 4.0) is None] == [1, 1]


def test_the_end_of_the_input_does_not_end_a_run_that_is_not_saved():
    core = make_core(1, disk_wait_s=5.0)
    (start,) = starts(core, 0.0)
    answer(core, start, 1.0)
    (action,) = commits(core, 1.0)
    core.refused(action.group.number, FULL, 1.0)

    assert not core.finished
    (action,) = commits(core, 2.0)
    core.committed(action.group.number, 2.0, PLENTY)
    assert core.finished
    assert core.complete


def test_a_stop_on_a_full_disk_ends_with_its_grace():
    core, running, group = refused_core()
    core.stop(1.5, grace_s=3.0)
    for start in running:
        answer(core, start, 1.6)

    assert commits(core, 1.7) == []
    assert not core.finished
    (action,) = commits(core, 2.0)
    assert action.group == group
    core.refused(group.number, FULL, 2.0)
    assert core.next_timer_s() == 3.0
    commits(core, 3.0)
    core.refused(group.number, FULL, 3.0)
    commits(core, 4.0)
    core.refused(group.number, FULL, 4.0)
    assert core.next_timer_s() == 4.5
    core.due(4.5)
    assert core.finished
    assert not core.disk_gave_up


def test_a_slow_commit_on_a_full_disk_makes_no_timer_of_the_past():
    core, running, group = refused_core()
    core.stop(1.5, grace_s=0.0)
    for start in running:
        core.cancelled(start, 1.5)
    core.due(1.5)
    commits(core, 2.0)

    for now_s in (2.0, 2.5, 4.0, 9.0):
        core.due(now_s)
        due_s = core.next_timer_s()
        assert due_s is None or due_s > now_s
        assert not core.finished
    core.refused(group.number, FULL, 9.0)
    assert core.finished


@pytest.mark.parametrize("refused", [False, True])
def test_giving_up_leaves_requests_their_grace_only_where_their_answers_could_be_saved(refused):
    if refused:
        core, _, _ = refused_core(disk_wait_s=3.0, grace_s=20.0)
        commits(core, 3.0)
        core.refused(1, FULL, 3.0)
    else:
        core, _ = low_core(free_bytes=1, disk_wait_s=3.0, grace_s=20.0)
        core.due(3.0)
        core.measured(Space(free_bytes=1, total_bytes=1 << 40), 3.0)

    assert bool(due(core, 4.0, Cancel)) == refused
    assert core.disk_gave_up
    assert bool(due(core, 23.9, Cancel)) is False
    assert bool(due(core, 24.0, Cancel)) != refused


def test_a_stop_with_a_long_grace_does_not_wait_for_longer_than_the_disk_is_waited_for():
    core, running, group = refused_core(disk_wait_s=3.0)
    core.stop(1.5, grace_s=3600.0)
    for start in running:
        answer(core, start, 1.6)
    for second in (2.0, 3.0):
        commits(core, second)
        core.refused(group.number, FULL, second)
    core.due(4.0)

    assert core.finished


def test_a_run_that_has_nothing_to_send_ends_though_the_disk_is_short():
    core = Core(FlowSettings(), [ServerSpec(url="http://s", limit=2)], Steady(), 0.0)
    core.measured(Space(free_bytes=1, total_bytes=1 << 40), 0.0)
    assert core.disk_trouble is not None
    assert kinds(core, 0.0) == [Read]
    core.offered(Chunk(prompts=(), exhausted=True), 0.1)

    assert core.finished
    assert core.complete


def test_a_disk_that_does_not_tell_its_size_is_believed_to_have_room():
    core, _ = low_core(free_bytes=0, total_bytes=0)

    assert core.disk_trouble is None


def low_core(*, free_bytes, total_bytes=1 << 40, answer_bytes=1_000_000, **settings):
    """A core with 10 slots, whose first answer is durable; the disk then has so much left."""
    core = make_core(50, (10,), disk_reserve_bytes=5_000_000, **settings)
    running = starts(core, 0.0)
    answer(core, running[0], 1.0, size_bytes=answer_bytes)
    actions = core.due(1.0)
    (group,) = [action.group for action in actions if isinstance(action, Commit)]
    running = running[1:] + [action for action in actions if isinstance(action, Start)]
    core.committed(group.number, 1.0, Space(free_bytes=free_bytes, total_bytes=total_bytes))
    return core, running


def test_nothing_more_is_sent_once_what_is_under_way_would_fill_the_disk():
    """Ten answers of about a megabyte, twice, one as large as the largest, and the reserve: 26 MB."""
    core, running = low_core(free_bytes=25_900_000)

    assert "26.0 MB are to be free" in core.disk_trouble
    assert kinds(core, 1.0) == []
    for start in running:
        answer(core, start, 1.5, size_bytes=1_000_000)
    # What had been sent is saved as ever: that is what the room is for.
    while found := commits(core, 1.6):
        for action in found:
            core.committed(action.group.number, 1.6, Space(free_bytes=15_900_000, total_bytes=1 << 40))
    assert core.unsaved == 0
    assert kinds(core, 1.9) == []
    assert core.next_timer_s() == pytest.approx(2.6)
    assert kinds(core, 2.6) == [Measure]
    core.measured(PLENTY, 2.7)
    assert core.disk_trouble is None
    assert len(starts(core, 2.7)) == 10


def test_a_little_more_room_is_enough():
    core, _ = low_core(free_bytes=26_100_000)

    assert core.disk_trouble is None


def test_of_a_small_disk_a_twentieth_is_kept_free():
    assert low_core(free_bytes=2_000, total_bytes=20_000, answer_bytes=10)[0].disk_trouble is None
    assert low_core(free_bytes=900, total_bytes=20_000, answer_bytes=10)[0].disk_trouble is not None


def test_a_disk_that_stays_low_ends_the_run_too():
    core, running = low_core(free_bytes=1, disk_wait_s=2.0)
    for start in running:
        answer(core, start, 1.5)
    (action,) = commits(core, 1.5)
    core.committed(action.group.number, 1.5, Space(free_bytes=1, total_bytes=1 << 40))
    core.due(2.5)
    core.measured(Space(free_bytes=1, total_bytes=1 << 40), 2.5)
    core.due(3.0)

    assert core.disk_gave_up
    assert core.finished
    assert core.unsaved == 0
