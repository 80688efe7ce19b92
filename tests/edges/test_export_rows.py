"""Records as rows of the formats that trainers read."""

import json

import pytest

from genpipe.core.errors import ConfigError
from tests.edges.export_runs import asked, export, make_run, record, response, rows_of

CALLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "2 + 2?"}
THOUGHT = "Two and two\nare four."


def assistant(content="Four.", **more):
    return {"role": "assistant", "content": content, **more}


# The formats.


def test_openai_is_what_was_sent_and_what_was_answered_with_what_people_know_it_by(tmp_path):
    given = record(7, id_json='"q7"', kept='"answer":"4","label":0')

    assert rows_of(tmp_path, given, format="openai") == [
        {"id": "q7", "index": 7, "messages": [USER, assistant()], "answer": "4", "label": 0}
    ]


def test_sharegpt_has_nothing_but_an_id_and_turns(tmp_path):
    given = record(7, id_json='"q7"', kept='"answer":"4"')

    assert rows_of(tmp_path, given, format="sharegpt") == [{"id": "q7", "conversations": [USER, assistant()]}]


def test_prompt_keeps_question_and_answer_apart(tmp_path):
    assert rows_of(tmp_path, record(7), format="prompt") == [
        {"index": 7, "prompt": [USER], "completion": [assistant()]}
    ]


@pytest.mark.parametrize(
    ("member", "payload"), [("prompt", "2 + 2 ="), ("text", "2 + 2 ="), ("input_ids", [17, 0, 5])]
)
def test_texts_and_ids_are_prompts_as_they_were_sent(tmp_path, member, payload):
    given = asked(member, payload, 7)
    assert rows_of(tmp_path, given, format="prompt") == [
        {"index": 7, "prompt": payload, "completion": "Four."}
    ]
    for name in ("openai", "sharegpt"):
        with pytest.raises(ConfigError, match=f"record 7 has '{member}' instead: use --format prompt"):
            rows_of(tmp_path, given, format=name)


def test_what_was_sent_stays_as_it_was_in_openai_and_prompt(tmp_path):
    parts = [{"type": "text", "text": "a", "cache": {"n": 1.50}}]
    sent = [
        {"role": "developer", "content": "d", "name": "x", "odd": None},
        {"role": "user", "content": parts},
    ]
    given = record(0, messages=sent)

    assert rows_of(tmp_path, given, format="openai")[0]["messages"][:-1] == sent
    assert rows_of(tmp_path, given, format="prompt")[0]["prompt"] == sent


