"""Benching, probes, trials, cut limits and the ramp."""

import pytest

from genpipe.core.books import Books
from genpipe.core.errors import FaultKind, PromptFault
from genpipe.core.fleet import JUDGED, RAMP_STEPS, TRIALS_FAILED, Fleet, ServerState
from genpipe.core.flow import Core
from genpipe.core.settings import FlowSettings
from genpipe.core.values import Checkup, Chunk, Probe, ServerSpec
from tests.core.build import (
    REFUSED,
    Steady,
    answer,
    bench,
    cancel,
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


def state(core, server=0):
    return core.fleet.servers[server].state


def on_trial(core, now_s=0.0):
    """Bench server 0 at ``now_s`` and let it through its first probe; the old attempts and the trial."""
    old = bench(core, 0, now_s)
    assert probes(core, now_s + 0.5) == [Probe(server=0, ask=False)]
    well(core, now_s + 1.0)
    (trial,) = [start for start in starts(core, now_s + 1.0) if start.server == 0]
    return old, trial


# ---- benching ----


@pytest.mark.parametrize("kind", [FaultKind.UNREACHABLE, FaultKind.BROKEN])
def test_three_faults_in_a_row_bench_a_server(kind):
    core = make_core(50, slots=(5,))
    found = starts(core, 0.0)
    fail(core, found[0], 0.0, kind)
    fail(core, found[1], 0.0, kind)
    assert state(core) is ServerState.SUSPECT
    fail(core, found[2], 0.0, kind)

    assert state(core) is ServerState.BENCHED
    assert starts(core, 0.4) == []


def test_an_answer_in_between_starts_the_count_anew():
    core = make_core(50, slots=(6,))
    found = starts(core, 0.0)
    for start in found[:2]:
        fail(core, start, 0.0)
    answer(core, found[2], 0.0)
    for start in found[3:5]:
        fail(core, start, 0.0)

    assert state(core) is ServerState.SUSPECT


def test_a_refusal_in_between_starts_the_count_anew_for_the_server_has_spoken():
    core = make_core(50, slots=(6,))
    found = starts(core, 0.0)
    for start in found[:2]:
        fail(core, start, 0.0)
    refuse(core, found[2], 0.0)
    fail(core, found[3], 0.0)

    assert state(core) is ServerState.SUSPECT


def test_a_prompt_that_ran_out_of_time_says_nothing_good_of_its_server():
    core = make_core(50, slots=(6,))
    found = starts(core, 0.0)
    for start in found[:2]:
        fail(core, start, 0.0)
    core.failed(found[2], PromptFault("no answer within 5 s"), 5.0)
    fail(core, found[3], 5.0)

    assert state(core) is ServerState.BENCHED


def test_a_wrong_key_benches_at_once():
    core = make_core(50, slots=(5,))
    fail(core, starts(core, 0.0)[0], 0.0, FaultKind.MISROUTED)

    assert state(core) is ServerState.BENCHED


def test_being_busy_never_benches():
    core = make_core(50, slots=(9,))
    for start in starts(core, 0.0):
        fail(core, start, 0.0, FaultKind.BUSY)

    assert state(core) is ServerState.UP


def test_a_benched_server_has_one_owner_for_its_slots():
    core = make_core(50, slots=(3,))
    bench(core, 0, 0.0)
    core.due(0.0)
    core.books.tick(0.5)

    assert core.books.owned_by_all_s()["down"] == pytest.approx(3 * 0.5)


def test_what_began_before_the_bench_does_not_disturb_it():
    """Neither answers nor faults of older attempts change a bench, a probe or a trial."""
    core = make_core(90, slots=(9,))
    old = bench(core, 0, 0.0)
    answer(core, old[0], 0.1)
    fail(core, old[1], 0.1)
    assert state(core) is ServerState.BENCHED
    assert probes(core, 0.5) == [Probe(server=0, ask=False)]
    answer(core, old[2], 0.6)
    fail(core, old[3], 0.6, FaultKind.MISROUTED)
    assert core.fleet.servers[0].probing
    assert state(core) is ServerState.BENCHED
    well(core, 0.7)
    assert len(starts(core, 0.7)) == 1
    answer(core, old[4], 0.8)
    fail(core, old[5], 0.8, FaultKind.MISROUTED)

    assert core.fleet.servers[0].on_trial
    assert state(core) is ServerState.SUSPECT
    assert starts(core, 0.9) == []


def test_faults_from_before_the_bench_do_not_count_after_it():
    core = make_core(90, slots=(9,))
    old, trial = on_trial(core)
    answer(core, trial, 2.0)
    for start in old:
        fail(core, start, 3.0)

    assert state(core) is ServerState.UP


# ---- probes and trials ----


def test_a_probe_is_sent_once_per_pause_and_pauses_double_to_their_bound():
    core = make_core(50, slots=(3,))
    bench(core, 0, 0.0)
    now_s, waits_s = 0.0, []
    for _ in range(7):
        next_s = core.next_timer_s()
        waits_s.append(next_s - now_s)
        assert len(probes(core, next_s)) == 1
        assert probes(core, next_s + 1.0) == []
        probed(core, 0, Checkup(trouble="refused", refused=True), next_s + 1.0)
        now_s = next_s + 1.0

    assert waits_s == pytest.approx([0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0])
    assert core.last_error == "http://s0: refused"
    assert core.fleet.servers[0].last_error == "refused"


def test_after_a_good_probe_one_prompt_is_the_trial():
    core = make_core(90, slots=(9,))
    on_trial(core)

    assert core.fleet.servers[0].on_trial
    assert state(core) is ServerState.SUSPECT
    assert starts(core, 1.0) == []


def test_the_other_slots_open_when_the_trial_is_answered():
    core = make_core(90, slots=(3,))
    _, trial = on_trial(core)
    answer(core, trial, 2.0)

    assert state(core) is ServerState.UP
    assert len(starts(core, 2.0)) == 3


def test_the_other_slots_open_when_the_trial_is_five_seconds_old():
    core = make_core(90, slots=(3,))
    on_trial(core)
    assert starts(core, 5.9) == []

    assert core.next_timer_s() == 6.0
    assert len(starts(core, 6.0)) == 2
    assert not core.fleet.servers[0].on_trial
    assert state(core) is ServerState.SUSPECT


def test_a_server_whose_trial_took_too_long_is_up_with_the_first_answer_to_what_began_after_it():
    core = make_core(90, slots=(3,))
    _, trial = on_trial(core)
    second, _ = starts(core, 6.0)
    answer(core, trial, 7.0)
    assert state(core) is ServerState.SUSPECT
    answer(core, second, 8.0)

    assert state(core) is ServerState.UP


def test_a_trial_that_fails_benches_at_once_and_for_longer():
    core = make_core(90, slots=(3,))
    _, trial = on_trial(core)
    fail(core, trial, 2.0)

    assert state(core) is ServerState.BENCHED
    assert probes(core, 2.9) == []
    assert len(probes(core, 3.0)) == 1


def test_a_trial_that_is_refused_shows_that_the_server_is_well():
    core = make_core(90, slots=(3,))
    _, trial = on_trial(core)
    refuse(core, trial, 2.0)

    assert state(core) is ServerState.UP


def test_a_trial_that_runs_out_of_time_makes_room_for_another():
    core = make_core(90, slots=(3,))
    _, trial = on_trial(core)
    core.failed(trial, PromptFault("no answer within 2 s"), 3.0)

    assert core.fleet.servers[0].on_trial
    assert len(starts(core, 3.0)) == 1


def test_a_trial_that_was_cancelled_makes_room_for_another():
    core = make_core(90, slots=(3,))
    _, trial = on_trial(core)
    cancel(core, trial, 2.0)

    assert core.fleet.servers[0].on_trial
    assert len(starts(core, 2.0)) == 1


def test_a_trial_that_is_called_off_for_its_age_has_failed():
    core = make_core(90, slots=(3,), stall_s=2.0)
    bench(core, 0, 0.0)
    assert len(probes(core, 0.5)) == 1
    well(core, 1.0)
    (trial,) = starts(core, 1.0)
    core.due(3.0)
    assert [flight.fault is not None for flight in core.flights()] == [True]
    cancel(core, trial, 3.0)

    assert state(core) is ServerState.BENCHED
    assert probes(core, 3.9) == []
    assert len(probes(core, 4.0)) == 1


def test_a_busy_trial_ends_the_bench_and_cuts_the_limit():
    core = make_core(90, slots=(8,))
    old, trial = on_trial(core)
    fail(core, trial, 2.0, FaultKind.BUSY)
    assert state(core) is ServerState.UP
    for start in old:
        answer(core, start, 3.0)

    assert starts(core, 3.2) == []
    assert len(starts(core, 3.25)) == (len(old) + 1) // 2


def test_suspect_prompts_do_not_starve_a_trial():
    """Prompts that broke a server wait behind the others, so that its trial is one that may succeed."""
    core = make_core(9, slots=(3,), backoff_s=0.1)
    bench(core, 0, 0.0, FaultKind.BROKEN)
    assert len(probes(core, 0.5)) == 1
    well(core, 1.0)
    (trial,) = starts(core, 1.0)

    assert trial.prompt.index == 3


def test_a_prompt_that_fails_again_and_again_is_not_each_trial():
    """A prompt that kills its server would otherwise be the first to meet it when it is back."""
    core = make_core(9, slots=(1, 1, 1, 1), backoff_s=0.1)
    now_s = 0.0
    for _ in range(3):
        (killer,) = [start for start in starts(core, now_s) if start.prompt.index == 0]
        fail(core, killer, now_s, FaultKind.UNREACHABLE)
        now_s = core.next_timer_s()
    found = starts(core, now_s)

    assert killer.tries == 3
    assert 0 not in [start.prompt.index for start in found]


def test_a_token_of_our_own_ends_the_doubling_of_pauses():
    core = make_core(3, slots=(3,))
    bench(core, 0, 0.0, FaultKind.BROKEN)
    assert probes(core, 0.5) == [Probe(server=0, ask=True)]
    well(core, 1.0, asked=True)
    found = starts(core, 1.0)
    assert len(found) == 3
    for start in found:
        fail(core, start, 2.0)

    assert probes(core, 2.4) == []
    assert len(probes(core, 2.5)) == 1


def test_a_server_that_made_a_token_of_ours_opens_all_its_slots_and_is_on_no_trial():
    core = make_core(90, slots=(4,))
    bench(core, 0, 0.0)
    assert len(probes(core, 0.5)) == 1
    well(core, 1.0, asked=True)

    assert state(core) is ServerState.SUSPECT
    assert not core.fleet.servers[0].on_trial
    assert len(starts(core, 1.0)) == 3


def break_trials(core, kind, count, now_s=0.0):
    """So many trials of the only server fail in this way, one after the other; its next probe."""
    if core.fleet.servers[0].in_use:
        bench(core, 0, now_s)
    for _ in range(count):
        now_s, _ = next_probe(core, now_s)
        well(core, now_s)
        (trial,) = [start for start in starts(core, now_s) if start.server == 0]
        fail(core, trial, now_s, kind)
    return next_probe(core, now_s)


def next_probe(core, now_s):
    """When the only server is probed next, and how."""
    for _ in range(100):
        now_s = max(now_s, core.next_timer_s())
        for probe in probes(core, now_s):
            return now_s, probe
    raise AssertionError("no probe")


@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind is not FaultKind.BUSY])
@pytest.mark.parametrize("count", [TRIALS_FAILED - 1, TRIALS_FAILED])
def test_after_two_trials_that_may_have_been_the_prompts_fault_a_token_is_asked_for(kind, count):
    """Though prompts wait that nobody suspects: each of them might break the next trial too."""
    core = make_core(90, slots=(3,), silent_s=1e6)
    _, probe = break_trials(core, kind, count)

    assert any(not work.pending for work in core._waiting.ready)
    assert probe.ask == (kind in JUDGED and count == TRIALS_FAILED)


