"""Options that SGLang does not read are named before anything is sent, with the nearest that it does."""

import pytest

from genpipe.edges.known_options import (
    _FIRST_READ,
    _KNOWN,
    _NEVER_READ,
    OTHER_NAMES,
    Option,
    depends_on_version,
    ignored,
    options_of,
    too_new,
)


def of(name, section="sampling"):
    sampling, extra = ([name], []) if section == "sampling" else ([], [name])
    return options_of(sampling, extra)[0]


@pytest.mark.parametrize(
    ("api", "option", "words"),
    [
        ("chat", of("max_token"), "request.sampling.max_token: SGLang's /v1/chat/completions is not known"),
        ("chat", of("max_token"), "did you mean max_tokens?"),
        ("chat", of("temprature", "extra_body"), "request.extra_body.temprature: "),
        ("chat", of("max_new_tokens"), "did you mean max_tokens?"),
        ("chat", of("echo"), "ignores what it does not know"),
        ("completions", of("best_of"), "takes it and never reads it"),
        ("completions", of("chat_template_kwargs", "extra_body"), "is for request.api = chat"),
        ("completions", of("tools", "extra_body"), "/v1/completions ignores it"),
        ("generate", of("reasoning_effort", "extra_body"), "is for request.api = chat"),
        ("generate", of("top_kk"), "refuses those that it does not know; did you mean top_k?"),
        ("generate", of("top_kk"), "every server will answer each request with an error, 500 before 0.5.22"),
        ("generate", of("logprobs", "extra_body"), "did you mean"),
        ("generate", of("temperature", "extra_body"), "looks for temperature in request.sampling alone"),
        ("generate", of("max_tokens", "extra_body"), "looks for max_new_tokens in request.sampling alone"),
        ("chat", of("zzzzqqq"), "ignores what it does not know"),
    ],
)
def test_what_is_not_read_is_named_in_one_line(api, option, words):
    text = ignored(api, option)

    assert text is not None
    assert words in text
    assert "\n" not in text
    assert "did you mean" not in (ignored(api, of("zzzzqqq")) or "")


@pytest.mark.parametrize(
    ("api", "names"),
    [
        (
            "chat",
            # What SGLang 0.5.11 has beside OpenAI's own.
            (
                "top_k min_p min_tokens repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos "
                "skip_special_tokens regex ebnf logit_bias seed continue_final_message separate_reasoning "
                "stream_reasoning chat_template_kwargs reasoning_effort priority extra_key cache_salt "
                "routed_dp_rank return_hidden_states return_routed_experts return_cached_tokens_details "
                "custom_logit_processor custom_params lora_path session_params temperature top_p max_tokens "
                "max_completion_tokens n stop presence_penalty frequency_penalty logprobs top_logprobs "
                "response_format tools tool_choice parallel_tool_calls user return_token_ids return_meta_info"
            ),
        ),
        ("completions", "max_tokens echo logprobs n json_schema seed return_token_ids"),
        ("generate", "return_logprob logprob_start_len top_logprobs_num lora_path priority"),
    ],
)
def test_what_is_read_is_not_warned_of(api, names):
    assert [ignored(api, of(name, "extra_body")) for name in names.split()] == [None] * len(names.split())


def test_sampling_of_generate_goes_by_its_own_names():
    names = "max_new_tokens min_new_tokens temperature top_p top_k stop n sampling_seed json_schema regex"
    assert [ignored("generate", of(name)) for name in names.split()] == [None] * 10
    for other, name in OTHER_NAMES.items():
        assert f"calls it {name}; name it so" in (ignored("generate", of(other)) or "")


def test_older_servers_are_named_with_their_versions():
    options = [Option("request.token_ids", "return_token_ids", is_sampling=False), of("temperature")]
    versions = {"http://a": "0.5.17", "http://b": "0.5.9.post1", "http://c": "0.5.11", "http://d": "dev"}

    assert list(too_new("chat", options, versions)) == [
        "request.token_ids: SGLang reads it from 0.5.17 on; http://b (0.5.9.post1) and 1 more will ignore it"
    ]
    assert list(too_new("chat", options, {"http://a": "0.5.100", "http://d": "main"})) == []
    assert list(too_new("chat", [of("temperature")], versions)) == []


def test_versions_are_asked_for_only_where_they_tell_something():
    assert depends_on_version("chat", ["temperature", "return_token_ids"])
    assert depends_on_version("generate", ["return_prompt_token_ids"])
    assert not depends_on_version("chat", ["temperature", "max_token"])


def test_the_tables_speak_of_names_that_are_known():
    for api, known in _KNOWN.items():
        assert _NEVER_READ[api] <= known
        assert set(_FIRST_READ[api]) <= known
