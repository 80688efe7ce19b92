"""The driver on a loop of virtual time: order, and that however a run ends, what had come is durable."""

import asyncio
import itertools

import pytest

from genpipe.core.errors import (
    ConfigError,
    DiskFull,
    FaultKind,
    ResumeMismatch,
    ServerFault,
    StoreError,
)
from genpipe.core.values import Space
from genpipe.driver import finish
from tests.driver.fakes import FakeStore
from tests.driver.rig import Rig
from tests.driver.virtual import VirtualClock, run_virtual

MOMENTS_S = [0.0, 0.001, 0.05, 0.6, 1.0, 3.0, 7.7, 31.0]


async def run_and_cancel(rig, *after_s):
    task = asyncio.ensure_future(rig.driver.run())
    for pause_s in after_s:
        await asyncio.sleep(pause_s)
        task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


# ---- a full disk ----


@pytest.mark.parametrize("seed", range(10))
def test_a_run_waits_on_a_full_disk_and_goes_on_by_itself(seed):
    async def main(loop):
        rig = Rig.from_seed(loop, seed)
        rig.store.trouble = {number: DiskFull("no room") for number in (0, 2, 3, 4)}
        await rig.driver.run()
        rig.check_saved()
        return rig

    rig = run_virtual(main)

    assert rig.core.complete
    assert len(rig.store.done) + len(rig.store.failed) == rig.source.total
    told = [text for text in rig.reporter.notes if "room" in text]
    assert len(told) >= 4
    assert all(text.startswith("no room. Nothing more is sent") for text in told[::2])
    assert all(text == "the disk has room again: going on" for text in told[1::2])


def test_a_disk_that_stays_full_ends_the_run_and_says_how_many_answers_are_not_on_it():
    async def main(loop):
        rig = Rig(loop, count=50, limits=(4,), settings={"disk_wait_s": 30.0})
        rig.store.trouble = {number: DiskFull("no room") for number in range(1, 999)}
        with pytest.raises(DiskFull, match=r"no room. \d+ prompts that had ended are not on disk") as caught:
            await rig.driver.run()
        return rig, loop.time(), str(caught.value)

    rig, ended_s, told = run_virtual(main)

    assert 30.0 <= ended_s < 33.0
    assert f" {rig.core.unsaved} prompts" in told
    assert 0 < rig.core.unsaved == len(rig.transport.came) - len(rig.store.done)
    assert len(rig.transport.came) < 50


def test_a_disk_that_stays_short_of_room_ends_the_run_with_all_answers_on_it():
    async def main(loop):
        rig = Rig(loop, count=50, limits=(4,), settings={"disk_wait_s": 30.0})
        rig.store.room = Space(free_bytes=10, total_bytes=1 << 40)
        with pytest.raises(DiskFull, match="no room for 30 s; all answers that had come are on it"):
            await rig.driver.run()
        rig.check_saved()
        return rig

    rig = run_virtual(main)

    assert rig.transport.log == []


def test_a_run_whose_disk_has_room_later_begins_then():
    async def main(loop):
        rig = Rig(loop, count=50, limits=(4,), settings={"disk_wait_s": 30.0})
        enough, rig.store.room = rig.store.room, Space(free_bytes=10, total_bytes=1 << 40)
        loop.call_later(12.5, lambda: setattr(rig.store, "room", enough))
        await rig.driver.run()
        rig.check_saved()
        return rig, loop.time()

    rig, ended_s = run_virtual(main)

    assert rig.core.complete
    assert ended_s >= 13.0
    assert len(rig.reporter.notes) == 2


# ---- a run that goes well ----


@pytest.mark.parametrize("seed", range(30))
def test_a_run_ends_with_every_prompt_durable(seed):
    async def main(loop):
        rig = Rig.from_seed(loop, seed)
        await rig.driver.run()
        rig.check_saved()
        return rig

    rig = run_virtual(main)

    assert rig.core.complete
    assert len(rig.store.done) + len(rig.store.failed) == rig.source.total


def test_an_empty_input_ends_at_once():
    async def main(loop):
        rig = Rig(loop, count=0)
        await rig.driver.run()
        return loop.time()

    assert run_virtual(main) == 0.0


def test_the_slot_is_refilled_before_the_reply_is_looked_at():
    async def main(loop):
        rig = Rig(loop, count=3, limits=(1,))
        await rig.driver.run()
        return rig.transport.log

    log = run_virtual(main)

    assert log == [
        ("sent", 0), ("came", 0), ("sent", 1), ("examined", 0), ("came", 1), ("sent", 2), ("examined", 1),
        ("came", 2), ("examined", 2),
    ]  # fmt: skip