def test_a_trial_that_is_answered_starts_the_count_of_broken_ones_anew():
    core = make_core(90, slots=(3,), silent_s=1e6)
    now_s, _ = break_trials(core, FaultKind.BROKEN, TRIALS_FAILED - 1)
    well(core, now_s)
    (trial,) = starts(core, now_s)
    answer(core, trial, now_s)
    _, probe = break_trials(core, FaultKind.BROKEN, TRIALS_FAILED - 1, now_s)

    assert not probe.ask


def test_a_token_starts_the_count_of_broken_trials_anew():
    core = make_core(90, slots=(3,), silent_s=1e6)
    now_s, probe = break_trials(core, FaultKind.BROKEN, TRIALS_FAILED)
    assert probe.ask
    well(core, now_s, asked=True)
    for start in starts(core, now_s):
        fail(core, start, now_s, FaultKind.UNREACHABLE)
    _, probe = break_trials(core, FaultKind.BROKEN, TRIALS_FAILED - 1, now_s)

    assert not probe.ask


def test_a_token_is_asked_for_again_while_the_server_makes_none():
    core = make_core(90, slots=(3,), silent_s=1e6)
    now_s, probe = break_trials(core, FaultKind.BROKEN, TRIALS_FAILED)
    for _ in range(3):
        assert probe.ask
        probed(core, 0, Checkup(trouble="made no token"), now_s)
        now_s, probe = next_probe(core, now_s)

    assert starts(core, now_s) == []


