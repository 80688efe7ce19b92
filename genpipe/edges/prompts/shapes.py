"""The shapes that input records have, and what each of them asks."""

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

from genpipe.core.values import ApiName, DialectName
from genpipe.edges.prompts.conversations import asked, checked, from_sharegpt, objects_in
from genpipe.edges.prompts.record_errors import RecordError, keys_of, kind_of

Shape = Literal["messages", "sharegpt", "turns", "alpaca", "prompt", "question", "text", "input_ids"]

CONVERSATION_KEYS: Final = ("conversations", "conversation")
MULTI_TURN: Final = "request.multi_turn=true"

_TEXT_SHAPES: dict[str, Shape] = {"question": "question", "text": "text"}


class Asked(NamedTuple):
    """What a record asks: just one of a text, messages and token ids.

    Attributes:
        shape: what the record looks like.
        key: the field in which it stands.
        text: one text.
        messages: a conversation, in a ShareGPT record with the old answers.
        ids: a tokenized prompt.
        as_given: the messages stand in the record just so.
    """

    shape: Shape
    key: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    ids: list[int] | None = None
    as_given: bool = False

    def asked_messages(self) -> list[dict[str, Any]]:
        """The messages up to what is asked; only old answers of ShareGPT are left out.

        Raises:
            RecordError: nothing is asked, or there are turns that one request cannot ask.
        """
        assert self.messages is not None
        if self.shape == "turns":
            raise RecordError(
                f"{self.key!r} is a list of {len(self.messages)} turns: {MULTI_TURN} asks them one by one",
                remedy=MULTI_TURN,
            )
        return asked(self.key, self.messages) if self.shape == "sharegpt" else self.messages

    @property
    def has_several_turns(self) -> bool:
        """The user speaks more than once."""
        return self.messages is not None and [m["role"] for m in self.messages].count("user") > 1

    @property
    def ends_in_answer(self) -> bool:
        """The last message is the model's, and is not left out by :meth:`asked_messages`."""
        messages = self.messages
        return self.shape == "messages" and messages is not None and messages[-1]["role"] == "assistant"


Read = Callable[[dict[str, Any], str, Any], Asked]


class Reader(NamedTuple):
    """How a record is read that has a certain field.

    Attributes:
        key: the field.
        read: makes of it what it asks.
        kind: the field counts only if it is a string or a list, as this says; None: it counts in any case.
    """

    key: str
    read: Read
    kind: type | None = None


def readers_of(name: DialectName, field: str | None, api: ApiName) -> tuple[Reader, ...]:
    """The readers of a dialect, in their order.

    Args:
        name: the dialect.
        field: the one field to look at, or None.
        api: how servers are asked: in ``auto``, texts go before conversations where only texts are taken.
    """
    if field is not None:
        return (Reader(field, _READ[name]),)
    if name == "sharegpt":
        return tuple(Reader(key, _sharegpt) for key in CONVERSATION_KEYS)
    if name == "alpaca":
        return (Reader("instruction", _alpaca),)
    if name != "auto":
        return (Reader(name, _READ[name]),)
    conversations = (
        Reader("messages", _messages),
        *(Reader(key, _sharegpt) for key in CONVERSATION_KEYS),
    )
    texts = (
        # These names are used for other things as well, for a count of turns, say.
        Reader("turns", _turns, list),
        Reader("instruction", _alpaca, str),
        Reader("prompt", _any),
        Reader("question", _any, str),
    )
    if api == "chat":
        # A ``text`` is what a model has read or written in many data sets: asked in a chat only on demand.
        return (*conversations, *texts)
    ids = (Reader("input_ids", _ids, list),) if api == "generate" else ()
    return (*texts, Reader("text", _any, str), *ids, *conversations)


def find(record: dict[str, Any], readers: tuple[Reader, ...]) -> Asked:
    """What ``record`` asks, by the first reader whose field is there and not null.

    Raises:
        RecordError: it asks nothing, or something that cannot be read.
    """
    for key, read, kind in readers:
        value = record.get(key)
        if value is not None and (kind is None or type(value) is kind):
            return read(record, key, value)
    raise _missing(tuple(reader.key for reader in readers), record)


def _text(record: dict[str, Any], key: str, value: Any) -> Asked:  # noqa: ARG001
    if not value:
        raise RecordError(f"{key!r} is an empty string")
    return Asked(_TEXT_SHAPES.get(key, "prompt"), key, value)


