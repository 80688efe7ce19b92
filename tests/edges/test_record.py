"""What stands in the lines of the journal and of failed.jsonl."""

import json
from dataclasses import replace
from datetime import datetime

import pytest

from genpipe.edges import lines, strict_json
from genpipe.edges.record import Wall, encode_finished, encode_given_up, facts_of
from tests.edges.samples import WALL, answer, finished, given_up


def test_a_record_holds_its_members_in_the_order_of_the_format():
    line = encode_finished(finished(5, id_json=b"7.0", keep_json=b'"topic":"a","n":[1]'), WALL, "abcd")

    record = json.loads(line)
    assert list(record) == [
        *("index", "id", "messages", "response", "finish_reason", "usage", "flags", "model", "server"),
        *("attempts", "started_at", "latency_s", "topic", "n", "settings", "_c"),
    ]
    assert record["messages"] == [{"role": "user", "content": "prompt 5"}]
    assert record["response"]["content"] == "answer to 5"
    assert (record["attempts"], record["flags"], record["settings"]) == (1, [], "abcd")
    assert lines.index_of(line) == 5
    assert lines.decode(line) is not None


def test_what_is_not_there_is_left_out():
    record = json.loads(encode_finished(finished(5), WALL, None))

    assert not record.keys() & {"id", "settings", "responses", "output_tokens"}


def test_the_prompts_own_json_is_copied_byte_for_byte():
    prompt = {
        "id_json": b'{"n":1.50,"n2":123456789012345678901234567890}',
        "keep_json": b'"k":  "\xe2\x80\xa8"',
    }

    line = encode_finished(finished(5, **prompt), WALL, None)

    assert b'"id":' + prompt["id_json"] + b',"messages":[{"role"' in line
    assert b',"k":  "\xe2\x80\xa8","_c"' in line


def test_several_answers_are_a_list_under_responses():
    several = [{"content": "a", "tool_calls": None}, {"content": "b", "tool_calls": None}]

    record = json.loads(encode_finished(finished(5, answer(response=several)), WALL, None))

    assert record["responses"] == several
    assert "response" not in record


def test_times_are_utc_to_the_millisecond_from_one_anchor():
    record = json.loads(encode_finished(finished(5), Wall(wall_s=1_700_000_000.0, run_s=100.0), None))

    assert record["started_at"] == "2023-11-14T22:13:21.500Z"
    assert datetime.fromisoformat(record["started_at"]).timestamp() == 1_700_000_001.5
    assert record["latency_s"] == 2.001


@pytest.mark.parametrize(
    ("content", "usage", "seen"),
    [
        ("half an emoji \ud83d", {"completion_tokens": 7}, "half an emoji \ufffd"),
        ("big", {"completion_tokens": 7, "big": 1 << 70}, "big"),
        ("not a number", {"completion_tokens": 7, "x": float("nan")}, "not a number"),
        ("line ends \n \r \u2028 \u0085 \0", {"completion_tokens": 7}, "line ends \n \r \u2028 \u0085 \0"),
    ],
)
def test_odd_answers_become_strict_json_on_one_line(content, usage, seen):
    line = encode_finished(finished(5, answer(content, usage=usage)), WALL, None)

    assert line.count(b"\n") == 1
    record = json.loads(line.decode(), parse_constant=pytest.fail)
    assert record["response"]["content"] == seen
    assert record["usage"].get("big", 1 << 70) == 1 << 70


def test_a_raw_line_feed_in_a_prompt_is_a_bug_that_is_not_written():
    with pytest.raises(AssertionError, match="prompt 5"):
        encode_finished(finished(5, keep_json=b'"a":\n1'), WALL, None)


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (answer(), (7, ())),
        (answer(output_tokens=None), (None, ())),
        (answer(output_tokens=None, usage={"completion_tokens": 0}), (None, ())),
        (answer(output_tokens=9, usage={"completion_tokens": 4}), (9, ())),
        (answer(output_tokens=9, usage=None), (9, ())),
        (answer(output_tokens=0, usage={"completion_tokens": 0}), (0, ())),
        (answer("", finish_reason="length", flags=("empty", "cut")), (7, ("empty", "cut"))),
        (answer(usage={"completion_tokens": 7, "big": 1 << 70}), (7, ())),
    ],
)
def test_tokens_and_flags_are_read_back_as_they_were_counted(given, facts):
    body = lines.decode(encode_finished(finished(5, given), WALL, None))

    assert body is not None
    assert facts_of(body) == facts == (given.output_tokens, given.flags)


