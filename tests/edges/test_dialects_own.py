"""What a record brings along for its own request, and conversations that are asked turn by turn."""

import json

import orjson
import pytest

from genpipe.core.errors import ConfigError
from genpipe.core.values import OWN_BODY_KEYS
from genpipe.edges import strict_json
from genpipe.edges.prompts.dialects import Dialect, RecordError


def prompt(line, **options):
    line = line if isinstance(line, bytes) else json.dumps(line).encode()
    return Dialect(**options).prompt(7, line)


def refused(line, **options):
    with pytest.raises(RecordError) as caught:
        prompt(line, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- sampling ----


def test_sampling_parameters_are_copied_digit_for_digit():
    line = b'{"prompt": "p", "s": {"temperature": 0.70, "seed": 123456789012345678901, "stop": ["\\u00e9"]}}'

    made = prompt(line, sampling_field="s")

    assert made.sampling_json == '"temperature":0.70,"seed":123456789012345678901,"stop":["é"]'.encode()
    assert made.body_json == b""


@pytest.mark.parametrize(
    ("member", "made"),
    [
        (b"", b""),
        (b', "s": null', b""),
        (b', "s": {}', b""),
        # A table has all columns in all rows.
        (b', "s": {"top_p": null}', b""),
        (b', "s": {"top_p": null, "temperature": 1e0, "n": 2}', b'"temperature":1e0,"n":2'),
    ],
)
def test_what_a_record_does_not_say_is_left_to_the_run(member, made):
    assert prompt(b'{"prompt": "p"%s}' % member, sampling_field="s").sampling_json == made


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
@pytest.mark.parametrize(
    "members",
    [
        '"s": {"temperature": %s}',
        '"s": {"logit_bias": {"7": [%s]}}',
        '"s": %s',
        '"tools": %s',
        '"tools": [{"a": %s}]',
        '"s": {"temperature": %s, "temperature": 1}',
    ],
)
def test_a_number_that_is_none_is_never_sent_and_never_dropped(members, word):
    line = f'{{"prompt": "p NaN", {members % word}}}'.encode()

    reason = refused(line, sampling_field="s", body_fields=("tools",))

    assert word in reason
    assert reason.startswith(("'s' ", "'tools' "))


def test_the_word_nan_elsewhere_is_no_fault_of_the_sampling():
    line = b'{"prompt": "NaN", "score": NaN, "s": {"stop": "NaN"}, "tools": "NaN"}'

    made = prompt(line, sampling_field="s", body_fields=("tools",), keep=("score",))

    assert (made.sampling_json, made.body_json) == (b'"stop":"NaN"', b'"tools":"NaN"')
    assert made.keep_json == b'"score":null'


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"s": "hot"}, "'s' is a string, not an object"),
        ({"s": [1]}, "'s' is a list, not an object"),
        ({"s": 0}, "'s' is a number, not an object"),
        *(({"s": {name: 1}}, f"s.{name} is set by genpipe itself") for name in sorted(OWN_BODY_KEYS)),
        ({"s": {"seed": 1}, "seed": 2}, "'seed' stands in the record's sampling parameters as well"),
    ],
)
def test_sampling_that_cannot_be_sent_is_refused(record, reason):
    assert reason in refused({"prompt": "p", **record}, sampling_field="s", body_fields=("seed",))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("max_tokens", "s.max_tokens: SGLang's /generate calls it max_new_tokens; name it so"),
        ("seed", "s.seed: SGLang's /generate calls it sampling_seed; name it so"),
        ("temprature", "; did you mean temperature?"),
        ("zzzz", "s.zzzz: SGLang's /generate is not known to have this sampling parameter, and refuses"),
    ],
)
def test_sampling_that_generate_refuses_is_a_bad_record(name, words):
    record = {"prompt": "p", "s": {"top_k": 1, name: 1}}

    assert words in refused(record, sampling_field="s", api="generate")
    # What is not sent is not refused.
    assert prompt({"prompt": "p", "s": {name: None}}, sampling_field="s", api="generate").sampling_json == b""
    assert prompt(record, sampling_field="s").sampling_json == b'"top_k":1,"%s":1' % name.encode()


