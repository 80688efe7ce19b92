"""Input records to requests."""

import dataclasses
import json
from pathlib import Path

import pytest

from genpipe.core.errors import ConfigError
from genpipe.core.values import Answer, ApiName, Finished
from genpipe.edges.prompts.dialects import RESERVED, Dialect, RecordError
from genpipe.edges.record import Wall, encode_finished

INPUTS = Path(__file__).parents[1] / "cases" / "inputs"
QUESTION = {"role": "user", "content": "Which?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def sent(record, **options):
    """The messages that a record becomes."""
    line = record if isinstance(record, bytes) else json.dumps(record).encode()
    return json.loads(Dialect(**options).prompt(7, line).payload)


def refused(record, **options):
    """Why a record is refused."""
    line = record if isinstance(record, bytes) else json.dumps(record).encode()
    with pytest.raises(RecordError) as caught:
        Dialect(**options).prompt(7, line)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def turn(who, text):
    return {"from": who, "value": text}


def test_a_prompt_is_one_user_message():
    prompt = Dialect().prompt(7, b'{"prompt": "Which?", "id": "q1", "x": 1}')

    assert prompt.index == 7
    assert prompt.payload == b'[{"role":"user","content":"Which?"}]'
    assert prompt.id_json == b'"q1"'
    assert prompt.keep_json == b""


def test_messages_are_sent_as_given():
    """Unknown roles and keys, null beside tool calls, content parts, and the digits of numbers."""
    line = (
        b'{"messages":[{"role":"wizard","content":"w","weight":1.50},'
        b'{"role":"assistant","content":null,"tool_calls":[{"id":"c","n":12345678901234567890123}]},'
        b'{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"u"}}]}]}'
    )

    assert Dialect().prompt(0, line).payload == line[len(b'{"messages":') : -1]


def test_a_last_turn_of_the_model_is_kept_in_messages_and_left_out_of_sharegpt():
    answer = {"role": "assistant", "content": "This"}
    turns = [turn("human", "Which?"), turn("gpt", "This"), turn("gpt", "and that")]

    assert sent({"messages": [QUESTION, answer]}) == [QUESTION, answer]
    assert sent({"conversations": turns}) == [QUESTION]
    assert sent({"conversations": [QUESTION, answer]}) == [QUESTION]
    assert sent({"messages": turns}) == [QUESTION]


def test_sharegpt_turns_in_the_middle_are_all_sent():
    turns = [turn("system", "Be brief."), turn("Human", "a"), turn("gpt", ""), turn("observation", "42")]

    assert sent({"conversation": turns}) == [
        SYSTEM,
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "42"},
    ]


def test_what_a_record_offers_is_taken_in_a_fixed_order():
    other = [{"role": "user", "content": "other"}]
    record = {"prompt": "p", "conversations": other, "messages": [QUESTION], "question": "q"}
    by_order: dict[str, object] = {
        "messages": [QUESTION],
        "conversations": other,
        "conversation": [turn("human", "singular")],
        "turns": ["one turn"],
        "instruction": "do it",
        "prompt": "p",
        "question": "q",
    }
    texts = ["Which?", "other", "singular", "one turn", "do it", "p", "q"]

    assert sent(record) == [QUESTION]
    assert sent(record, field="question") == [{"role": "user", "content": "q"}]
    assert sent(record, name="prompt") == [{"role": "user", "content": "p"}]
    assert sent(record, name="sharegpt") == other
    assert sent({**record, "messages": None}) == other
    for key, text in zip(list(by_order), texts, strict=True):
        assert sent(dict(reversed(by_order.items()))) == [{"role": "user", "content": text}]
        by_order[key] = None  # as a column that a row has nothing in


def test_a_named_field_may_hold_a_text_or_messages():
    assert sent({"q": "Which?"}, field="q") == [QUESTION]
    assert sent({"q": [QUESTION]}, field="q") == [QUESTION]
    assert sent({"q": [turn("human", "Which?")]}, field="q") == [QUESTION]
    assert sent({"q": json.dumps([QUESTION])}, field="q", name="messages") == [QUESTION]
    assert sent({"q": ["Which?"]}, field="q") == [QUESTION]
    assert "list of 2 turns" in refused({"q": ["a", "b"]}, field="q")
    assert "q" in refused({"q": 7}, field="q")


