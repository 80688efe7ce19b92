"""What a request asks for: SGLang 0.5.11's request bodies, checked and refused as it does."""

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

import orjson

from genpipe.sim.refusals import Api, Refusal, encodable, flat_error, invalid, refuse
from genpipe.sim.sampling import check_sampling, limit

CHAT_TURN_TOKENS = 5
"""Tokens that a chat template adds for a message, and once more for the turn it opens (an estimate)."""

_PROMPT_IDS = "return_prompt_token_ids"
_ROLES = frozenset({"user", "system", "developer", "assistant", "tool", "function"})


def to_json(value: object) -> bytes:
    """JSON of anything a request can carry, lone surrogates included (those as escapes)."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


def from_json(body: bytes) -> Any:
    """Parse as the real server does: lone surrogates, NaN and numbers of any size are accepted.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return json.loads(body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One sequence to be continued.

    Attributes:
        user: the last user text; for chat parts their texts joined, for token ids the ids joined by commas.
        tokens: length of the prompt (tokens, estimated).
        ids: its token ids, where it came as ids.
    """

    user: str
    tokens: int
    ids: tuple[int, ...] | None = None

    @property
    def row(self) -> str:
        """First 16 hex digits of the SHA-256 of the user text."""
        return hashlib.sha256(self.user.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request that passed every check.

    Attributes:
        api: which endpoint.
        model: the name it used.
        rid: its own id, or None.
        texts: the prompts, at least one.
        batched: it came as a list.
        has_user: a chat has a user message.
        count: answers per prompt (``n``).
        max_tokens: limit of one answer, the room in the context included (tokens).
        ignore_eos: generate up to the limit, whatever comes.
        thinks: thinking is not switched off.
        separates: thinking goes into ``reasoning_content``; else it stands in the text, between its marks.
        has_tool_result: a chat ends in what a tool gave back.
        wants_ids: token ids are asked for, as servers from 0.5.17 on give them.
        wants_prompt_ids: likewise those of the prompt.
    """

    api: Api
    model: str
    rid: str | None
    texts: tuple[Text, ...]
    batched: bool
    has_user: bool
    count: int
    max_tokens: int
    ignore_eos: bool
    thinks: bool
    separates: bool
    has_tool_result: bool
    wants_ids: bool
    wants_prompt_ids: bool


def read_ask(api: Api, content_type: str, body: bytes, context_tokens: int) -> Ask:
    """Read and check one request.

    Raises:
        Refusal: the server would refuse it.
    """
    fields = _read_object(api, content_type, body)
    if fields.get("stream"):
        raise refuse(api, "This server does not stream: send the request with stream false.")
    if api is Api.GENERATE:
        sampling = fields.get("sampling_params") or {}
        if not isinstance(sampling, dict):
            raise refuse(api, "sampling_params must be an object: lists of them are not supported here.")
        texts, batched = _generate_texts(fields)
        asked = sampling.get("max_new_tokens")
    else:
        sampling, batched = fields, False
        if api is Api.CHAT:
            texts = (_chat_text(fields),)
        else:
            texts, batched = _completion_texts(fields)
        limit_field = _int_field(fields, "max_completion_tokens") if api is Api.CHAT else None
        asked = limit_field or _int_field(fields, "max_tokens")
    _check_model(api, fields)
    count = check_sampling(api, sampling)
    rid = fields.get("rid")
    return Ask(
        api=api,
        model=str(fields.get("model", "default")),
        rid=encodable(rid) if isinstance(rid, str) and rid else None,
        texts=texts,
        batched=batched,
        has_user=api is not Api.CHAT or any(str(m["role"]).lower() == "user" for m in fields["messages"]),
        count=count,
        max_tokens=limit(api, max(text.tokens for text in texts), asked, context_tokens),
        ignore_eos=bool(sampling.get("ignore_eos")),
        thinks=api is not Api.CHAT or _thinks(fields),
        separates=api is Api.CHAT and fields.get("separate_reasoning") is not False,
        has_tool_result=api is Api.CHAT and str(fields["messages"][-1]["role"]).lower() == "tool",
        wants_ids=api is Api.GENERATE or bool(fields.get("return_token_ids")),
        wants_prompt_ids=bool(fields.get("return_token_ids" if api is not Api.GENERATE else _PROMPT_IDS)),
    )


def _thinks(fields: dict[str, Any]) -> bool:
    """Whether the chat template lets the model think, by the names that Qwen and DeepSeek have for it."""
    given = fields.get("chat_template_kwargs")
    given = given if isinstance(given, dict) else {}
    effort = fields.get("reasoning_effort")
    on = effort != "none" if effort is not None else True
    return all(given.get(name, on) is not False for name in ("enable_thinking", "thinking"))


def _read_object(api: Api, content_type: str, body: bytes) -> dict[str, Any]:
    if content_type.partition(";")[0].strip().lower() != "application/json":
        message = (
            " [{'loc': ['header', 'content-type'], 'msg': \"Unsupported Media Type: Only 'application/json' "
            "is allowed\", 'type': 'value_error'}]"
        )
        raise Refusal(400, flat_error(400, message, "Bad Request"))
    try:
        fields = from_json(body)
    except ValueError as error:
        at, why = (error.pos, error.msg) if isinstance(error, json.JSONDecodeError) else (0, str(error))
        raise invalid(
            [
                {
                    "type": "json_invalid",
                    "loc": ("body", at),
                    "msg": "JSON decode error",
                    "input": {},
                    "ctx": {"error": why},
                }
            ]
        ) from None
    if not isinstance(fields, dict):
        raise invalid(
            [
                {
                    "type": "model_attributes_type",
                    "loc": ("body",),
                    "msg": f"Input should be a valid object for {api.name.lower()}",
                    "input": fields,
                }
            ]
        )
    return fields


def _missing(name: str, fields: dict[str, Any]) -> Refusal:
    return invalid([{"type": "missing", "loc": ("body", name), "msg": "Field required", "input": fields}])


def _int_field(fields: dict[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
    message = "Input should be a valid integer, unable to parse string as an integer"
    raise invalid([{"type": "int_parsing", "loc": ("body", name), "msg": message, "input": value}])


def _chat_text(fields: dict[str, Any]) -> Text:
    messages = fields.get("messages")
    if "messages" not in fields:
        raise _missing("messages", fields)
    if not isinstance(messages, list):
        message = "Input should be a valid list"
        raise invalid([{"type": "list_type", "loc": ("body", "messages"), "msg": message, "input": messages}])
    user, chars, length = "", 0, CHAT_TURN_TOKENS
    for place, message in enumerate(messages):
        role, text = _message_text(place, message)
        chars += len(text)
        length += CHAT_TURN_TOKENS
        if role == "user":
            user = text
    if not messages:
        raise refuse(Api.CHAT, "Messages cannot be empty.")
    return Text(user=user, tokens=length + math.ceil(chars / 4))


def _message_text(place: int, message: object) -> tuple[str, str]:
    """Role and text of one message; a message may hold anything beside them."""
    loc = ("body", "messages", place)
    if not isinstance(message, dict):
        raise invalid(
            [{"type": "dict_type", "loc": loc, "msg": "Input should be a valid dictionary", "input": message}]
        )
    role = message.get("role")
    if not isinstance(role, str) or role.lower() not in _ROLES:
        why = "'role' must be one of 'system', 'developer', 'assistant', 'tool', or 'function'"
        raise invalid([{"type": "value_error", "loc": (*loc, "role"), "msg": why, "input": role}])
    role = role.lower()
    content = message.get("content")
    if isinstance(content, str):
        return role, content
    if content is None and role != "user":
        return role, ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        texts = (part.get("text") for part in content if part.get("type", "text") == "text")
        return role, "".join(text for text in texts if isinstance(text, str))
    why = "Input should be a valid string or a list of parts"
    raise invalid([{"type": "string_type", "loc": (*loc, "content"), "msg": why, "input": content}])


def _completion_texts(fields: dict[str, Any]) -> tuple[tuple[Text, ...], bool]:
    if "prompt" not in fields:
        raise _missing("prompt", fields)
    read = _texts(fields["prompt"])
    if read is None:
        why = "Input should be a string, a list of strings, or token ids"
        raise invalid([{"type": "string_type", "loc": ("body", "prompt"), "msg": why, "input": None}])
    if not read[0]:
        raise refuse(Api.COMPLETIONS, "Prompt cannot be empty")
    return read


def _generate_texts(fields: dict[str, Any]) -> tuple[tuple[Text, ...], bool]:
    given = fields.get("text")
    if given is None:
        given = fields.get("input_ids")
    read = None if given is None else _texts(given)
    if read is None or not read[0]:
        raise refuse(Api.GENERATE, "Either text, input_ids or input_embeds should be provided.")
    return read


def _texts(given: object) -> tuple[tuple[Text, ...], bool] | None:
    """Prompts of one of four forms: text, texts, token ids, lists of token ids; None for anything else."""
    if isinstance(given, str):
        return (_plain(given),), False
    if not isinstance(given, list):
        return None
    if all(isinstance(item, int) for item in given):
        return ((_ids(given),) if given else ()), False
    if all(isinstance(item, str) for item in given):
        return tuple(_plain(item) for item in given), True
    if all(isinstance(item, list) and all(isinstance(i, int) for i in item) for item in given):
        return tuple(_ids(item) for item in given), True
    return None


def _plain(text: str) -> Text:
    return Text(user=text, tokens=max(1, math.ceil(len(text) / 4)))


def _ids(ids: list[int]) -> Text:
    return Text(user=",".join(map(str, ids)), tokens=len(ids), ids=tuple(ids))


def _check_model(api: Api, fields: dict[str, Any]) -> None:
    model = fields.get("model")
    if api is not Api.GENERATE and isinstance(model, str) and ":" in model:
        adapter = encodable(model.partition(":")[2])
        raise refuse(
            api,
            f"LoRA adapter '{adapter}' was requested, but LoRA is not enabled. Launch the server with "
            "--enable-lora and load adapters with --lora-paths or /load_lora_adapter.",
        )
