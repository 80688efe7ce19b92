"""No server can be used: the run says so, waits, goes on by itself, and gives up only where it is told to."""

import itertools

import pytest

from genpipe.core.errors import FaultKind
from genpipe.core.flow import Core, FlowSettings
from genpipe.core.notices import Notices
from genpipe.core.outage import PROVEN_S
from genpipe.core.settings import GuardSettings
from genpipe.core.values import Cancel, Checkup, Chunk, Commit, Probe, ServerSpec
from tests.core.build import (
    REFUSED,
    Steady,
    answer,
    bench,
    cancel,
    commit,
    due,
    fail,
    make_core,
    probed,
    probes,
    prompts,
    refuse,
    started,
    starts,
    well,
)


def out(count=50, slots=(3,), **settings):
    """A core whose only server is benched at 10 s."""
    core = make_core(count, slots, **{"silent_s": 1e6, "backoff_s": 0.01, "backoff_max_s": 0.01, **settings})
    starts(core, 0.0)
    for server in range(len(slots)):
        for start in started(core, server)[:3]:
            fail(core, start, 10.0, FaultKind.UNREACHABLE)
    core.due(10.0)
    return core


def go_on(core, until_s, checkup=REFUSED, now_s=10.0):
    """Time passes, and each look finds this; the time at which nothing more is due."""
    while True:
        for action in core.due(now_s):
            if isinstance(action, Probe):
                probed(core, action.server, checkup, now_s)
        core.check()
        next_s = core.next_timer_s()
        if next_s is None or next_s > until_s:
            return now_s
        assert next_s > now_s
        now_s = next_s


# ---- that it is one ----


def test_an_outage_begins_when_the_last_server_goes():
    core = make_core(50, (3, 3), silent_s=1e6)
    bench(core, 0, 5.0)
    core.due(5.0)
    assert core.outage.since_s is None
    assert core.outage.text(5.0) is None
    for start in started(core, 1):
        fail(core, start, 7.0, FaultKind.UNREACHABLE)
    core.due(7.0)

    assert core.outage.since_s == 7.0


def test_the_text_says_since_when_why_and_that_nothing_is_lost():
    core = out()
    assert core.outage.text(10.5) == (
        "no server can be used (http://s0: it is unreachable); all answers that came are kept, and the run "
        "goes on by itself"
    )

    assert core.outage.text(75.0).startswith("no server can be used for 1 min 05 s (http://s0: ")


def test_the_text_names_the_server_that_went_last():
    core = make_core(50, (3, 3), silent_s=1e6)
    for server, now_s in ((1, 5.0), (0, 7.0)):
        core.due(now_s)
        for start in started(core, server)[:3]:
            fail(core, start, now_s, FaultKind.UNREACHABLE)
    core.due(7.0)
    assert "http://s0" in core.outage.text(7.5)
    core = make_core(50, (3, 3), silent_s=1e6)
    for server, now_s in ((0, 5.0), (1, 7.0)):
        core.due(now_s)
        for start in started(core, server)[:3]:
            fail(core, start, now_s, FaultKind.UNREACHABLE)
    core.due(7.0)

    assert "http://s1" in core.outage.text(7.5)


def test_servers_that_only_say_that_they_are_busy_cannot_be_used():
    core = make_core(50, (1, 1), give_up_s=30.0)
    for start in starts(core, 0.0):
        fail(core, start, 0.0, FaultKind.BUSY, retry_after_s=5.0)
    core.due(0.0)
    assert core.outage.since_s == 0.0
    for _ in range(20):
        now_s = core.next_timer_s()
        core.due(now_s)
        # While one is on its way it is not known yet that it will be turned away.
        core.due(now_s + 0.1)
        for start in started(core):
            fail(core, start, now_s + 0.1, FaultKind.BUSY, retry_after_s=5.0)
        core.due(now_s + 0.1)
        if core.stopping:
            break

    # Both went for the same reason and at the same time, and the first of them is named.
    assert core.refusal == "retry.give_up_s: no server could be used for 30 s (http://s0: it is busy)"


def test_a_server_that_turned_one_away_and_works_on_others_can_be_used():
    core = make_core(50, (4,))
    fail(core, starts(core, 0.0)[0], 0.0, FaultKind.BUSY)
    core.due(0.0)

    assert core.outage.since_s is None


def test_an_answer_shows_that_a_server_which_turned_one_away_takes_prompts_again():
    core = make_core(2, (2,), backoff_s=60.0, backoff_max_s=60.0)
    first, second = starts(core, 0.0)
    fail(core, first, 0.0, FaultKind.BUSY)
    answer(core, second, 1.0)
    core.due(1.0)

    assert core.in_flight == 0
    assert core.outage.since_s is None


