"""The driver with servers that fall silent, break, and come and go; on a loop of virtual time."""

import asyncio
import itertools

import pytest

from genpipe.core.errors import FaultKind, ServerFault
from genpipe.core.values import Checkup, Vitals
from tests.driver.fakes import FakeStore
from tests.driver.rig import Rig
from tests.driver.virtual import VirtualClock, run_virtual

NEVER_S = 1e6


def only_at(server, latency_s, else_s=1.0):
    """One server takes so long, all others a second."""
    return lambda start: latency_s if start.server == server else else_s


# ---- silent servers ----


@pytest.mark.parametrize("vitals", [Vitals(trouble="reset"), Vitals(known=3, mark="1700")])
def test_what_a_silent_server_had_is_called_off_and_answered_by_another(vitals):
    async def main(loop):
        rig = Rig(
            loop,
            count=30,
            limits=(3, 2),
            latency_s=only_at(0, NEVER_S),
            vitals=lambda server: vitals,
            trouble=lambda server: "unwell",
            settings={"hedge": False},
        )
        await rig.driver.run()
        rig.check_saved()
        return rig, loop.time()

    rig, ended_s = run_virtual(main)

    assert rig.core.complete
    assert sorted(rig.store.done) == list(range(30))
    assert 60.0 < ended_s < 75.0
    assert {inquire.server for inquire in rig.transport.inquiries} == {0}
    assert rig.core.fleet.servers[0].faults[FaultKind.STALLED] == 3


def test_a_server_that_works_on_keeps_a_request_of_seven_minutes():
    async def main(loop):
        marks = itertools.count()
        rig = Rig(
            loop,
            count=2,
            limits=(1, 1),
            latency_s=lambda start: 420.0,
            vitals=lambda server: Vitals(known=1, mark=str(next(marks))),
        )
        await rig.driver.run()
        rig.check_saved()
        return rig, loop.time()

    rig, ended_s = run_virtual(main)

    assert ended_s < 421.0
    assert [what for what, _ in rig.transport.log].count("sent") == 2


def silent(loop, latency_s):
    """One request to a server that is silent: it answers after so long, or is sent again."""
    return Rig(
        loop,
        count=1,
        limits=(1, 1),
        latency_s=lambda start: latency_s if start.tries == 1 else 1.0,
        vitals=lambda server: Vitals(trouble="reset"),
        settings={"hedge": False},
    )


def the_moment_it_is_called_off():
    async def main(loop):
        rig = silent(loop, NEVER_S)
        called_off_s = []
        call_off = rig.core._flights.call_off

        def noted(flight, fault):
            called_off_s.append(loop.time())
            call_off(flight, fault)

        rig.core._flights.call_off = noted
        await rig.driver.run()
        return called_off_s[0]

    return run_virtual(main)


@pytest.mark.parametrize("off_s", [-1e-10, 0.0, 1e-10])
def test_an_answer_that_comes_in_the_turn_of_the_loop_in_which_it_is_called_off_is_kept(off_s):
    moment_s = the_moment_it_is_called_off()

    async def main(loop):
        rig = silent(loop, moment_s + off_s)
        await rig.driver.run()
        rig.check_saved()
        return rig, loop.time()

    rig, ended_s = run_virtual(main)

    assert ended_s == pytest.approx(moment_s, abs=0.1)
    assert [what for what, _ in rig.transport.log] == ["sent", "came", "examined"]
    assert rig.core.late == 0


def test_an_answer_that_would_have_come_a_millisecond_later_is_not_waited_for():
    moment_s = the_moment_it_is_called_off()

    async def main(loop):
        rig = silent(loop, moment_s + 0.001)
        await rig.driver.run()
        rig.check_saved()
        return rig

    rig = run_virtual(main)

    assert [what for what, _ in rig.transport.log] == ["sent", "sent", "came", "examined"]


def test_an_inquiry_under_way_does_not_hold_up_the_end():
    """It began at 10 s and would take ten more; the answer comes at 15 s."""

    async def main(loop):
        rig = Rig(loop, count=1, limits=(1,), latency_s=lambda start: 15.0, inquire_s=NEVER_S)
        await rig.driver.run()
        rig.check_saved()
        return len(rig.transport.inquiries), loop.time()

    inquiries, ended_s = run_virtual(main)

    assert inquiries == 1
    assert ended_s < 15.1


def test_helpers_that_have_ended_are_forgotten():
    async def main(loop):
        marks = itertools.count()
        rig = Rig(
            loop,
            count=1,
            limits=(1,),
            latency_s=lambda start: 300.0,
            vitals=lambda server: Vitals(known=1, mark=str(next(marks))),
        )
        loop.call_later(299.0, lambda: sizes.append(len(rig.driver._helpers)))
        await rig.driver.run()
        return len(rig.transport.inquiries)

    sizes: list[int] = []

    assert run_virtual(main) >= 25
    assert sizes == [0]


