"""Continuous batching as a fluid: a token a step for each, and steps slow down as the batch grows.

No token is ever ticked. A token clock advances at one token per step time; a request that begins to decode at
clock ``v`` and wants ``n`` tokens ends when the clock reads ``v + n``, whatever the batch does meanwhile. Who
comes or goes changes only the rate of the clock, so each costs one heap operation.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum


class Phase(Enum):
    """Where a job is in its life."""

    NEW = "new"
    QUEUED = "queued"
    HELD = "held"
    DECODING = "decoding"
    ENDED = "ended"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One sequence to generate.

    The first four are the caller's; the rest belong to the batch.

    Attributes:
        tokens: how many tokens it generates (count, >= 0).
        prompt_tokens: length of its prompt (tokens).
        hold_s: time it holds a running slot before its first token, at a slow factor of 1 (seconds).
        notify: called once, without arguments, when the job has ended or was aborted.
        phase: where it is now.
        was_queued: it was aborted before it ever ran.
        started_s: when it left the queue (seconds, caller's clock), or None.
        ended_s: when its last token was made, or None.
        made_tokens: tokens made when it ended (count).
    """

    tokens: int
    prompt_tokens: int = 0
    hold_s: float = 0.0
    notify: Callable[[], None] | None = None
    phase: Phase = Phase.NEW
    was_queued: bool = False
    started_s: float | None = None
    ended_s: float | None = None
    made_tokens: int = 0
    clock_start: float = field(default=0.0, repr=False)

    @property
    def over(self) -> bool:
        """It ended, or was aborted."""
        return self.phase is Phase.ENDED or self.phase is Phase.ABORTED

    @property
    def aborted(self) -> bool:
        """It was ended early."""
        return self.phase is Phase.ABORTED