def test_a_fleet_with_nobody_in_use_is_not_usable():
    core = make_core(50, slots=(3,))
    assert core.fleet.usable()
    bench(core, 0, 0.0)

    assert not core.fleet.usable()


def test_the_prompts_of_a_dead_server_go_to_the_others():
    core = make_core(50, slots=(3, 3))
    bench(core, 0, 0.0)

    assert {start.server for start in starts(core, 0.6)} <= {1}


# ---- 429 and 503 ----


def test_being_busy_cuts_the_limit_and_answers_give_it_back():
    core = make_core(200, slots=(8,))
    found = starts(core, 0.0)
    fail(core, found[0], 0.0, FaultKind.BUSY)
    assert starts(core, 0.5) == []
    for start in found[1:]:
        answer(core, start, 0.5)

    assert starts(core, 1.2) == []
    assert len(starts(core, 1.25)) == 4
    now_s = 1.25
    while len(started(core)) < 8:
        for start in started(core):
            answer(core, start, now_s)
        starts(core, now_s)
        now_s += 1.0
        assert now_s < 20.0


@pytest.mark.parametrize(("wish_s", "rest_s"), [(None, 1.25), (7.0, 8.75), (0.0, 0.0), (3600.0, 75.0)])
def test_a_wish_for_a_pause_is_respected_within_reason_and_made_up_to_a_quarter_longer(wish_s, rest_s):
    core = make_core(50, slots=(2,))
    first, second = starts(core, 0.0)
    fail(core, first, 0.0, FaultKind.BUSY, retry_after_s=wish_s)
    answer(core, second, 0.0)

    if rest_s:
        assert starts(core, rest_s - 0.1) == []
    assert len(starts(core, rest_s)) == 1