def test_a_bug_in_an_inquiry_ends_the_run_as_a_bug():
    async def main(loop):
        rig = Rig(loop, count=5, limits=(1, 1), latency_s=only_at(0, NEVER_S), vitals=lambda server: 1 // 0)
        with pytest.raises(ExceptionGroup) as caught:
            await rig.driver.run()
        assert caught.group_contains(ZeroDivisionError)
        rig.check_saved()

    run_virtual(main)


# ---- the tail ----


def test_in_the_tail_the_late_ones_are_asked_elsewhere_too_and_recorded_once():
    async def main(loop):
        slow = {37, 38, 39}
        rig = Rig(
            loop,
            count=40,
            limits=(4, 4),
            latency_s=lambda start: NEVER_S if start.prompt.index in slow and start.tries == 1 else 1.0,
        )
        await rig.driver.run()
        rig.check_saved()
        return rig, loop.time()

    rig, ended_s = run_virtual(main)

    assert sorted(rig.store.done) == list(range(40))
    assert rig.core.hedging.count == 3
    assert ended_s < 12.0


@pytest.mark.parametrize("apart_s", [-0.3, 0.0, 1e-10, 0.3])
def test_two_answers_to_one_prompt_make_one_record_however_close_they_come(apart_s):
    async def main(loop):
        clock = VirtualClock(loop)
        at_s = {}

        def latency_s(start):
            if start.prompt.index != 39:
                return 1.0
            at_s[start.tries] = clock.now_s()
            # Both attempts end at 20 s, or nearly so.
            return 20.0 - clock.now_s() + (apart_s if start.tries == 1 else 0.0)

        rig = Rig(loop, count=40, limits=(4, 4), latency_s=latency_s)
        await rig.driver.run()
        rig.check_saved()
        return rig, len(at_s)

    rig, attempts = run_virtual(main)

    assert attempts == 2
    assert sorted(rig.store.done) == list(range(40))
    assert len(rig.transport.came) == 40 + rig.core.late
    assert rig.core.late == (1 if abs(apart_s) < 0.1 else 0)


def test_without_hedging_a_slow_answer_is_waited_for():
    async def main(loop):
        marks = itertools.count()
        rig = Rig(
            loop,
            count=40,
            limits=(4, 4),
            latency_s=lambda start: 500.0 if start.prompt.index == 39 else 1.0,
            vitals=lambda server: Vitals(known=1, mark=str(next(marks))),
            settings={"hedge": False},
        )
        await rig.driver.run()
        rig.check_saved()
        return rig.core.hedging.count, loop.time()

    count, ended_s = run_virtual(main)

    assert count == 0
    assert ended_s > 500.0


# ---- limits that change, servers that come and go ----


def most_open(rig):
    """By server, the most requests that were ever open at once; measured as they are sent."""
    most: dict[int, int] = {}
    latency_s = rig.transport._latency_s

    def noted(start):
        count = sum(other.server == start.server for other in rig.transport.open.values())
        most[start.server] = max(most.get(start.server, 0), count)
        return latency_s(start)

    rig.transport._latency_s = noted
    return most


def test_a_limit_that_is_raised_while_running_is_used_at_once():
    async def main(loop):
        rig = Rig(loop, count=100, limits=(2,), latency_s=lambda start: 10.0)
        most = most_open(rig)
        loop.call_later(5.0, rig.driver.set_limit, "http://s0", 50)
        await rig.driver.run()
        rig.check_saved()
        return most, loop.time()

    most, ended_s = run_virtual(main)

    assert most == {0: 50}
    # 2 of 100 in the first ten seconds, 50 at a time from the fifth on.
    assert ended_s < 30.0


def test_a_server_that_joins_while_running_is_looked_at_and_used():
    async def main(loop):
        rig = Rig(loop, count=100, limits=(2,))
        most = most_open(rig)
        loop.call_later(5.0, rig.driver.set_limit, "http://new", 8)
        await rig.driver.run()
        rig.check_saved()
        return rig, most, loop.time()

    rig, most, ended_s = run_virtual(main)

    assert [probe.server for probe in rig.transport.probes] == [1]
    assert most == {0: 2, 1: 8}
    assert ended_s < 20.0


def test_a_server_that_leaves_while_running_gets_nothing_more_and_what_it_has_is_kept():
    async def main(loop):
        rig = Rig(loop, count=60, limits=(4, 4), latency_s=lambda start: 3.0, settings={"hedge": False})
        sent_s: list[float] = []
        latency_s = rig.transport._latency_s

        def noted(start):
            if start.server == 0:
                sent_s.append(loop.time())
            return latency_s(start)

        rig.transport._latency_s = noted
        loop.call_later(7.0, rig.driver.set_limit, "http://s0", 0)
        await rig.driver.run()
        rig.check_saved()
        return rig, sent_s

    rig, sent_s = run_virtual(main)

    assert max(sent_s) <= 7.0
    assert len(sent_s) == rig.core.fleet.servers[0].answers
    assert rig.core.complete


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_changed_while_running_every_prompt_is_durable_once(seed):
    async def main(loop):
        rig = Rig.from_seed(loop, seed)
        for number in range(8):
            url = f"http://s{(seed + number) % 4}"
            loop.call_later(0.7 * number + 0.3, rig.driver.set_limit, url, (number * 5 + seed) % 6 + 1)
        loop.call_later(8.0, rig.driver.set_limit, "http://s0", 0)
        loop.call_later(9.0, rig.driver.set_limit, "http://s0", 3)
        await rig.driver.run()
        for timer in loop.timers():
            timer.cancel()
        rig.check_saved()
        return rig

    rig = run_virtual(main)

    assert rig.core.complete
    assert len(rig.store.done) + len(rig.store.failed) == rig.source.total


def test_a_mistake_in_a_change_ends_the_run_and_not_only_the_change():
    """A server that was never there cannot leave: whoever asks for that has a bug."""

    async def main(loop):
        rig = Rig(loop, count=40)
        loop.call_later(3.5, rig.driver.set_limit, "http://nobody", -1)
        with pytest.raises(ExceptionGroup) as caught:
            await rig.driver.run()
        assert caught.group_contains(AssertionError)
        for timer in loop.timers():
            timer.cancel()
        rig.check_saved()

    run_virtual(main)


# ---- what is said ----


def down_until(clock, until_s):
    """All servers are unreachable from 3 s on until then."""
    return {
        "fault": lambda start: (
            ServerFault("refused", kind=FaultKind.UNREACHABLE) if 3.0 < clock.now_s() < until_s else None
        ),
        "trouble": lambda server: (
            Checkup(trouble="refused", refused=True) if clock.now_s() < until_s else None
        ),
    }


def test_an_outage_is_noted_and_so_is_its_end_and_the_run_goes_on_by_itself():
    async def main(loop):
        rig = Rig(loop, count=100, limits=(3, 3), **down_until(VirtualClock(loop), 40.0))
        await rig.driver.run()
        rig.check_saved()
        return rig, loop.time()

    rig, ended_s = run_virtual(main)

    begins, ends = rig.reporter.notes
    assert begins.startswith("no server can be used")
    assert "http://s" in begins
    assert ends.endswith("going on")
    assert rig.core.complete
    assert len(rig.store.done) == 100
    assert ended_s < 80.0


def test_an_outage_that_lasts_too_long_ends_the_run_with_everything_that_came():
    async def main(loop):
        rig = Rig(
            loop,
            count=100,
            limits=(3, 3),
            settings={"give_up_s": 30.0},
            **down_until(VirtualClock(loop), 1e9),
        )
        await rig.driver.run()
        rig.check_saved()
        return rig, loop.time()

    rig, ended_s = run_virtual(main)

    assert rig.core.refusal == "retry.give_up_s: no server could be used for 30 s (http://s0: refused)"
    assert 33.0 < ended_s < 36.0
    assert len(rig.store.done) >= 12
    assert rig.store.failed == set()
    assert not rig.core.complete


def test_a_server_that_serves_another_model_is_named_once():
    async def main(loop):
        rig = Rig(
            loop,
            count=60,
            limits=(1,),
            trouble=lambda server: (
                Checkup(trouble="serves b, this run is of a", alien=True) if server else None
            ),
        )
        loop.call_later(1.5, rig.driver.set_limit, "http://new", 4)
        await rig.driver.run()
        rig.check_saved()
        return rig

    rig = run_virtual(main)

    assert len(rig.transport.probes) > 3
    assert [note for note in rig.reporter.notes if "serves b" in note] == [
        "warning: http://new serves b, this run is of a"
    ]
    assert rig.core.fleet.servers[1].answers == 0


# ---- stops and cancels in the midst of it ----


@pytest.mark.parametrize("after_s", [0.5, 9.99, 10.005, 61.0, 70.0, 130.0])
@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_however_it_ends_amid_silent_servers_and_second_attempts_every_answer_is_kept(how, after_s):
    async def main(loop):
        rig = Rig(
            loop,
            count=300,
            limits=(3, 3, 1),
            store=FakeStore(0.5),
            latency_s=lambda start: NEVER_S if start.server == 0 or start.prompt.index > 290 else 1.0,
            vitals=lambda server: Vitals(trouble="reset"),
        )
        task = asyncio.ensure_future(rig.driver.run())
        await asyncio.sleep(after_s)
        if how == "stop":
            rig.driver.stop(0.0)
            await task
        else:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        rig.check_saved()
        assert loop.time() < after_s + 3.0

    run_virtual(main)
