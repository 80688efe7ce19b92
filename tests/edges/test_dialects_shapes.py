"""The shapes of records beside plain prompts and conversations, and the APIs that take them."""

import json

import pytest

from genpipe.core.errors import ConfigError
from genpipe.edges.prompts.dialects import Dialect, RecordError

DEEP = b"[" * 3_000 + b"1.50" + b"]" * 3_000
CHAT_ONLY = [{"role": "user", "content": "Which?"}]


def prompt(record, **options):
    line = record if isinstance(record, bytes) else json.dumps(record).encode()
    return Dialect(**options).prompt(7, line)


def text(record, **options):
    """The one user text that a record becomes in a chat."""
    (message,) = json.loads(prompt(record, **options).payload)
    assert message["role"] == "user"
    return message["content"]


def refused(record, **options):
    with pytest.raises(RecordError) as caught:
        prompt(record, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value), caught.value.remedy


def shape(record, **options):
    return Dialect(**options).convert(0, json.dumps(record).encode())[1:3]


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({"input": "Wien"}, "Name the river.\n\nWien"),
        ({"input": " two\nlines "}, "Name the river.\n\n two\nlines "),
        ({"input": ""}, "Name the river."),
        ({"input": " \n"}, "Name the river."),
        ({"input": None}, "Name the river."),
        ({}, "Name the river."),
    ],
)
def test_an_alpaca_record_is_its_instruction_and_below_it_its_input(more, wanted):
    record = {"instruction": "Name the river.", "output": "Danube", "text": "Below is …", **more}

    assert text(record) == wanted
    assert text(record, name="alpaca") == wanted
    assert prompt(record, api="completions").payload == json.dumps(wanted).encode()


def test_a_single_turn_is_a_prompt_and_several_need_to_be_asked_one_by_one():
    assert text({"turns": ["Which?"], "question_id": 81}) == "Which?"

    reason, remedy = refused({"turns": ["Which?", "And why?"], "question_id": 81})
    assert "'turns' is a list of 2 turns" in reason
    assert "request.multi_turn=true" in reason
    assert remedy == "request.multi_turn=true"


def test_turns_may_be_messages_too():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]

    assert json.loads(prompt({"turns": messages}).payload) == messages
    assert shape({"turns": messages}) == ("messages", False)


def test_what_only_shares_a_name_with_a_shape_is_passed_over():
    """In ``auto``, a count of turns is no turn; where a dialect is set, it is what the field has to hold."""
    record = {"turns": 2, "instruction": {"a": 1}, "question": ["x"], "prompt": "Which?"}

    assert text(record) == "Which?"
    assert refused(record, name="turns")[0] == "'turns' is a number"
    assert refused(record, name="alpaca")[0] == "'instruction' is an object"
    assert "list of texts" in refused(record, name="question")[0]


def test_a_text_is_asked_in_a_chat_only_on_demand():
    record = {"text": "Once upon a time", "id": 1}

    assert refused(record)[1] == "input.dialect=text"
    assert text(record, name="text") == "Once upon a time"
    assert text(record, field="text") == "Once upon a time"


def test_a_field_of_another_name_is_asked_for():
    reason, remedy = refused({"query": "Which?"})

    assert "it has 'query'" in reason
    assert remedy == "input.field=NAME"
    assert text({"query": "Which?"}, field="query") == "Which?"
    assert refused({"input_ids": [1, 2]})[1] == "request.api=generate"


# ---- completions and generate ----


@pytest.mark.parametrize(("api", "member"), [("completions", "prompt"), ("generate", "text")])
@pytest.mark.parametrize(
    ("record", "options"),
    [
        ({"prompt": "Once é"}, {}),
        ({"question": "Once é"}, {}),
        ({"text": "Once é"}, {}),
        ({"instruction": "Once é"}, {}),
        ({"turns": ["Once é"]}, {}),
        ({"x": "Once é", "prompt": "other"}, {"field": "x"}),
        ({"text": "Once é", "prompt": "other"}, {"name": "text"}),
        ({"prompt": "Once é", "messages": CHAT_ONLY}, {}),
    ],
)
def test_a_text_goes_out_as_it_is(api, member, record, options):
    made = prompt(record, api=api, **options)

    assert (made.member, made.payload) == (member, '"Once é"'.encode())


@pytest.mark.parametrize("api", ["completions", "generate"])
@pytest.mark.parametrize(
    ("record", "options"),
    [
        ({"messages": CHAT_ONLY}, {}),
        ({"conversations": [{"from": "human", "value": "a"}]}, {}),
        ({"prompt": CHAT_ONLY}, {}),
        ({"turns": ["a", "b"]}, {}),
        ({"x": CHAT_ONLY}, {"field": "x"}),
    ],
)
def test_a_conversation_is_no_text(api, record, options):
    reason, remedy = refused(record, api=api, **options)

    assert f"request.api = {api} needs a text" in reason
    assert remedy == "request.api=chat"