def test_all_slots_whose_replies_come_at_once_are_refilled_before_any_reply_is_looked_at():
    async def main(loop):
        rig = Rig(loop, count=8, limits=(4,))
        await rig.driver.run()
        return [what for what, _ in rig.transport.log]

    what = run_virtual(main)

    assert what[4:8] == ["came"] * 4
    assert what[8:16] == ["sent"] * 4 + ["examined"] * 4


def test_there_is_one_timer_in_all():
    async def main(loop):
        rig = Rig.from_seed(loop, 3)
        most = 0

        def fault(start, fault=rig.transport._fault):
            nonlocal most
            timers = [timer for timer in loop.timers() if timer._callback == rig.driver._step]
            most = max(most, len(timers))
            return fault(start)

        rig.transport._fault = fault
        await rig.driver.run()
        return most

    assert run_virtual(main) == 1


def test_waiting_costs_no_turns_of_the_loop():
    """A minute without news is a report a second and no more."""

    async def main(loop):
        rig = Rig(loop, count=1, limits=(1,), latency_s=lambda start: 60.0)
        turns = 0
        select = loop._selector.select

        def counted(timeout=None):
            nonlocal turns
            turns += 1
            return select(timeout)

        loop._selector.select = counted
        await rig.driver.run()
        return turns

    assert run_virtual(main) < 250


def test_the_reporter_is_told_once_a_second_also_while_nothing_moves():
    async def main(loop):
        rig = Rig(loop, count=1, latency_s=lambda start: 30.0)
        await rig.driver.run()
        return rig.reporter.times_s

    times_s = run_virtual(main)

    assert len(times_s) == pytest.approx(30, abs=1)
    assert all(1.0 <= later - earlier < 1.01 for earlier, later in itertools.pairwise(times_s))


def test_a_probe_under_way_does_not_hold_up_the_end():
    """Server 1 is benched and its probe hangs; server 0 finishes the work, and the run is over."""

    async def main(loop):
        rig = Rig(
            loop,
            count=30,
            limits=(2, 3),
            fault=lambda start: ServerFault("x", kind=FaultKind.UNREACHABLE) if start.server else None,
            probe_s=10_000.0,
        )
        await rig.driver.run()
        rig.check_saved()
        return loop.time()

    assert run_virtual(main) < 30.0


def test_a_benched_server_is_probed_and_comes_back():
    async def main(loop):
        clock = VirtualClock(loop)
        rig = Rig(
            loop,
            count=100,
            limits=(3,),
            fault=lambda start: (
                ServerFault("x", kind=FaultKind.UNREACHABLE) if clock.now_s() < 20.0 else None
            ),
            trouble=lambda server: "refused" if clock.now_s() < 20.0 else None,
        )
        await rig.driver.run()
        rig.check_saved()
        return loop.time()

    assert run_virtual(main) < 75.0


# ---- cancelled from outside ----


@pytest.mark.parametrize("after_s", MOMENTS_S)
@pytest.mark.parametrize("seed", range(25))
def test_a_cancelled_run_keeps_every_answer(seed, after_s):
    async def main(loop):
        rig = Rig.from_seed(loop, seed)
        began = loop.time()
        cancelled = await run_and_cancel(rig, after_s)
        assert cancelled or rig.core.complete
        # The commit under way is carried to its end, and what is held after it.
        assert not cancelled or loop.time() - began <= after_s + 1.0 * (2 + len(rig.store.groups))
        if after_s:
            rig.check_saved()

    run_virtual(main)


@pytest.mark.parametrize("seed", range(15))
def test_nothing_is_sent_once_a_run_is_cancelled(seed):
    async def main(loop):
        rig = Rig.from_seed(loop, seed)
        task = asyncio.ensure_future(rig.driver.run())
        await asyncio.sleep(2.5)
        task.cancel()
        sent = len(rig.transport.log)
        await asyncio.wait({task})
        rig.check_saved()
        return [what for what, _ in rig.transport.log[sent:]]

    assert "sent" not in run_virtual(main)


