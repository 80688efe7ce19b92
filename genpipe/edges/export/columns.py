"""The type of each column of an export, found by looking at all of its rows.

A column has a type of its own where all of its values agree: texts, booleans, whole numbers of 64 bits,
numbers (whole ones among them up to 2**53, and others as far as a double holds their digits), lists of one
of these, and for conversations and answers a list of objects, or an object, with a type for each member by
the same rules. Whatever else it is (objects of the user's, values of several kinds, numbers past these
bounds) the column holds each value as a text of JSON, texts too, and says so in its metadata. What is null,
or not there, is null.
"""

import json
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from genpipe.edges import strict_json
from genpipe.edges.export.rows import Exact

if TYPE_CHECKING:
    import pyarrow as pa

JSON_MARK = {b"format": b"json"}
"""Metadata of a column, or a member, whose values are texts of JSON."""

_OBJECTS = frozenset(
    {"messages", "conversations", "prompt", "completion", "response", "responses", "token_ids"}
)
_NAMES = """
    id index sample role messages conversations prompt text completion content response responses
    reasoning_content tool_calls tool_call_id name tools input_ids loss_mask finish_reason usage output_tokens
    token_ids flags steps sampling body model server attempts started_at latency_s rid
"""
_ORDER = {name: place for place, name in enumerate(_NAMES.split())}
_LEVELS_MAX = 3
_EXACT_INT, _INT64 = 1 << 53, 1 << 63

Convert = Callable[[Any], Any]
"""Makes what Arrow takes of a value that is not None."""


class Column:
    """What was seen of one column, or of the members of one.

    Attributes:
        kinds: what its values were.
    """

    __slots__ = ("_has_objects", "_item", "_levels", "_members", "kinds")

    def __init__(self, *, has_objects: bool, levels: int = _LEVELS_MAX) -> None:
        """Nothing seen yet.

        Args:
            has_objects: an object in it has members with types of their own.
            levels: of lists in lists that have a type.
        """
        self.kinds: set[str] = set()
        self._has_objects = has_objects
        self._levels = levels
        self._item: Column | None = None
        self._members: dict[str, Column] = {}

    def see(self, value: Any) -> None:
        """Take one value into account."""
        kind = type(value)
        if kind is str:
            self.kinds.add("text")
        elif value is None:
            return
        elif kind is bool:
            self.kinds.add("bool")
        elif kind is int:
            self.kinds.add(_kind_of_int(value))
        elif kind is float:
            self.kinds.add("number" if abs(value) < _INT64 else "json")
        elif kind is list and self._levels:
            self._see_list(value)
        elif kind is dict and self._has_objects and value:
            self.kinds.add("object")
            for key, member in value.items():
                self._member(key).see(member)
        elif kind is Exact:
            self._see_exact(value)
        else:
            self.kinds.add("json")

    def _see_exact(self, exact: Exact) -> None:
        value = exact.value
        is_one = isinstance(value, dict) or (self._has_objects and isinstance(value, list))
        if is_one or not _are_held(exact.json):
            self.kinds.add("json")
        else:
            self.see(value)

    def _see_list(self, items: list[Any]) -> None:
        self.kinds.add("list")
        if self._item is None:
            self._item = Column(has_objects=self._has_objects, levels=self._levels - 1)
        if set(map(type, items)) == {int}:
            # Token ids are many, and this is what they are.
            items = [min(items), max(items)]
        for item in items:
            self._item.see(item)

    def _member(self, key: str) -> "Column":
        if key not in self._members:
            self._members[key] = Column(has_objects=False)
        return self._members[key]

    @property
    def is_json(self) -> bool:
        """Its values have to be texts of JSON."""
        return self._plain_type() is None

    def typed(self) -> "tuple[pa.DataType, Convert | None]":
        """Its type, and what its values need before they have it; None where they have."""
        import pyarrow as pa

        plain = self._plain_type()
        if plain is None:
            return pa.string(), _json_text
        if plain == "object":
            return self._struct()
        if plain == "list":
            assert self._item is not None
            item_type, convert = self._item.typed()
            return pa.list_(item_type), None if convert is None else _each(convert)
        scalar: pa.DataType = getattr(pa, plain)()
        return scalar, None

    def _plain_type(self) -> str | None:
        """The name of its type; None where that is a text of JSON."""
        kinds = self.kinds
        if not kinds or kinds == {"text"}:
            return "string"
        if kinds == {"bool"}:
            return "bool_"
        if kinds <= {"int", "large"}:
            return "int64"
        if kinds <= {"int", "number"}:
            return "float64"
        if kinds == {"object"}:
            return "object"
        if kinds == {"list"}:
            assert self._item is not None
            return None if self._item.is_json else "list"
        return None

    def _struct(self) -> "tuple[pa.DataType, Convert | None]":
        import pyarrow as pa

        fields, converts = [], {}
        for key in in_order(self._members):
            member = self._members[key]
            fields.append(field(key, member))
            convert = member.typed()[1]
            if convert is not None:
                converts[key] = convert
        return pa.struct(fields), _members(converts) if converts else None


