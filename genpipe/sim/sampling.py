"""Sampling parameters of a request: SGLang 0.5.11's names and checks."""

from typing import Any

from genpipe.sim.refusals import Api, Refusal, refuse

SAMPLING = frozenset(
    {
        "custom_params",
        "ebnf",
        "frequency_penalty",
        "ignore_eos",
        "json_schema",
        "logit_bias",
        "max_new_tokens",
        "min_new_tokens",
        "min_p",
        "n",
        "no_stop_trim",
        "presence_penalty",
        "regex",
        "repetition_penalty",
        "sampling_seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_regex",
        "stop_token_ids",
        "stream_interval",
        "structural_tag",
        "temperature",
        "top_k",
        "top_p",
    }
)
"""What ``/generate`` knows in ``sampling_params``; it refuses all else there."""


def check_sampling(api: Api, sampling: dict[str, Any]) -> int:
    """The number of answers to each prompt, once the parameters are found to be in range.

    Raises:
        Refusal: one is not, or ``/generate`` does not know it.
    """
    if api is Api.GENERATE and not set(sampling) <= SAMPLING:
        # The real server lets a TypeError escape here, and closes the connection behind the reply.
        raise Refusal(500, b"Internal Server Error", headers={"Connection": "close"}, plain=True)
    temperature, top_p = sampling.get("temperature"), sampling.get("top_p")
    if isinstance(temperature, int | float) and temperature < 0:
        raise refuse(api, f"temperature must be non-negative, got {float(temperature)}.")
    if isinstance(top_p, int | float) and not 0 < top_p <= 1:
        raise refuse(api, f"top_p must be in (0, 1], got {float(top_p)}.")
    count = sampling.get("n")
    if count is None:
        return 1
    if not isinstance(count, int) or count < 1:
        raise refuse(api, "range() arg 3 must not be zero", type_="BadRequest")
    return count


def limit(api: Api, longest: int, asked: object, context_tokens: int) -> int:
    """The answer's limit in tokens; the real checks, in the real order.

    Raises:
        Refusal: it is none, or there is no room for it behind the ``longest`` prompt (tokens).
    """
    if asked is not None and (not isinstance(asked, int) or asked < 0):
        raise refuse(api, f"max_new_tokens must be at least 0, got {asked}.")
    if api is Api.CHAT and asked is not None and asked > context_tokens:
        raise refuse(
            api,
            f"max_completion_tokens is too large: {asked}."
            f"This model supports at most {context_tokens} completion tokens.",
        )
    if longest >= context_tokens:
        raise refuse(
            api,
            f"The input ({longest} tokens) is longer than the model's context length "
            f"({context_tokens} tokens).",
        )
    room = context_tokens - longest
    if asked is None:
        return room if api.value is None else min(room, api.value)
    if asked > room:
        raise refuse(
            api,
            f"Requested token count exceeds the model's maximum context length of {context_tokens} tokens. "
            f"You asked for {longest + asked} tokens: {longest} of input and {asked} of completion.",
        )
    return asked
