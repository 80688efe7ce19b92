"""How fast the run is, and when it will end, with a range.

While prompts are left to send, they go at the run's rate. Then the last requests run out with nobody to
refill their slots, and the longest of them decides. With ``S`` the survival function of the latencies, ``r``
the rate and ``b`` the time that sending takes, the requests expected to be alive at ``x`` from now are those
in flight, of age ``a``, and those to be sent::

    sum of S(a + x) / S(a)  +  r * integral of S(u) for u from x - b to x

The run is expected to end where this is ``exp(-Euler's gamma) = 0.56``.

A conversation counts as one request that lives for as long as all its turns together.

``S`` is the Kaplan-Meier estimate: requests still in flight count as "at least this old". Without them the
first answers, which are the short ones, would make every early ETA too good.
"""

import bisect
import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from genpipe.core.histogram import Histogram
from genpipe.core.values import Group

ANSWERS_MIN = 5
"""Answers before there is ground for an ETA (count)."""

AGES_MAX = 128
"""Requests in flight that an ETA looks at; more are sampled (count)."""

WINDOW_S = 60.0
"""The recent window is at least this long (seconds), and at least two median latencies."""

WINDOW_MAX_S = 600.0
"""The recent window is at most this long (seconds)."""

TAIL_POWER = 4
"""Beyond the longest latency seen, survivors are taken to thin out with this power of the time."""

_EXPECTED, _EARLY, _LATE = 0.56, 3.0, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Prompts and tokens per second; None where nothing has been answered yet.

    Attributes:
        recent: prompts done, over the recent window.
        segment: prompts done, since this process began.
        tokens_recent: output tokens, over the recent window. They count when they come, those of a
            conversation turn by turn: what a stop, or a later failure, takes with an unfinished conversation
            is in the rates, while all totals have only what is durable.
        tokens_segment: likewise since this process began.
    """

    recent: float | None
    segment: float | None
    tokens_recent: float | None
    tokens_segment: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Eta:
    """Seconds until the end: expected, and the bounds of a range of about nine in ten."""

    expected_s: float
    low_s: float
    high_s: float


class Pace:
    """Rates and the ETA of one process's part of a run.

    Attributes:
        latencies_s: of answered attempts.
    """

    def __init__(self, now_s: float) -> None:
        self.latencies_s = Histogram(per_octave=8, least=0.001)
        # How long prompts live: other than the latencies only where there are conversations.
        self._lives_s = self.latencies_s
        self._began_s = now_s
        self._done = self._ended = self._tokens = 0
        self._notes: deque[tuple[float, int, int, int]] = deque([(now_s, 0, 0, 0)])

    def answered(
        self,
        latency_s: float,
        now_s: float,  # noqa: ARG002 - events all take the time
        *,
        tokens: int = 0,
        spent_s: float = 0.0,
    ) -> None:
        """A prompt was answered, by an attempt that took ``latency_s``.

        Args:
            latency_s: of that attempt.
            now_s: the run's clock.
            tokens: how many its answer has.
            spent_s: what the earlier turns of a conversation took (seconds).
        """
        self.latencies_s.add(latency_s)
        if self._lives_s is not self.latencies_s:
            self._lives_s.add(spent_s + latency_s)
        self._tokens += tokens

    def stepped(self, latency_s: float, tokens: int, now_s: float) -> None:
        """A turn of a conversation was answered, by an attempt that took ``latency_s``, and it goes on."""
        if self._lives_s is self.latencies_s:
            self._lives_s = copy.deepcopy(self.latencies_s)
        self.latencies_s.add(latency_s)
        self._tokens += tokens
        self._note(now_s)

    def committed(self, group: Group, now_s: float) -> None:
        """A group is durable."""
        self._done += len(group.finished)
        self._ended += len(group.finished) + len(group.given_up)
        self._note(now_s)

    def _note(self, now_s: float) -> None:
        """Remember the counts of now, for rates over a window."""
        if now_s - self._notes[-1][0] >= 0.5:
            self._notes.append((now_s, self._done, self._ended, self._tokens))
            while len(self._notes) > 2 and self._notes[1][0] < now_s - WINDOW_MAX_S:
                self._notes.popleft()

    def rates(self, now_s: float) -> Rates:
        """Rates now; a window that began with the segment counts from its beginning."""
        past_s = now_s - self._began_s
        if past_s <= 0 or (self._done == 0 and self._tokens == 0):
            return Rates(recent=None, segment=None, tokens_recent=None, tokens_segment=None)
        began_s, done, _, tokens = self._window(now_s)
        window_s = now_s - began_s
        return Rates(
            recent=(self._done - done) / window_s if self._done else None,
            segment=self._done / past_s if self._done else None,
            tokens_recent=(self._tokens - tokens) / window_s,
            tokens_segment=self._tokens / past_s,
        )

    def eta(self, remaining: int, ages_s: Sequence[float], in_flight: int, now_s: float) -> Eta | None:
        """When ``remaining`` prompts, those in flight among them, will have ended.

        Args:
            remaining: prompts that have not ended.
            ages_s: ages of the requests in flight, or an even sample of them; what the earlier turns of a
                conversation took belongs to them.
            in_flight: how many those are.
            now_s: the run's clock.

        Returns:
            None without ground for an estimate: too few answers, or nothing in flight.
        """
        if remaining <= 0:
            return Eta(expected_s=0.0, low_s=0.0, high_s=0.0)
        lives_s = self._lives_s
        if lives_s.count < ANSWERS_MIN or in_flight == 0:
            return None
        weight = in_flight / len(ages_s)
        life = _Survival(lives_s, ages_s, weight)
        to_send = max(0, remaining - in_flight)
        bulk_s = to_send / self._speed(life.mean_s, in_flight, now_s)
        error = min(0.9, 2 * life.spread / float(lives_s.count) ** 0.5)
        parts = [
            life.last_of(ages_s, weight, to_send, bulk_s * factor, left)
            for factor, left in ((1.0, _EXPECTED), (1 - error, _EARLY), (1 / (1 - error), _LATE))
        ]
        return Eta(expected_s=parts[0], low_s=min(parts), high_s=max(parts))

    def _speed(self, mean_s: float, in_flight: int, now_s: float) -> float:
        """Prompts ended per second: counted where there is enough to count, else by Little's law."""
        began_s, _, ended, _ = self._window(now_s)
        counted, window_s = self._ended - ended, now_s - began_s
        if counted >= 50 and window_s >= 3 * mean_s:
            return counted / window_s
        return in_flight / mean_s

    def _window(self, now_s: float) -> tuple[float, int, int, int]:
        """The note at the start of the recent window."""
        median_s = self._lives_s.quantile(0.5) or 0.0
        start_s = now_s - min(WINDOW_MAX_S, max(WINDOW_S, 2 * median_s))
        place = bisect.bisect_right(self._notes, start_s, key=lambda note: note[0])
        return self._notes[max(0, place - 1)]


