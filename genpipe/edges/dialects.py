"""Input records in the shapes that people have, to the JSON that a request carries."""

import dataclasses
from typing import Any, Literal

from genpipe.core.errors import ConfigError
from genpipe.core.values import ApiName, DialectName, Prompt
from genpipe.edges.strict_json import dumps, loads, raw_member

RESERVED = frozenset(
    {"index", "id", "messages", "response", "responses", "finish_reason", "usage", "flags", "model"}
    | {"output_tokens", "server", "attempts", "started_at", "latency_s", "queue_s", "token_ids", "rid"}
    | {"settings", "_c"}
)
"""Keys of our own records; no input field may be copied over them."""

Shape = Literal["messages", "prompt", "sharegpt"]

_CONVERSATION_KEYS = ("conversations", "conversation")
_KEYS: dict[str, tuple[str, ...]] = {
    "auto": ("messages", *_CONVERSATION_KEYS, "prompt"),
    "messages": ("messages",),
    "prompt": ("prompt",),
    "sharegpt": _CONVERSATION_KEYS,
}
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_NEEDS_CONTENT = frozenset({"user", "system", "developer", "tool"})
_KIND = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
_USER = b'{"role":"user","content":'


class RecordError(ValueError):
    """An input record that cannot become a prompt; the message is one line and says why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How an input record becomes a prompt.

    ``auto`` takes the first of ``messages``, ``conversations``, ``conversation`` and ``prompt`` that is there
    and not null. A value under any key may be a list of messages; under ``messages`` and the conversation
    keys it may also be such a list inside a string. Messages are sent as given. Of ShareGPT turns, trailing
    turns of the model are the old answer and are not sent, nor are keys other than speaker and text.

    Attributes:
        name: ``auto``, or the one shape to expect.
        field: the record's field to use instead, whatever it is called; its value is a text or messages.
        id_field: the record's field that holds the user's own id.
        system: text of a system message put first, unless the record begins with a system (or developer)
            message of its own.
        keep: fields copied into the answer's record where the input record has them.
        api: how servers are asked, which decides what a prompt may be.
        multi_turn: the turns of a conversation are to be asked one by one.
        sampling_field: the field that holds a record's own sampling parameters.
        body_fields: fields that go into the request as they are.

    Raises:
        ConfigError: ``keep`` names a key of our own records.
    """

    name: DialectName = "auto"
    field: str | None = None
    id_field: str = "id"
    system: str | None = None
    keep: tuple[str, ...] = ()
    api: ApiName = "chat"
    multi_turn: bool = False
    sampling_field: str | None = None
    body_fields: tuple[str, ...] = ()
    _system_json: bytes = dataclasses.field(init=False, repr=False, compare=False)
    _keys: tuple[str, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if taken := [name for name in self.keep if name in RESERVED]:
            raise ConfigError(
                f"output.keep names {taken[0]!r}, a key of genpipe's own records: rename it in the input"
            )
        system_json = b""
        if self.system is not None:
            system_json = dumps({"role": "system", "content": self.system})
        object.__setattr__(self, "_system_json", system_json)
        object.__setattr__(self, "_keys", (self.field,) if self.field is not None else _KEYS[self.name])

    def prompt(self, index: int, line: bytes) -> Prompt:
        """The prompt that one line of the input holds.

        Args:
            index: the record's 0-based place in the input.
            line: one JSON object, white space around it allowed, no byte order mark.

        Raises:
            RecordError: it holds none.
        """
        return self.convert(index, line)[0]

    def convert(self, index: int, line: bytes) -> tuple[Prompt, Shape]:
        """As :meth:`prompt`, and which shape the record had.

        Raises:
            RecordError: it holds no prompt.
        """
        try:
            record = _record(line)
            payload, shape = self._payload(record, line)
            id_json = raw_member(line, record, self.id_field) if self.id_field in record else b""
            keep_json = self._kept(record, line) if self.keep else b""
        except RecordError:
            raise
        except ValueError as error:
            raise RecordError(str(error)) from None
        return Prompt(index=index, payload=payload, id_json=id_json, keep_json=keep_json), shape

    def _payload(self, record: dict[str, Any], line: bytes) -> tuple[bytes, Shape]:
        for key in self._keys:
            value = record.get(key)
            if value is not None:
                break
        else:
            raise RecordError(_missing(self._keys, record))
        is_text = type(value) is str
        if is_text and (key == "prompt" or self.field is not None) and self.name in ("auto", "prompt"):
            if not value:
                raise RecordError(f"{key!r} is an empty string")
            return self._array(_USER + dumps(value) + b"}"), "prompt"
        turns = _turns(key, _list_in(key, value) if is_text else value)
        first = turns[0]
        if key in _CONVERSATION_KEYS or self.name == "sharegpt" or ("from" in first and "role" not in first):
            messages = _asked(key, _from_sharegpt(key, turns) if "from" in first else _checked(key, turns))
            shape: Shape = "sharegpt"
            payload = dumps(messages)
        else:
            messages, shape = _checked(key, turns), "messages"
            payload = dumps(messages) if is_text else raw_member(line, record, key)
        if messages[0]["role"] in ("system", "developer"):
            return payload, shape
        return self._array(payload[1:-1]), shape

    def _array(self, members: bytes) -> bytes:
        """The messages as an array, our system message before them."""
        if self._system_json:
            return b"[" + self._system_json + b"," + members + b"]"
        return b"[" + members + b"]"

    def _kept(self, record: dict[str, Any], line: bytes) -> bytes:
        return b",".join(
            dumps(name) + b":" + raw_member(line, record, name)
            for name in dict.fromkeys(self.keep)
            if name in record
        )


def _record(line: bytes) -> dict[str, Any]:
    record = loads(line)
    if type(record) is not dict:
        raise RecordError(f"not a JSON object but {_kind(record)}")
    return record


def _from_sharegpt(key: str, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns of ``from`` and ``value`` as messages."""
    messages = []
    for place, turn in enumerate(turns):
        who = turn.get("from", turn.get("role"))
        role = _ROLES.get(who.lower()) if isinstance(who, str) else None
        if role is None:
            raise RecordError(f"{key}[{place}]: unknown speaker {_short(who)}")
        text = turn.get("value", turn.get("content"))
        if not isinstance(text, str):
            raise RecordError(f"{key}[{place}]: its value is {_kind(text)}, not a string")
        if role == "user" and not text:
            raise RecordError(f"{key}[{place}]: the user's text is empty")
        messages.append({"role": role, "content": text})
    return messages


def _asked(key: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation up to what the model is asked: its old answer at the end is left out."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if all(message["role"] == "system" for message in messages[:end]):
        raise RecordError(f"{key!r} holds nothing that asks for an answer")
    return messages[:end]


def _checked(key: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as they are, once they are found to be messages."""
    for place, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str):
            has = _keys_of(message)
            raise RecordError(f"{key}[{place}] has no string 'role'; it has {has}")
        content = message.get("content")
        if content is None:
            if role in _NEEDS_CONTENT:
                what = "content null" if "content" in message else "no content"
                raise RecordError(f"{key}[{place}] has {what}, which a {role} message needs")
        elif not isinstance(content, str | list):
            raise RecordError(
                f"{key}[{place}]: its content is {_kind(content)}, not a string or a list of parts"
            )
    return messages


def _list_in(key: str, text: str) -> object:
    """The list that some data sets store as a string of JSON."""
    try:
        return loads(text.encode())
    except ValueError:
        raise RecordError(f"{key!r} is a string, and no list of messages stands in it") from None


def _turns(key: str, value: object) -> list[dict[str, Any]]:
    """``value``, once it is found to be a list of objects, one at least."""
    if not isinstance(value, list):
        raise RecordError(f"{key!r} is {_kind(value)}")
    if not value:
        raise RecordError(f"{key!r} is an empty list")
    for place, item in enumerate(value):
        if isinstance(item, dict):
            continue
        if all(isinstance(other, str) for other in value):
            raise RecordError(
                f"{key!r} is a list of texts: one record is one prompt, so give each its own line"
            )
        raise RecordError(f"{key}[{place}] is {_kind(item)}, not an object")
    return value


def _missing(keys: tuple[str, ...], record: dict[str, Any]) -> str:
    """Why no prompt was found: what was looked for, and what is there."""
    for key in keys:
        if key in record:
            return f"{key!r} is null"
    wanted = " or ".join([", ".join(map(repr, keys[:-1])), repr(keys[-1])] if keys[1:] else [repr(keys[0])])
    return f"no {wanted} in the record; it has {_keys_of(record)}"


def _keys_of(record: dict[str, Any]) -> str:
    names = [_short(name) for name in list(record)[:8]]
    if len(record) > len(names):
        names.append(f"{len(record) - len(names)} more")
    return ", ".join(names) or "no keys"


def _short(value: object) -> str:
    """``value`` in one line of at most 40 characters."""
    text = repr(value[:40]) if isinstance(value, str) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _kind(value: object) -> str:
    """What JSON calls the type of ``value``."""
    return _KIND.get(type(value), "a number")
