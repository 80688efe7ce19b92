"""The scheduler over many seeds, in virtual time, held to its promises after every event."""

import math

import pytest

from genpipe.core.books import shares
from genpipe.core.errors import FaultKind
from genpipe.core.flow import FlowSettings
from genpipe.sim.engine import Engine
from genpipe.sim.world import DRAWN, Fate, Ill, ServerLaw, Spell, World, from_seed

FAST_SEEDS, ALL_SEEDS = 40, 240


def run(world, **settings):
    return Engine(world, FlowSettings(**{"ramp_s": 0.0, **settings})).run()


def fleet(count, **law):
    return tuple(ServerLaw(**{"limit": 8, "median_s": 1.0, "sigma": 0.4, **law}) for _ in range(count))


def share(outcome, owner):
    by_owner = shares(outcome.core.books.owned_by_all_s())
    assert by_owner is not None
    return by_owner[owner]


# ---- seeds ----


@pytest.mark.parametrize("seed", range(FAST_SEEDS))
def test_a_seed_keeps_every_promise_and_comes_to_its_end(seed):
    world = from_seed(seed)
    outcome = Engine(world).run()

    assert outcome.core.complete or outcome.core.stopping
    assert not outcome.done & outcome.gave_up


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FAST_SEEDS, ALL_SEEDS))
def test_many_more_seeds_keep_every_promise(seed):
    Engine(from_seed(seed)).run()


@pytest.mark.parametrize("seed", [3, 7, 11])
def test_the_same_seed_gives_the_same_run(seed):
    first, again = (Engine(from_seed(seed)).run() for _ in range(2))

    assert (first.makespan_s, first.done, first.attempts) == (again.makespan_s, again.done, again.attempts)
    assert first.core.books.owned_by_all_s() == again.core.books.owned_by_all_s()


def test_seeds_make_worlds_with_trouble_of_every_kind():
    worlds = [from_seed(seed) for seed in range(FAST_SEEDS)]
    laws = [law for world in worlds for law in world.servers]

    assert any(world.stop_s is not None for world in worlds)
    assert any(change.limit == 0 for world in worlds for change in world.changes)
    for share in ("refused", "cursed", "kills", "hangs", "stuck", "bad", "long", "talks"):
        assert any(getattr(world, f"{share}_share") and world.prompts > 50 for world in worlds)
    for trouble in ("busy_over", "retry_after_s", "joins_s", "starting", "crashes", "swallows", "lies"):
        assert any(getattr(law, trouble) for law in laws)
    for kind in DRAWN:
        assert any(law.faults.get(kind) for law in laws)
    for ill in Ill:
        assert any(spell.ill is ill for law in laws for spell in law.spells)


def test_seeds_try_every_setting_on_both_sides():
    usual = FlowSettings()
    tried = [from_seed(seed).settings for seed in range(FAST_SEEDS)]

    for name in ("silent_s", "stall_s", "longest_first", "alone", "hedge", "give_up_s"):
        same = [getattr(settings, name) == getattr(usual, name) for settings in tried]
        assert any(same)
        assert not all(same)


# ---- conversations ----


@pytest.mark.parametrize(
    "settings", [{}, {"longest_first": True}, {"backlog_records_max": 4, "hedge": False}]
)
def test_conversations_come_to_their_end_one_after_the_other(settings):
    """No more of them are under way than there are slots, and no turn is asked twice."""
    world = World(seed=3, prompts=300, servers=fleet(3), talks_share=1.0)
    engine = Engine(world, FlowSettings(**{"ramp_s": 0.0, **settings}))
    waiting = []
    engine.watch = lambda now_s: waiting.append(
        sum(work.past is not None for work in engine.core._waiting.ready)
    )
    outcome = engine.run()

    assert len(outcome.done) == 300
    assert outcome.attempts - outcome.counts.get("hedges", 0) == sum(engine._script.turns)
    assert outcome.counts["turns that others follow"] > 600
    assert max(waiting) <= 24


def test_a_conversation_near_the_end_is_hedged_turn_by_turn_and_late_answers_lead_nowhere():
    """Slow turns everywhere, and answers that come in the very moment in which they are called off."""
    counts = [
        Engine(
            World(seed=seed, prompts=60, servers=fleet(3, sigma=1.2), talks_share=1.0, tardy=1.0)
        ).run().counts
        for seed in range(12)
    ]  # fmt: skip

    assert sum(each.get("hedges", 0) for each in counts) > 10
    assert sum(each.get("late answers dropped", 0) for each in counts) > 3


# ---- liveness and fairness ----


