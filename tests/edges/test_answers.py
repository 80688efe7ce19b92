"""What is made of a 200 of each endpoint; the replies of real servers are in ``recordings/replies.json``."""

import json
from pathlib import Path

import pytest

from genpipe.core.errors import FaultKind, ServerFault
from genpipe.core.values import Prompt, Reply
from genpipe.edges.answers import examine

REPLIES = json.loads((Path(__file__).parents[1] / "recordings" / "replies.json").read_text("utf-8"))
RID = "0123456789abcdef" + "0" * 16
TEXT = Prompt(index=0, payload=b'"hi"', member="text")
GENERATED = {"text": "x", "output_ids": [5, 6], "meta_info": {"id": RID, "completion_tokens": 2}}


def reply_of(data, rid=None):
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    return Reply(body=body, wire_s=3.0, last_s=4.0, rid=rid)


def recorded(name):
    """How it was asked, and the reply."""
    return next((case["api"], json.loads(case["reply"])) for case in REPLIES if case["name"] == name)


def taken(name, **options):
    api, data = recorded(name)
    return examine(reply_of(data), api=api, **options)


def chat(*choices, **members):
    return {"choices": list(choices), **members}


def choice(text="x", **members):
    return {"message": {"content": text}, "finish_reason": "stop", **members}


def said(data, **options):
    with pytest.raises(ServerFault) as caught:
        examine(data if isinstance(data, Reply) else reply_of(data), **options)
    assert (caught.value.kind, caught.value.status, caught.value.wire_s) == (FaultKind.BROKEN, 200, 3.0)
    return str(caught.value)


# ---- replies of real servers ----


@pytest.mark.parametrize("case", REPLIES, ids=lambda case: case["name"])
def test_every_recorded_reply_is_an_answer_with_its_text_and_count_or_an_abort(case):
    data = json.loads(case["reply"])
    if "abort" in case["name"]:
        assert "finish_reason abort" in said(data, api=case["api"])
        return
    asked = case["request"].get("sampling_params", case["request"]).get("n", 1)
    answer = examine(reply_of(case["reply"].encode()), api=case["api"], samples=asked)
    made = data if isinstance(data, list) else data.get("choices", [data])
    parts = answer.response if isinstance(answer.response, list) else [answer.response]

    assert len(parts) == len(made) >= asked
    for part, one in zip(parts, made, strict=True):
        assert list(part) == ["content", "reasoning_content", "tool_calls"]
        assert part["content"] == one.get("text", one.get("message", {}).get("content"))
    assert answer.finish_reason in ("stop", "length", "tool_calls")
    assert answer.usage is not None
    assert answer.output_tokens == answer.usage["completion_tokens"] > 0
    assert answer.token_ids is None


def test_several_samples_of_generate_are_counted_together_and_their_prompt_once():
    usage = {"prompt_tokens": 3, "completion_tokens": 8, "reasoning_tokens": 0, "cached_tokens": 4}
    assert taken("generate_n2 0.5.17").usage == usage
    assert taken("generate_n2 0.5.17").output_tokens == 8


