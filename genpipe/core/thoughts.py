"""Thoughts that stand in the text of an answer, as they do where the server has no parser for them."""

from typing import NamedTuple

OPEN, CLOSE = "<think>", "</think>"
QUOTES = frozenset("`'\"“‘«")


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

    A thought that does not end has nothing behind it. A mark in quotes is only spoken of.
    """
    is_marked = text.lstrip().startswith(OPEN)
    end = text.find(CLOSE)
    start = text.find(OPEN) + len(OPEN) if is_marked else 0
    if end < 0:
        return Split(text[start:].strip(), "", True) if is_marked else Split(None, text, False)
    if not is_marked and (OPEN in text[:end] or text[max(0, end - 1) : end] in QUOTES):
        return Split(None, text, False)
    return Split(text[start:end].strip(), text[end + len(CLOSE) :].lstrip(), is_marked)