@pytest.mark.parametrize("again_s", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("seed", range(10))
def test_cancelling_again_and_again_does_not_interrupt_the_last_commits(seed, again_s):
    async def main(loop):
        rig = Rig.from_seed(loop, seed)
        rig.store._commit_s = 1.0
        await run_and_cancel(rig, 4.1, again_s, again_s, again_s)
        rig.check_saved()

    run_virtual(main)


def test_a_cancel_during_a_commit_lets_it_end_and_goes_through():
    async def main(loop):
        rig = Rig(loop, count=2, store=FakeStore(commit_s=10.0))
        assert await run_and_cancel(rig, 5.0)
        rig.check_saved()
        return loop.time(), sorted(rig.store.done)

    time_s, done = run_virtual(main)

    assert time_s == pytest.approx(11.0, abs=0.1)
    assert done == [0, 1]


def test_a_cancel_while_a_commit_fails_shows_the_failure():
    async def main(loop):
        rig = Rig(loop, count=4, limits=(2,), store=FakeStore(commit_s=10.0))
        rig.store.trouble[0] = StoreError("disk gone")
        with pytest.raises(StoreError, match="disk gone"):
            await run_and_cancel(rig, 5.0)
        return rig.store.groups

    assert run_virtual(main) == []


# ---- stopped ----


@pytest.mark.parametrize("grace_s", [0.0, 0.7, 50.0])
@pytest.mark.parametrize("after_s", MOMENTS_S)
@pytest.mark.parametrize("seed", range(6))
def test_a_stopped_run_ends_in_time_and_keeps_every_answer(seed, after_s, grace_s):
    async def main(loop):
        rig = Rig.from_seed(loop, seed)
        loop.call_later(after_s, rig.driver.stop, grace_s)
        sent = []
        loop.call_later(after_s + 1e-6, lambda: sent.append(len(rig.transport.log)))
        await rig.driver.run()
        for timer in loop.timers():
            timer.cancel()
        rig.check_saved()
        later = [what for what, _ in rig.transport.log[sent[0] :]] if sent else []
        assert "sent" not in later
        latest_s = after_s + grace_s + 0.5 + 1.0 * (2 + len(rig.store.groups))
        assert rig.core.complete or loop.time() <= latest_s
        given_up = len(rig.store.done) + len(rig.store.failed)
        assert given_up + rig.core.returned + len(rig.core._waiting) == rig.core.offered_total

    run_virtual(main)


@pytest.mark.parametrize("again_s", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("seed", range(12))
def test_a_second_stop_ends_at_once_and_keeps_every_answer(seed, again_s):
    async def main(loop):
        rig = Rig.from_seed(loop, seed)
        task = asyncio.ensure_future(rig.driver.run())
        await asyncio.sleep(2.2)
        rig.driver.stop(1000.0)
        await asyncio.sleep(again_s)
        rig.driver.stop(0.0)
        await task
        rig.check_saved()
        assert loop.time() < 2.2 + again_s + 1.0 * (2 + len(rig.store.groups))

    run_virtual(main)


def test_a_stop_cancels_attempts_that_have_not_taken_their_first_step():
    async def main(loop):
        rig = Rig(loop, count=4, limits=(2,), latency_s=lambda start: 1000.0)
        # Called after the read has started attempts, and before those take their first step.
        rig.source.at_end_of_read = lambda: loop.call_soon(rig.driver.stop, 0.0)
        await rig.driver.run()
        rig.check_saved()
        return rig.core.returned, loop.time()

    returned, time_s = run_virtual(main)

    assert returned == 2
    assert time_s < 1.0


def test_a_stop_before_the_run_and_one_after_it_do_no_harm():
    async def main(loop):
        rig = Rig(loop)
        rig.driver.stop(0.0)
        await rig.driver.run()
        rig.driver.stop(0.0)
        rig.driver.fail(ConfigError("too late"))
        return rig.source.reads, rig.transport.log

    assert run_virtual(main) == ([], [])


def test_a_stop_during_the_last_commits_begins_nothing():
    async def main(loop):
        rig = Rig(loop, count=20, limits=(6,), store=FakeStore(1.0), settings={"group_records_max": 2})
        task = asyncio.ensure_future(rig.driver.run())
        await asyncio.sleep(1.5)
        task.cancel()
        await asyncio.sleep(0.6)
        rig.driver.stop(0.0)
        rig.driver.fail(ConfigError("too late"))
        with pytest.raises(asyncio.CancelledError):
            await task
        rig.check_saved()

    run_virtual(main)


# ---- errors ----


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("seed", range(10))
def test_a_store_error_ends_the_run_and_nothing_more_is_committed(seed, number):
    async def main(loop):
        rig = Rig.from_seed(loop, seed)
        rig.store.trouble = {number: DiskFull("no space left")}
        try:
            await rig.driver.run()
        except DiskFull:
            assert len(rig.store.groups) == number
        else:
            rig.check_saved()
        assert not rig.transport.open
        assert set(rig.store.done) <= set(rig.transport.came)
        rig.core.check()

    run_virtual(main)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("seed", range(10))
def test_an_input_that_cannot_be_read_ends_the_run_and_every_answer_is_kept(seed, number):
    async def main(loop):
        rig = Rig.from_seed(loop, seed)
        rig.source._chunk_max = 5
        rig.source.trouble = {number: ConfigError("cannot read")}
        with pytest.raises(ConfigError, match="cannot read"):
            await rig.driver.run()
        rig.check_saved()

    run_virtual(main)


@pytest.mark.parametrize("after_s", [0.0005, 0.7, 3.0])
@pytest.mark.parametrize("seed", range(8))
def test_an_error_from_outside_ends_the_run_and_every_answer_is_kept(seed, after_s):
    async def main(loop):
        rig = Rig.from_seed(loop, seed)
        loop.call_later(after_s, rig.driver.fail, ResumeMismatch("another input"))
        with pytest.raises(ResumeMismatch):
            await rig.driver.run()
        rig.check_saved()

    run_virtual(main)


def plant(bug, where, rig):
    """Let ``bug`` happen at one place of a run."""
    normal = rig.transport._fault
    match where:
        case "generate":
            rig.transport._fault = lambda start: bug if start.prompt.index == 17 else normal(start)
        case "examine":
            rig.transport.crash_in_examine = 17
            rig.transport._fault = lambda start: None
        case "probe":
            astray = ServerFault("x", kind=FaultKind.MISROUTED)
            rig.transport._fault = lambda start: astray if start.server == 0 else normal(start)
            rig.transport._trouble = lambda server: 1 // 0
        case "report":
            rig.loop.call_later(1.5, setattr, rig.reporter, "trouble", bug)
        case "read":
            rig.source._chunk_max = 3
            rig.source.trouble[1] = bug
        case "commit":
            rig.store.trouble[1] = bug
        case "core":
            rig.core.fleet.settle_gaps = lambda touched: 1 // 0


@pytest.mark.parametrize("where", ["generate", "examine", "probe", "report", "read", "commit", "core"])
@pytest.mark.parametrize("seed", range(6))
def test_a_bug_anywhere_ends_the_run_as_a_bug_and_every_answer_is_kept(seed, where):
    """Also where it happens in a step that the loop itself calls, whose error it would only log."""

    async def main(loop):
        rig = Rig.from_seed(loop, seed)
        bug = ZeroDivisionError("a bug")
        plant(bug, where, rig)
        with pytest.raises(ExceptionGroup) as caught:
            await rig.driver.run()
        assert caught.group_contains(ZeroDivisionError)
        for timer in loop.timers():
            timer.cancel()
        if where == "commit":
            assert len(rig.store.groups) == 1
        elif where == "examine":
            assert sorted(rig.store.done) == sorted(set(rig.transport.came) - {17})
        elif where == "core":
            assert rig.core.done == len(rig.store.done)
        else:
            rig.check_saved()
        assert not rig.transport.open

    run_virtual(main)


def test_two_errors_of_ours_at_once_are_told_as_the_first():
    async def main(loop):
        rig = Rig(loop)
        loop.call_later(1.5, rig.driver.fail, ResumeMismatch("first"))
        loop.call_later(1.5, rig.driver.fail, ConfigError("second"))
        with pytest.raises(ConfigError, match="first"):
            await rig.driver.run()
        rig.check_saved()

    run_virtual(main)


# ---- finish ----


def test_finish_hands_on_the_result_and_the_error():
    async def main(loop):
        assert await finish(asyncio.sleep(1.0, "result")) == "result"
        with pytest.raises(StoreError):
            await finish(failing(StoreError("x")))

    run_virtual(main)


async def failing(error, after_s=1.0):
    await asyncio.sleep(after_s)
    raise error


def test_finish_outlasts_any_number_of_cancels():
    async def main(loop):
        ended = []

        async def work():
            await asyncio.sleep(10.0)
            ended.append(loop.time())

        task = asyncio.ensure_future(finish(work()))
        for _ in range(5):
            await asyncio.sleep(1.0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return ended

    assert run_virtual(main) == [10.0]
