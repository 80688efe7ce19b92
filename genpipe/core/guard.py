"""Notices early that a run is not worth going on with."""

from collections import Counter

from genpipe.core.errors import AttemptError, PromptFault


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
        if isinstance(error, PromptFault):
            self._refused[str(error)[:200]] += 1
        refused = self._refused.total()
        if not self._after <= self._ended <= 2 * self._after or refused <= self._share_max * self._ended:
            return None
        message, count = self._refused.most_common(1)[0]
        return f"{refused} of the first {self._ended} prompts were refused, {count} with: {message}"