class Columns:
    """All columns of an export."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        self._columns: dict[str, Column] = {}

    def see(self, row: dict[str, Any]) -> None:
        """Take one row into account."""
        for name, value in row.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = Column(has_objects=name in _OBJECTS)
            column.see(value)

    def found(self) -> "tuple[pa.Schema, dict[str, Convert]]":
        """The columns with their types, and what makes values of each of them of what rows have."""
        import pyarrow as pa

        if not self._columns:
            self._columns["index"] = Column(has_objects=False)
            self._columns["index"].see(0)
        names = in_order(self._columns)
        fields = [field(name, self._columns[name]) for name in names]
        return pa.schema(fields), {name: _whole(self._columns[name].typed()[1]) for name in names}


def field(name: str, column: Column) -> "pa.Field":
    """A column, or a member, by name."""
    import pyarrow as pa

    return pa.field(name, column.typed()[0], metadata=JSON_MARK if column.is_json else None)


def in_order(names: Iterable[str]) -> list[str]:
    """Names as they stand in a file: ours as records have them, then the others by the alphabet."""
    return sorted(names, key=lambda name: (_ORDER.get(name, len(_ORDER)), name))


def _kind_of_int(value: int) -> str:
    if -_EXACT_INT <= value <= _EXACT_INT:
        return "int"
    return "large" if -_INT64 <= value < _INT64 else "json"


def _are_held(text: bytes) -> bool:
    """Whether doubles hold all digits of the numbers with a point or an exponent in a JSON value."""
    held = True

    def see(digits: str) -> float:
        nonlocal held
        number = float(digits)
        shown = repr(number)
        held = held and (shown == digits or Decimal(digits) == Decimal(shown))
        return number

    try:
        json.loads(text, parse_float=see)
    except (ArithmeticError, RecursionError, ValueError):
        # An exponent, or a depth, beyond all bounds.
        return False
    return held


def _json_text(value: Any) -> str:
    return (value.json if isinstance(value, Exact) else strict_json.dumps(value)).decode()


def _whole(convert: Convert | None) -> Convert:
    """Also of null, and of exact values, which a text of JSON keeps and a type does not need."""

    def whole(value: Any) -> Any:
        if value is None or convert is _json_text:
            return value if value is None else _json_text(value)
        plain = value.value if isinstance(value, Exact) else value
        return plain if convert is None else convert(plain)

    return whole


def _each(convert: Convert) -> Convert:
    return lambda items: [None if item is None else convert(item) for item in items]


def _members(converts: dict[str, Convert]) -> Convert:
    def convert(value: dict[str, Any]) -> dict[str, Any]:
        changed = {key: change(value[key]) for key, change in converts.items() if value.get(key) is not None}
        return {**value, **changed} if changed else value

    return convert
