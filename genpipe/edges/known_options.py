"""Request options that SGLang does not read: known names by endpoint, and one line for each odd one.

The names are the fields of ``ChatCompletionRequest`` and ``CompletionRequest``
(``sglang/srt/entrypoints/openai/protocol.py``), of ``GenerateReqInput`` (``managers/io_struct.py``), and of
``SamplingParams`` (``sampling/sampling_params.py``) in SGLang 0.5.11, 0.5.17 and 0.5.23, all taken together.
What a server does not know it ignores without a word; in ``sampling_params`` alone it refuses it (with 500 in
0.5.11 and 0.5.17, with 400 from 0.5.22 on).
"""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from genpipe.core.values import ApiName

PATHS: Mapping[ApiName, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "generate": "/generate",
}
"""The endpoint of each way of asking."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OPENAI = _names(
    """
    bootstrap_host bootstrap_port bootstrap_room cache_salt custom_logit_processor custom_params
    data_parallel_rank disagg_prefill_dp_rank ebnf extra_key frequency_penalty ignore_eos images_config
    logit_bias logprobs lora_path max_tokens min_p min_tokens mm_processor_kwargs n no_stop_trim
    presence_penalty priority regex repetition_penalty response_format return_cached_tokens_details
    return_hidden_states return_routed_experts return_spec_tokens_details return_token_ids routed_dp_rank
    routed_experts_start_len seed session_id session_params skip_special_tokens stop stop_regex
    stop_token_ids stream_options temperature top_k top_p user watermark
    """
)
_CHAT = _names(
    """
    chat_template_kwargs continue_final_message max_completion_tokens max_dynamic_patch min_dynamic_patch
    parallel_tool_calls reasoning reasoning_effort return_flat_raw_output_top_logprobs
    return_flat_raw_top_logprobs_b64 return_input_ids_in_sglext return_meta_info
    return_output_ids_in_sglext return_prompt_token_ids return_sampling_mask sampling_logprobs_mode
    separate_reasoning stream_reasoning task thinking tool_choice tools top_logprobs use_audio_in_video
    video_config
    """
)
_COMPLETIONS = _names("best_of custom_labels echo json_schema suffix")
_GENERATE = _names(
    """
    audio_data background bootstrap_host bootstrap_pair_key bootstrap_port bootstrap_room cache_salt
    conversation_id custom_labels custom_logit_processor data_parallel_rank decode_tp_size
    disagg_prefill_dp_rank encoder_urls external_trace_header extra_key http_worker_ipc image_data
    image_max_dynamic_patch images_config input_embeds kv_hints log_metrics logprob_start_len lora_id
    lora_path max_dynamic_patch max_thinking_tokens min_dynamic_patch mm_content_hashes mm_data_mooncake
    mm_hashes mm_processor_kwargs modalities multi_item_delimiter_indices need_wait_for_mm_inputs no_logs
    num_items_assigned positional_embed_overrides priority received_time require_reasoning return_bytes
    return_entropy return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs
    return_flat_raw_top_logprobs_b64 return_hidden_states return_indexer_topk return_logprob
    return_prompt_token_ids return_routed_experts return_sampling_mask return_text_in_logprobs
    routed_dp_rank routed_experts_start_len routing_key sampling_logprobs_mode session_id session_params
    token_ids_logprob token_indices_to_pool top_logprobs_num use_audio_in_video video_config video_data
    video_max_dynamic_patch watermark
    """
)
_SAMPLING = _names(
    """
    beam_width custom_params ebnf frequency_penalty ignore_eos json_schema logit_bias max_new_tokens
    min_new_tokens min_p n no_stop_trim presence_penalty regex repetition_penalty sampling_seed
    skip_special_tokens spaces_between_special_tokens stop stop_regex stop_token_ids stream_interval
    structural_tag temperature top_k top_p watermark
    """
)

_KNOWN: Mapping[ApiName, frozenset[str]] = {
    "chat": _OPENAI | _CHAT,
    "completions": _OPENAI | _COMPLETIONS,
    "generate": _GENERATE,
}
_NEVER_READ: Mapping[ApiName, frozenset[str]] = {
    "chat": frozenset(),
    "completions": frozenset({"best_of", "suffix"}),
    "generate": frozenset(),
}
"""Fields that are taken and that no code of the endpoint looks at."""

_FIRST_READ: Mapping[ApiName, Mapping[str, tuple[int, int, int]]] = {
    "chat": {
        "return_meta_info": (0, 5, 13),
        "return_prompt_token_ids": (0, 5, 13),
        "return_token_ids": (0, 5, 17),
        "return_output_ids_in_sglext": (0, 5, 20),
    },
    "completions": {"return_token_ids": (0, 5, 17)},
    "generate": {"return_prompt_token_ids": (0, 5, 17)},
}
"""Options that older servers ignore, and the first version that reads them."""

OTHER_NAMES: Mapping[str, str] = {
    "max_completion_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
"""What ``/generate`` calls the sampling parameters that it has under other names than OpenAI's API."""