def test_one_crowd_of_busy_replies_cuts_once():
    core = make_core(200, slots=(8,))
    for start in starts(core, 0.0):
        fail(core, start, 0.0, FaultKind.BUSY)

    assert len(starts(core, 1.25)) == 4


def test_a_cut_limit_is_booked_as_cut():
    core = make_core(200, slots=(4,))
    found = starts(core, 0.0)
    fail(core, found[0], 0.0, FaultKind.BUSY)
    core.due(0.0)
    core.books.tick(1.0)

    owned_s = core.books.owned_by_all_s()
    assert owned_s["cut"] == pytest.approx(1.0)
    assert owned_s["wire"] == pytest.approx(3.0)


def test_a_server_that_asked_for_a_pause_gets_no_trial_before_it_is_over():
    core = make_core(200, slots=(9,))
    found = starts(core, 0.0)
    fail(core, found[0], 0.0, FaultKind.BUSY, retry_after_s=30.0)
    for start in found[1:4]:
        fail(core, start, 0.0)
    assert len(probes(core, 0.5)) == 1
    well(core, 1.0)
    for start in found[4:]:
        answer(core, start, 1.0)

    assert starts(core, 37.0) == []
    assert len(starts(core, 37.5)) == 1
    assert core.books.owned_by_all_s()["dispatch"] == 0.0


# ---- suspects ----


def test_a_server_with_a_fault_since_its_last_answer_is_taken_after_all_others_however_empty_it_is():
    core = make_core(4, slots=(8, 2), exhausted=False, backoff_s=50.0, backoff_max_s=50.0)
    core.due(0.0)
    assert [len(started(core, server)) for server in (0, 1)] == [3, 1]
    fail(core, started(core, 0)[0], 1.0, FaultKind.UNREACHABLE)
    core.due(1.0)
    core.offered(Chunk(prompts=prompts(4, 5), exhausted=True), 1.0)

    assert state(core) is ServerState.SUSPECT
    assert [start.server for start in starts(core, 1.0)] == [1, 0]


def test_a_suspect_is_used_where_the_others_are_full():
    core = make_core(20, slots=(4, 2))
    found = starts(core, 0.0)
    fail(core, next(start for start in found if start.server == 0), 1.0)

    assert [start.server for start in starts(core, 1.0)] == [0]