@pytest.mark.parametrize("settings", [{}, {"backlog_records_max": 4}, {"ready_spare": 0}])
def test_servers_that_come_back_get_all_work_done(settings):
    outages = ((0.0, 40.0), (60.0, 90.0))
    outcome = run(World(seed=1, prompts=600, servers=fleet(3, outages=outages)), **settings)

    assert len(outcome.done) == 600


def test_cursed_prompts_are_given_up_and_all_others_are_answered():
    """Also at the end, when nobody else is left whose answer could clear a server."""
    world = World(seed=2, prompts=400, servers=fleet(3), cursed_share=0.1)
    cursed = {index for index, fate in enumerate(Engine(world).fates) if fate is Fate.CURSED}
    outcome = run(world)

    assert outcome.gave_up == cursed
    assert outcome.makespan_s < 300.0


def test_one_cursed_prompt_alone_is_given_up():
    outcome = run(World(seed=3, prompts=1, servers=fleet(2), cursed_share=1.0))

    assert outcome.gave_up == {0}
    assert outcome.attempts <= 20


@pytest.mark.parametrize(
    "kind",
    [
        FaultKind.BROKEN,
        pytest.param(FaultKind.UNREACHABLE, marks=pytest.mark.slow),
        pytest.param(FaultKind.MISROUTED, marks=pytest.mark.slow),
    ],
)
def test_a_black_hole_swallows_nothing(kind):
    """One of 20 servers fails every request at once; nobody is given up and little time is lost."""
    healthy = fleet(19, median_s=2.0)
    hole = ServerLaw(limit=8, median_s=0.001, faults={kind: 1.0})
    without = Engine(World(seed=4, prompts=5000, servers=healthy), check=False).run()
    outcome = Engine(World(seed=4, prompts=5000, servers=(hole, *healthy)), check=False).run()

    assert outcome.gave_up == frozenset()
    assert len(outcome.done) == 5000
    assert outcome.makespan_s < 1.1 * without.makespan_s
    assert outcome.attempts < 5000 + 200


@pytest.mark.slow
def test_dead_servers_cost_their_share_and_no_more():
    dead = ServerLaw(limit=8, outages=((0.0, math.inf),))
    world = World(seed=5, prompts=6000, servers=(dead,) * 5 + fleet(15, median_s=2.0))
    outcome = Engine(world, check=False).run()

    assert outcome.gave_up == frozenset()
    assert share(outcome, "down") == pytest.approx(0.25, abs=0.01)


def test_a_server_that_queues_gets_as_much_as_it_bears():
    world = World(seed=6, prompts=1500, servers=fleet(1, limit=32, busy_over=10, sigma=0.0))
    outcome = run(world)

    assert len(outcome.done) == 1500
    assert outcome.attempts < 1.35 * 1500
    assert outcome.makespan_s < 2.0 * 1500 / 10


# ---- servers that stall, die and are changed ----


def spell(ill, start_s, end_s):
    return Spell(ill=ill, start_s=start_s, end_s=end_s)


@pytest.mark.parametrize("ill", [Ill.STOPPED, Ill.HUNG, Ill.HOLE])
def test_what_a_server_that_stalls_holds_is_answered_elsewhere_in_time(ill):
    """Two minutes of silence after 60 s: all that it had is asked again within about 75 s, and it is back."""
    sick = ServerLaw(limit=8, median_s=1.0, sigma=0.4, spells=(spell(ill, 10.0, 190.0),))
    outcome = run(World(seed=1, prompts=1200, servers=(sick, *fleet(1)), quiet_s=200.0))

    assert len(outcome.done) == 1200
    assert 8 <= outcome.counts["stalled"] <= 24
    assert outcome.makespan_s < 160.0


def test_a_short_standstill_costs_no_request():
    sick = ServerLaw(limit=8, median_s=1.0, sigma=0.4, spells=(spell(Ill.STOPPED, 10.0, 50.0),))
    outcome = run(World(seed=1, prompts=1200, servers=(sick, *fleet(1)), quiet_s=60.0), hedge=False)

    assert outcome.attempts == 1200


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_honest_answers_of_seven_minutes_survive_among_answers_of_a_second(seed):
    world = World(seed=seed, prompts=600, servers=fleet(3), long_share=0.03, long_s=420.0)
    outcome = run(world, hedge=False)

    assert outcome.attempts == len(outcome.done) == 600


