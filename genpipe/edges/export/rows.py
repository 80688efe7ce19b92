"""Records to rows, in the form that is wished for.

All formats but ``raw`` have in each row:

- ``id``: the user's own, as it is, and left out where there was none;
- ``index``: the prompt's place in the input, and ``sample`` (from 0) where several answers were asked for;
- ``messages``, ``conversations``, or ``prompt`` and ``completion``;
- ``tools``, where the request had some;
- ``input_ids`` and ``loss_mask``, where they are wished for;
- the input's fields that ``[output].keep`` names. One that has a name from above is called ``input_NAME``,
  or ``input_input_NAME`` where another has that name already, and so on.

``sharegpt`` is what the readers of SpecForge and speculators take: messages of ``role`` and ``content`` under
``conversations``. SpecForge hands every column that it does not know to the chat template, and wants one type
for each; so there is no ``index``, no ``sample`` and no kept field, ``tools`` are a text of JSON, and ``id``
is always a text: that of the user's id, or of the index where there was none, with ``#SAMPLE`` where there
are several.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from genpipe.core.errors import ConfigError
from genpipe.edges import strict_json
from genpipe.edges.export import messages as export_messages
from genpipe.edges.export.tokens import training_tokens
from genpipe.edges.export.wish import Wish

Row = dict[str, Any]

MEMBERS = ("messages", "prompt", "text", "input_ids")
"""What the payload of a request may be called; it is the first of them in a record."""

_OWN_COLUMNS = frozenset(
    {"id", "index", "sample", "messages", "conversations", "prompt", "completion", "reasoning_content"}
    | {"tools", "input_ids", "loss_mask"}
)
_NUMBER = re.compile(rb"-?[0-9][0-9.eE+-]*")
_NOT_KEPT = frozenset({"queue_s", "token_ids", "rid", "settings"})
_TURN_KEYS = ("reasoning_content", "tool_calls", "tool_call_id", "name")


@dataclass(frozen=True, slots=True)
class Exact:
    """A value whose numbers may not be those of its JSON to the digit.

    Attributes:
        value: as it was parsed.
        json: as it was written.
    """

    value: Any
    json: bytes


class Maker:
    """Makes rows of records; of one record always the same."""

    def __init__(self, wish: Wish, run: dict[str, Any], *, as_columns: bool) -> None:
        """Prepare.

        Args:
            wish: what is wished for.
            run: what ``run.json`` says.
            as_columns: rows are for columns of a type, not for JSON: ids and kept fields with numbers that
                may have lost digits are :class:`Exact` values.
        """
        self._wish = wish
        self._as_columns = as_columns
        request = run["settings"].get("request", {})
        self._run_tools = (request.get("extra_body") or {}).get("tools")

    def rows(self, record: dict[str, Any], line: bytes, samples: Iterable[int] | None = None) -> list[Row]:
        """The rows of one record; none where they should have token ids, and these are not known.

        Args:
            record: what ``line`` was parsed to; changed, and perhaps part of the rows.
            line: the record as a line, without its checksum.
            samples: which of several answers have a row; all where it is None.

        Raises:
            ValueError: it is nested too deeply, or has no payload.
            AttributeError: it is not made as a record is; likewise KeyError and TypeError.
            ConfigError: it cannot be put into the form that is wished for.
        """
        kept = kept_keys(record)
        for key in ("id", "messages", *kept):
            if key in record:
                record[key] = self._exact(record, line, key)
        if self._wish.format == "raw":
            return [record]
        if "response" in record:
            rows = [self._row(record, record["response"], None, kept)]
        else:
            responses = record["responses"]
            chosen = range(len(responses)) if samples is None else samples
            rows = [self._row(record, responses[sample], sample, kept) for sample in chosen]
        return [row for row in rows if row is not None]

    def _row(
        self, record: dict[str, Any], response: dict[str, Any], sample: int | None, kept: list[str]
    ) -> Row | None:
        """One row; None where it has no token ids and should have."""
        row = self._names(record, sample)
        member = _payload_member(record)
        row.update(self._talk(record, member, response))
        tools = (record.get("body") or {}).get("tools") or self._run_tools
        if tools:
            row["tools"] = strict_json.dumps(tools).decode() if self._wish.format == "sharegpt" else tools
        if self._wish.token_ids:
            tokens = training_tokens(record, sample, asked_with_ids=member == "input_ids")
            if tokens is None:
                return None
            row["input_ids"], row["loss_mask"] = tokens
        if self._wish.format != "sharegpt":
            for key in kept:
                name = key
                if key in _OWN_COLUMNS:
                    while name in _OWN_COLUMNS or name in kept or name in row:
                        name = f"input_{name}"
                row[name] = record[key]
        return row

    def _names(self, record: dict[str, Any], sample: int | None) -> Row:
        """How the row is known."""
        if self._wish.format == "sharegpt":
            name = _text_of(record["id"] if "id" in record else record["index"])
            return {"id": name if sample is None else f"{name}#{sample}"}
        row = {"id": record["id"]} if "id" in record else {}
        row["index"] = record["index"]
        if sample is not None:
            row["sample"] = sample
        return row

    def _talk(self, record: dict[str, Any], member: str, response: dict[str, Any]) -> Row:
        """What was asked and answered."""
        reasoning = self._wish.reasoning
        said = export_messages.answer(
            response, reasoning, finish_reason=record.get("finish_reason"), is_text=member != "messages"
        )
        if member != "messages":
            return self._text(record, member, said)
        told = export_messages.history(record, record["messages"], reasoning)
        if self._wish.format == "prompt":
            return {"prompt": told, "completion": [said]}
        if self._wish.format == "openai":
            return {"messages": [*told, said]}
        return {"conversations": [_turn(message) for message in (*told, said)]}

    def _text(self, record: dict[str, Any], member: str, said: dict[str, Any]) -> Row:
        if self._wish.format != "prompt":
            raise ConfigError(
                f"--format {self._wish.format} is made of messages, and record {record['index']} has "
                f"{member!r} instead: use --format prompt"
            )
        row = {"prompt": record[member], "completion": said["content"] or ""}
        if "reasoning_content" in said:
            row["reasoning_content"] = said["reasoning_content"]
        return row

    def _exact(self, record: dict[str, Any], line: bytes, key: str) -> Any:
        value = record[key]
        if type(value) is str:
            return value
        exact = _number_in(line, key) if type(value) is float else None
        if exact is None:
            exact = strict_json.exact_member(line, record, key)
        if exact is value or key == "messages" or not self._as_columns:
            return exact
        return Exact(value, strict_json.dumps(exact))


def _number_in(line: bytes, key: str) -> orjson.Fragment | None:
    """A record's own number as it is written; None where that takes more than a look."""
    mark = b"," + strict_json.dumps(key) + b":"
    if line.count(mark) != 1:
        return None
    found = _NUMBER.match(line, line.index(mark) + len(mark))
    return None if found is None else orjson.Fragment(found[0])


def _payload_member(record: dict[str, Any]) -> str:
    """What a record's payload is called. Kept fields, which may have such names too, come later."""
    for key in record:
        if key in MEMBERS:
            return key
    raise ValueError("a record without a payload")


def kept_keys(record: dict[str, Any]) -> list[str]:
    """The input's fields in a record: all that stands after its last fact, the latency."""
    keys = list(record)
    try:
        first = keys.index("latency_s") + 1
    except ValueError:
        return []
    return [key for key in keys[first:] if key not in _NOT_KEPT]


def _turn(message: dict[str, Any]) -> dict[str, Any]:
    """A message as a turn, with a text wherever that can be."""
    content = message.get("content")
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        part = content[0]
        if set(part) == {"type", "text"} and isinstance(part["text"], str):
            content = part["text"]
    more = {key: message[key] for key in _TURN_KEYS if message.get(key) is not None}
    return {"role": message["role"], "content": "" if content is None else content, **more}


def _text_of(value: Any) -> str:
    if isinstance(value, Exact):
        return value.json.decode()
    return value if isinstance(value, str) else strict_json.dumps(value).decode()