def test_in_sharegpt_a_single_part_is_its_text_and_unknown_members_are_gone(tmp_path):
    one, two = {"type": "text", "text": "a"}, {"type": "text", "text": "b"}
    sent = [
        {"role": "system", "content": [one], "odd": 1},
        {"role": "user", "content": [one, two]},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
    (row,) = rows_of(tmp_path, record(0, messages=sent), format="sharegpt")

    assert row["conversations"][:-1] == [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [one, two]},
        {"role": "assistant", "content": "", "tool_calls": CALLS},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(
    ("id_json", "text"),
    [
        ('"q"', "q"),
        ("7", "7"),
        ("1e3", "1e3"),
        ("0.10", "0.10"),
        ("12345678901234567890123", "12345678901234567890123"),
        ("null", "null"),
        ('{"a": 1.0}', '{"a":1.0}'),
        (None, "3"),
    ],
)
def test_a_sharegpt_id_is_always_a_text(tmp_path, id_json, text):
    assert rows_of(tmp_path, record(3, id_json=id_json), format="sharegpt")[0]["id"] == text


def test_tools_go_along(tmp_path):
    given = [record(0, body={"tools": TOOLS}), record(1)]
    request = {"extra_body": {"tools": [TOOLS[0], TOOLS[0]]}}

    assert [row["tools"] for row in rows_of(tmp_path, *given, format="openai", request=request)] == [
        TOOLS,
        TOOLS * 2,
    ]
    (row,) = rows_of(tmp_path, given[0], format="sharegpt")
    assert json.loads(row["tools"]) == TOOLS
    assert "tools" not in rows_of(tmp_path, given[1], format="openai")[0]


def test_calls_of_tools_are_part_of_the_answer_and_null_is_not(tmp_path):
    given = record(0, response=response(None, None, CALLS))

    assert rows_of(tmp_path, given, format="openai")[0]["messages"][1] == assistant(None, tool_calls=CALLS)
    assert rows_of(tmp_path, given, format="sharegpt")[0]["conversations"][1] == assistant(
        "", tool_calls=CALLS
    )


def test_kept_fields_never_take_the_place_of_ours(tmp_path):
    kept = '"messages":"theirs","prompt":1,"tools":[],"settings":"d","note":null'
    given = record(0, kept=kept.replace('"messages":"theirs",', ""))
    (row,) = rows_of(tmp_path, given, format="openai")

    assert row == {
        "index": 0,
        "messages": [USER, assistant()],
        "input_prompt": 1,
        "input_tools": [],
        "note": None,
    }


def test_digits_are_kept_in_ids_kept_fields_and_messages(tmp_path):
    numbers = ["1e3", "0.10", "12345678901234567890123", "-0", "-0.0", "1E-7", "7.0"]
    for name in ("openai", "prompt"):
        for place, digits in enumerate(numbers):
            kept = f'"deep":{{"a":[{digits}]}},"x":{digits},"y":"\\"x\\":5"'
            made = record(place, id_json=digits, kept=kept, user="HERE").replace(b'"HERE"', digits.encode())
            folder = make_run(tmp_path / f"{name}{place}", made)
            line = export(folder, f"{name}{place}.jsonl", format=name)[1].read_text()
            assert f'"id":{digits},' in line
            assert f'"x":{digits},' in line
            assert f'{{"a":[{digits}]}}' in line
            assert f'"content":{digits}}}' in line


def test_a_number_is_not_taken_from_within_another_field(tmp_path):
    kept = '"deep":{"a":1,"x":2.50},"x":2.5'

    line = export(make_run(tmp_path / "run", record(0, kept=kept)), format="openai")[1].read_text()
    assert line.endswith('"deep":{"a":1,"x":2.50},"x":2.5}\n')


# Several samples.


def test_each_sample_is_a_row(tmp_path):
    two = {"responses": [response("Four."), response("4", "hm")]}
    given = record(5, id_json='"q"', kept='"a":1', **two)

    assert rows_of(tmp_path, given, format="openai") == [
        {"id": "q", "index": 5, "sample": 0, "messages": [USER, assistant()], "a": 1},
        {
            "id": "q",
            "index": 5,
            "sample": 1,
            "messages": [USER, assistant("4", reasoning_content="hm")],
            "a": 1,
        },
    ]
    assert [row["id"] for row in rows_of(tmp_path, given, format="sharegpt")] == ["q#0", "q#1"]
    assert [row["sample"] for row in rows_of(tmp_path, given, format="prompt")] == [0, 1]
    exported, _ = export(make_run(tmp_path / "run", given), format="openai")
    assert exported.as_text() == "1 records exported as 2 rows"


# Reasoning.


@pytest.mark.parametrize(
    ("reasoning", "said"),
    [
        ("field", assistant("Four.", reasoning_content=THOUGHT)),
        ("think", assistant(f"<think>\n{THOUGHT}\n</think>\n\nFour.")),
        ("drop", assistant("Four.")),
    ],
)
def test_reasoning_is_a_field_or_in_the_text_or_gone(tmp_path, reasoning, said):
    given = record(0, response=response("\nFour.", f"\n{THOUGHT}\n"))
    if reasoning != "think":
        given = record(0, response=response("Four.", THOUGHT))
    for name, key in {"openai": "messages", "sharegpt": "conversations", "prompt": "completion"}.items():
        assert rows_of(tmp_path, given, format=name, reasoning=reasoning)[0][key][-1] == said


def test_where_there_was_no_thought_nothing_is_put_around_it(tmp_path):
    for thought in (None, ""):
        given = record(0, response=response("Four.", thought))
        for reasoning in ("field", "think"):
            (row,) = rows_of(tmp_path, given, format="openai", reasoning=reasoning)
            assert row["messages"][-1] == assistant()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"response": response("", "on and on"), "finish_reason": "length"}, "<think>\non and on"),
        ({"response": response("x", "on"), "finish_reason": "length"}, "<think>\non\n</think>\n\nx"),
        ({"response": response(None, "on"), "finish_reason": "stop"}, "<think>\non\n</think>\n\n"),
        (
            {"response": response(None, "on", CALLS), "finish_reason": "length"},
            "<think>\non\n</think>\n\n",
        ),
    ],
)
def test_a_thought_that_was_cut_off_is_not_ended_for_the_model(tmp_path, changes, said):
    (row,) = rows_of(tmp_path, record(0, **changes), format="openai", reasoning="think")

    assert row["messages"][-1]["content"] == said