class Batch:
    """The batch of one server, and the queue before it. Pure: time is an argument.

    A step of a batch of B decoding requests takes ``slow * (fixed_s + per_request_s * B)``.

    Attributes:
        running_max: requests that hold a slot at once (count, >= 1).
        queued_max: requests that may wait, or None for no limit (count, >= 0).
        slow: factor on step times and holds (> 0).
        frozen: nothing moves and nobody is let in while true.
        running_integral_s: integral of the running count over time (request-seconds).
        queued_integral_s: integral of the queue's length over time (request-seconds).
        tokens_made: tokens of all jobs that are over (count).
    """

    def __init__(
        self,
        *,
        running_max: int,
        queued_max: int | None = None,
        fixed_s: float = 0.0,
        per_request_s: float = 0.0,
        now_s: float = 0.0,
    ) -> None:
        self.running_max = running_max
        self.queued_max = queued_max
        self.slow = 1.0
        self.frozen = False
        self.running_integral_s = 0.0
        self.queued_integral_s = 0.0
        self.tokens_made = 0
        self._fixed_s = fixed_s
        self._per_request_s = per_request_s
        self._now_s = now_s
        self._clock = 0.0
        self._clock_starts = 0.0
        self._decoding = 0
        self._prompt_tokens = 0
        self._running = 0
        self._queued = 0
        self._queue: deque[Job] = deque()
        self._held: list[tuple[float, int, Job]] = []
        self._marks: list[tuple[float, int, Job]] = []
        self._order = 0
        self._over: list[Job] = []

    @property
    def running(self) -> int:
        """Jobs that hold a slot."""
        return self._running

    @property
    def queued(self) -> int:
        """Jobs that wait for a slot."""
        return self._queued

    @property
    def step_s(self) -> float:
        """What one step takes at the present batch size (seconds)."""
        return self.slow * (self._fixed_s + self._per_request_s * self._decoding)

    @property
    def tokens_per_s(self) -> float:
        """What the whole batch makes now; 0 where nothing runs or steps take no time."""
        step_s = self.step_s
        return 0.0 if self.frozen or step_s <= 0.0 else self._decoding / step_s

    @property
    def used_tokens(self) -> int:
        """Prompt and generated tokens of the jobs that hold a slot."""
        return self._prompt_tokens + int(self._decoding * self._clock - self._clock_starts)

    def submit(self, job: Job, now_s: float) -> bool:
        """Take a job in, into a slot or into the queue; False if the queue is full.

        Jobs that were over by ``now_s`` are handed out by the next ``advance``; one that takes no time
        is over on return, and its ``notify`` is not called for it here.
        """
        self._advance_to(now_s)
        free = not self.frozen and self._running < self.running_max and not self._queued
        if not free and self.queued_max is not None and self._queued >= self.queued_max:
            return False
        job.phase = Phase.QUEUED
        self._queue.append(job)
        self._queued += 1
        self._admit()
        return True

    def advance(self, now_s: float) -> list[Job]:
        """Let time pass up to ``now_s``: the jobs that are over since the last call, in order."""
        self._advance_to(now_s)
        over, self._over = self._over, []
        return over

    def next_s(self) -> float | None:
        """When the next job ends or begins to decode if nobody comes or goes, or None."""
        if self.frozen or not self._running:
            return None
        due_s = min(self._hold_due_s(), self._mark_due_s())
        return None if math.isinf(due_s) else due_s

    def abort(self, job: Job, now_s: float) -> None:
        """End a job early, wherever it is; what it made stays counted. No effect on others."""
        self._advance_to(now_s)
        if job.over or job.phase is Phase.NEW:
            return
        if job.phase is Phase.QUEUED:
            job.was_queued = True
            self._queued -= 1
            job.phase = Phase.ABORTED
            job.ended_s = now_s
            self._over.append(job)
            return
        self._leave(job, now_s, Phase.ABORTED)
        self._admit()

    def change(
        self, now_s: float, *, running_max: int, queued_max: int | None, slow: float, frozen: bool
    ) -> None:
        """Change the limits and the pace from ``now_s`` on. Running jobs are never put back."""
        self._advance_to(now_s)
        self.running_max = running_max
        self.queued_max = queued_max
        self.slow = slow
        self.frozen = frozen
        self._admit()

    def check(self) -> None:
        """Every count agrees with what it counts."""
        held, decoding = _alive(self._held, Phase.HELD), _alive(self._marks, Phase.DECODING)
        assert self._running == len(held) + len(decoding)
        assert self._decoding == len(decoding)
        assert self._prompt_tokens == sum(job.prompt_tokens for job in held + decoding)
        assert math.isclose(self._clock_starts, math.fsum(job.clock_start for job in decoding), abs_tol=1e-3)
        assert self._queued == sum(1 for job in self._queue if job.phase is Phase.QUEUED)
        assert not self._queued or self.frozen or self._running >= self.running_max

    def _advance_to(self, now_s: float) -> None:
        while not self.frozen and self._running:
            hold_s, mark_s = self._hold_due_s(), self._mark_due_s()
            due_s = min(hold_s, mark_s)
            if due_s > now_s:
                break
            self._move(due_s)
            if mark_s <= hold_s:
                self._leave(heapq.heappop(self._marks)[2], self._now_s, Phase.ENDED)
            else:
                self._decode(heapq.heappop(self._held)[2])
            self._admit()
        self._move(now_s)

    def _move(self, now_s: float) -> None:
        elapsed_s = now_s - self._now_s
        if elapsed_s <= 0.0:
            return
        self._now_s = now_s
        self.running_integral_s += elapsed_s * self._running
        self.queued_integral_s += elapsed_s * self._queued
        if self._decoding and not self.frozen and (step_s := self.step_s) > 0.0:
            self._clock += elapsed_s / step_s

    def _hold_due_s(self) -> float:
        held = self._held
        while held and held[0][2].phase is not Phase.HELD:
            heapq.heappop(held)
        return max(held[0][0], self._now_s) if held else math.inf

    def _mark_due_s(self) -> float:
        marks = self._marks
        while marks and marks[0][2].phase is not Phase.DECODING:
            heapq.heappop(marks)
        return self._now_s + max(0.0, marks[0][0] - self._clock) * self.step_s if marks else math.inf

    def _admit(self) -> None:
        while self._queued and self._running < self.running_max and not self.frozen:
            job = self._queue.popleft()
            if job.phase is not Phase.QUEUED:
                continue
            self._queued -= 1
            self._running += 1
            self._prompt_tokens += job.prompt_tokens
            job.started_s = self._now_s
            hold_s = job.hold_s * self.slow
            if hold_s > 0.0:
                job.phase = Phase.HELD
                self._order += 1
                heapq.heappush(self._held, (self._now_s + hold_s, self._order, job))
            else:
                self._decode(job)
        if not self._queued:
            self._queue.clear()

    def _decode(self, job: Job) -> None:
        job.phase = Phase.DECODING
        job.clock_start = self._clock
        self._decoding += 1
        self._clock_starts += job.clock_start
        if job.tokens == 0 or self.step_s == 0.0:
            self._leave(job, self._now_s, Phase.ENDED)
            return
        self._order += 1
        heapq.heappush(self._marks, (self._clock + job.tokens, self._order, job))

    def _leave(self, job: Job, now_s: float, phase: Phase) -> None:
        if job.phase is Phase.DECODING:
            self._decoding -= 1
            self._clock_starts -= job.clock_start
            job.made_tokens = min(job.tokens, int(self._clock - job.clock_start))
        if phase is Phase.ENDED:
            job.made_tokens = job.tokens
        if not self._decoding:
            # An empty batch starts the clock anew, so that rounding errors never pile up.
            self._clock = self._clock_starts = 0.0
        self._running -= 1
        self._prompt_tokens -= job.prompt_tokens
        self.tokens_made += job.made_tokens
        job.phase = phase
        job.ended_s = now_s
        self._over.append(job)


def _alive(entries: Iterable[tuple[float, int, Job]], phase: Phase) -> list[Job]:
    return [job for _, _, job in entries if job.phase is phase]