def _any(record: dict[str, Any], key: str, value: Any) -> Asked:
    """A text, or messages."""
    return _text(record, key, value) if type(value) is str else _messages(record, key, value)


def _of_any_kind(record: dict[str, Any], key: str, value: Any) -> Asked:
    """A text, messages, turns or token ids."""
    if type(value) is list and value:
        kind = type(value[0])
        if kind is str:
            return _turns(record, key, value)
        if kind is int:
            return _ids(record, key, value)
    return _any(record, key, value)


def _messages(record: dict[str, Any], key: str, value: Any) -> Asked:  # noqa: ARG001
    turns = objects_in(key, value)
    first = turns[0]
    if "from" in first and "role" not in first:
        return Asked("sharegpt", key, None, from_sharegpt(key, turns))
    return Asked("messages", key, None, checked(key, turns), None, type(value) is not str)


def _sharegpt(record: dict[str, Any], key: str, value: Any) -> Asked:  # noqa: ARG001
    turns = objects_in(key, value)
    messages = from_sharegpt(key, turns) if "from" in turns[0] else checked(key, turns)
    return Asked("sharegpt", key, None, messages)


def _turns(record: dict[str, Any], key: str, value: Any) -> Asked:
    """The user's texts, to be asked one after the other; a single one is a prompt like any other."""
    if type(value) is not list or not value:
        raise RecordError(f"{key!r} is {'an empty list' if value == [] else kind_of(value)}")
    if type(value[0]) is dict:
        return _messages(record, key, value)
    for place, text in enumerate(value):
        if type(text) is not str:
            raise RecordError(f"{key}[{place}] is {kind_of(text)}, not a text")
        if not text:
            raise RecordError(f"{key}[{place}] is an empty string")
    if len(value) == 1:
        return Asked("turns", key, value[0])
    return Asked("turns", key, None, [{"role": "user", "content": text} for text in value])


def _alpaca(record: dict[str, Any], key: str, value: Any) -> Asked:
    """The instruction, and below it the input where there is one."""
    if type(value) is not str:
        raise RecordError(f"{key!r} is {kind_of(value)}")
    if not value:
        raise RecordError(f"{key!r} is an empty string")
    more = record.get("input")
    if more is None:
        return Asked("alpaca", key, value)
    if type(more) is not str:
        raise RecordError(f"'input' is {kind_of(more)}, not a string")
    return Asked("alpaca", key, f"{value}\n\n{more}" if more.strip() else value)


def _ids(record: dict[str, Any], key: str, value: Any) -> Asked:  # noqa: ARG001
    if type(value) is not list or not value:
        raise RecordError(f"{key!r} is {'an empty list' if value == [] else kind_of(value)}")
    # By type, since a boolean is an int to Python; at C's speed, since there may be 100,000 of them.
    if set(map(type, value)) != {int}:
        place, odd = next((place, item) for place, item in enumerate(value) if type(item) is not int)
        what = "not a whole number" if isinstance(odd, float) else kind_of(odd)
        raise RecordError(f"{key}[{place}] is {what}, not a token id")
    if min(value) < 0:
        raise RecordError(f"{key!r} holds {min(value)}, which is no token id")
    return Asked("input_ids", key, None, None, value)


_READ: dict[DialectName, Read] = {
    "auto": _of_any_kind,
    "messages": _messages,
    "sharegpt": _sharegpt,
    "turns": _turns,
    "prompt": _any,
    "question": _any,
    "text": _any,
    "input_ids": _ids,
}


def _missing(keys: tuple[str, ...], record: dict[str, Any]) -> RecordError:
    """Why no prompt was found: what was looked for, and what is there."""
    remedy = "input.field=NAME"
    if type(record.get("text")) is str:
        remedy = "input.dialect=text"
    elif type(record.get("input_ids")) is list:
        remedy = "request.api=generate"
    for key in keys:
        if key in record:
            return RecordError(f"{key!r} is {kind_of(record[key])}")
    wanted = " or ".join([", ".join(map(repr, keys[:-1])), repr(keys[-1])] if keys[1:] else [repr(keys[0])])
    return RecordError(f"no {wanted} in the record; it has {keys_of(record)}", remedy=remedy)