def test_a_prompt_goes_to_a_suspect_before_it_goes_back_to_the_server_that_failed_it():
    core = make_core(2, slots=(1, 1), backoff_s=1.0)
    first, second = starts(core, 0.0)
    answer(core, second, 0.5)
    core.fleet.servers[second.server].state = ServerState.SUSPECT
    fail(core, first, 1.0, FaultKind.UNREACHABLE)
    (again,) = starts(core, 2.0)

    assert again.server == second.server


def test_an_answer_makes_a_suspect_as_good_as_the_others():
    core = make_core(20, slots=(4, 2))
    found = [start for start in starts(core, 0.0) if start.server == 0]
    fail(core, found[0], 1.0)
    assert state(core) is ServerState.SUSPECT
    answer(core, found[1], 1.0)

    assert state(core) is ServerState.UP


def test_a_fault_of_what_began_before_the_present_state_makes_nobody_a_suspect():
    core = make_core(90, slots=(9,))
    old, trial = on_trial(core)
    answer(core, trial, 2.0)
    fail(core, old[0], 3.0)

    assert state(core) is ServerState.UP


# ---- servers that are not in use yet, or not the right ones ----


def starting_core(count=20, slots=(2, 2), starting=(0,), **settings):
    specs = [ServerSpec(url=f"http://s{number}", limit=limit) for number, limit in enumerate(slots)]
    fields = {"ramp_s": 0.0, "hedge": False, **settings}
    core = Core(FlowSettings(**fields), specs, Steady(), 0.0, starting=starting)
    return core, core.due(0.0)


def offer(core, count, now_s=0.0):
    core.offered(Chunk(prompts=prompts(*range(count)), exhausted=True), now_s)
    core.check()


def test_a_server_that_starts_is_probed_at_once_and_given_nothing():
    core, actions = starting_core()
    offer(core, 9)

    assert Probe(server=0, ask=False) in actions
    assert state(core) is ServerState.STARTING
    assert [start.server for start in starts(core, 0.0)] == [1, 1]


def test_a_server_that_starts_stays_so_until_it_is_seen_well_and_is_then_tried_with_one():
    core, _ = starting_core()
    offer(core, 9)
    starts(core, 0.0)
    probed(core, 0, REFUSED, 0.1)
    assert state(core) is ServerState.STARTING
    assert probes(core, 0.5) == []
    assert len(probes(core, 0.6)) == 1
    probed(core, 0, REFUSED, 0.7)
    assert probes(core, 1.6) == []
    assert len(probes(core, 1.7)) == 1
    well(core, 1.8)

    assert [start.server for start in starts(core, 1.8)] == [0]
    assert starts(core, 1.9) == []


def test_faults_before_it_was_seen_well_do_not_lengthen_the_first_bench_afterwards():
    core, _ = starting_core(slots=(3,))
    offer(core, 9)
    for now_s in (0.1, 0.6, 1.6):
        core.due(now_s)
        probed(core, 0, REFUSED, now_s)
    core.due(3.6)
    well(core, 3.6, asked=True)
    for start in starts(core, 3.6):
        fail(core, start, 4.0)

    assert state(core) is ServerState.BENCHED
    assert probes(core, 4.4) == []
    assert len(probes(core, 4.5)) == 1


def test_a_server_that_serves_another_model_is_taken_out_even_while_it_is_in_use():
    core = make_core(50, slots=(4, 4))
    fail(core, starts(core, 0.0)[0], 0.0, FaultKind.LOST)
    assert len(probes(core, 0.5)) == 1
    probed(core, 0, Checkup(trouble="serves another model", alien=True), 0.6)

    assert state(core) is ServerState.BENCHED
    assert core.fleet.servers[0].last_error == "serves another model"


# ---- a look at a server whose connection broke ----


def lost_at_first(core, now_s):
    lost = started(core, 0)[0]
    fail(core, lost, now_s, FaultKind.LOST)
    return lost


def test_a_server_whose_connection_broke_is_looked_at_though_it_is_in_use():
    core = make_core(50, slots=(4, 4))
    starts(core, 0.0)
    lost_at_first(core, 1.0)
    assert probes(core, 1.4) == []

    assert probes(core, 1.5) == [Probe(server=0, ask=False)]
    assert state(core) is ServerState.SUSPECT
    well(core, 1.6)
    assert state(core) is ServerState.SUSPECT
    assert probes(core, 9.0) == []