# ---- further members ----


def test_fields_for_the_body_are_copied_where_they_are_there():
    line = b'{"prompt": "p", "tools": [{"a": 1.50}], "seed": 0, "lora_path": null, "s": {"seed": null}}'
    fields = ("seed", "lora_path", "tools", "absent")

    assert prompt(line, body_fields=fields).body_json == b'"seed":0,"tools":[{"a":1.50}]'
    assert prompt(line, body_fields=fields, sampling_field="s").body_json == b'"seed":0,"tools":[{"a":1.50}]'
    assert prompt(line).body_json == b""


# ---- turn by turn ----


@pytest.fixture
def begun(monkeypatch):
    """What is handed over to be asked turn by turn, with something that keeps it in place of the real one."""
    calls = []

    def begin(messages):
        calls.append(messages)
        if not any(message["role"] == "user" for message in messages):
            raise ValueError("nothing is asked")
        return strict_json.dumps(messages[:1]), len(calls)

    monkeypatch.setattr("genpipe.edges.prompts.dialects.conversation.begin", begin)
    return calls


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        ({"prompt": "a"}, ["user a"]),
        ({"turns": ["a", "b"]}, ["user a", "user b"]),
        ({"turns": ["a"]}, ["user a"]),
        ({"instruction": "a", "input": "b"}, ["user a\n\nb"]),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]},
            ["user a", "assistant x"],
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x", "weight": 0}]},
            ["user a", "assistant x"],
        ),
    ],
)
def test_a_conversation_is_handed_over_whole(begun, record, wanted):
    made = prompt(record, multi_turn=True, system="s")

    assert [f"{message['role']} {message['content']}" for message in begun[0]] == ["system s", *wanted]
    assert all(set(message) == {"role", "content"} for message in begun[0])
    assert (made.payload, made.conversation) == (b'[{"role":"system","content":"s"}]', 1)
    assert made.member == "messages"


def test_a_conversation_with_a_system_message_of_its_own_keeps_it(begun):
    own = {"role": "developer", "content": "Own."}

    prompt({"messages": [own, {"role": "user", "content": "a"}]}, multi_turn=True, system="s")

    assert begun[0][0] == own


def test_numbers_within_messages_are_handed_over_with_their_digits(begun):
    line = b'{"messages": [{"role": "user", "content": "a", "n": [1.50, 123456789012345678901, 7]}]}'

    prompt(line, multi_turn=True)

    assert orjson.dumps(begun[0]) == b'[{"role":"user","content":"a","n":[1.50,123456789012345678901,7]}]'


def test_a_conversation_that_asks_nothing_is_a_bad_record(begun):
    line = {"conversations": [{"from": "system", "value": "s"}, {"from": "gpt", "value": "x"}]}

    assert refused(line, multi_turn=True) == "nothing is asked"


@pytest.mark.parametrize("field", ["s", "n"])
@pytest.mark.parametrize("count", [2, 0, True, "1"])
def test_several_answers_to_one_turn_are_refused(begun, field, count):
    value = {"n": count} if field == "s" else count
    options = {"sampling_field": "s", "body_fields": ("n",)}

    assert "'s.n'" in refused({"prompt": "p", field: value}, multi_turn=True, **options) or field == "n"
    assert "one answer at a time" in refused({"prompt": "p", field: value}, multi_turn=True, **options)
    assert prompt({"prompt": "p", field: value}, **options)
    assert prompt({"prompt": "p", "s": {"n": 1}}, multi_turn=True, **options).sampling_json == b'"n":1'


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "prompt"),
        ({}, "messages"),
        ({"field": "q"}, "q"),
        ({"name": "alpaca"}, "input"),
        ({"api": "generate"}, "text"),
    ],
)
def test_the_field_of_the_prompt_is_not_its_id_too(options, name):
    with pytest.raises(ConfigError, match=f"^input.id_field names '{name}', which holds the prompt$"):
        Dialect(id_field=name, **options)
    assert prompt({"prompt": "p", "text": 7}, id_field="text").id_json == b"7"