def test_a_run_that_has_nothing_to_send_has_no_outage():
    core = make_core(1, (1,))
    answer(core, starts(core, 0.0)[0], 1.0)
    commit(core, 1.0)
    core.fleet.bench(core.fleet.servers[0], 1.0)
    core.due(2.0)

    assert core.outage.since_s is None


def test_a_fleet_that_has_not_started_yet_is_an_outage_from_the_beginning():
    specs = [ServerSpec(url="http://s", limit=1)]
    core = Core(FlowSettings(give_up_s=60.0), specs, Steady(), 0.0, starting=[0])
    core.due(0.0)
    core.offered(Chunk(prompts=prompts(0), exhausted=True), 0.0)
    probed(core, 0, REFUSED, 0.0)
    go_on(core, 100.0, now_s=0.0)

    why = "http://s: connection refused"
    assert core.refusal == f"retry.give_up_s: no server could be used for 1 min 00 s ({why})"


# ---- that it ends ----


def test_by_default_a_run_waits_for_ever_and_goes_on_by_itself():
    core = out()
    go_on(core, 100_000.0)
    assert not core.stopping
    now_s = core.next_timer_s()
    assert len(probes(core, now_s)) == 1
    well(core, now_s + 1.0)

    assert len(starts(core, now_s + 1.0)) == 1


def test_probes_in_an_outage_are_at_most_eight_seconds_apart():
    core = out()
    at_s, now_s = [], 10.0
    while now_s < 500.0:
        now_s = core.next_timer_s()
        for probe in probes(core, now_s):
            at_s.append(now_s)
            probed(core, probe.server, REFUSED, now_s)

    assert max(later - earlier for earlier, later in itertools.pairwise(at_s)) == pytest.approx(8.0)


def test_an_outage_ends_with_an_answer():
    core = out()
    go_on(core, 30.0)
    now_s = core.next_timer_s()
    core.due(now_s)
    well(core, now_s)
    (trial,) = starts(core, now_s)
    assert core.outage.since_s == 10.0
    assert core.outage.text(now_s) is None
    answer(core, trial, now_s + 1.0)

    assert core.outage.since_s is None


def test_a_trial_that_fails_does_not_end_an_outage():
    """A server whose health says well and which answers nobody: the time goes on from its beginning."""
    core = out(give_up_s=60.0)
    now_s = 10.0
    while not core.stopping:
        for action in core.due(now_s):
            if isinstance(action, Probe):
                well(core, now_s, action.server)
        for start in starts(core, now_s):
            fail(core, start, now_s, FaultKind.UNREACHABLE)
        now_s = max(now_s + 0.01, core.next_timer_s() or 0.0)
        assert now_s < 200.0

    assert core.refusal.startswith("retry.give_up_s: no server could be used for 1 min")
    assert now_s < 80.0


def test_a_server_that_has_been_in_use_beyond_its_trial_ends_an_outage_though_its_answers_take_long():
    """Otherwise a second outage, minutes later, would be counted from the beginning of the first."""
    core = out(give_up_s=60.0)
    core.due(10.5)
    well(core, 11.0)
    assert len(starts(core, 11.0)) == 1
    core.due(16.0)
    core.due(17.0)
    assert core.outage.since_s is None
    for start in started(core):
        fail(core, start, 300.0, FaultKind.UNREACHABLE)
    for now_s in (300.0, 300.1):
        for start in starts(core, now_s):
            fail(core, start, now_s, FaultKind.UNREACHABLE)
    core.due(301.0)

    assert not core.stopping


@pytest.mark.parametrize(("used_s", "since_s"), [(PROVEN_S - 0.1, 10.0), (PROVEN_S, 11.0 + PROVEN_S)])
def test_a_server_has_to_be_used_for_a_while_before_its_next_absence_is_another_outage(used_s, since_s):
    core = out()
    core.due(10.5)
    well(core, 11.0)
    core.due(11.0)
    for start in started(core):
        fail(core, start, 11.0 + used_s, FaultKind.MISROUTED)
    core.due(11.0 + used_s)

    assert core.outage.text(11.0 + used_s) is not None
    assert core.outage.since_s == since_s


# ---- giving up ----


def test_after_the_time_that_is_set_the_run_stops_and_everything_that_came_is_kept():
    core = make_core(50, (4,), give_up_s=120.0, silent_s=1e6)
    found = starts(core, 0.0)
    for start in found[:3]:
        fail(core, start, 10.0, FaultKind.UNREACHABLE)
    core.due(10.0)
    assert go_on(core, 129.9) < 130.0
    assert not core.stopping
    assert core.next_timer_s() == 130.0
    assert due(core, 130.0, Cancel) == [Cancel(attempt=found[3].attempt)]
    cancel(core, found[3], 130.0)

    assert core.refusal == (
        "retry.give_up_s: no server could be used for 2 min 00 s (http://s0: connection refused)"
    )
    assert core.finished
    assert not core.complete
    assert core.gave_up == 0


