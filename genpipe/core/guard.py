"""Notices early that a run is not worth going on with."""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from genpipe.core import wording
from genpipe.core.errors import AttemptError, Poison, PromptFault
from genpipe.core.lengths import Lengths
from genpipe.core.settings import GuardSettings
from genpipe.core.values import Answer

_MESSAGE_CHARS = 200
"""Of a message no more is kept and told (characters)."""


class RefusalGuard:
    """Nearly all prompts are refused: then the request itself is wrong.

    Looks at the prompts that ended first, by an answer or without one; bad lines were never asked.
    """

    def __init__(self, *, after: int, share_max: float) -> None:
        self._after = after
        self._share_max = share_max
        self._ended = 0
        self._refused: Counter[str] = Counter()

    def answered(self) -> None:
        """A prompt was answered."""
        self._ended += 1

    def gave_up(self, error: AttemptError) -> str | None:
        """A prompt was given up; why the run should stop, or None."""
        self._ended += 1
        if self._ended > 2 * self._after:
            return None
        if isinstance(error, PromptFault) and not isinstance(error, Poison):
            self._refused[str(error)[:_MESSAGE_CHARS]] += 1
        refused = self._refused.total()
        if self._ended < self._after or refused <= self._share_max * self._ended:
            return None
        return (
            f"guards.refused_share: {wording.number(refused)} of the first {wording.number(self._ended)} "
            f"prompts were refused (bound {_percent(self._share_max)}), {_most(self._refused)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """A share that is not to be passed.

    Attributes:
        key: its name among the settings.
        share_max: the bound itself.
        then: what happens once it is passed.
        what: what is counted, as it follows "870 of the last 1,000".
        advice: what to look at; none where what is counted says it.
    """

    key: str
    share_max: float
    then: Literal["stop", "warn"]
    what: str
    advice: str = ""


def _bounds_by_flag(settings: GuardSettings) -> dict[str, _Bound]:
    """The bounds on answers that are odd by themselves."""
    return {
        "empty": _Bound(
            key="empty_share",
            share_max=settings.empty_share_max,
            then=settings.on_empty,
            what="answers are empty",
            advice="look at max_tokens, which a thought may have used up, at stop and at the chat template",
        ),
        "cut": _Bound(
            key="cut_share",
            share_max=settings.cut_share_max,
            then=settings.on_cut,
            what="answers are cut off at the length limit",
            advice="raise max_tokens, or leave it out",
        ),
        "looping": _Bound(
            key="looping_share",
            share_max=settings.looping_share_max,
            then=settings.on_looping,
            what="answers end in a phrase that repeats itself",
            advice="look at temperature and repetition_penalty, and at the chat template",
        ),
        "unclosed_think": _Bound(
            key="unclosed_think_share",
            share_max=settings.unclosed_think_share_max,
            then=settings.on_unclosed_think,
            what="answers end within their reasoning",
            advice="raise max_tokens, or set enable_thinking = false in chat_template_kwargs",
        ),
    }


class _Last:
    """What is odd about the last so many of something.

    Attributes:
        counts: how many of them have which oddity.
        odd: how many of them have any.
    """

    def __init__(self, settings: GuardSettings) -> None:
        assert settings.after >= 1
        assert settings.window >= 1
        self.counts: Counter[str] = Counter()
        self.odd = 0
        self._after = settings.after
        self._window = settings.window
        self._seen = 0
        self._oddities: deque[tuple[str, ...]] = deque()

    def add(self, oddities: tuple[str, ...]) -> bool:
        """One more came, and this is odd about it; whether a bound may be passed now that was not before."""
        self._seen += 1
        self._oddities.append(oddities)
        if oddities:
            self.counts.update(oddities)
            self.odd += 1
        if len(self._oddities) > self._window:
            oldest = self._oddities.popleft()
            self.odd -= bool(oldest)
            for oddity in oldest:
                self.counts[oddity] -= 1
                # Messages are of any number, and none may be kept for ever.
                if not self.counts[oddity]:
                    del self.counts[oddity]
        return bool(oddities) or self._seen == self._after

    def shares(self) -> dict[str, float] | None:
        """The share of each oddity that is there; None before anything came."""
        looked_at = len(self._oddities)
        return {oddity: count / looked_at for oddity, count in self.counts.items()} if looked_at else None

    def passed(self, bound: _Bound, count: int) -> str | None:
        """How a bound is passed, in words; None where it is not, or where too few came to say so."""
        looked_at = len(self._oddities)
        if self._seen < self._after or count / looked_at <= bound.share_max:
            return None
        of = f"{wording.number(count)} of the last {wording.number(looked_at)}"
        advice = f": {bound.advice}" if bound.advice else ""
        return f"guards.{bound.key}: {of} {bound.what} (bound {_percent(bound.share_max)}){advice}"


class QualityGuard:
    """Too many of the last prompts failed, or too many of the last answers are odd.

    Costs the same for each prompt, and remembers no more of them than its window has. Flags of earlier
    segments do not count.

    Attributes:
        reason: why the run should stop: the key of the bound that was passed first, with the numbers; None
            while none was.
        lengths: how long the answers are.
    """

    def __init__(self, settings: GuardSettings, lengths: Lengths) -> None:
        self.reason: str | None = None
        self.lengths = lengths
        self._settings = settings
        self._ended = _Last(settings)
        self._answers = _Last(settings)
        self._failed = _Bound(
            key="failed_share",
            share_max=settings.failed_share_max,
            then=settings.on_failed,
            what="prompts ended without an answer",
        )
        self._by_flag = _bounds_by_flag(settings)

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line for each bound that is passed now and stops nothing; gone again once it is kept.

        Likewise for each server whose answers are far shorter than those of the others.
        """
        return (*self._passed("warn"), *self.lengths.warnings())

    def recent_shares(self) -> dict[str, float] | None:
        """The share of each flag that the last answers have; None before there is one."""
        return self._answers.shares()

    def answered(self, answer: Answer, server: int) -> Answer:
        """A prompt was answered by the server at this position; the answer, flagged where it is short."""
        if self.lengths.add(answer, server):
            answer = replace(answer, flags=(*answer.flags, "short"))
        may_stop = self._ended.add(())
        if self._answers.add(answer.flags) or may_stop:
            self._judge()
        return answer

    def gave_up(self, error: AttemptError) -> None:
        """A prompt that was asked ended without an answer."""
        self._ended.add((str(error)[:_MESSAGE_CHARS],))
        self._judge()

    def _judge(self) -> None:
        if self.reason is None:
            self.reason = next(self._passed("stop"), None)

    def _passed(self, then: str) -> Iterator[str]:
        """The bounds of one kind that are passed, in words."""
        if self._failed.then == then and (text := self._ended.passed(self._failed, self._ended.odd)):
            yield f"{text}, {_most(self._ended.counts)}"
        for flag, bound in self._by_flag.items():
            if bound.then == then and (text := self._answers.passed(bound, self._answers.counts[flag])):
                yield text
        short = self._answers.counts["short"]
        if self._settings.on_short == then and (text := self._answers.passed(self._short, short)):
            yield text

    @property
    def _short(self) -> _Bound:
        """The bound on short answers; what is short may change with the run's median."""
        what, unless = self.lengths.short_texts
        return _Bound(
            key="short_share",
            share_max=self._settings.short_share_max,
            then=self._settings.on_short,
            what=what,
            advice=f"look at max_tokens, at stop and at the chat template, or {unless}",
        )


def _most(messages: Counter[str]) -> str:
    """The message that is most frequent."""
    message, count = messages.most_common(1)[0]
    return f"{wording.number(count)} with: {message}"


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"
