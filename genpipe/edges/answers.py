"""Which 200 is an answer, and what is kept of it: chat, completions, and SGLang's own ``/generate``."""

from typing import Any, NamedTuple

import orjson

from genpipe.core.errors import FaultKind, ServerFault
from genpipe.core.quality import flags_of
from genpipe.core.values import Answer, ApiName, Prompt, Reply
from genpipe.edges import strict_json
from genpipe.edges.replies import RID_HEAD_CHARS, message_of, one_line

OUTPUT_TOKENS_MAX = 1 << 40
"""A server that counts more has not counted (count)."""

_COUNTED = ("prompt_tokens", "completion_tokens", "reasoning_tokens", "cached_tokens")
"""What ``/generate`` counts in ``meta_info``, by the names that usage objects have for it."""

_PARTS = ("content", "reasoning_content", "tool_calls")


class _Reading(NamedTuple):
    """What a reply says, whatever its endpoint.

    Attributes:
        parts: the answers, each as records have it.
        reasons: why they ended.
        usage: tokens of prompt and answers.
        model: the model's name.
    """

    parts: list[dict[str, Any]]
    reasons: list[str | None]
    usage: dict[str, Any] | None
    model: str | None


class _NoAnswerError(Exception):
    """Why a reply is none."""


def examine(
    reply: Reply,
    *,
    api: ApiName = "chat",
    samples: int = 1,
    ids_of: Prompt | None = None,
) -> Answer:
    """Look whether a 200 is an answer.

    Args:
        reply: of a server.
        api: how it was asked.
        samples: fewer answers than this are none (count).
        ids_of: the prompt that was sent, where token ids are wanted; None: they are not kept.

    Raises:
        ServerFault: it was aborted, has too few choices, is no JSON, or is an error object.
    """
    try:
        data = _parsed(reply.body)
        read = _native if api == "generate" else _openai
        parts, reasons, usage, model = read(data, reply.rid, api)
        _demand_samples(len(parts), samples)
    except _NoAnswerError as error:
        message, kind = str(error), FaultKind.BROKEN
        raise ServerFault(message, kind=kind, status=200, wire_s=reply.wire_s) from None
    # Of several samples the one that was cut off says most.
    finish_reason = "length" if "length" in reasons else reasons[0]
    return Answer(
        response=parts[0] if len(parts) == 1 else parts,
        finish_reason=finish_reason,
        usage=usage,
        output_tokens=_output_tokens(usage, parts),
        flags=flags_of(finish_reason, parts),
        model=model,
        size_bytes=len(reply.body),
        rid=reply.rid,
        token_ids=None if ids_of is None else _token_ids(data, api, ids_of),
    )


def _parsed(body: bytes) -> Any:
    try:
        return strict_json.loads(body)
    except ValueError as error:
        why = f" ({error})" if "nested" in str(error) else ""
        raise _NoAnswerError(f"200 with a body that is not JSON{why}: {body[:60]!r}") from None


def _demand_samples(got: int, asked: int) -> None:
    if got < asked:
        raise _NoAnswerError(f"200 with {got} of the {asked} answers that n asks for")