def test_the_time_that_is_set_begins_anew_with_each_outage():
    core = out(give_up_s=60.0)
    go_on(core, 60.0)
    now_s = core.next_timer_s()
    core.due(now_s)
    well(core, now_s)
    (trial,) = starts(core, now_s)
    answer(core, trial, now_s)
    for start in starts(core, now_s):
        fail(core, start, now_s, FaultKind.UNREACHABLE)
    go_on(core, now_s + 59.0, now_s=now_s)

    assert not core.stopping
    go_on(core, now_s + 61.0, now_s=now_s + 59.5)
    assert core.stopping


# ---- notices ----


def test_an_outage_is_told_once_when_it_begins_and_once_when_it_is_over():
    core, notices = out(), Notices()
    (begins,) = notices.due(core, 10.5)
    assert begins == core.outage.text(10.5)
    assert notices.due(core, 11.5) == []
    core.due(10.5)
    well(core, 12.0)
    (trial,) = starts(core, 12.0)
    assert notices.due(core, 12.5) == []
    answer(core, trial, 13.0)

    assert notices.due(core, 13.5) == ["a server can be used again: going on"]
    assert notices.due(core, 14.5) == []


def test_an_outage_that_is_over_before_anybody_looks_is_not_told():
    core, notices = out(), Notices()
    core.due(10.5)
    well(core, 10.6)
    (trial,) = starts(core, 10.6)
    assert notices.due(core, 10.7) == []
    answer(core, trial, 10.8)

    assert notices.due(core, 11.0) == []


def test_the_same_thing_is_said_once():
    notices = Notices()

    assert notices.once("http://a serves another model") == ["warning: http://a serves another model"]
    assert notices.once("http://a serves another model") == []
    assert notices.once("http://b serves another model") == ["warning: http://b serves another model"]


def test_a_bound_that_is_passed_is_told_once_and_again_when_it_is_passed_again():
    guards = GuardSettings(refused_after=99, after=2, window=4, failed_share_max=0.5, on_failed="warn")
    core = make_core(100, (100,), guards=guards)
    notices = Notices()
    found = starts(core, 0.0)
    for start in found[:3]:
        refuse(core, start, 0.0)
    (warning,) = notices.due(core, 1.0)
    assert warning.startswith("warning: guards.failed_share: 3 of the last 3 prompts")
    refuse(core, found[3], 1.0)
    assert notices.due(core, 2.0) == []
    for start in found[4:8]:
        answer(core, start, 2.0)
    assert notices.due(core, 3.0) == []
    for start in found[8:11]:
        refuse(core, start, 3.0)

    assert len(notices.due(core, 4.0)) == 1
    assert not core.stopping


# ---- guards that stop a run ----


def test_a_bound_that_is_passed_by_prompts_that_were_called_off_stops_the_run_too():
    """The last events of such a run are cancels; it does not end as if all were well."""
    core = make_core(
        3,
        (3, 1),
        prompt_attempts=1,
        stall_s=10.0,
        backoff_s=0.01,
        backoff_max_s=0.01,
        guards=GuardSettings(refused_after=99, after=1, failed_share_max=0.1),
    )
    now_s = 0.0
    while not core.finished:
        for action in core.due(now_s):
            match action:
                case Probe(server=server, ask=ask):
                    core.probed(server, Checkup(asked=ask), now_s)
                case Commit(group=group):
                    core.committed(group.number, now_s)
                case Cancel(attempt=attempt):
                    (called_off,) = [start for start in started(core) if start.attempt == attempt]
                    cancel(core, called_off, now_s)
        now_s = max(now_s + 0.01, core.next_timer_s() or 0.0)
        assert now_s < 500.0

    assert core.gave_up >= 1
    assert core.refusal is not None
    assert core.refusal.startswith("guards.failed_share: ")


def test_a_bound_that_is_passed_by_deaths_stops_the_run_too():
    core = make_core(
        1,
        (1, 1, 1),
        backoff_s=0.01,
        backoff_max_s=0.01,
        guards=GuardSettings(refused_after=99, after=1, failed_share_max=0.1),
    )
    for second in (1.0, 2.0):
        core.due(second)
        for start in started(core):
            fail(core, start, second, FaultKind.LOST)
            assert len(probes(core, second + 0.5)) == 1
            probed(core, start.server, REFUSED, second + 0.5)
    core.due(3.0)

    assert core.refusal is not None
    assert core.refusal.startswith("guards.failed_share: ")