def test_token_ids_go_out_as_they_are():
    record = {"input_ids": [0, 151_644, 2**64 - 1]}

    for options in ({}, {"name": "input_ids"}, {"field": "input_ids"}):
        made = prompt(record, api="generate", **options)
        assert (made.member, made.payload) == ("input_ids", b"[0,151644,18446744073709551615]")
    assert prompt({**record, "text": "t"}, api="generate").member == "text"
    assert prompt({**record, "text": "t"}, api="generate", name="input_ids").member == "input_ids"
    assert shape(record, api="generate") == ("input_ids", False)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([], "'input_ids' is an empty list"),
        ([1, -1], "'input_ids' holds -1"),
        ([1, True], "input_ids[1] is a boolean, not a token id"),
        ([1, 2.0], "input_ids[1] is not a whole number"),
        ([[1, 2]], "input_ids[0] is a list"),
        (["1"], "input_ids[0] is a string"),
        ([None], "input_ids[0] is null"),
        ({"a": 1}, "'input_ids' is an object"),
    ],
)
def test_what_are_no_token_ids_is_refused(ids, reason):
    assert reason in refused({"input_ids": ids}, api="generate", name="input_ids")[0]


def test_token_ids_are_no_text_for_completions():
    assert refused({"x": [1, 2]}, api="completions", field="x")[1] == "request.api=generate"
    assert refused({"x": [1, 2]}, field="x")[1] == "request.api=generate"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"api": "completions", "system": "Be brief."}, "input.system is for request.api = chat"),
        ({"api": "generate", "system": "Be brief."}, "input.system is for request.api = chat"),
        ({"api": "generate", "multi_turn": True}, "request.multi_turn is for request.api = chat"),
        ({"api": "completions", "name": "messages"}, "input.dialect = messages is for request.api = chat"),
        ({"api": "completions", "name": "sharegpt"}, "input.dialect = sharegpt is for request.api = chat"),
        (
            {"api": "completions", "name": "input_ids"},
            "input.dialect = input_ids is for request.api = generate",
        ),
        ({"name": "input_ids"}, "input.dialect = input_ids is for request.api = generate"),
        ({"name": "alpaca", "field": "q"}, "input.field is not for input.dialect = alpaca"),
        ({"sampling_field": "id"}, "'id', which is input.id_field"),
        ({"sampling_field": "prompt"}, "'prompt', which holds the prompt"),
        ({"sampling_field": "input"}, "'input', which holds the prompt"),
        ({"field": "q", "sampling_field": "q"}, "'q', which holds the prompt"),
        ({"body_fields": ("messages",)}, "'messages', which genpipe sets itself"),
        ({"body_fields": ("rid",)}, "'rid', which genpipe sets itself"),
        ({"body_fields": ("id",)}, "'id', which is input.id_field"),
        ({"body_fields": ("question",)}, "'question', which holds the prompt"),
        ({"body_fields": ("tools", "tools")}, "'tools', which it has named before"),
        ({"body_fields": ("s",), "sampling_field": "s"}, "'s', which is input.sampling_field"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(options, reason):
    with pytest.raises(ConfigError) as caught:
        Dialect(**options)

    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_field_that_holds_no_prompt_in_this_dialect_is_free():
    assert Dialect(field="q", body_fields=("question", "input"), sampling_field="prompt").field == "q"


# ---- how records look ----


@pytest.mark.parametrize(
    ("record", "options", "wanted"),
    [
        ({"prompt": "a"}, {}, ("prompt", False)),
        ({"question": "a"}, {}, ("question", False)),
        ({"text": "a"}, {"name": "text"}, ("text", False)),
        ({"q": "a"}, {"field": "q"}, ("prompt", False)),
        ({"instruction": "a"}, {}, ("alpaca", False)),
        ({"turns": ["a"]}, {}, ("turns", False)),
        ({"messages": CHAT_ONLY}, {}, ("messages", False)),
        ({"messages": CHAT_ONLY * 2}, {}, ("messages", True)),
        ({"prompt": CHAT_ONLY}, {}, ("messages", False)),
        ({"messages": [{"from": "human", "value": "a"}]}, {}, ("sharegpt", False)),
        ({"conversations": [{"from": "human", "value": "a"}] * 2}, {}, ("sharegpt", True)),
        ({"conversation": CHAT_ONLY}, {}, ("sharegpt", False)),
    ],
)
def test_a_record_says_which_shape_it_has_and_whether_the_user_speaks_more_than_once(record, options, wanted):
    assert shape(record, **options) == wanted


# ---- depth ----


@pytest.mark.parametrize(
    "line",
    [
        b'{"id": "deep", "prompt": "Which?", "meta": %s}',
        b'{"meta": %s, "prompt": "Which?", "id": %s}',
        b'{"x": {"y": [%s]}, "prompt": "Which?", "meta": 0.5}',
    ],
)
def test_a_record_as_deep_as_three_thousand_lists_is_asked_and_kept(line):
    line = line.replace(b"%s", DEEP)

    made = prompt(line, keep=("meta",))

    assert made.payload == b'[{"role":"user","content":"Which?"}]'
    assert made.keep_json in (b'"meta":' + DEEP, b'"meta":0.5')
    assert made.id_json in (b'"deep"', DEEP, b"")


def test_a_deep_answer_of_a_tool_is_sent_as_given():
    line = b'{"messages":[{"role":"user","content":"Which?"},{"role":"tool","content":"x","more":%s}]}' % DEEP

    assert prompt(line).payload == line[len(b'{"messages":') : -1]