def test_a_server_in_use_at_whose_address_nobody_listens_is_benched():
    core = make_core(50, slots=(4, 4))
    starts(core, 0.0)
    lost_at_first(core, 1.0)
    core.due(1.5)
    probed(core, 0, REFUSED, 1.6)

    assert state(core) is ServerState.BENCHED


def test_a_health_that_fails_takes_no_server_out_that_is_in_use_and_is_asked_again():
    core = make_core(50, slots=(4, 4))
    starts(core, 0.0)
    lost_at_first(core, 1.0)
    now_s = 1.5
    for _ in range(3):
        assert len(probes(core, now_s)) == 1
        probed(core, 0, Checkup(trouble="/health says 503"), now_s)
        now_s += 0.5

    assert state(core) is ServerState.SUSPECT


def test_a_connection_that_breaks_while_the_server_is_looked_at_has_it_looked_at_again():
    """What the look finds may be older than the break."""
    core = make_core(50, slots=(8, 8))
    starts(core, 0.0)
    lost_at_first(core, 1.0)
    assert len(probes(core, 1.5)) == 1
    lost_at_first(core, 1.6)
    assert probes(core, 2.1) == []
    well(core, 3.0)

    assert len(probes(core, 3.0)) == 1
    well(core, 3.1)
    answer(core, started(core, 0)[0], 3.2)
    lost_at_first(core, 4.0)
    assert len(probes(core, 4.5)) == 1


# ---- the ramp ----


def ramped(slots, ramp_s=1.0):
    return make_core(1000, slots=slots, ramp_s=ramp_s, ready_spare=2000)


def ticks(core):
    """The moments of a core's own timers, from 0 to 1 s."""
    now_s: float | None = 0.0
    while now_s is not None and now_s <= 1.0:
        yield now_s
        now_s = core.next_timer_s()


def test_slots_open_over_the_ramp():
    core = ramped((100,))
    opened = {}
    for now_s in ticks(core):
        core.due(now_s)
        opened[round(now_s, 6)] = core.in_flight

    assert opened[0.0] == 1
    assert opened[0.5] == 50
    assert opened[1.0] == 100
    assert len(opened) == RAMP_STEPS + 1


def test_a_large_fleet_does_not_begin_with_one_request_each_at_once():
    core = ramped((4,) * 100)
    core.due(0.0)
    first = core.in_flight
    core.due(0.02)

    assert first == 1
    assert core.in_flight < 20


def test_the_ramp_costs_half_its_time_in_each_slot():
    core = ramped((100,))
    for now_s in ticks(core):
        core.due(now_s)
    core.books.tick(2.0)

    owned_s = core.books.owned_by_all_s()
    assert owned_s["ramp"] == pytest.approx(100 * 0.5, rel=0.05)
    assert owned_s["ramp"] + owned_s["wire"] == pytest.approx(200.0)


def test_slots_that_are_not_open_yet_are_not_cut():
    """Ten slots, six open, none allowed while the server rests, four held: the ramp has its four first."""
    core = ramped((10,))
    for now_s in ticks(core):
        if core.in_flight == 6:
            break
        core.due(now_s)
    found = started(core)
    fail(core, found[0], now_s, FaultKind.BUSY)
    answer(core, found[1], now_s)
    before = core.books.owned_by_all_s()
    core.books.tick(now_s + 0.015)
    after = core.books.owned_by_all_s()

    grown = {owner: round((after[owner] - before[owner]) / 0.015, 3) for owner in ("wire", "ramp", "cut")}
    assert grown == {"wire": 4.0, "ramp": 4.0, "cut": 2.0}


def test_without_a_ramp_all_slots_are_open_and_no_timer_runs_but_the_look_at_what_is_in_flight():
    core = make_core(5, slots=(5,), silent_s=60.0)

    assert len(starts(core, 0.0)) == 5
    assert core.next_timer_s() == 10.0


# ---- the list of servers with room ----


def test_the_list_of_servers_with_room_does_not_grow_with_time():
    specs = [ServerSpec(url=f"http://s{number}", limit=2) for number in range(3)]
    books = Books([2, 2, 2], 0.0)
    fleet = Fleet(specs, books, FlowSettings(ramp_s=0.0), Steady(), 0.0)
    for attempt in range(1000):
        server = fleet.pick(None, 0.0)
        assert server is not None
        fleet.took(server, attempt, 0.0)
        books.release(server.position, held_s=0.0, wire_s=0.0, late_s=0.0, lost=False)
        fleet.gave(server, attempt, 0.0, 0.0)
        fleet.check()

    assert fleet.room(0.0) == 6
