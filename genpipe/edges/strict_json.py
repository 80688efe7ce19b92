"""JSON in and out: lenient towards words that are no JSON on the way in, strict on the way out."""

import json
import math
import re
from typing import Any

import orjson

_SURROGATE = re.compile("[\ud800-\udfff]")


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
        return _parse(data)


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
        pass
    try:
        text = json.dumps(_clean(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return text.encode()


def raw_member(line: bytes, record: dict[str, Any], field: str) -> bytes:
    """The value of ``record[field]`` as JSON, its numbers digit for digit as they stand in ``line``.

    ``7.0`` stays ``7.0``, ``1e3`` stays ``1e3``, and a whole number keeps all its digits. ``line`` is parsed
    a second time only where a number asks for it.

    Args:
        line: what ``record`` was parsed from.
        record: what :func:`loads` made of it.
        field: a key of ``record``.

    Raises:
        ValueError: nested too deeply.
    """
    value = record[field]
    if type(value) is str:
        return dumps(value)
    if _may_have_lost_digits(value):
        try:
            return orjson.dumps(_parse(line, exact=True)[field])
        except orjson.JSONEncodeError:
            # Nested deeper than orjson writes: better its value without the digits than no answer at all.
            return dumps(value)
    return dumps(value)


def _parse(data: bytes, *, exact: bool = False) -> Any:
    """By the standard library, what :func:`loads` does; ``exact`` keeps numbers as they are written."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}") from None
    try:
        value = json.loads(
            text,
            parse_float=_float_fragment if exact else _finite,
            parse_int=orjson.Fragment if exact else int,
            parse_constant=_nothing,
        )
        return _clean(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    except ValueError:
        raise ValueError("JSON with a whole number of too many digits") from None


def _finite(digits: str) -> float | None:
    number = float(digits)
    return number if math.isfinite(number) else None


def _float_fragment(digits: str) -> orjson.Fragment | None:
    return None if _finite(digits) is None else orjson.Fragment(digits)


def _nothing(word: str) -> None:  # noqa: ARG001  # the signature is the standard library's
    return None


def _clean(value: object) -> object:
    """A copy of ``value`` without lone surrogates and without numbers that are not finite."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _may_have_lost_digits(value: object) -> bool:
    """Whether ``value`` may be written otherwise than it was read: a float, or a 0 that was ``-0``."""
    heap = [value]
    while heap:
        item = heap.pop()
        if isinstance(item, dict):
            heap.extend(item.values())
        elif isinstance(item, list):
            heap.extend(item)
        elif isinstance(item, float) or (type(item) is int and item == 0):
            return True
    return False
