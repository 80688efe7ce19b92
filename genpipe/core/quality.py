"""What is odd about one answer: for nearly all of them, nothing.

Only what is sure is flagged. Of the marks around a thought ``<think>`` and ``</think>`` are known; others,
such as ``[THINK]`` or ``<|channel|>``, are special tokens, which servers leave out of the text. Where the
chat template has opened the thought already, one that was cut off has no mark at all in the content, and the
answer is only ``cut``. Where a mark is only spoken of is for :mod:`genpipe.core.thoughts` to say.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from genpipe.core import thoughts

FLAGS = ("empty", "cut", "looping", "unclosed_think", "short")
"""Every flag, in the order in which a record has them; ``short`` is found by :mod:`genpipe.core.lengths`."""

TAIL_CHARS = 1 << 16
"""No more of the end of a text is searched for a phrase that repeats itself (characters)."""

NEEDLE_CHARS = 32
"""The end of a text is looked for in what comes before it, so much of it at first (characters)."""

LOOP_CHARS_MIN = 300
"""A phrase that repeats itself fills at least so much of the end (characters), ..."""

LOOP_TIMES_MIN, LONG_TIMES_MIN, LONG_CHARS = 5, 3, 200
"""... and comes so many times; a phrase of 200 characters or more so many times."""

NEEDLES_MAX = 4
"""The end is made longer so often where it also repeats something within the phrase (count)."""


def flags_of(finish_reason: str | None, parts: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """What is odd about an answer, in the order of :data:`FLAGS`.

    ``empty``: no sample has text beside its thought, or a call of a tool. ``cut``: one ended at the length
    limit. ``looping``: one ends in a phrase that repeats itself; where there is no content, its reasoning
    does. ``unclosed_think``: one ends within its thought.

    Args:
        finish_reason: ``length`` where any sample has it.
        parts: the samples, each with ``content``, ``reasoning_content`` and ``tool_calls``.
    """
    cut = finish_reason == "length"
    empty, looping, unclosed = True, False, False
    for part in parts:
        text, calls = part["content"], part["tool_calls"]
        if not text or (isinstance(text, str) and text.isspace()):
            empty &= not calls
            text = part["reasoning_content"]
            unclosed |= cut and bool(text) and not calls
        elif isinstance(text, str):
            empty &= not calls and _is_thought_alone(text)
            # One character is found much faster than a mark.
            unclosed |= "<" in text and thoughts.ends_within(text)
        else:
            empty = False
        looping |= isinstance(text, str) and ends_in_loop(text)
    if not (empty or cut or looping or unclosed):
        return ()
    found = (empty, cut, looping, unclosed)
    return tuple(flag for flag, is_so in zip(FLAGS, found, strict=False) if is_so)


def ends_in_loop(text: str) -> bool:
    """Whether a text ends in a phrase that repeats itself; the last time it may break off anywhere.

    Takes time that grows with the text at most, and looks at no more than the last :data:`TAIL_CHARS`.
    """
    tail = text[-TAIL_CHARS:]
    end = tail.rstrip()
    size, known = len(end), NEEDLE_CHARS
    if len(tail) - size >= LOOP_CHARS_MIN:
        # Blanks without end, as grammars that allow them make them.
        return True
    if size < LOOP_CHARS_MIN:
        return False
    for _ in range(NEEDLES_MAX):
        # A longer period does not come three times.
        at = end.rfind(end[-known:], max(0, size - known - size // LONG_TIMES_MIN), -1)
        if at < 0:
            return False
        period = size - known - at
        span = _span(end, period)
        if span >= max(LOOP_CHARS_MIN, period * (LONG_TIMES_MIN if period >= LONG_CHARS else LOOP_TIMES_MIN)):
            return True
        # It repeats itself only within the end of a phrase, as zeros in a row of a table do; as much as that
        # does not come so shortly before.
        known = span
    return False


def _span(text: str, period: int) -> int:
    """How much of the end of ``text`` repeats what stands ``period`` before it, the first time included."""
    least, most = period, len(text)
    while least < most:
        middle = (least + most + 1) // 2
        start = len(text) - middle
        if text[start:-period] == text[start + period :]:
            least = middle
        else:
            most = middle - 1
    return least


def _is_thought_alone(text: str) -> bool:
    """Whether nothing is said behind the thought. Nearly all texts are told by their last characters."""
    end = text.rstrip() if text[-1].isspace() else text
    return end.endswith(thoughts.CLOSE) and not thoughts.split(end).said