def test_texts_have_their_thoughts_beside_or_before_them(tmp_path):
    given = asked("text", "2 + 2 =", response=response("4", "hm"))

    assert rows_of(tmp_path, given, format="prompt") == [
        {"index": 0, "prompt": "2 + 2 =", "completion": "4", "reasoning_content": "hm"}
    ]
    assert rows_of(tmp_path, given, format="prompt", reasoning="think")[0] == {
        "index": 0,
        "prompt": "2 + 2 =",
        "completion": "<think>\nhm\n</think>\n\n4",
    }


INLINE = f"<think>\n{THOUGHT}\n</think>\n\nFour."


@pytest.mark.parametrize(
    ("content", "field", "think", "drop"),
    [
        (INLINE, (THOUGHT, "Four."), INLINE, "Four."),
        # The chat template has opened the thought.
        (INLINE[8:], (THOUGHT, "Four."), INLINE, "Four."),
        # It was cut off.
        ("<think>\nhm", ("hm", ""), "<think>\nhm", ""),
        ("<think>\n\n</think>\n\nFour.", (None, "Four."), "<think>\n\n</think>\n\nFour.", "Four."),
        # It is only spoken of.
        ("say `</think>` now", (None, "say `</think>` now"), "say `</think>` now", "say `</think>` now"),
        (
            "a <think> b </think>",
            (None, "a <think> b </think>"),
            "a <think> b </think>",
            "a <think> b </think>",
        ),
    ],
)
def test_a_thought_in_the_text_of_an_answer_is_found_there(tmp_path, content, field, think, drop):
    made = {
        reasoning: rows_of(tmp_path, record(0, content), format="openai", reasoning=reasoning)[0]["messages"][
            -1
        ]
        for reasoning in ("field", "think", "drop")
    }

    thought, said = field
    assert made["field"] == assistant(said, **({} if thought is None else {"reasoning_content": thought}))
    assert (made["think"], made["drop"]) == (assistant(think), assistant(drop))


def test_what_goes_on_with_a_text_keeps_the_thought_in_it(tmp_path):
    given = asked("text", "<|user|>2 + 2?<think>", content="hm</think>\n4")
    found = {
        reasoning: rows_of(tmp_path, given, format="prompt", reasoning=reasoning)[0]["completion"]
        for reasoning in ("field", "think", "drop")
    }

    assert found == {"field": "hm</think>\n4", "think": "hm</think>\n4", "drop": "4"}


# Conversations of several turns.