def _refuse_errors(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _NoAnswerError("200 with JSON that is no object")
    if data.get("error") or data.get("object") == "error":
        raise _NoAnswerError(f"200 with an error: {message_of(data)}")
    return data


def _refuse_others(given: Any, rid: str) -> None:
    """Refuse the reply to another of our own requests: bytes left on a connection shift its replies.

    Where several samples were asked for, SGLang appends to the id that it was given.
    """
    if given == rid or not isinstance(given, str):
        return
    if given[:RID_HEAD_CHARS] == rid[:RID_HEAD_CHARS] and not given.startswith(rid):
        raise _NoAnswerError("200 with the reply to another request")


# Chat and completions


def _openai(data: Any, rid: str | None, api: ApiName) -> _Reading:
    data = _refuse_errors(data)
    if rid is not None:
        _refuse_others(data.get("id"), rid)
    choices = data.get("choices")
    if not isinstance(choices, list) or not choices:
        raise _NoAnswerError("200 without choices")
    part_of = _message if api == "chat" else _text
    parts, reasons = [], []
    for choice in _by_index(choices):
        if not isinstance(choice, dict):
            raise _NoAnswerError("200 with a choice that is none")
        reasons.append(_finish_reason(choice.get("finish_reason")))
        parts.append(part_of(choice))
    usage, model = data.get("usage"), data.get("model")
    return _Reading(
        parts,
        reasons,
        usage if isinstance(usage, dict) else None,
        model if isinstance(model, str) else None,
    )


def _by_index(choices: list[Any]) -> list[Any]:
    """In the order of their own numbers, where all have one."""
    if len(choices) == 1:
        return choices
    indices = [choice.get("index") if isinstance(choice, dict) else None for choice in choices]
    if any(type(index) is not int for index in indices):
        return choices
    return sorted(choices, key=lambda choice: int(choice["index"]))


def _message(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message")
    if not isinstance(message, dict):
        raise _NoAnswerError("200 with a choice without a message")
    part = {name: message.get(name) for name in _PARTS}
    if part["reasoning_content"] is None:
        # vLLM's name for it.
        part["reasoning_content"] = message.get("reasoning")
    return part


def _text(choice: dict[str, Any]) -> dict[str, Any]:
    text = choice.get("text")
    if not isinstance(text, str):
        raise _NoAnswerError("200 with a choice without a text")
    return {"content": text, "reasoning_content": None, "tool_calls": None}


# SGLang's own


def _native(data: Any, rid: str | None, _: ApiName) -> _Reading:
    parts, reasons, metas = [], [], []
    for item in map(_refuse_errors, data if isinstance(data, list) else [data]):
        meta, text = item.get("meta_info"), item.get("text")
        # A server without a tokenizer has ids alone.
        if not isinstance(meta, dict) or not (
            isinstance(text, str) or (text is None and "output_ids" in item)
        ):
            raise _NoAnswerError("200 with an answer without text or meta_info")
        if rid is not None:
            _refuse_others(meta.get("id"), rid)
        parts.append({"content": text, "reasoning_content": None, "tool_calls": None})
        reasons.append(_finish_reason(meta.get("finish_reason")))
        metas.append(meta)
    if not parts:
        raise _NoAnswerError("200 without an answer")
    return _Reading(parts, reasons, _usage(metas), None)


def _usage(metas: list[dict[str, Any]]) -> dict[str, Any] | None:
    """As the other endpoints have it: a prompt that is answered several times counts once."""
    usage: dict[str, Any] = {}
    for name in _COUNTED:
        counts = [meta.get(name) for meta in metas]
        if all(_is_count(count) for count in counts):
            usage[name] = counts[0] if name == "prompt_tokens" else sum(counts)
    return usage or None


# What all have


def _finish_reason(given: Any) -> str | None:
    """As chat completions give it; SGLang's own endpoint puts it into an object."""
    said = None
    if isinstance(given, dict):
        said, given = given.get("message"), given.get("type")
    if given == "abort":
        why = f": {one_line(said)}" if isinstance(said, str) and said else ""
        raise _NoAnswerError(f"200 with finish_reason abort{why}")
    return given if isinstance(given, str) else None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= OUTPUT_TOKENS_MAX


def _output_tokens(usage: dict[str, Any] | None, parts: list[dict[str, Any]]) -> int | None:
    """What the server counted; zero for an answer with text in it means that it did not count."""
    tokens = usage.get("completion_tokens") if usage is not None else None
    if not _is_count(tokens) or (tokens == 0 and any(value for part in parts for value in part.values())):
        return None
    return tokens


# Token ids


def _token_ids(data: Any, api: ApiName, prompt: Prompt) -> dict[str, Any] | None:
    """The ids of prompt and answers, where the server told those of all answers."""
    if api == "generate":
        items = data if isinstance(data, list) else [data]
        outputs, given = [item.get("output_ids") for item in items], items[0].get("prompt_token_ids")
    else:
        outputs, given = _ids_in_choices(data)
    if not all(map(_are_ids, outputs)):
        return None
    if prompt.member == "input_ids":
        given = orjson.loads(prompt.payload)
    output = outputs[0] if len(outputs) == 1 else outputs
    return {"prompt": given if _are_ids(given) else None, "output": output}


def _ids_in_choices(data: dict[str, Any]) -> tuple[list[Any], Any]:
    """Wherever servers put them: those of each answer, and of the prompt.

    SGLang has ``token_ids`` in each choice (0.5.17, and completions), ``response_token_ids`` (chat in 0.5.23)
    or all in ``sglext``; vLLM has ``token_ids``, and those of the prompt beside the choices.
    """
    choices, beside = _by_index(data["choices"]), data.get("sglext")
    beside = beside if isinstance(beside, dict) else {}
    outputs = [_first(choice, "response_token_ids", "token_ids") for choice in choices]
    if outputs == [None] * len(choices) and isinstance(apart := beside.get("output_ids"), list):
        outputs = apart if len(apart) == len(choices) else outputs
    given = _first(choices[0], "prompt_token_ids") or data.get("prompt_token_ids") or beside.get("input_ids")
    return outputs, given


def _first(choice: dict[str, Any], *names: str) -> Any:
    return next((choice[name] for name in names if choice.get(name) is not None), None)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}
