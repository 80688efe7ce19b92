"""JSON of any shape without recursion: slow, for the few values that are nested too deeply for libraries."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import orjson

DEPTH_MAX: Final = 10_000
"""Levels of lists and objects within each other; more is refused."""

SURROGATE = re.compile("[\ud800-\udfff]")

_TOO_DEEP = "JSON nested too deeply"
_END: Final = object()
_CLOSERS = {"[": "]", "{": "}"}
_TOKEN = re.compile(
    r"""[ \t\n\r]*(?:
      (?P<mark>[\[\]{},:])
    | (?P<string>"[^"\\]*(?:\\.[^"\\]*)*")
    | (?P<real>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+(?:[eE][+-]?[0-9]+)?|[eE][+-]?[0-9]+))
    | (?P<whole>-?(?:0|[1-9][0-9]*))
    | (?P<word>true|false|null)
    | (?P<constant>NaN|-?Infinity)
    )""",
    re.VERBOSE,
)
_WORDS = {"true": True, "false": False, "null": None}


def parse(
    text: str,
    place: int = 0,
    *,
    parse_float: Callable[[str], Any],
    parse_int: Callable[[str], Any],
    parse_constant: Callable[[str], Any],
) -> tuple[Any, int]:
    """Parse the JSON value at ``place``, as a :class:`json.JSONDecoder` with these arguments would.

    Returns:
        The value, with U+FFFD in place of lone surrogates, and where it ends.

    Raises:
        ValueError: it is no JSON, or nested more than ``DEPTH_MAX`` deep.
    """
    readers: dict[str | None, Callable[[str], Any]] = {
        "string": _string,
        "real": parse_float,
        "whole": parse_int,
        "word": _WORDS.__getitem__,
        "constant": parse_constant,
    }
    heap: list[Any] = []
    keys: list[str] = []
    while True:
        kind, piece, place = _next(text, place)
        if piece in _CLOSERS:
            if len(heap) == DEPTH_MAX:
                raise ValueError(_TOO_DEEP)
            value: Any = {} if piece == "{" else []
            _, ahead, after = _next(text, place)
            if ahead != _CLOSERS[piece]:
                heap.append(value)
                if piece == "{":
                    key, place = _key(text, place)
                    keys.append(key)
                continue
            place = after
        elif kind in readers:
            value = readers[kind](piece)
        else:
            raise _fault(place - 1)
        while heap:
            around = heap[-1]
            is_object = isinstance(around, dict)
            if is_object:
                around[keys[-1]] = value
            else:
                around.append(value)
            _, piece, place = _next(text, place)
            if piece == ",":
                if is_object:
                    keys[-1], place = _key(text, place)
                break
            if piece != ("}" if is_object else "]"):
                raise _fault(place - len(piece))
            value = heap.pop()
            if is_object:
                keys.pop()
        else:
            return value, place


def encode(value: Any) -> bytes:
    """Strict, compact JSON in UTF-8: NaN and Infinity become null, lone surrogates U+FFFD.

    Raises:
        ValueError: nested more than ``DEPTH_MAX`` deep.
        TypeError: a value of a type that JSON does not have.
    """
    parts: list[bytes] = []
    heap: list[tuple[Iterator[Any], bytes]] = []
    while True:
        if isinstance(value, dict):
            parts.append(b"{")
            heap.append((iter(value.items()), b"}"))
        elif isinstance(value, list | tuple):
            parts.append(b"[")
            heap.append((iter(value), b"]"))
        else:
            parts.append(_scalar(value))
        if len(heap) > DEPTH_MAX:
            raise ValueError(_TOO_DEEP)
        while heap:
            items, closer = heap[-1]
            value = next(items, _END)
            if value is _END:
                parts.append(closer)
                heap.pop()
                continue
            if parts[-1] not in (b"[", b"{"):
                parts.append(b",")
            if closer == b"}":
                key, value = value
                if not isinstance(key, str):
                    raise TypeError(f"a key of type {type(key).__name__}")
                parts += (_scalar(key), b":")
            break
        else:
            return b"".join(parts)


def _next(text: str, place: int) -> tuple[str | None, str, int]:
    """The token at ``place``: its kind, its text, and where it ends."""
    found = _TOKEN.match(text, place)
    if found is None:
        raise _fault(place)
    kind = found.lastgroup
    assert kind is not None
    return kind, found[kind], found.end()


def _key(text: str, place: int) -> tuple[str, int]:
    """A key and its colon, and where that ends."""
    kind, piece, place = _next(text, place)
    _, colon, after = _next(text, place)
    if kind != "string" or colon != ":":
        raise _fault(place)
    return _string(piece), after


def _string(piece: str) -> str:
    """A string's text; the library refuses control characters and unknown escapes."""
    text: str = json.loads(piece)
    return SURROGATE.sub("\ufffd", text)


def _scalar(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:
        if isinstance(value, str):
            return orjson.dumps(SURROGATE.sub("\ufffd", value))
        if isinstance(value, int):
            return b"%d" % value
        raise


def _fault(place: int) -> ValueError:
    return ValueError(f"not JSON: at character {place}")