class Option(NamedTuple):
    """One option of a run or of a record.

    Attributes:
        place: how to name it to its user, such as ``request.sampling.top_k``.
        name: its name.
        is_sampling: it is one of the sampling parameters.
    """

    place: str
    name: str
    is_sampling: bool


def options_of(sampling: Collection[str], extra_body: Collection[str]) -> list[Option]:
    """The options of a whole run."""
    return [
        *(Option(f"request.sampling.{name}", name, is_sampling=True) for name in sampling),
        *(Option(f"request.extra_body.{name}", name, is_sampling=False) for name in extra_body),
    ]


def refused_sampling(name: str) -> str | None:
    """Why ``/generate`` refuses requests with this sampling parameter, and the nearest that it has.

    None: it is not known to.
    """
    if name in _SAMPLING:
        return None
    if name in OTHER_NAMES:
        return f"SGLang's {PATHS['generate']} calls it {OTHER_NAMES[name]}; name it so"
    return (
        f"SGLang's {PATHS['generate']} is not known to have this sampling parameter, and refuses those that "
        f"it does not know{_nearest(name, _SAMPLING)}"
    )


def ignored(api: ApiName, option: Option) -> str | None:
    """Why an option does not do what its user thinks, in one line; None where nothing is known against it."""
    place, name, is_sampling = option
    path = PATHS[api]
    if api == "generate" and is_sampling:
        why = refused_sampling(name)
        return why and (
            f"{place}: {why}; every server will answer each request with an error, 500 before 0.5.22, and be "
            "put on the bench"
        )
    if name in _NEVER_READ[api]:
        return f"{place}: SGLang's {path} takes it and never reads it"
    if name in _KNOWN[api]:
        return None
    if api == "generate" and name in _SAMPLING | OTHER_NAMES.keys():
        return f"{place}: SGLang's {path} looks for {OTHER_NAMES.get(name, name)} in request.sampling alone"
    if name in _CHAT:
        return f"{place}: is for request.api = chat, and SGLang's {path} ignores it"
    return (
        f"{place}: SGLang's {path} is not known to read it, and ignores what it does not know"
        f"{_nearest(name, _KNOWN[api])}"
    )


def too_new(api: ApiName, options: Collection[Option], versions: Mapping[str, str]) -> Iterator[str]:
    """Lines on options that some servers are too old for.

    Args:
        api: how they are asked.
        options: of the run.
        versions: SGLang's, by address, as far as they are known.
    """
    for place, name, _ in options:
        first = _FIRST_READ[api].get(name)
        old = [url for url, said in versions.items() if first and (_version(said) or first) < first]
        if first and old:
            more = f" and {len(old) - 1} more" if len(old) > 1 else ""
            yield (
                f"{place}: SGLang reads it from {'.'.join(map(str, first))} on; {old[0]} "
                f"({versions[old[0]]}){more} will ignore it"
            )


def depends_on_version(api: ApiName, names: Collection[str]) -> bool:
    """Whether it is worth asking servers for their version."""
    return not _FIRST_READ[api].keys().isdisjoint(names)


def _version(text: str) -> tuple[int, ...] | None:
    numbers = re.match(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})", text)
    return tuple(map(int, numbers.groups())) if numbers else None


def _nearest(name: str, known: Collection[str]) -> str:
    near = (
        [OTHER_NAMES[name]] if OTHER_NAMES.get(name) in known else difflib.get_close_matches(name, known, 1)
    )
    return f"; did you mean {near[0]}?" if near else ""
