"""Input records in the shapes that people have, to the JSON that a request carries."""

import dataclasses
from typing import Any, NamedTuple

import orjson

from genpipe.core.errors import ConfigError
from genpipe.core.values import OWN_BODY_KEYS, ApiName, DialectName, Prompt
from genpipe.edges import conversation
from genpipe.edges.prompts import own_members
from genpipe.edges.prompts.record_errors import RecordError, kind_of
from genpipe.edges.prompts.shapes import Asked, Reader, Shape, find, readers_of
from genpipe.edges.strict_json import dumps, exact_member, loads_odd, raw_member

__all__ = ["RESERVED", "Converted", "Dialect", "RecordError"]

RESERVED = frozenset(
    {"index", "id", "messages", "response", "responses", "finish_reason", "usage", "flags", "model"}
    | {"output_tokens", "server", "attempts", "started_at", "latency_s", "queue_s", "token_ids", "rid"}
    | {"steps", "sampling", "body", "settings", "_c"}
)
"""Keys of our own records; no input field may be copied over them."""

_MEMBERS: dict[ApiName, tuple[str, ...]] = {
    "chat": ("messages",),
    "completions": ("prompt",),
    "generate": ("text", "input_ids"),
}
_CONTINUES = b'"continue_final_message":true'
_USER = b'{"role":"user","content":'


