"""The command that runs worlds, and whether a defect of the scheduler would be noticed there."""

from copy import copy
from dataclasses import replace
from typing import Any

import pytest

from genpipe.core import poison
from genpipe.core.errors import PromptFault
from genpipe.core.flow import Core
from genpipe.core.values import Finished, GivenUp
from genpipe.sim.engine import Engine
from genpipe.sim.seeds import main
from genpipe.sim.world import from_seed

SEEDS_TO_FIND = 60

FIRST_SEED = {"TakesStatusForLife": 60, "GoesOnWhileStopping": 30}
"""Where the search for a rare one begins: these show in about one world of thirty."""


class SendsAfterTheStop(Core):
    def due(self, now_s):
        actions = super().due(now_s)
        if self.stopping:
            self._sending.due(now_s, actions, exhausted=self.exhausted, give_up=lambda work, error: None)
        return actions


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


class DropsWhatItCancels(Core):
    def cancelled(self, start, now_s):
        super().cancelled(start, now_s)
        self._outcomes.returned -= 1


class Spoilt(Core):
    """A core of which one part is replaced."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.spoil()

    def spoil(self: Any):
        raise NotImplementedError


class ChargesAlways(Spoilt):
    def spoil(self: Any):
        self._outcomes._attempts_max = 1


class HurriesItsCommits(Spoilt):
    def spoil(self: Any):
        committed = self._saving.committed

        def hurry(number):
            self._outbox._last_commit_s = -1.0
            return committed(number)

        self._saving.committed = hurry


class ReusesSlotsAtOnce(Spoilt):
    def spoil(self: Any):
        self.fleet.hold_back = lambda server, now_s: None


class SendsMarkedOnesTogether(Spoilt):
    def spoil(self: Any):
        mark = self.fleet.mark

        def forget(server, start, now_s, *, alone=False):
            if alone:
                mark(server, start, now_s, alone=True)

        self.fleet.mark = forget


class ForgetsDeaths(Spoilt):
    def spoil(self: Any):
        decide = self._sending.poison._decide
        self._sending.poison._decide = lambda server, *, died: decide(server, died=False)


class NeverDecidesDoubts(Spoilt):
    def spoil(self: Any):
        self._sending.poison._decide = lambda server, *, died: None


class GivesThreeDeathsToAll(Spoilt):
    def spoil(self: Any):
        self._sending.poison._is_lost = lambda work: len(work.killed) > poison.DEATHS_MAX
        place_for = self._sending.poison._place_for

        def carelessly(work, now_s, *, last):
            killed, work.killed = work.killed, work.killed[:1]
            place = place_for(work, now_s, last=last)
            work.killed = killed
            return place if len(killed) <= poison.DEATHS_MAX else None

        self._sending.poison._place_for = carelessly


class WatchesNobody(Spoilt):
    def spoil(self: Any):
        look = self._sending.vigil.look

        def blindly(flights, now_s):
            look(flights, now_s)
            return [], []

        self._sending.vigil.look = blindly


class TakesStatusForLife(Spoilt):
    """Given up only where the server says nothing at all."""

    def spoil(self: Any):
        inquired = self._sending.vigil.inquired

        def lightly(server, vitals, flights, now_s):
            if vitals.trouble is None:
                server.vitals.alive_s = now_s
            return inquired(server, vitals, flights, now_s)

        self._sending.vigil.inquired = lightly


class GivesUpTheHonest(Spoilt):
    """Takes a server that was not heard of for a while for one that stalled, whatever work it shows."""

    def spoil(self: Any):
        inquired = self._sending.vigil.inquired

        def hastily(server, vitals, flights, now_s):
            return inquired(server, replace(vitals, mark="always the same"), flights, now_s)

        self._sending.vigil.inquired = hastily


class CountsLateAnswers(Spoilt):
    def spoil(self: Any):
        answered = self._outcomes.answered

        def twice(start, answer, now_s):
            work = self._flights._flights[start.attempt].work
            work.ended = False
            answered(start, answer, now_s)

        self._outcomes.answered = twice


class HedgesOnTheSameServer(Spoilt):
    def spoil(self: Any):
        due = self.hedging.due

        def here(flights, now_s):
            for flight, place in due(flights, now_s):
                mine = self.fleet.servers[flight.start.server]
                yield flight, mine if mine.room(now_s) > 0 else place

        self.hedging.due = here


class ForgetsChangesInTheBooks(Spoilt):
    def spoil(self: Any):
        self.books.resize = lambda server, slots: None


class SendsToAliens(Spoilt):
    def spoil(self: Any):
        probed = self.fleet.probed

        def trust(position, checkup, now_s):
            probed(position, type(checkup)(asked=checkup.asked) if checkup.alien else checkup, now_s)

        self.fleet.probed = trust


class NeverLooksAgain(Spoilt):
    """Once on the bench, a server is probed one time only."""

    def spoil(self: Any):
        due = self.fleet.due
        seen: set[int] = set()

        def once(now_s, *, ask):
            probes = [probe for probe in due(now_s, ask=ask) if probe.server not in seen]
            seen.update(probe.server for probe in probes)
            return probes

        self.fleet.due = once


class SkipsTheTrial(Spoilt):
    def spoil(self: Any):
        begin = self.fleet._set

        def at_once(server, state, now_s, *, on_trial=False):
            begin(server, state, now_s)

        self.fleet._set = at_once


class RetriesAtOnce(Spoilt):
    def spoil(self: Any):
        self._waiting.sleep = lambda work, now_s: self._waiting.put_back(work)


class KeepsToOldLimits(Spoilt):
    def spoil(self: Any):
        resize = self.fleet._resize

        def half(server, limit, now_s):
            server.limiter, kept = copy(server.limiter), server.limiter
            resize(server, limit, now_s)
            server.limiter = kept

        self.fleet._resize = half


class KeepsTwins(Spoilt):
    """What is in flight a second time is not called off once the first answer has come."""

    def spoil(self: Any):
        self._flights.call_off_twins = lambda work: None


class Talkative(Spoilt):
    """A core with other ideas of what follows on a turn of a conversation."""

    def spoil(self: Any):
        answered = self._outcomes.answered

        def step(start, answer, now_s):
            work = self._flights._flights[start.attempt].work
            is_step = answer.more is not None and not work.ended
            if is_step:
                self.before(work)
            answered(start, answer, now_s)
            if is_step:
                self.after(start, answer, work, now_s)

        self._outcomes.answered = step
        go_on = self._outcomes._go_on

        def change(work):
            self.change(work)
            go_on(work)

        self._outcomes._go_on = change

    def before(self, work):
        pass

    def after(self, start, answer, work, now_s):
        pass

    def change(self, work):
        pass


class KeepsTwinsOfATurn(Talkative):
    """What is in flight a second time goes on though its turn was answered."""

    def before(self: Any, work):
        self._flights.call_off_twins = lambda work: None

    def after(self: Any, start, answer, work, now_s):
        del self._flights.call_off_twins


class GoesOnFromLateAnswers(Talkative):
    def after(self, start, answer, work, now_s):
        work.ended = False


class CountsEachTurnAsDone(Talkative):
    def after(self: Any, start, answer, work, now_s):
        url, tries, started_s = "http://s0", start.tries, start.started_s
        self._saving.hold(
            Finished(
                prompt=start.prompt,
                answer=answer,
                server=url,
                tries=tries,
                started_s=started_s,
                latency_s=1.0,
            )
        )


class CountsTokensTwice(Talkative):
    def change(self, work):
        work.past = replace(work.past, tokens=0)


class ForgetsTries(Talkative):
    def change(self, work):
        work.tries = 0


class AsksTheSameTurnAgain(Talkative):
    def after(self: Any, start, answer, work, now_s):
        if self._waiting.ready:
            self._waiting.ready[0].prompt = start.prompt


class GoesOnWhileStopping(Spoilt):
    def spoil(self: Any):
        self._outcomes._go_on = self._waiting.put_back


class SendsNextTurnsLast(Spoilt):
    def spoil(self: Any):
        go_on = self._outcomes._go_on
        self._outcomes._go_on = lambda work: (
            go_on(work) if self.stopping or work.marked else self._waiting.ready.append(work)
        )


class DropsWhatWasMade(Spoilt):
    def spoil(self: Any):
        hold = self._saving.hold
        self._saving.hold = lambda ended: hold(
            replace(ended, made_json=b"") if isinstance(ended, GivenUp) else ended
        )


class BlamesServersForWhatLeadsNowhere(Spoilt):
    """Takes a good answer that no conversation goes on from for a request that was hung up on."""

    def spoil(self: Any):
        failed = self._outcomes.failed

        def blame(start, error, now_s):
            landed = self._flights._flights[start.attempt].landed_s is not None
            failed(start, error, now_s)
            if landed and isinstance(error, PromptFault):
                self.fleet.hold_back(self.fleet.servers[start.server], now_s)

        self._outcomes.failed = blame


MUTANTS = [
    ChargesAlways, SendsAfterTheStop, NeverBenches, ForgetsSleepers, BackoffHoldsItsSlot, ForgetsItsTimer,
    HurriesItsCommits, DropsWhatItCancels, ReusesSlotsAtOnce, SendsMarkedOnesTogether, ForgetsDeaths,
    NeverDecidesDoubts, GivesThreeDeathsToAll, WatchesNobody, TakesStatusForLife, GivesUpTheHonest,
    CountsLateAnswers, HedgesOnTheSameServer, ForgetsChangesInTheBooks, SendsToAliens, NeverLooksAgain,
    KeepsTwins, SkipsTheTrial, RetriesAtOnce, KeepsToOldLimits,
    KeepsTwinsOfATurn, GoesOnFromLateAnswers, CountsEachTurnAsDone, CountsTokensTwice, ForgetsTries,
    AsksTheSameTurnAgain, GoesOnWhileStopping, SendsNextTurnsLast, DropsWhatWasMade,
    BlamesServersForWhatLeadsNowhere,
]  # fmt: skip

LATE = {NeverBenches, HedgesOnTheSameServer, CountsLateAnswers, SendsToAliens}
"""Those that show only after many seeds, or in long worlds."""


@pytest.mark.parametrize(
    "mutant", [pytest.param(each, marks=[pytest.mark.slow] if each in LATE else []) for each in MUTANTS]
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

    first = FIRST_SEED.get(mutant.__name__, 0)
    assert any(is_found(seed) for seed in range(first, first + SEEDS_TO_FIND))


# ---- the command ----


def test_one_seed_tells_its_world_its_story_and_its_outcome(capsys):
    assert main(["7"]) == 0
    text = capsys.readouterr().out

    assert text.startswith("the world of seed 7\n")
    assert "\nwhat happened\n" in text
    assert "slot time\n  wire" in text


def test_a_broken_promise_is_told_with_the_command_that_repeats_it(capsys):
    class Engaged(Engine):
        core_class = BackoffHoldsItsSlot

    assert main(["0"], engine=Engaged) == 1
    text = capsys.readouterr().out

    assert "seed 0: a promise was broken: " in text
    assert text.endswith("again with: make sim SEED=0\n")


def test_many_seeds_go_on_after_one_that_fails_and_are_summed_up(capsys):
    class Engaged(Engine):
        core_class = BackoffHoldsItsSlot

    assert main(["--count", "4"], engine=Engaged) == 1
    text = capsys.readouterr().out

    assert "; again with: make sim SEED=0\n" in text
    assert "4 worlds in " in text
    assert text.endswith(" of 4 seeds broke a promise\n")


def test_many_sound_seeds_run_on_all_cores_and_say_so(capsys):
    assert main(["--count", "8"]) == 0
    text = capsys.readouterr().out

    assert text.startswith("8 worlds in ")
    assert text.endswith("every promise was kept\n")
