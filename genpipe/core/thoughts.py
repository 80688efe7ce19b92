"""Thoughts that stand in the text of an answer, as they do where the server has no parser for them."""

from typing import NamedTuple

OPEN, CLOSE = "<think>", "</think>"
QUOTES = frozenset("`'\"“‘«")

_BLANKS = " \t\r"
_FENCE = "```"


class Split(NamedTuple):
    """A text taken apart.

    Attributes:
        thought: what stands before what is said; None where nothing does.
        said: the rest.
        is_marked: the thought's first mark is there; where the chat template has written it, it is missing.
    """

    thought: str | None
    said: str
    is_marked: bool


def split(text: str) -> Split:
    """The thought at the beginning of an answer, and what is said behind it.

    A thought that does not end has nothing behind it. Without its first mark, it ends at the first other mark
    that begins or ends a line, as models write it; one within a line, in quotes, in a block of code, or
    behind a first mark is only spoken of. A text that speaks of the mark and ends a line with it is not told
    from a thought.
    """
    is_marked = text.lstrip().startswith(OPEN)
    start = text.find(OPEN) + len(OPEN) if is_marked else 0
    end = text.find(CLOSE) if is_marked else _end_of_thought(text)
    if end < 0:
        return Split(text[start:].strip(), "", True) if is_marked else Split(None, text, False)
    return Split(text[start:end].strip(), text[end + len(CLOSE) :].lstrip(), is_marked)


def ends_within(text: str) -> bool:
    """Whether a thought begins, with its mark, behind the last one that ended.

    The mark counts where it begins the text, a line or what stands behind that last thought, and is not in a
    block of code. Not seen are thoughts that speak of the mark at their end, and those that begin in
    mid-line.
    """
    if OPEN not in text:
        return False
    last = text.rfind(CLOSE)
    past = 0 if last < 0 else last + len(CLOSE)
    fences = text.count(_FENCE, 0, past)
    is_first = True
    while (at := text.find(OPEN, past)) >= 0:
        fences += text.count(_FENCE, past, at)
        if fences % 2 == 0 and _begins(text, past, at, is_first=is_first):
            return True
        past, is_first = at + len(OPEN), False
    return False


def _end_of_thought(text: str) -> int:
    """Where the mark stands that ends a thought whose first mark is missing; -1 where none does."""
    end = text.find(CLOSE)
    if end < 0:
        return -1
    opened, past, fences = text.find(OPEN), 0, 0
    while end >= 0 and not 0 <= opened < end:
        fences += text.count(_FENCE, past, end)
        behind = end + len(CLOSE)
        ends_line = behind == len(text) or text.startswith(("\n", "\r\n"), behind)
        is_quoted = text[max(0, end - 1) : end] in QUOTES
        if fences % 2 == 0 and not is_quoted and (ends_line or _begins(text, past, end, is_first=past == 0)):
            return end
        end, past = text.find(CLOSE, behind), behind
    return -1


def _begins(text: str, past: int, at: int, *, is_first: bool) -> bool:
    """Whether nothing but blanks stands before a mark on its line.

    Args:
        text: all of it.
        past: the end of the mark before it; no more is looked at, so that many marks take linear time.
        at: where it stands.
        is_first: nothing stands before ``past`` on the line either.
    """
    before = text[past:at].rstrip(_BLANKS)
    return before.endswith("\n") or (is_first and not before)