class Converted(NamedTuple):
    """What a record became.

    Attributes:
        prompt: the prompt.
        shape: what the record looked like.
        several_turns: the user speaks more than once in it.
        ends_in_answer: the request ends in the model's words, and does not tell it to go on from them.
    """

    prompt: Prompt
    shape: Shape
    several_turns: bool
    ends_in_answer: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How an input record becomes a prompt.

    ``auto`` takes the first of ``messages``, ``conversations``, ``conversation``, ``turns``, ``instruction``,
    ``prompt`` and ``question`` that is there and not null; where servers are asked for completions, texts go
    first, with ``text`` (and ``input_ids`` for ``generate``) among them. A conversation may also stand in a
    string. Messages are sent as given. Of ShareGPT turns, trailing turns of the model are the old answer and
    are not sent, nor are keys other than speaker and text.

    Attributes:
        name: ``auto``, or the one shape to expect.
        field: the record's field to use instead, whatever it is called; its value is a text, messages, texts
            as turns, or token ids.
        id_field: the record's field that holds the user's own id.
        system: text of a system message put first, unless the record begins with a system (or developer)
            message of its own.
        keep: fields copied into the answer's record where the input record has them.
        api: how servers are asked, which decides what a prompt may be.
        multi_turn: the turns of a conversation are to be asked one by one.
        sampling_field: the field that holds a record's own sampling parameters.
        body_fields: fields that go into the request as they are.
        continues: requests tell the model to go on from an answer at their end.

    Raises:
        ConfigError: these do not go together, or ``keep`` names a key of our own records.
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
    continues: bool = False
    _system_json: bytes = dataclasses.field(init=False, repr=False, compare=False)
    _readers: tuple[Reader, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        reserved = RESERVED.union(_MEMBERS[self.api])
        if taken := [name for name in self.keep if name in reserved]:
            raise ConfigError(
                f"output.keep names {taken[0]!r}, a key of genpipe's own records: rename it in the input"
            )
        self._check_shape()
        object.__setattr__(self, "_readers", readers_of(self.name, self.field, self.api))
        self._check_own_members()
        system_json = b"" if self.system is None else dumps({"role": "system", "content": self.system})
        object.__setattr__(self, "_system_json", system_json)

    def _check_shape(self) -> None:
        if self.field is not None and self.name == "alpaca":
            raise ConfigError(
                "input.field is not for input.dialect = alpaca, which has two fields: remove it"
            )
        if self.name == "input_ids" and self.api != "generate":
            raise ConfigError("input.dialect = input_ids is for request.api = generate")
        if self.api == "chat":
            return
        if self.name in ("messages", "sharegpt"):
            raise ConfigError(
                f"input.dialect = {self.name} is for request.api = chat, and not for {self.api}"
            )
        if self.system is not None:
            raise ConfigError(f"input.system is for request.api = chat, and not for {self.api}: remove it")
        if self.multi_turn:
            raise ConfigError(f"request.multi_turn is for request.api = chat, and not for {self.api}")

    def _check_own_members(self) -> None:
        """No field may be two things at once."""
        roles = {reader.key: "holds the prompt" for reader in self._readers}
        if "instruction" in roles:
            roles["input"] = "holds the prompt"
        if self.id_field in roles:
            raise ConfigError(f"input.id_field names {self.id_field!r}, which {roles[self.id_field]}")
        roles[self.id_field] = "is input.id_field"
        if self.sampling_field is not None:
            if self.sampling_field in roles:
                raise ConfigError(
                    f"input.sampling_field names {self.sampling_field!r}, which {roles[self.sampling_field]}"
                )
            roles[self.sampling_field] = "is input.sampling_field"
        for name in self.body_fields:
            if name in OWN_BODY_KEYS:
                raise ConfigError(f"input.body_fields names {name!r}, which genpipe sets itself: remove it")
            if name in roles:
                raise ConfigError(f"input.body_fields names {name!r}, which {roles[name]}")
            roles[name] = "it has named before"

    def prompt(self, index: int, line: bytes) -> Prompt:
        """The prompt that one line of the input holds.

        Args:
            index: the record's 0-based place in the input.
            line: one JSON object, white space around it allowed, no byte order mark.

        Raises:
            RecordError: it holds none.
        """
        return self._converted(index, line)[0]

    def convert(self, index: int, line: bytes) -> Converted:
        """As :meth:`prompt`, and what the record looked like.

        Raises:
            RecordError: it holds no prompt.
        """
        prompt, asked = self._converted(index, line)
        return Converted(prompt, asked.shape, asked.has_several_turns, self._ends_in_answer(prompt, asked))

    def _converted(self, index: int, line: bytes) -> tuple[Prompt, Asked]:
        try:
            record, odd = _record(line)
            asked = find(record, self._readers)
            member, payload, begun = self._payload(asked, record, line)
            id_json = raw_member(line, record, self.id_field) if self.id_field in record else b""
            keep_json = self._kept(record, line) if self.keep else b""
            sampling_json = body_json = b""
            if self.sampling_field is not None or self.body_fields:
                sampling_json, body_json = self._own_members(record, line, odd=odd)
        except RecordError:
            raise
        except ValueError as error:
            raise RecordError(str(error)) from None
        prompt = Prompt(
            index=index,
            payload=payload,
            member=member,
            id_json=id_json,
            keep_json=keep_json,
            sampling_json=sampling_json,
            body_json=body_json,
            conversation=begun,
        )
        return prompt, asked

    def _ends_in_answer(self, prompt: Prompt, asked: Asked) -> bool:
        if self.multi_turn or self.continues or not asked.ends_in_answer:
            return False
        return _CONTINUES not in prompt.body_json and _CONTINUES not in prompt.sampling_json

    def _payload(self, asked: Asked, record: dict[str, Any], line: bytes) -> tuple[str, bytes, Any]:
        """What the request carries: as which member, as what JSON, and what is asked after it."""
        if self.api != "chat" or asked.ids is not None:
            return *self._bare(asked), None
        if self.multi_turn:
            return "messages", *conversation.begin(self._whole(asked, record, line))
        if asked.text is not None:
            return "messages", self._array(_USER + dumps(asked.text) + b"}"), None
        messages = asked.asked_messages()
        payload = raw_member(line, record, asked.key) if asked.as_given else dumps(messages)
        if self._system_json and messages[0]["role"] not in ("system", "developer"):
            payload = self._array(payload[1:-1])
        return "messages", payload, None

    def _bare(self, asked: Asked) -> tuple[str, bytes]:
        """A text or token ids, for an API that takes them as they are."""
        if asked.ids is not None:
            if self.api == "generate":
                return "input_ids", dumps(asked.ids)
            raise RecordError(
                f"{asked.key!r} holds token ids, which only request.api = generate takes",
                remedy="request.api=generate",
            )
        if asked.text is None:
            raise RecordError(
                f"request.api = {self.api} needs a text, and {asked.key!r} holds a conversation",
                remedy="request.api=chat",
            )
        return _MEMBERS[self.api][0], dumps(asked.text)

    def _whole(self, asked: Asked, record: dict[str, Any], line: bytes) -> list[dict[str, Any]]:
        """The whole conversation, old answers and all, our system message before it."""
        if asked.text is not None:
            messages = [{"role": "user", "content": asked.text}]
        else:
            assert asked.messages is not None
            messages = exact_member(line, record, asked.key) if asked.as_given else asked.messages
        if self.system is not None and messages[0]["role"] not in ("system", "developer"):
            return [{"role": "system", "content": self.system}, *messages]
        return messages

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

    def _own_members(self, record: dict[str, Any], line: bytes, *, odd: bool) -> tuple[bytes, bytes]:
        """The record's own sampling parameters, and what goes into the request besides."""
        sampling_json = body_json = b""
        sampling = None
        if self.sampling_field is not None:
            sampling_json = own_members.sampling_of(
                line, record, self.sampling_field, api=self.api, odd=odd, single=self.multi_turn
            )
            sampling = record.get(self.sampling_field)
        if self.body_fields:
            body_json = own_members.body_of(
                line, record, self.body_fields, odd=odd, single=self.multi_turn, sampling=sampling
            )
        return sampling_json, body_json


def _record(line: bytes) -> tuple[dict[str, Any], bool]:
    """The record, and whether it is no strict JSON."""
    try:
        record, odd = orjson.loads(line), False
    except orjson.JSONDecodeError:
        record, odd = loads_odd(line), True
    if type(record) is not dict:
        raise RecordError(f"not a JSON object but {kind_of(record)}")
    return record, odd