def talk(**changes):
    """Two new answers after an example of the input's own, and a third."""
    sent = [
        {"role": "assistant", "content": "an example", "reasoning_content": "its own"},
        {"role": "user", "content": "one"},
        assistant("1st"),
        {"role": "user", "content": "two"},
        assistant(None, tool_calls=CALLS),
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
    steps = [
        {"response": response("1st", "r1"), "finish_reason": "stop"},
        {"response": response(None, "r2", CALLS), "finish_reason": "tool_calls"},
        {"response": response("3rd", "r3"), "finish_reason": "stop"},
    ]
    given = {"messages": sent, "response": response("3rd", "r3"), "steps": steps}
    return record(0, **{**given, **changes})


def said_in(row, key="messages"):
    return [message for message in row[key] if message["role"] == "assistant"]


def test_each_new_answer_of_a_conversation_has_its_own_thought(tmp_path):
    (row,) = rows_of(tmp_path, talk(), format="openai")
    assert said_in(row) == [
        assistant("an example", reasoning_content="its own"),
        assistant("1st", reasoning_content="r1"),
        assistant(None, reasoning_content="r2", tool_calls=CALLS),
        assistant("3rd", reasoning_content="r3"),
    ]
    (row,) = rows_of(tmp_path, talk(), format="openai", reasoning="think")
    assert [message["content"] for message in said_in(row)[1:]] == [
        f"<think>\nr{place}\n</think>\n\n{text}" for place, text in enumerate(("1st", "", "3rd"), 1)
    ]
    (row,) = rows_of(tmp_path, talk(), format="sharegpt", reasoning="drop")
    assert said_in(row, "conversations")[1:] == [
        assistant("1st"),
        assistant("", tool_calls=CALLS),
        assistant("3rd"),
    ]


def test_calls_in_the_history_keep_the_ids_that_their_results_name(tmp_path):
    named = [{**CALLS[0], "id": "call_1_0"}]
    sent = [
        USER,
        assistant("", tool_calls=named),
        {"role": "tool", "tool_call_id": "call_1_0", "content": "4"},
    ]
    steps = [{"response": response("", "r1", [{**CALLS[0], "id": None}])}, {"response": response("2nd")}]
    given = record(0, messages=sent, response=response("2nd"), steps=steps)

    (row,) = rows_of(tmp_path, given, format="openai")
    assert row["messages"][1] == assistant(None, reasoning_content="r1", tool_calls=named)


def test_thoughts_in_the_text_of_earlier_answers_are_found_there(tmp_path):
    sent = [USER, assistant("1st"), {"role": "user", "content": "two"}]
    steps = [{"response": response("r1\n</think>1st")}, {"response": response("r2\n</think>2nd")}]
    given = record(0, messages=sent, response=response("r2\n</think>2nd"), steps=steps)
    found = {
        reasoning: said_in(rows_of(tmp_path, given, format="openai", reasoning=reasoning)[0])
        for reasoning in ("field", "think", "drop")
    }

    assert found == {
        "field": [assistant("1st", reasoning_content="r1"), assistant("2nd", reasoning_content="r2")],
        "think": [assistant("<think>\nr1\n</think>1st"), assistant("<think>\nr2\n</think>2nd")],
        "drop": [assistant("1st"), assistant("2nd")],
    }


def test_thoughts_that_stand_in_the_history_are_not_there_twice(tmp_path):
    sent = [
        {"role": "user", "content": "one"},
        assistant("<think>\nr1\n</think>\n\n1st", reasoning_content="r1"),
        {"role": "user", "content": "two"},
    ]
    steps = [{"response": response("1st", "r1")}, {"response": response("2nd", "r2")}]
    given = record(0, messages=sent, response=response("2nd", "r2"), steps=steps)

    assert rows_of(tmp_path, given, format="openai")[0]["messages"][1] == assistant(
        "1st", reasoning_content="r1"
    )
    (row,) = rows_of(tmp_path, given, format="openai", reasoning="drop")
    assert row["messages"][1] == assistant("1st")


# Token ids.


def ids(prompt, output):
    return {"prompt": prompt, "output": output}


def tokens_of(tmp_path, *given):
    rows = rows_of(tmp_path, *given, format="openai", token_ids=True)
    return [(row["input_ids"], row["loss_mask"]) for row in rows]


def test_the_mask_is_over_what_the_model_wrote(tmp_path):
    assert tokens_of(tmp_path, record(0, token_ids=ids([1, 0, 3], [4, 5]))) == [
        ([1, 0, 3, 4, 5], [0, 0, 0, 1, 1])
    ]


def test_each_sample_has_its_own_ids(tmp_path):
    two = {"responses": [response("a"), response("b")]}
    given = record(0, **two, token_ids=ids([1, 2], [[3], [4, 5]]))

    assert tokens_of(tmp_path, given) == [([1, 2, 3], [0, 0, 1]), ([1, 2, 4, 5], [0, 0, 1, 1])]


@pytest.mark.parametrize(
    ("first", "second", "mask"),
    [
        # Both earlier answers stand in the last prompt as the model wrote them.
        (ids([1], [2, 3]), ids([1, 2, 3, 4], [5]), [0, 1, 1, 0, 1, 0, 1, 1]),
        # The first was written otherwise into the prompts that follow; the second was not.
        (ids([1], [2, 9]), ids([1, 2, 3, 4], [5]), [0, 0, 0, 0, 1, 0, 1, 1]),
        # The second prompt is no beginning of the third.
        (ids([1], [2, 3]), ids([1, 2, 3, 8], [5]), [0, 1, 1, 0, 0, 0, 1, 1]),
        (None, ids([1, 2, 3, 4], [5]), [0, 0, 0, 0, 1, 0, 1, 1]),
        (ids(None, [2, 3]), None, [0, 0, 0, 0, 0, 0, 1, 1]),
        # Longer than the last prompt.
        (ids([1], [2, 3, 4, 5, 6, 7, 8]), None, [0, 0, 0, 0, 0, 0, 1, 1]),
    ],
)
def test_earlier_answers_count_where_the_last_prompt_has_them_to_the_id(tmp_path, first, second, mask):
    last = ids([1, 2, 3, 4, 5, 6], [7, 8])
    steps = [{"response": response(), "token_ids": given} for given in (first, second, last)]
    given = record(0, steps=steps, token_ids=last)

    assert tokens_of(tmp_path, given) == [([1, 2, 3, 4, 5, 6, 7, 8], mask)]


def test_records_whose_ids_are_not_known_are_left_out_and_counted(tmp_path):
    unknown = [None, ids(None, [1]), ids([1], None), ids([1], []), ids([], [1])]
    given = [record(place, token_ids=known) for place, known in enumerate(unknown)]
    given += [record(8), record(9, token_ids=ids([1], [2]))]
    exported, out = export(make_run(tmp_path / "run", *given), format="sharegpt", token_ids=True)

    assert out.read_bytes().count(b"\n") == 1
    assert exported.as_text() == "1 records exported, 6 left out (no token ids)"
    assert exported.is_whole


def test_who_asked_with_ids_knows_those_of_the_prompt(tmp_path):
    given = asked("input_ids", [8, 9], token_ids=ids(None, [3]))
    (row,) = rows_of(tmp_path, given, format="prompt", token_ids=True)

    assert (row["input_ids"], row["loss_mask"]) == ([8, 9, 3], [0, 0, 1])


# Which records.


def test_flags_choose_records_in_every_format(tmp_path):
    given = [
        record(place, flags=flags) for place, flags in enumerate([[], ["cut"], ["empty", "cut"], ["short"]])
    ]
    for name, wish in {
        (0, 3): {"without": frozenset({"cut"})},
        (1, 2, 3): {"only": frozenset({"cut", "short"})},
    }.items():
        for format_name in ("raw", "openai", "prompt"):
            rows = rows_of(tmp_path, *given, format=format_name, **wish)
            assert tuple(row["index"] for row in rows) == name
    exported, _ = export(make_run(tmp_path / "run", *given), "f.jsonl", without=frozenset({"cut", "short"}))
    assert exported.as_text() == "1 records exported, 2 left out (flagged cut), 1 left out (flagged short)"


def test_raw_records_that_are_chosen_stay_byte_for_byte(tmp_path):
    odd = record(1, id_json='"\\ud800"', kept='"x":1.50e1')
    folder = make_run(tmp_path / "run", record(0, flags=["cut"]), odd)

    assert export(folder, without=frozenset({"cut"}))[1].read_bytes() == odd + b"}\n"


def test_what_cannot_be_parsed_is_left_out_loudly_and_stays_where_lines_are_copied(tmp_path):
    folder = make_run(tmp_path / "run", record(0), b'{"index":1,"messages":' + b"[" * 20_000, record(2))
    warnings: list[str] = []
    exported, out = export(folder, format="openai", warnings=warnings)

    assert (exported.records, exported.is_whole) == (2, False)
    assert out.read_bytes().count(b"\n") == 2
    assert len(warnings) == 1
    assert "1 records cannot be parsed or put into this form (the first is prompt 1's)" in warnings[0]
    exported, out = export(folder, "raw.jsonl", card=tmp_path / "card.md")
    assert (exported.records, exported.is_whole, out.read_bytes().count(b"\n")) == (3, True, 3)
    assert "| not readable | 1 |" in (tmp_path / "card.md").read_text()
    exported, out = export(folder, "f.jsonl", warnings=warnings, without=frozenset({"cut"}))
    assert (exported.records, exported.is_whole, out.read_bytes().count(b"\n")) == (2, False, 2)