def test_a_system_text_comes_first_unless_the_record_has_its_own():
    own = {"role": "system", "content": "Own."}
    developer = {"role": "developer", "content": "Own."}

    assert sent({"prompt": "Which?"}, system="Be brief.") == [SYSTEM, QUESTION]
    assert sent({"messages": [QUESTION]}, system="Be brief.") == [SYSTEM, QUESTION]
    assert sent({"conversations": [turn("human", "Which?")]}, system="Be brief.") == [SYSTEM, QUESTION]
    assert sent({"messages": [own, QUESTION]}, system="Be brief.") == [own, QUESTION]
    assert sent({"messages": [developer, QUESTION]}, system="Be brief.") == [developer, QUESTION]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "t", "id": 1}, "no 'messages', 'conversations', 'conversation', 'turns', 'instruction', "),
        ({"text": "t", "id": 1}, "'prompt' or 'question' in the record"),
        ({"text": "t", "id": 1}, "it has 'text', 'id'"),
        ({f"k{i}": 0 for i in range(20)}, "12 more"),
        ({"k\n" * 300: 0}, r"'k\nk\n"),
        ({}, "no keys"),
        ({"prompt": None}, "'prompt' is null"),
        ({"prompt": 7}, "'prompt' is a number"),
        ({"prompt": True}, "'prompt' is a boolean"),
        ({"prompt": ""}, "'prompt' is an empty string"),
        ({"prompt": ["a"]}, "list of texts"),
        ({"messages": []}, "'messages' is an empty list"),
        ({"messages": "hello"}, "'messages' is a string"),
        ({"messages": {"role": "user"}}, "'messages' is an object"),
        ({"messages": [QUESTION, 3]}, "messages[1] is a number"),
        ({"messages": [QUESTION, {"content": "x"}]}, "messages[1] has no string 'role'"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0] has content null"),
        ({"messages": [{"role": "user"}]}, "messages[0] has no content"),
        ({"messages": [{"role": "user", "content": {}}]}, "content is an object"),
        ({"conversations": [turn("narrator", "x")]}, "unknown speaker 'narrator'"),
        ({"conversations": [turn(None, "x")]}, "unknown speaker None"),
        ({"conversations": [turn("human", None)]}, "value is null"),
        ({"conversations": [turn("human", "")]}, "text is empty"),
        ({"conversations": [turn("system", "s"), turn("gpt", "x")]}, "nothing that asks"),
        ([1], "not a JSON object but a list"),
        (b"7", "not a JSON object but a number"),
        (b'{"prompt": "a', "not JSON"),
        (b'{"prompt": "p", "id": ' + b"[" * 10_001 + b"1.5" + b"]" * 10_001 + b"}", "nested too deeply"),
        ({"instruction": ""}, "'instruction' is an empty string"),
        ({"instruction": 7, "response": "r"}, "'instruction' is a number"),
        ({"instruction": "do", "input": 7}, "'input' is a number"),
        ({"turns": ["a", ""]}, "turns[1] is an empty string"),
        ({"turns": ["a", None]}, "turns[1] is null, not a text"),
        ({"turns": []}, "'turns' is an empty list"),
        ({"turns": 2}, "'turns' is a number"),
        ({"question": ""}, "'question' is an empty string"),
    ],
)
def test_a_refusal_says_what_is_wrong(record, reason):
    assert reason in refused(record)
    assert len(refused(record)) < 200


def test_fields_are_kept_as_members_digit_for_digit():
    dialect = Dialect(keep=("meta", "absent", "n", "meta", 'q"'))
    line = b'{"n": 1.50, "prompt": "p", "meta": {"x": [1e3, NaN]}, "q\\"": "\\ud800"}'

    kept = dialect.prompt(0, line).keep_json

    assert kept == b'"meta":{"x":[1e3,null]},"n":1.50,"q\\"":"\xef\xbf\xbd"'


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_key_of_our_own_records_cannot_be_kept(name):
    with pytest.raises(ConfigError, match=f"'{name}'"):
        Dialect(keep=("meta", name))


def test_every_key_of_a_record_is_one_that_cannot_be_kept():
    line = b'{"prompt": "p", "id": 1, "s": {"n": 2}, "b": 1}'
    prompt = Dialect(sampling_field="s", body_fields=("b",)).prompt(0, line)
    answer = Answer(
        response=[{"content": "a"}],
        finish_reason="stop",
        usage=None,
        output_tokens=7,
        model="m",
        size_bytes=9,
        rid="r",
        token_ids={"prompt": None, "output": [[1]]},
        steps=[{}],
    )
    finished = Finished(prompt=prompt, answer=answer, server="s", tries=1, started_s=0.0, latency_s=1.0)
    one = dataclasses.replace(finished, answer=dataclasses.replace(answer, response={"content": "a"}))

    written = [encode_finished(each, Wall(wall_s=1e9, run_s=0.0), "digest") for each in (finished, one)]

    keys = set().union(*map(json.loads, written))
    assert keys >= {"responses", "response", "steps", "sampling", "body", "token_ids", "rid", "settings"}
    assert keys <= RESERVED


def test_a_key_is_ours_only_where_the_records_of_that_api_have_it():
    members: tuple[tuple[ApiName, str], ...] = (
        ("completions", "prompt"),
        ("generate", "text"),
        ("generate", "input_ids"),
    )
    for api, name in members:
        assert Dialect(keep=(name,)).keep == (name,)
        with pytest.raises(ConfigError, match=f"'{name}'"):
            Dialect(keep=(name,), api=api)


def test_an_id_is_copied_with_its_type_and_digits():
    lines = (INPUTS / "prompts_dups.jsonl").read_bytes().split(b"\n")[5:-1]

    ids = [Dialect().prompt(0, line).id_json for line in lines]

    assert ids == [
        b"7",
        b'"7"',
        b"7.0",
        b"true",
        b"1",
        b"null",
        b'""',
        b'{"a":1}',
        b'"../../etc/x"',
        b"",
        b"",
    ]


def test_the_id_may_stand_in_another_field():
    line = b'{"prompt": "p", "id": 1, "key": 2}'

    assert Dialect(id_field="key").prompt(0, line).id_json == b"2"
    assert Dialect(id_field="other").prompt(0, line).id_json == b""


def test_extra_keys_of_a_sharegpt_turn_are_not_sent():
    record = {"conversations": [{**turn("human", "Which?"), "weight": 0}, turn("gpt", "x")]}

    assert sent(record) == [QUESTION]
