"""The scheduler over many seeds, in virtual time, held to its promises after every event."""

import math

import pytest

from genpipe.core.books import shares
from genpipe.core.errors import FaultKind
from genpipe.core.flow import Core, FlowSettings
from genpipe.core.values import Action
from genpipe.sim.engine import Engine, main
from genpipe.sim.world import ServerLaw, World, from_seed

FAST_SEEDS, ALL_SEEDS = 80, 600


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

    assert any(world.stop_s is not None for world in worlds)
    assert any(world.cursed_share and world.prompts for world in worlds)
    assert any(law.busy_over is not None for world in worlds for law in world.servers)
    for kind in FaultKind:
        assert any(law.faults[kind] for world in worlds for law in world.servers)


# ---- liveness and fairness ----


@pytest.mark.parametrize("settings", [{}, {"backlog_records_max": 4}, {"ready_spare": 0}])
def test_servers_that_come_back_get_all_work_done(settings):
    outages = ((0.0, 40.0), (60.0, 90.0))
    outcome = run(World(seed=1, prompts=600, servers=fleet(3, outages=outages)), **settings)

    assert len(outcome.done) == 600


def test_cursed_prompts_are_given_up_and_all_others_are_answered():
    """Also at the end, when nobody else is left whose answer could clear a server."""
    world = World(seed=2, prompts=400, servers=fleet(3), cursed_share=0.1)
    cursed = {index for index, fate in enumerate(Engine(world)._fates) if fate < 0.1}
    outcome = run(world)

    assert outcome.gave_up == cursed
    assert outcome.makespan_s < 300.0


def test_one_cursed_prompt_alone_is_given_up():
    outcome = run(World(seed=3, prompts=1, servers=fleet(2), cursed_share=1.0))

    assert outcome.gave_up == {0}
    assert outcome.attempts <= 20


@pytest.mark.parametrize("kind", [FaultKind.BROKEN, FaultKind.UNREACHABLE, FaultKind.MISROUTED])
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


# ---- can these tests fail? ----


class ChargesAlways(Core):
    def _charge(self, work):
        work.charged += 1


class SendsAfterTheStop(Core):
    def due(self, now_s):
        return super().due(now_s) + (self._leftovers(now_s) if self.stopping else [])

    def _leftovers(self, now_s):
        starts: list[Action] = []
        self._due_starts(now_s, starts)
        return starts


class NeverBenches(Core):
    def _tick(self, now_s):
        super()._tick(now_s)
        for server in self.fleet.servers:
            server.faults_in_a_row = 0


class ForgetsSleepers(Core):
    @property
    def finished(self):
        return not (self._flights or self.unsaved or self._reading or self._waiting.ready) and self.exhausted


class BackoffHoldsItsSlot(Core):
    def failed(self, start, error, now_s):
        super().failed(start, error, now_s)
        self.fleet.took(self.fleet.servers[start.server], start.attempt, now_s)


class ForgetsItsTimer(Core):
    def next_timer_s(self):
        return None


class HurriesItsCommits(Core):
    def committed(self, number, now_s, space=None):
        super().committed(number, now_s, space)
        self._outbox._last_commit_s = -1.0


class DropsWhatItCancels(Core):
    def cancelled(self, start, now_s):
        super().cancelled(start, now_s)
        self.returned -= 1


@pytest.mark.parametrize(
    "mutant",
    [
        ChargesAlways,
        SendsAfterTheStop,
        NeverBenches,
        ForgetsSleepers,
        BackoffHoldsItsSlot,
        ForgetsItsTimer,
        HurriesItsCommits,
        DropsWhatItCancels,
    ],
)
def test_a_defect_is_found_within_a_few_seeds(mutant):
    class Engaged(Engine):
        core_class = mutant

    def is_found(seed):
        try:
            Engaged(from_seed(seed)).run()
        except AssertionError:
            return True
        return False

    assert any(is_found(seed) for seed in range(30))


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


# ---- the command ----


def test_the_command_prints_the_world_and_the_outcome(capsys):
    assert main(["7"]) == 0
    text = capsys.readouterr().out

    assert text.startswith("the world of seed 7\n")
    assert "slot time\n  wire" in text
    assert text.endswith("again with: python -m genpipe.sim.engine 7\n")


def test_a_broken_promise_is_told_with_its_seed_first(capsys):
    class Engaged(Engine):
        core_class = ChargesAlways

    with pytest.raises(AssertionError):
        main(["7"], engine=Engaged)
    text = capsys.readouterr().out

    assert text.startswith("seed 7: a promise was broken; again with: python -m genpipe.sim.engine 7\n")
    assert "the world of seed 7" in text