def test_thinking_and_calls_are_kept_whole():
    thought = taken("chat_completion_0.5.11_length_in_think")
    called = taken("chat_completion_0.5.11_tools")

    assert thought.response["reasoning_content"] == "Let me work it out ..."
    assert (thought.flags[:2], thought.usage["reasoning_tokens"]) == (("empty", "cut"), 2048)
    assert called.response["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'
    assert (called.flags, called.finish_reason) == ((), "tool_calls")


def test_vllm_s_name_for_thinking_is_known():
    answer = examine(reply_of(chat({"message": {"content": "4", "reasoning": "2 + 2"}})))

    assert answer.response == {"content": "4", "reasoning_content": "2 + 2", "tool_calls": None}


# ---- token ids ----


@pytest.mark.parametrize(
    ("data", "prompt", "output"),
    [
        (chat(choice(response_token_ids=[7, 8], prompt_token_ids=[1])), [1], [7, 8]),
        (chat(choice(token_ids=[7, 8], prompt_token_ids=[1])), [1], [7, 8]),
        (chat(choice(token_ids=[7, 8]), prompt_token_ids=[1]), [1], [7, 8]),
        (chat(choice(), sglext={"output_ids": [[7, 8]], "input_ids": [1]}), [1], [7, 8]),
        (chat(choice(), sglext={"output_ids": [[7, 8]]}), None, [7, 8]),
        (chat(choice(response_token_ids=[], prompt_token_ids=[1])), [1], []),
        (
            chat(choice(index=1, token_ids=[9]), choice(index=0, token_ids=[7], prompt_token_ids=[1])),
            [1],
            [[7], [9]],
        ),
    ],
)
def test_ids_are_taken_wherever_a_server_puts_them(data, prompt, output):
    answer = examine(reply_of(data), ids_of=TEXT)

    assert answer.token_ids == {"prompt": prompt, "output": output}
    assert examine(reply_of(data)).token_ids is None


def test_ids_of_the_newest_recorded_shape():
    answer = taken("chat_completion_0.5.23_meta_info", ids_of=TEXT)

    assert answer.token_ids == {
        "prompt": [248045, 846, 198],
        "output": [785, 4226, 374, 220, 19, 17, 13, 248046],
    }


def test_generate_has_ids_in_every_reply_and_those_of_a_prompt_are_what_was_sent():
    ids = Prompt(index=0, payload=b"[1,2,3,4]", member="input_ids")

    assert taken("generate_input_ids 0.5.17", ids_of=ids).token_ids == {
        "prompt": [1, 2, 3, 4],
        "output": [6436, 3023, 239, 6139],
    }
    assert taken("generate 0.5.17", ids_of=TEXT).token_ids["prompt"] is None
    assert [len(ids) for ids in taken("generate_n2 0.5.11", ids_of=TEXT).token_ids["output"]] == [4, 4]
    with_prompt = reply_of({**GENERATED, "prompt_token_ids": [9]})
    assert examine(with_prompt, api="generate", ids_of=TEXT).token_ids == {"prompt": [9], "output": [5, 6]}


@pytest.mark.parametrize(
    "data",
    [
        chat(choice()),
        chat(choice(token_ids=None), prompt_token_ids=[1]),
        chat(choice(token_ids="1 2")),
        chat(choice(token_ids=[1, "2"])),
        chat(choice(token_ids=[[1]])),
        chat(choice(token_ids=[True])),
        chat(choice(token_ids=[1]), choice()),
        chat(choice(), choice(), sglext={"output_ids": [[7]]}),
        chat(choice(), sglext={"output_ids": 3}),
        chat(choice(), sglext=[]),
    ],
)
def test_what_are_no_ids_of_all_answers_are_none(data):
    assert examine(reply_of(data), ids_of=TEXT).token_ids is None


def test_prompt_ids_that_are_none_do_not_cost_those_of_the_answer():
    answer = examine(reply_of(chat(choice(token_ids=[1], prompt_token_ids=["a"]))), ids_of=TEXT)

    assert answer.token_ids == {"prompt": None, "output": [1]}


# ---- how many, whose, and in which order ----


def test_choices_stand_in_the_order_of_their_numbers():
    numbered = chat(choice("c", index=2), choice("a", index=0), choice("b", index=1))
    odd = chat(choice("c", index=2), choice("a"), choice("b", index=1))

    assert [part["content"] for part in examine(reply_of(numbered)).response] == ["a", "b", "c"]
    assert [part["content"] for part in examine(reply_of(odd)).response] == ["c", "a", "b"]


def test_fewer_samples_than_n_are_no_answer_and_more_are():
    assert said(chat(choice()), samples=2) == "200 with 1 of the 2 answers that n asks for"
    assert said(GENERATED, api="generate", samples=3).startswith("200 with 1 of the 3")
    assert len(examine(reply_of(chat(choice(), choice())), samples=1).response) == 2


@pytest.mark.parametrize("given", [RID, RID + "_0", RID + "_9f0e", "another server's", "", None, 7])
@pytest.mark.parametrize("api", ["chat", "generate"])
def test_ids_of_samples_begin_with_that_of_their_request(api, given):
    data = chat(choice(), id=given) if api == "chat" else {**GENERATED, "meta_info": {"id": given}}

    assert examine(reply_of(data, RID), api=api).rid == RID


@pytest.mark.parametrize("api", ["chat", "generate"])
def test_the_reply_to_another_of_our_own_requests_is_none(api):
    other = RID[:16] + "f" * 16
    data = (
        chat(choice(), id=other) if api == "chat" else [GENERATED, {**GENERATED, "meta_info": {"id": other}}]
    )

    assert said(reply_of(data, RID), api=api) == "200 with the reply to another request"


# ---- what is none ----


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "200 without an answer"),
        ([[]], "no object"),
        ("x", "no object"),
        ({}, "without text or meta_info"),
        ({"text": "x"}, "without text or meta_info"),
        ({"meta_info": {}}, "without text or meta_info"),
        ({"text": 1, "meta_info": {}}, "without text or meta_info"),
        ({"text": "x", "meta_info": []}, "without text or meta_info"),
        ({"error": {"message": "too long"}}, "200 with an error: too long"),
        ([GENERATED, {"error": "no"}], "200 with an error: no"),
        (
            {**GENERATED, "meta_info": {"finish_reason": {"type": "abort", "message": "Aborted by\nyou"}}},
            "200 with finish_reason abort: Aborted by you",
        ),
    ],
)
def test_what_is_no_answer_of_generate(data, words):
    assert words in said(data, api="generate")


@pytest.mark.parametrize("text", [None, 7, ["x"]])
def test_a_completion_needs_a_text(text):
    assert "without a text" in said(chat({"text": text}), api="completions")


def test_a_server_without_a_tokenizer_gives_ids_alone():
    data = {"output_ids": [5, 6], "meta_info": {"completion_tokens": 2, "finish_reason": {"type": "stop"}}}
    answer = examine(reply_of(data), api="generate", ids_of=TEXT)

    assert answer.response["content"] is None
    assert answer.token_ids == {"prompt": None, "output": [5, 6]}


def test_counts_of_generate_that_are_none_are_unknown():
    meta = {"prompt_tokens": True, "completion_tokens": -1, "cached_tokens": "4"}

    assert examine(reply_of({"text": "x", "meta_info": meta}), api="generate").usage is None


# ---- what is nested deeply ----

DEEP = b"[" * 3000 + b"]" * 3000


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices":[{"message":{"content":"x"},"logprobs":%s}]}' % DEEP,
        b'{"choices":[{"message":{"content":"x"}}],"usage":{"completion_tokens":3,"more":%s}}' % DEEP,
        b'{"choices":[{"message":{"content":"x","tool_calls":[{"function":{"arguments":%s}}]}}]}' % DEEP,
    ],
)
def test_3000_levels_anywhere_cost_no_answer(body):
    answer = examine(reply_of(body))

    assert answer.response["content"] == "x"
    assert answer.size_bytes == len(body)


def test_a_reply_that_is_nothing_but_depth_is_no_answer():
    assert "JSON nested too deeply" in said(reply_of(b"[" * 1_000_000))