class _Survival:
    """How many requests live longer than x: a straight line within each bucket."""

    def __init__(self, latencies_s: Histogram, ages_s: Sequence[float], weight: float) -> None:
        alive: dict[int, float] = {}
        for age_s in ages_s:
            bucket = latencies_s.bucket(age_s)
            alive[bucket] = alive.get(bucket, 0.0) + weight
        deaths = latencies_s.buckets
        first, last = min(deaths), max(deaths)
        at_risk = latencies_s.count + sum(count for bucket, count in alive.items() if bucket >= first)
        self.starts_s = [0.0]
        self.shares = [1.0]
        share = 1.0
        for bucket in range(first, last + 1):
            censored = alive.get(bucket, 0.0)
            died = deaths.get(bucket, 0)
            self.starts_s.append(latencies_s.low(bucket))
            self.shares.append(share)
            if died:
                share *= max(0.0, 1 - died / max(died, at_risk - censored / 2))
            at_risk -= died + censored
        self.end_s = latencies_s.low(last + 1)
        # That nobody has been seen to live longer than the end proves little: half of one request may.
        self.end_share = max(share, 0.5 / (latencies_s.count + len(ages_s) * weight))
        self.starts_s.append(self.end_s)
        self.shares.append(self.end_share)
        self._areas = self._tail_areas()
        self.mean_s = self._areas[0]
        second = sum(
            self._middle(place) * (self.starts_s[place + 1] ** 2 - self.starts_s[place] ** 2)
            for place in range(len(self.starts_s) - 1)
        )
        self.spread = max(0.1, second / self.mean_s**2 - 1) ** 0.5

    def _tail_areas(self) -> list[float]:
        """The integral of the survival function from each start on."""
        area = self._area_of_tail(self.end_s)
        areas = [area]
        for place in range(len(self.starts_s) - 2, -1, -1):
            area += self._middle(place) * (self.starts_s[place + 1] - self.starts_s[place])
            areas.append(area)
        areas.reverse()
        return areas

    def _middle(self, place: int) -> float:
        return (self.shares[place] + self.shares[place + 1]) / 2

    def at(self, age_s: float) -> float:
        """Share of requests that live longer than ``age_s``."""
        if age_s >= self.end_s:
            return self.end_share * (self.end_s / age_s) ** TAIL_POWER
        place = bisect.bisect_right(self.starts_s, age_s) - 1
        start_s, end_s = self.starts_s[place], self.starts_s[place + 1]
        share, next_share = self.shares[place], self.shares[place + 1]
        return share + (next_share - share) * (age_s - start_s) / (end_s - start_s)

    def _area_of_tail(self, from_s: float) -> float:
        return self.end_share * (self.end_s / from_s) ** TAIL_POWER * from_s / (TAIL_POWER - 1)

    def _area(self, from_s: float) -> float:
        """The integral of the survival function from ``from_s`` on (seconds)."""
        if from_s >= self.end_s:
            return self._area_of_tail(from_s)
        place = bisect.bisect_right(self.starts_s, from_s) - 1
        end_s = self.starts_s[place + 1]
        return self._areas[place + 1] + (self.at(from_s) + self.shares[place + 1]) / 2 * (end_s - from_s)

    def last_of(
        self, ages_s: Sequence[float], weight: float, to_send: int, sending_s: float, left: float
    ) -> float:
        """When only ``left`` requests are expected to be alive (seconds from now, at least ``sending_s``).

        Args:
            ages_s: ages of a sample of the requests in flight.
            weight: how many requests each of them stands for.
            to_send: requests still to be sent, evenly spread over ``sending_s``.
            sending_s: how long that takes.
            left: how many may be left (count, > 0).
        """
        lives = [(age_s, self.at(age_s)) for age_s in ages_s]
        each = to_send / sending_s if sending_s > 0 else 0.0

        def alive(after_s: float) -> float:
            old = weight * sum(self.at(age_s + after_s) / share for age_s, share in lives)
            return old + each * (self._area(after_s - sending_s) - self._area(after_s))

        low_s, high_s = sending_s, sending_s + self.end_s
        while alive(high_s) > left:
            low_s, high_s = high_s, 2 * high_s
        for _ in range(16):
            middle_s = (low_s + high_s) / 2
            if alive(middle_s) > left:
                low_s = middle_s
            else:
                high_s = middle_s
        return high_s
