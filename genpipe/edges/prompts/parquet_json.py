"""Rows of Arrow batches as JSON objects; :mod:`genpipe.edges.prompts.parquet_rows` says how values look."""

import base64
import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from itertools import islice
from typing import Any, Final

import orjson
import pyarrow as pa
from pyarrow import types

from genpipe.edges.prompts.chunks import LINE_BYTES_MAX, TOO_LONG
from genpipe.edges.prompts.record_errors import short

_EPOCH: Final = dt.datetime(1970, 1, 1)  # noqa: DTZ001  # instants are counted from it, zones put behind
_DIGITS: Final = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_DAY_S: Final = 86_400
_BYTES: Final = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


def texts_of(batch: pa.RecordBatch) -> list[bytes | str]:
    """Each row as a JSON object, or in one line why there is none."""
    if not batch.num_columns:
        return [b"{}"] * batch.num_rows
    names = batch.schema.names
    columns = []
    for name, column in zip(names, batch.columns, strict=True):
        try:
            columns.append(values_of(column))
        except (ValueError, OverflowError, pa.ArrowException):
            if batch.num_rows == 1:
                # What the library says of it is for programmers.
                return [_no_json(name, f"a value of the type {column.type}")]
            # The other rows are sound.
            return [text for number in range(batch.num_rows) for text in texts_of(batch.slice(number, 1))]
    return [_text_of(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]


def values_of(array: Any) -> list[Any]:
    """The values of an Arrow array, as Python values that :func:`_text_of` knows.

    Raises:
        ValueError: one of them has no such form.
    """
    kind = array.type
    if _is_plain(kind):
        try:
            return list(array.to_pylist())
        except ValueError:
            # Text that is no UTF-8, or a name that a struct has twice: taken apart below.
            if not (_is_text(kind) or types.is_dictionary(kind) or types.is_nested(kind)) and not isinstance(
                array, pa.ExtensionArray
            ):
                raise
    if isinstance(array, pa.ExtensionArray):
        return values_of(array.storage)
    if _is_text(kind):
        return list(array.cast(_BYTES[kind]).to_pylist())
    if types.is_dictionary(kind):
        return values_of(array.dictionary_decode())
    if types.is_struct(kind):
        return _structs(array)
    if types.is_map(kind):
        entry = pa.struct([("key", kind.key_type), ("value", kind.item_type)])
        return [_object(entries) for entries in values_of(array.cast(pa.list_(entry)))]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        items = iter(values_of(array.flatten()))
        return [
            None if size is None else list(islice(items, size)) for size in array.value_lengths().to_pylist()
        ]
    if types.is_date(kind):
        return _dates(array)
    bits = pa.int32() if types.is_time32(kind) else pa.int64()
    say = _say_duration if types.is_duration(kind) else _say_time if types.is_time(kind) else _say_instant
    zone = "+00:00" if types.is_timestamp(kind) and kind.tz is not None else ""
    return [None if count is None else say(count, kind.unit, zone) for count in array.view(bits).to_pylist()]


def _structs(array: Any) -> list[Any]:
    """Structs as objects, or as lists of pairs where one has a name twice."""
    kind = array.type
    names = [kind.field(number).name for number in range(kind.num_fields)]
    made = dict if len(set(names)) == len(names) else list
    rows = zip(*map(values_of, array.flatten()), strict=True)
    valid = array.is_valid().to_pylist()
    return [
        made(zip(names, row, strict=True)) if there else None for there, row in zip(valid, rows, strict=True)
    ]


def _dates(array: Any) -> list[Any]:
    """Dates as ISO 8601 says them, with as many digits as the year needs; beyond, the days as stored."""
    said = array.cast(pa.string()).to_pylist()
    if not any(text is not None and text.startswith("<") for text in said):
        return list(said)
    counts = array.view(pa.int32() if types.is_date32(array.type) else pa.int64()).to_pylist()
    return [
        count if text is not None and text.startswith("<") else text
        for text, count in zip(said, counts, strict=True)
    ]


@lru_cache(maxsize=1_000)
def _is_plain(kind: pa.DataType) -> bool:
    """Whether the library's own Python values are what we want, all the way down."""
    if isinstance(kind, pa.BaseExtensionType):
        return _is_plain(kind.storage_type)
    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    if types.is_timestamp(kind) or types.is_time(kind) or types.is_duration(kind):
        return False
    if types.is_date(kind) or types.is_map(kind):
        return False
    return all(_is_plain(part.type) for part in _parts(kind))


def _is_text(kind: pa.DataType) -> bool:
    return kind in _BYTES


def _parts(kind: pa.DataType) -> Iterator[pa.Field]:
    if types.is_nested(kind):
        for number in range(kind.num_fields):
            yield kind.field(number)


def _text_of(row: dict[str, Any]) -> bytes | str:
    try:
        text = orjson.dumps(row, default=_json_value)
    except orjson.JSONEncodeError as error:
        return _no_json(_guilty(row), str(error.__cause__ or error))
    return text if len(text) <= LINE_BYTES_MAX else TOO_LONG


def _guilty(row: dict[str, Any]) -> str:
    """The column whose value has no JSON."""
    for name, value in row.items():
        try:
            orjson.dumps({name: value}, default=_json_value)
        except orjson.JSONEncodeError:
            return name
    return "?"


def _no_json(column: str, what: str) -> str:
    return f"a row that is no JSON: column {short(column)} holds {what[:200]}"


def _json_value(value: object) -> object:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            # Not a bare text, which a model would be asked.
            return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Decimal):
        return orjson.Fragment(format(value, "f"))
    raise TypeError(f"a value of the type {type(value).__name__}")


def _object(entries: list[dict[str, Any]] | None) -> object:
    """A map as an object, where JSON can have it so, else as pairs."""
    if entries is None:
        return None
    members = {entry["key"]: entry["value"] for entry in entries}
    if len(members) == len(entries) and all(isinstance(key, str) for key in members):
        return members
    return [(entry["key"], entry["value"]) for entry in entries]


def _say_instant(count: int, unit: str, zone: str) -> object:
    seconds, fraction = divmod(count, 10 ** _DIGITS[unit])
    try:
        instant = _EPOCH + dt.timedelta(seconds=seconds)
    except OverflowError:
        # Before the year 1 or after 9999, where ISO 8601 has no four digits for it: as it is stored.
        return count
    return instant.isoformat() + _said(fraction, unit) + zone


def _say_time(count: int, unit: str, zone: str) -> str:
    seconds, fraction = divmod(count, 10 ** _DIGITS[unit])
    return (_EPOCH + dt.timedelta(seconds=seconds % _DAY_S)).time().isoformat() + _said(fraction, unit) + zone


def _say_duration(count: int, unit: str, zone: str) -> object:  # noqa: ARG001  # as the others
    return Decimal(count).scaleb(-_DIGITS[unit])


def _said(fraction: int, unit: str) -> str:
    return f".{fraction:0{_DIGITS[unit]}d}" if fraction else ""
