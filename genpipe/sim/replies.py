"""Texts and reply bodies in SGLang 0.5.11's shapes, made from plain numbers."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from genpipe.sim.asks import Api, Ask, to_json
from genpipe.sim.orders import Orders

EOS_ID = 151645
"""Token id that ends an answer of Qwen-family models; given as the reason of a ``stop``."""

_WORDS = (
    "the old harbour wakes before the light while slow boats turn against a soft grey tide and men carry "
    "rope past open doors where bread is cut and coffee poured for those who came in late with salt on "
    "their hands "
)
_LONG = _WORDS * 500
_PHRASE = "and then the wave came back again "
_WIDE = "größer als das Meer, 海は広い, ще вода 🌊 "
_SEPARATORS = "\u2028\u2029\x85"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One generated sequence.

    Attributes:
        text: its content; None for JSON null.
        reasoning: text of its thinking, or None.
        tokens: all tokens made, thinking included (count).
        reason_tokens: those of the thinking (count).
        prompt_tokens: length of its prompt (tokens).
        finish: ``stop``, ``length``, ``abort``, or None.
    """

    text: str | None
    reasoning: str | None
    tokens: int
    reason_tokens: int
    prompt_tokens: int
    finish: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When things happened to a request, for the replies that tell.

    Attributes:
        arrival_s: when it came (seconds, monotonic).
        queue_s: how long it waited for a slot (seconds).
        elapsed_s: from arrival to the end of generation (seconds).
    """

    arrival_s: float
    queue_s: float
    elapsed_s: float


def filler(chars: int) -> str:
    """Plain words, that many characters of them."""
    if chars <= len(_LONG):
        return _LONG[: max(0, chars)]
    return (_LONG * (chars // len(_LONG) + 1))[:chars]


def answer_text(row: str, tokens: int, reply_bytes: int | None, orders: Orders, user: str) -> str:
    """The text of a whole answer: ``echo`` and the prompt's hash, then about four characters a token.

    The echo is never cut. Where the prompt holds a line separator of Unicode, the answer holds all three, so
    that a reader that splits lines at them is found out.
    """
    head = f"echo {row} "
    if orders.content == "replacement":
        head += "\ufffd "
    if any(mark in user for mark in _SEPARATORS):
        head += _SEPARATORS + " "
    room = (4 * tokens if reply_bytes is None else reply_bytes) - len(head)
    if orders.loop:
        return head + (_PHRASE * (room // len(_PHRASE) + 1))[: max(0, room)]
    if orders.split_utf8:
        return head + _WIDE * max(1, room // len(_WIDE))
    return head + filler(room)


def finished(
    *, row: str, prompt_tokens: int, tokens: int, reason_tokens: int, cut: bool, orders: Orders, text: str
) -> Answer:
    """The answer of a sequence that ran to its end.

    Args:
        row: hash of the prompt, for the thinking to name.
        prompt_tokens: length of the prompt.
        tokens: thinking and content together.
        reason_tokens: thinking alone.
        cut: the limit ended it.
        orders: of the prompt.
        text: the content, empty where it never got that far.
    """
    content: str | None = text or None
    if orders.content == "empty":
        content = ""
    finish: str | None = "length" if cut else "stop"
    if orders.finish is not None:
        finish = None if orders.finish == "null" else orders.finish
    return Answer(
        text=content,
        reasoning=f"thinking {row} " + filler(4 * reason_tokens - 26) if reason_tokens else None,
        tokens=tokens,
        reason_tokens=reason_tokens,
        prompt_tokens=prompt_tokens,
        finish=finish,
    )


def aborted(prompt_tokens: int, made: int, text: str, *, was_queued: bool) -> Answer:
    """The answer of a sequence that was aborted: what there was of it; not even usage if it never ran."""
    return Answer(
        text=text[: 4 * made] or None,
        reasoning=None,
        tokens=made,
        reason_tokens=0,
        prompt_tokens=0 if was_queued else prompt_tokens,
        finish="abort",
    )


def body_of(
    ask: Ask, rid: str, answers: list[Answer], orders: Orders, timing: Timing, *, metrics: bool
) -> bytes:
    """The reply to a request, by its endpoint; with ``huge`` the text is drawn out to the ordered size."""
    if ask.api is Api.GENERATE:
        items = [
            _native(rid if len(answers) == 1 else f"{rid}_{i}", a, timing, metrics)
            for i, a in enumerate(answers)
        ]
        body = to_json(items if ask.batched or ask.count > 1 else items[0])
    else:
        body = to_json(_openai(ask, rid, answers, orders))
    missing = (orders.huge_bytes or 0) - len(body)
    first = answers[0].text
    if missing > 0 and first is not None:
        # The first answer alone grows: its text is plain ASCII, so that a character is a byte.
        return body.replace(to_json(first)[:-1], to_json(first + filler(missing))[:-1], 1)
    return body


def _openai(ask: Ask, rid: str, answers: list[Answer], orders: Orders) -> dict[str, Any]:
    chat = ask.api is Api.CHAT
    reply: dict[str, Any] = {
        "id": rid,
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": ask.model,
        "choices": [_choice(place, answer, chat) for place, answer in enumerate(answers)],
    }
    if orders.body == "nochoices":
        reply["choices"] = []
    if orders.usage != "none":
        reply["usage"] = None if orders.usage == "null" else _usage(ask, answers, orders.usage == "zero")
    reply["metadata"] = {"weight_version": "default"}
    return reply


def _choice(place: int, answer: Answer, chat: bool) -> dict[str, Any]:
    matched = EOS_ID if answer.finish == "stop" else None
    if not chat:
        return {
            "index": place,
            "text": answer.text or "",
            "logprobs": None,
            "finish_reason": answer.finish,
            "matched_stop": matched,
        }
    return {
        "index": place,
        "message": {
            "role": "assistant",
            "content": answer.text,
            "reasoning_content": answer.reasoning,
            "tool_calls": None,
        },
        "logprobs": None,
        "finish_reason": answer.finish,
        "matched_stop": matched,
    }


def _usage(ask: Ask, answers: list[Answer], zero: bool) -> dict[str, Any]:
    # A prompt that is answered n times counts once.
    prompt = 0 if zero else sum(answer.prompt_tokens for answer in answers[:: ask.count])
    made = 0 if zero else sum(answer.tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + made,
        "completion_tokens": made,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0 if zero else sum(answer.reason_tokens for answer in answers),
    }


def _native(rid: str, answer: Answer, timing: Timing, metrics: bool) -> dict[str, Any]:
    finish: dict[str, Any] | None = None
    match answer.finish:
        case "stop":
            finish = {"type": "stop", "matched": EOS_ID}
        case "length":
            finish = {"type": "length", "length": answer.tokens}
        case "abort":
            finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    sent_at = time.time()
    received_at = sent_at - (time.monotonic() - timing.arrival_s)
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": finish,
        "prompt_tokens": answer.prompt_tokens,
        "weight_version": "default",
        "total_retractions": 0,
    }
    if metrics:
        meta |= {
            "queue_time": timing.queue_s,
            "prefill_waiting_latency": None,
            "prefill_launch_latency": None,
        }
    meta |= {
        "reasoning_tokens": answer.reason_tokens,
        "completion_tokens": answer.tokens,
        "cached_tokens": 0,
        "cached_tokens_details": None,
        "dp_rank": None,
        "e2e_latency": timing.elapsed_s,
    }
    if metrics:
        busy_s = max(timing.elapsed_s - timing.queue_s, 1e-6)
        meta |= {
            "request_received_ts": received_at,
            "api_server_dispatch_finish_ts": received_at,
            "request_finished_ts": received_at + timing.elapsed_s,
            "inference_time": busy_s,
            "decode_throughput": answer.tokens / busy_s,
        }
    meta["response_sent_to_client_ts"] = sent_at
    text = answer.text or ""
    return {"text": text, "output_ids": _ids(text, answer.tokens), "meta_info": meta}


def _ids(text: str, count: int) -> list[int]:
    """Token ids that are stable for a text and mean nothing."""
    first = 1000 + sum(text[5:21].encode("utf-8", "replace")) % 1000
    return list(range(first, first + count))


ERROR_IN_200 = orjson.dumps(
    {
        "object": "error",
        "message": "Internal server error: generation failed",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
)
HTML_PAGE = (
    b"<!DOCTYPE html><html><head><title>Bad gateway</title></head><body><h1>Bad gateway</h1></body></html>\n"
)


def error_of(orders: Orders, prompt_tokens: int, context_tokens: int) -> tuple[str, str]:
    """Message and type of an ordered error reply."""
    status = orders.status or 500
    match orders.why:
        case "too_long":
            message = (
                f"The input ({max(prompt_tokens, context_tokens + 1)} tokens) is longer than the model's "
                f"context length ({context_tokens} tokens)."
            )
        case "queue_full":
            message = "The request queue is full."
        case None:
            message = f"Ordered error {status}"
        case why:
            message = why.replace("_", " ")
    return message, {400: "BadRequestError", 500: "InternalServerError"}.get(status, str(status))


def split_characters(body: bytes) -> Iterator[bytes]:
    """Cut a body inside its multi-byte characters, in at most 64 places."""
    start, cuts = 0, 0
    for place in range(1, len(body)):
        if body[place] & 0xC0 == 0x80 and cuts < 64:
            yield body[start:place]
            start, cuts = place, cuts + 1
    yield body[start:]
