"""Texts and reply bodies in the shapes of SGLang 0.5.11, and of 0.5.17, made from plain numbers."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import orjson

from genpipe.sim.asks import Ask, Text, to_json
from genpipe.sim.orders import Orders
from genpipe.sim.refusals import Api

EOS_ID = 151645
"""Token id that ends an answer of Qwen-family models; given as the reason of a ``stop``."""

_WORDS = (
    "the old harbour wakes before the light while slow boats turn against a soft grey tide and men carry "
    "rope past open doors where bread is cut and coffee poured for those who came in late with salt on "
    "their hands "
)
# In an order of its own, since a text that repeats itself is what clients look for.
_LONG = _WORDS + " ".join(random.Random(1).choices(_WORDS.split(), k=20_000)) + " "
_PHRASE = "and then the wave came back again "
_WIDE = "größer als das Meer, 海は広い, ще вода 🌊 "
_ODD = {"replacement": "\ufffd ", "surrogate": "\ud83d ", "nul": "\0 "}
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
        row: hash of its prompt.
        calls: functions that it calls instead of saying something.
    """

    text: str | None
    reasoning: str | None
    tokens: int
    reason_tokens: int
    prompt_tokens: int
    finish: str | None
    row: str = ""
    calls: tuple[str, ...] = ()


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
    head += _ODD.get(orders.content or "", "")
    if any(mark in user for mark in _SEPARATORS):
        head += _SEPARATORS + " "
    room = (4 * tokens if reply_bytes is None else reply_bytes) - len(head)
    if orders.loop:
        return head + (_PHRASE * (room // len(_PHRASE) + 1))[: max(0, room)]
    if orders.split_utf8:
        return head + _WIDE * max(1, room // len(_WIDE))
    return head + filler(room)


def finished(
    *,
    row: str,
    prompt_tokens: int,
    tokens: int,
    reason_tokens: int,
    cut: bool,
    orders: Orders,
    text: str,
    calls: tuple[str, ...] = (),
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
        calls: functions that are called instead, if it gets that far.
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
        row=row,
        calls=calls if text else (),
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
    ask: Ask,
    rid: str,
    answers: list[Answer],
    orders: Orders,
    timing: Timing,
    *,
    metrics: bool,
    is_newer: bool,
) -> bytes:
    """The reply to a request, by its endpoint; with ``huge`` the text is drawn out to the ordered size."""
    if ask.count > 1:
        # Each has an id of its own, which begins with that of the request in newer versions.
        rids = [f"{rid}_{uuid4().hex}" if is_newer else uuid4().hex for _ in answers]
    else:
        rids = [rid] if len(answers) == 1 else [f"{rid}_{place}" for place in range(len(answers))]
    if ask.api is Api.GENERATE:
        items = [_native(one, answer, timing, metrics) for one, answer in zip(rids, answers, strict=True)]
        if is_newer and ask.wants_prompt_ids:
            for place, item in enumerate(items):
                item["prompt_token_ids"] = _prompt_ids(ask.texts[place // ask.count])
        body = to_json(items if ask.batched or ask.count > 1 else items[0])
    else:
        body = to_json(_openai(ask, rids[0], answers, orders, is_newer))
    if orders.deep_levels:
        nested = b"[" * orders.deep_levels + b"]" * orders.deep_levels
        key = b'"cached_tokens_details":' if ask.api is Api.GENERATE else b'"logprobs":'
        body = body.replace(key + b"null", key + nested, 1)
    missing = (orders.huge_bytes or 0) - len(body)
    first = answers[0].text
    if missing > 0 and first is not None:
        # The first answer alone grows: its text is plain ASCII, so that a character is a byte.
        return body.replace(to_json(first)[:-1], to_json(first + filler(missing))[:-1], 1)
    return body


def _openai(ask: Ask, rid: str, answers: list[Answer], orders: Orders, is_newer: bool) -> dict[str, Any]:
    chat = ask.api is Api.CHAT
    choices = [_choice(place, answer, ask) for place, answer in enumerate(answers)]
    if is_newer and ask.wants_ids:
        for place, answer in enumerate(answers):
            choices[place]["prompt_token_ids"] = _prompt_ids(ask.texts[place // ask.count])
            choices[place]["token_ids"] = _ids(answer.text or "", answer.tokens)
    reply: dict[str, Any] = {
        "id": rid,
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": ask.model,
        "choices": [] if orders.body == "nochoices" else choices,
    }
    if orders.usage != "none":
        reply["usage"] = None if orders.usage == "null" else _usage(ask, answers, orders.usage == "zero")
    reply["metadata"] = {"weight_version": "default"}
    return reply


def _choice(place: int, answer: Answer, ask: Ask) -> dict[str, Any]:
    finish = answer.finish
    matched = EOS_ID if finish == "stop" else None
    if ask.api is not Api.CHAT:
        return {
            "index": place,
            "text": _whole_text(answer),
            "logprobs": None,
            "finish_reason": finish,
            "matched_stop": matched,
        }
    calls = [_call(number, name, answer.row) for number, name in enumerate(answer.calls)]
    if calls and finish == "stop":
        finish = "tool_calls"
    content = answer.text if ask.separates else _whole_text(answer)
    return {
        "index": place,
        "message": {
            "role": "assistant",
            "content": None if calls else content,
            "reasoning_content": answer.reasoning if ask.separates else None,
            "tool_calls": calls or None,
        },
        "logprobs": None,
        "finish_reason": finish,
        "matched_stop": matched,
    }


def _whole_text(answer: Answer) -> str:
    """What the model wrote, its marks included: nobody takes it apart."""
    text = answer.text or ""
    if answer.calls:
        text = "\n".join(
            f'<tool_call>\n{{"name": "{name}", "arguments": {_arguments(answer.row)}}}\n</tool_call>'
            for name in answer.calls
        )
    if answer.reasoning is None:
        return text
    if not text and answer.finish == "length":
        return f"<think>\n{answer.reasoning}"
    return f"<think>\n{answer.reasoning}\n</think>\n\n{text}"


def _call(number: int, name: str, row: str) -> dict[str, Any]:
    """The call of a function; its id is a matter of the prompt and its number."""
    return {
        "id": f"call_{row}{number:08x}",
        "index": number,
        "type": "function",
        "function": {"name": name, "arguments": _arguments(row)},
    }


def _arguments(row: str) -> str:
    return f'{{"row": "{row}"}}'


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
    ids = _ids(answer.text or "", answer.tokens)
    return {"text": _whole_text(answer), "output_ids": ids, "meta_info": meta}


def _ids(text: str, count: int) -> list[int]:
    """Token ids that are stable for a text and mean nothing."""
    first = 1000 + sum(text[5:21].encode("utf-8", "replace")) % 1000
    return list(range(first, first + count))


def _prompt_ids(text: Text) -> list[int]:
    return list(text.ids) if text.ids is not None else _ids(text.user, text.tokens)


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
