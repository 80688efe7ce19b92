"""Reads what ``strace`` wrote, into calls."""

import codecs
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

LINE_OPTIONS = ("-s", "100000000")
"""All bytes of every string, for they are replayed."""

_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"(\.\.\.)?')
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"(?:\.\.\.)?|[\[\]{}(),]|[^"\[\]{}(),]+')
_LINE = re.compile(r"(?P<thread>\d+) +(?P<rest>.*)", re.DOTALL)
_BEGUN = re.compile(r"(?P<name>\w+)\((?P<arguments>.*)", re.DOTALL)
_RESUMED = re.compile(r"<\.\.\. (?P<name>\w+) resumed>(?P<arguments>.*)", re.DOTALL)
_RESULT = re.compile(r"\) += (?P<value>-?\d+|\?)(?: (?P<error>E[A-Z]+))?[^=]*$")
_UNFINISHED = " <unfinished ...>"


@dataclass(frozen=True, kw_only=True)
class Call:
    """A system call begins, or has returned.

    Attributes:
        thread: who made it.
        name: of the call.
        arguments: as they were written, but for strings.
        returned: this is its end; every call has a beginning, and none need have an end.
        result: what it returned, where it returned anything.
        error: the name of the error, where it failed.
    """

    thread: int
    name: str
    arguments: tuple[str, ...]
    returned: bool
    result: int | None = None
    error: str | None = None

    def text(self, place: int) -> bytes:
        """All strings in one argument, joined."""
        pieces = []
        for body, is_cut in _STRING.findall(self.arguments[place]):
            assert not is_cut, f"a string of {self.name} was cut short in the trace"
            pieces.append(codecs.escape_decode(body.encode("latin-1"))[0])
        return b"".join(pieces)

    def number(self, place: int) -> int:
        """A whole number."""
        return int(self.arguments[place])


def calls(lines: Iterable[str]) -> Iterator[Call]:
    """The beginnings and the ends of all calls of a trace made with ``-f``, in their order."""
    begun: dict[int, str] = {}
    for line in lines:
        match = _LINE.fullmatch(line.rstrip("\n"))
        assert match, line
        thread, rest = int(match["thread"]), match["rest"]
        if resumed := _RESUMED.fullmatch(rest):
            yield _call(thread, resumed["name"], begun.pop(thread) + resumed["arguments"], returned=True)
        elif call := _BEGUN.fullmatch(rest):
            name, arguments = call["name"], call["arguments"]
            if arguments.endswith(_UNFINISHED):
                begun[thread] = arguments.removesuffix(_UNFINISHED)
                yield _call(thread, name, begun[thread], returned=False)
            else:
                yield _call(thread, name, arguments, returned=False)
                yield _call(thread, name, arguments, returned=True)


def _call(thread: int, name: str, text: str, *, returned: bool) -> Call:
    result = _RESULT.search(text)
    arguments = tuple(_split(text[: result.start()] if result else text))
    if not returned or result is None or result["value"] == "?":
        return Call(thread=thread, name=name, arguments=arguments, returned=False)
    return Call(
        thread=thread,
        name=name,
        arguments=arguments,
        returned=True,
        result=int(result["value"]),
        error=result["error"],
    )


def _split(text: str) -> Iterator[str]:
    """Arguments, separated by commas that stand in no brackets and no string."""
    depth, piece = 0, ""
    for token in _TOKEN.findall(text):
        if token == "," and depth == 0:
            yield piece.strip()
            piece = ""
            continue
        depth += (token in "[{(") - (token in "]})")
        piece += token
    if piece.strip():
        yield piece.strip()
