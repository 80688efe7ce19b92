"""JSON in and out: lenient towards words that are no JSON on the way in, strict on the way out."""

import json
import math
import re
from collections.abc import Callable
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import orjson

from genpipe.edges import deep_json
from genpipe.edges.deep_json import SURROGATE

_BEFORE_KEY = re.compile(r'[ \t\n\r]*[{,][ \t\n\r]*"')
_COLON = re.compile(r"[ \t\n\r]*:[ \t\n\r]*")
_SKIPPING = json.JSONDecoder()


class _Hooks(NamedTuple):
    """How numbers, and the words that stand for numbers, are read."""

    parse_float: Callable[[str], Any]
    parse_int: Callable[[str], Any]
    parse_constant: Callable[[str], Any]


def loads(data: bytes) -> Any:
    """Parse one JSON value.

    What orjson refuses but other writers produce is taken in: a lone surrogate becomes U+FFFD, and NaN,
    Infinity and numbers too large for a double become None. Of a key given twice the last value counts.

    Raises:
        ValueError: not UTF-8, not one JSON value, nested too deeply or a number of too many digits; the
            message is one short line.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return loads_odd(data)


def loads_odd(data: bytes) -> Any:
    """What :func:`loads` does with what orjson has refused.

    Raises:
        ValueError: as :func:`loads` does.
    """
    hooks = _LENIENT._asdict()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}") from None
    try:
        try:
            return _clean(json.loads(text, **hooks))
        except RecursionError:
            value, end = deep_json.parse(text, **hooks)
            if text[end:].strip(" \t\n\r"):
                raise ValueError(f"not JSON: Extra data at character {end}") from None
            return value
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:
        if "JSON" in str(error):
            raise
        raise ValueError("JSON with a whole number of too many digits") from None


def dumps(value: object) -> bytes:
    """Strict, compact JSON in UTF-8.

    NaN and Infinity become null and lone surrogates become U+FFFD. Whole numbers may have any size.

    Raises:
        ValueError: nested too deeply.
        TypeError: a value of a type that JSON does not have.
    """
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return deep_json.encode(value)


def raw_member(line: bytes, record: dict[str, Any], field: str) -> bytes:
    """The value of ``record[field]`` as JSON, its numbers digit for digit as they stand in ``line``.

    ``7.0`` stays ``7.0``, ``1e3`` stays ``1e3``, and a whole number keeps all its digits.

    Args:
        line: what ``record`` was parsed from.
        record: what :func:`loads` made of it.
        field: a key of ``record``.

    Raises:
        ValueError: nested too deeply.
    """
    value = record[field]
    return dumps(value if type(value) is str else exact_member(line, record, field))


def exact_member(line: bytes, record: dict[str, Any], field: str) -> Any:
    """``record[field]`` with each number such that :func:`dumps` writes it as it stands in ``line``.

    ``line`` is looked through a second time only where a number asks for it.
    """
    value = record[field]
    return _member(line, field, _EXACT_DECODER, _EXACT) if _may_have_lost_digits(value, line) else value


def no_numbers(line: bytes, field: str) -> list[str]:
    """What stands in a member of ``line`` in a number's place and is no number of JSON's or no double.

    Args:
        line: a JSON object that :func:`loads` took.
        field: one of its keys.

    Returns:
        ``NaN``, ``-Infinity``, ``1e400`` and the like, as they stand there.
    """
    found: list[str] = []

    def parse_float(digits: str) -> float | None:
        number = _finite(digits)
        if number is None:
            found.append(digits)
        return number

    hooks = _Hooks(parse_float=parse_float, parse_int=int, parse_constant=found.append)
    _member(line, field, json.JSONDecoder(**hooks._asdict()), hooks)
    # What is nested too deeply for the first look is looked at once more.
    return list(dict.fromkeys(found))


def _member(line: bytes, field: str, decoder: json.JSONDecoder, hooks: _Hooks) -> Any:
    """The last member of that name in a JSON object, as ``decoder``, which has these ``hooks``, reads it."""
    text = line.decode()
    value, place = None, 0
    while before := _BEFORE_KEY.match(text, place):
        key, place = scanstring(text, before.end(), True)
        colon = _COLON.match(text, place)
        assert colon is not None, place
        is_it = SURROGATE.sub("\ufffd", key) == field
        try:
            found, place = (decoder if is_it else _SKIPPING).raw_decode(text, colon.end())
            found = _clean(found) if is_it else None
        except RecursionError:
            found, place = deep_json.parse(text, colon.end(), **(hooks if is_it else _LENIENT)._asdict())
        if is_it:
            value = found
    return value


def _finite(digits: str) -> float | None:
    number = float(digits)
    return number if math.isfinite(number) else None


def _nothing(word: str) -> None:  # noqa: ARG001  # the signature is the standard library's
    return None


def _hooks(number: Callable[[str], Any]) -> _Hooks:
    """Each number made from its digits; None where it is too large for a double."""

    def parse_float(digits: str) -> Any:
        return None if _finite(digits) is None else number(digits)

    return _Hooks(parse_float=parse_float, parse_int=number, parse_constant=_nothing)


_LENIENT = _Hooks(parse_float=_finite, parse_int=int, parse_constant=_nothing)
_EXACT = _hooks(orjson.Fragment)
_EXACT_DECODER = json.JSONDecoder(**_EXACT._asdict())


def _clean(value: object) -> object:
    """A copy of ``value`` without lone surrogates."""
    if isinstance(value, str):
        return SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value


def _may_have_lost_digits(value: object, line: bytes) -> bool:
    """Whether ``value`` may not be written as it stands in ``line``: a float, or a 0 that was ``-0``."""
    heap: list[Any] = [value]
    zero = False
    while heap:
        item = heap.pop()
        kind = type(item)
        if kind is str:
            continue
        if kind is dict:
            heap.extend(item.values())
        elif kind is list:
            heap.extend(item)
        elif kind is float:
            return True
        elif kind is int and item == 0:
            zero = True
    return zero and b"-0" in line
