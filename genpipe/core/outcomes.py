"""How attempts end, and what becomes of their prompts: saved, given up, or sent again."""

from genpipe.core.errors import AttemptError, FaultKind, Poison, PromptFault, ServerFault
from genpipe.core.eta import Pace
from genpipe.core.flights import Flight
from genpipe.core.guard import QualityGuard, RefusalGuard
from genpipe.core.lengths import Lengths
from genpipe.core.outage import Outage
from genpipe.core.poison import DEATHS_MAX
from genpipe.core.saving import Saving
from genpipe.core.sending import Sending
from genpipe.core.settings import FlowSettings
from genpipe.core.values import Answer, Finished, GivenUp, Start
from genpipe.core.waiting import Work


class Outcomes:
    """Takes the end of each attempt, and decides about its prompt.

    A step of a conversation ends nothing: it is credited to its server as any answer is, and the next turn is
    sent before all other prompts. The quality of a conversation is judged once, when it has ended, so that
    the guards and ``progress.json`` count what records have.

    Attributes:
        stopping: no more is started: what would be sent again is left to a later run.
        returned: prompts that were left so.
        late: answers that came for prompts which had ended already, and were dropped.
        quality: what is odd about the answers.
        reason: why a guard wants the run to stop, or None.
        last_error: the last error in one line, or None.
    """

    def __init__(
        self, settings: FlowSettings, sending: Sending, saving: Saving, pace: Pace, outage: Outage
    ) -> None:
        self.stopping = False
        self.returned = self.late = 0
        self.reason: str | None = None
        self.last_error: str | None = None
        self._attempts_max = settings.prompt_attempts
        self._refusals = RefusalGuard(
            after=settings.guards.refused_after, share_max=settings.guards.refused_share_max
        )
        self._sending = sending
        self._saving = saving
        self._pace = pace
        self._outage = outage
        self._fleet, self._flights, self._waiting = sending.fleet, sending.flights, sending.waiting
        lengths = Lengths(
            short_tokens=settings.guards.short_tokens, known=saving.sums.lengths, servers=self._fleet.servers
        )
        self.quality = QualityGuard(settings.guards, lengths)

    def answered(self, start: Start, answer: Answer, now_s: float) -> None:
        """A landed reply was examined and is an answer."""
        flight = self._flights.end(start, None, now_s)
        assert flight.landed_s is not None
        self._spoke(start, now_s)
        work = flight.work
        if work.ended:
            # Another attempt of this prompt was first: one record a prompt.
            self.late += 1
            return
        latency_s = flight.landed_s - start.started_s
        server = self._fleet.servers[start.server]
        tokens = answer.output_tokens or 0
        if answer.more is not None:
            server.output_tokens += tokens
            self._pace.stepped(latency_s, tokens, now_s)
            # The turn has ended, the prompt has not: what comes late for this turn finds its own work ended.
            self._end(work)
            more, started_s = answer.more, start.started_s
            self._go_on(work.next_turn(more, started_s=started_s, latency_s=latency_s, tokens=tokens))
            return
        started_s, spent_s = start.started_s, 0.0
        if (past := work.past) is not None:
            started_s, spent_s = past.began_s, past.spent_s
            # The last answer of a conversation has the tokens of all its turns.
            tokens = max(0, tokens - past.tokens)
        server.output_tokens += tokens
        self._pace.answered(latency_s, now_s, tokens=tokens, spent_s=spent_s)
        finished = Finished(
            prompt=start.prompt,
            answer=self.quality.answered(answer, start.server),
            server=server.spec.url,
            tries=start.tries,
            started_s=started_s,
            latency_s=flight.landed_s - started_s,
        )
        self._end(work)
        self._saving.hold(finished)
        self._refusals.answered()
        self.reason = self.reason or self.quality.reason

    def _spoke(self, start: Start, now_s: float) -> None:
        """A server gave a good answer, whoever needs it."""
        self._fleet.answered(start, now_s)
        self._outage.answered()
        self._sending.poison.answered(start)

    def _go_on(self, work: Work) -> None:
        """The next turn of a conversation is sent next; after a stop, a later run begins it anew."""
        if self.stopping:
            self.returned += 1
        else:
            self._waiting.put_back(work)

    def failed(self, start: Start, error: AttemptError, now_s: float) -> None:
        """An attempt ended in an error, on the wire or when its reply was examined."""
        flight = self._flights.end(start, error.wire_s, now_s, lost=isinstance(error, ServerFault))
        server = self._fleet.servers[start.server]
        if error.status is not None:
            server.heard_s = now_s
        if isinstance(error, ServerFault):
            self._fault(flight, error, now_s)
            return
        self.last_error = f"{server.spec.url}: {error}"
        if flight.landed_s is not None:
            # A good answer, from which a conversation cannot go on.
            self._spoke(start, now_s)
        elif error.status is not None:
            self._fleet.refused(start, now_s)
        else:
            # It ran out of time, or was never sent: the server has not spoken.
            self._fleet.dropped(start, now_s)
            if error.wire_s is not None and not self.stopping:
                self._fleet.hold_back(server, now_s)
        if not flight.work.ended:
            self._give_up(flight.work, error, for_good=True)

    def cancelled(self, start: Start, now_s: float) -> None:
        """An attempt was cancelled, by us; its prompt is asked again later, by this run or another."""
        flight = self._flights.end(start, None, now_s)
        work = flight.work
        if not self.stopping:
            self._fleet.hold_back(self._fleet.servers[start.server], now_s)
        if flight.fault is not None:
            self._fault(flight, flight.fault, now_s)
            return
        self._fleet.dropped(start, now_s)
        if not work.ended and not work.live:
            if self.stopping:
                self.returned += 1
            else:
                self._waiting.put_back(work)

    def give_up_poison(self, work: Work, error: Poison) -> None:
        """A prompt that servers died of is sent to none of them any more."""
        self.last_error = str(error)
        # Somebody else may have killed these servers, but for one that it had to itself.
        self._give_up(work, error, for_good=len(work.killed) > DEATHS_MAX)

    def _fault(self, flight: Flight, fault: ServerFault, now_s: float) -> None:
        """A server fault: it is the server's, perhaps the prompt's, and the prompt goes elsewhere."""
        work, server = flight.work, self._fleet.servers[flight.start.server]
        self.last_error = f"{server.spec.url}: {fault}"
        self._fleet.faulted(flight.start, fault, now_s)
        if work.ended:
            return
        work.faults += 1
        for position in tuple(work.pending or ()):
            # Charge the faults whose server has answered somebody since.
            work.charge(position, self._fleet.servers[position].answers)
        is_cut = fault.kind is FaultKind.LOST and fault.status is not None
        if fault.kind in (FaultKind.BROKEN, FaultKind.OVERDUE, FaultKind.STALLED) or is_cut:
            work.suspect(server.position, server.answers)
            work.overdue += fault.kind is FaultKind.OVERDUE
        if fault.kind in (FaultKind.LOST, FaultKind.STALLED):
            self._sending.poison.lost(work, server.position, now_s)
            self._sending.mark_twins(work, now_s)
        if work.live:
            # Another attempt of it is in flight, and decides.
            return
        if work.charged >= self._attempts_max:
            self._give_up(work, fault, for_good=False)
        elif self.stopping:
            self.returned += 1
        else:
            self._waiting.sleep(work, now_s)

    def _give_up(self, work: Work, error: AttemptError, *, for_good: bool) -> None:
        made_json = error.made_json if isinstance(error, PromptFault) else b""
        if not made_json and work.prompt.made is not None:
            made_json = work.prompt.made()
        gave_up = GivenUp(
            index=work.prompt.index,
            tries=work.tries,
            error_class=type(error).__name__,
            message=str(error),
            last_status=error.status,
            for_good=for_good,
            made_json=made_json,
        )
        self._end(work)
        self._saving.hold(gave_up)
        self.quality.gave_up(error)
        self.reason = self.reason or self._refusals.gave_up(error) or self.quality.reason

    def _end(self, work: Work) -> None:
        work.ended = True
        self._flights.call_off_twins(work)