def test_a_half_surrogate_in_the_prompt_hides_no_facts():
    line = encode_finished(finished(5, keep_json=b'"k":"\\ud83d"'), WALL, None)

    assert facts_of(lines.body_of(line)) == (15, ())


def test_a_failure_is_one_line_with_a_short_message():
    line = encode_given_up(given_up(9, message="bad\nthing\r\n " + "x" * 2000))

    assert json.loads(line) | {"_c": ""} == {
        "index": 9,
        "attempts": 2,
        "error_class": "PromptFault",
        "message": "bad thing " + "x" * 490,
        "last_status": 400,
        "for_good": True,
        "_c": "",
    }
    assert lines.index_of(line) == 9


def test_a_record_names_its_payload_as_the_request_did():
    for member in ("messages", "prompt", "text", "input_ids"):
        record = json.loads(encode_finished(finished(5, member=member), WALL, None))

        assert list(record)[1] == member
        assert record[member] == [{"role": "user", "content": "prompt 5"}]


def test_all_that_a_record_can_have_stands_in_its_place():
    given = answer(
        output_tokens=7,
        usage=None,
        token_ids={"prompt": [1], "output": [2, 3]},
        flags=("cut",),
        steps=[{"response": {"content": "a"}}],
        rid="r",
    )
    own = {
        "sampling_json": b'"temperature":0.50,"seed":123456789012345678901234567890',
        "body_json": b'"tools":[{"n":1.10}]',
    }
    line = encode_finished(finished(5, given, id_json=b"1", keep_json=b'"k":1', **own), WALL, "abcd")

    record = json.loads(line)
    assert list(record) == [
        *("index", "id", "messages", "response", "finish_reason", "usage", "output_tokens", "token_ids"),
        *("flags", "steps", "sampling", "body", "model", "server", "attempts", "started_at", "latency_s"),
        *("rid", "k", "settings", "_c"),
    ]
    assert b',"sampling":{"temperature":0.50,"seed":123456789012345678901234567890},"body":{"tools"' in line
    assert b'"body":{"tools":[{"n":1.10}]},' in line
    assert record["token_ids"] == {"prompt": [1], "output": [2, 3]}
    assert record["steps"] == [{"response": {"content": "a"}}]
    assert facts_of(lines.body_of(line)) == (7, ("cut",))


def test_a_record_has_only_what_its_prompt_has_of_its_own():
    only_sampling = json.loads(encode_finished(finished(5, sampling_json=b'"n":1'), WALL, None))
    only_body = json.loads(encode_finished(finished(5, body_json=b'"n":1'), WALL, None))

    assert (only_sampling["sampling"], only_sampling.keys() & {"body"}) == ({"n": 1}, set())
    assert (only_body["body"], only_body.keys() & {"sampling"}) == ({"n": 1}, set())
    assert not json.loads(encode_finished(finished(5), WALL, None)).keys() & {
        *("sampling", "body", "token_ids", "steps"),
    }


def test_an_answer_that_is_nested_3000_deep_is_written_and_read_back():
    deep = strict_json.loads(b"[" * 3000 + b"]" * 3000)
    given = answer(response={"content": None, "reasoning_content": None, "tool_calls": deep})

    line = encode_finished(finished(5, given), WALL, None)

    assert b'"tool_calls":' + b"[" * 3000 + b"]" * 3000 in line
    assert facts_of(lines.body_of(line)) == (7, ())


def test_what_a_failed_conversation_made_is_kept_with_it():
    made = b'"messages":[{"role":"user","content":"a"}],"steps":[{"usage":{"completion_tokens":1.0}}]'

    line = encode_given_up(replace(given_up(9), made_json=made))

    record = json.loads(line)
    assert list(record)[-4:] == ["for_good", "messages", "steps", "_c"]
    assert made in line
    assert lines.decode(line) is not None