@pytest.mark.parametrize("seed", [7, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (8, 10))])
@pytest.mark.parametrize(("kills", "hangs"), [(0.0015, 0.0), (0.0, 0.0015)])
def test_a_prompt_that_harms_servers_harms_two_and_takes_no_other_prompt_along(kills, hangs, seed):
    world = World(
        seed=seed, prompts=900, servers=fleet(5), revive_s=60.0, kills_share=kills, hangs_share=hangs
    )
    (poison,) = (index for index, fate in enumerate(Engine(world).fates) if fate is not Fate.ANSWERED)
    outcome = run(world)

    assert outcome.gave_up == {poison}
    assert outcome.counts["deaths"] == 2


def test_alone_a_prompt_that_kills_servers_gets_one_more_chance():
    world = World(seed=8, prompts=900, servers=fleet(5), kills_share=0.0015, revive_s=60.0)
    outcome = run(world, alone=True)

    assert outcome.counts["deaths"] == 3
    assert len(outcome.gave_up) == 1


def test_the_tail_is_hedged_and_one_record_is_made():
    slow = ServerLaw(limit=8, median_s=60.0, sigma=0.0)
    world = World(seed=5, prompts=400, servers=(slow, *fleet(3)), tardy=0.5)
    hedged, plain = run(world), run(world, hedge=False)

    assert hedged.counts["hedges"] >= 4
    assert plain.counts.get("hedges", 0) == 0
    assert len(hedged.done) == 400
    assert hedged.makespan_s < 0.7 * plain.makespan_s


def test_a_run_without_any_server_ends_after_give_up_s():
    world = World(seed=1, prompts=500, servers=fleet(2, outages=((5.0, math.inf),)))
    outcome = run(world, give_up_s=30.0)

    assert outcome.core.refusal is not None
    assert outcome.makespan_s == pytest.approx(35.0, abs=4.0)


# ---- the books of worlds that can be reckoned by hand ----


def test_a_perfect_world_is_all_wire_and_drain():
    """80 prompts of 1 s on 8 slots: ten rounds, no gap."""
    world = World(prompts=80, servers=fleet(1, sigma=0.0, connect_s=0.0), read_s=0.0, commit_s=0.0)
    outcome = run(world, group_interval_s=0.0)

    assert outcome.makespan_s == pytest.approx(10.0)
    assert share(outcome, "wire") == pytest.approx(1.0)


def test_a_slow_connect_is_overhead():
    world = World(prompts=80, servers=fleet(1, sigma=0.0, connect_s=0.25), read_s=0.0, commit_s=0.0)
    outcome = run(world, group_interval_s=0.0)

    assert share(outcome, "overhead") == pytest.approx(0.2)
    assert share(outcome, "wire") == pytest.approx(0.8)


@pytest.mark.slow
def test_a_slow_client_is_dispatch():
    """Replies are handled up to 0.5 s late, 0.25 s on average; each takes 1 s."""
    world = World(seed=1, prompts=4000, servers=fleet(1, sigma=0.0, connect_s=0.0), handle_s=0.5, read_s=0.0)
    outcome = run(world)

    assert share(outcome, "dispatch") == pytest.approx(0.25 / 1.25, rel=0.05)


def test_a_slow_disk_is_storage():
    """A commit of 16 takes 4 s, and the servers alone would make 64 in that time."""
    world = World(seed=1, prompts=800, servers=fleet(2, sigma=0.0), commit_s=4.0, read_s=0.0)
    outcome = run(world, group_records_max=16, backlog_records_max=32)

    assert outcome.makespan_s == pytest.approx(200.0, rel=0.05)
    assert share(outcome, "storage") == pytest.approx(0.75, abs=0.05)
    assert share(outcome, "dispatch") == 0.0


def test_a_slow_input_is_input():
    """Eight prompts each 4 s, and eight slots that do them in 1 s."""
    world = World(prompts=160, servers=fleet(1, sigma=0.0), read_s=4.0, chunk_max=8)
    outcome = run(world)

    assert share(outcome, "input") == pytest.approx(0.75, abs=0.03)


def test_one_slow_answer_at_the_end_is_drain():
    """Nine prompts on eight slots: a second round with one of eight slots in use."""
    world = World(prompts=9, servers=fleet(1, sigma=0.0, connect_s=0.0), read_s=0.0, commit_s=0.0)
    outcome = run(world, group_interval_s=0.0)

    assert share(outcome, "drain") == pytest.approx(7 / 16, abs=0.01)


def test_ramp_is_charged_only_while_it_lasts():
    world = World(prompts=800, servers=fleet(1, sigma=0.0), read_s=0.0)
    outcome = run(world, ramp_s=10.0)

    assert outcome.core.books.owned_by_all_s()["ramp"] == pytest.approx(8 * 10.0 / 2, rel=0.15)
