"""Conversations turn by turn: what is asked next, what is kept, and where one cannot go on."""

import json
from dataclasses import replace
from typing import Any

import pytest

from genpipe.core.errors import PromptFault
from genpipe.core.quality import FLAGS
from genpipe.core.values import Prompt, Reply, Start
from genpipe.edges import conversation, strict_json
from genpipe.edges.conversation import begin, follow
from tests.edges.samples import answer

REPLY = Reply(body=b"", wire_s=10.5, last_s=12.0)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text, role="system"):
    return {"role": role, "content": text}


def call(name, number, arguments="{}"):
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text, number):
    return {"role": "tool", "content": text, "tool_call_id": number}


def calling(*calls, content=None):
    """A new answer that calls tools; servers give each call its place."""
    given = [{**each, "index": place} for place, each in enumerate(calls)]
    return answer(response={"content": content, "reasoning_content": None, "tool_calls": given})


def start_of(messages):
    payload, begun = begin(messages)
    prompt = Prompt(index=7, payload=payload, conversation=begun, id_json=b'"u"', keep_json=b'"a":1')
    return Start(attempt=1, prompt=prompt, server=0, tries=1, started_s=10.0)


def step(start, given, *, keep_reasoning=False, server="http://s0"):
    return follow(start, REPLY, given, server=server, keep_reasoning=keep_reasoning)


class Play:
    """A conversation that is played with these answers; texts stand for whole answers.

    Attributes:
        sent: the messages of each request.
        final: the last answer.
    """

    def __init__(self, messages, *answers, **how):
        start, self.sent = start_of(messages), []
        for place, given in enumerate(answers):
            self.sent.append(json.loads(start.prompt.payload))
            made = answer(given) if isinstance(given, str) else given
            self.final = step(start, made, server=f"http://s{place}", **how)
            if self.final.more is None:
                assert place == len(answers) - 1, "it has ended before"
                return
            assert self.final.steps is None
            start = replace(start, prompt=self.final.more, attempt=place + 2)
        raise AssertionError("it goes on")


# ---- what is asked ----


def test_each_message_of_the_users_is_asked_with_the_new_answers_and_no_old_one():
    old = [user("a"), assistant("old 1"), user("b"), assistant("old 2"), user("c"), assistant("old 3")]
    play = Play(old, "new 1", "new 2", "new 3")

    assert play.sent == [
        [user("a")],
        [user("a"), assistant("new 1"), user("b")],
        [user("a"), assistant("new 1"), user("b"), assistant("new 2"), user("c")],
    ]
    assert play.final.response["content"] == "new 3"


def test_messages_of_the_users_one_after_the_other_are_each_asked():
    assert Play([user("a"), user("b")], "1", "2").sent[1] == [user("a"), assistant("1"), user("b")]


def test_what_was_answered_before_the_first_question_is_dropped_too():
    assert Play([assistant("hello"), user("a")], "1").sent == [[user("a")]]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_messages_stay_where_they_stand(role):
    late, later, last = system("late", role), system("later", role), system("last", role)
    first = system("first", role)
    old = [first, assistant("x"), user("a"), late, assistant("old"), later, user("b"), last]
    play = Play(old, "1", "2")

    assert play.sent == [
        [first, user("a"), late],
        [first, user("a"), late, assistant("1"), later, user("b"), last],
    ]


def test_a_system_message_between_two_of_the_users_stays_between_them():
    assert Play([user("a"), system("s"), user("b")], "1", "2").sent == [
        [user("a")],
        [user("a"), assistant("1"), system("s"), user("b")],
    ]


def test_messages_go_out_as_they_are():
    odd = {"role": "user", "name": "Zoë", "content": [{"type": "text", "text": "\u2028 \0 🌊"}], "x": 1.5}

    assert Play([odd, assistant("old"), user("b")], "1", "2").sent[1][0] == odd


def test_without_a_message_of_a_user_there_is_nothing_to_ask():
    for messages in ([], [system("s")], [system("s"), assistant("a")]):
        with pytest.raises(ValueError, match=r"^no message of a user, so that there is nothing to ask$"):
            begin(messages)


def test_what_else_a_prompt_has_goes_along():
    more = step(start_of([user("a"), user("b")]), answer("1")).more

    assert (more.index, more.id_json, more.keep_json, more.member) == (7, b'"u"', b'"a":1', "messages")


def test_a_step_can_be_followed_twice_from_two_answers():
    """Of two attempts both may answer: the late one must not change what is gone on from."""
    start = start_of([user("a"), user("b")])
    first, late = step(start, answer("first")), step(start, answer("late"))
    final = step(replace(start, prompt=first.more), answer("2"))

    assert json.loads(late.more.payload)[1] == assistant("late")
    assert [each["response"]["content"] for each in final.steps] == ["first", "2"]


# ---- the new answers in the history ----


THOUGHT = {"content": "4", "reasoning_content": "two and two", "tool_calls": None}


@pytest.mark.parametrize(
    ("keep", "said"),
    [(False, assistant("4")), (True, assistant("4", reasoning_content="two and two"))],
)
def test_reasoning_is_kept_and_stands_in_the_history_only_where_it_is_wished_for(keep, said):
    play = Play([user("a"), user("b")], answer(response=THOUGHT), "2", keep_reasoning=keep)

    assert play.sent[1][1] == said
    assert play.final.steps[0]["response"] == THOUGHT


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("<think>hm</think>\n\nYes.", "Yes."),
        ("\n<think>\nhm\n</think>Yes.", "Yes."),
        ("hm, the template has opened it</think>\n\nYes.", "Yes."),
        ("<think>never ended", ""),
        ("Write `</think>` to end it.", "Write `</think>` to end it."),
        ("A <think> here </think> there.", "A <think> here </think> there."),
        ("Plain.", "Plain."),
    ],
)
def test_a_thought_in_the_text_itself_is_left_out_of_the_history(content, said):
    old = [user("a"), user("b")]

    assert Play(old, content, "2").sent[1][1] == assistant(said)
    assert Play(old, content, "2", keep_reasoning=True).sent[1][1] == assistant(content)


@pytest.mark.parametrize("content", [None, ""])
def test_an_empty_answer_is_gone_on_from_as_text_that_servers_take(content):
    empty = answer(response={**THOUGHT, "content": content}, flags=("empty",))
    play = Play([user("a"), user("b")], empty, "2")

    assert play.sent[1][1] == assistant("")
    assert play.final.flags == ("empty",)


def test_an_answer_that_was_cut_off_is_gone_on_from_and_flagged():
    cut = answer("1", finish_reason="length", flags=("cut",))
    play = Play([user("a"), user("b")], cut, "2")

    assert (play.final.flags, play.final.finish_reason) == (("cut",), "stop")


# ---- tools ----


WEATHER = [
    user("Rain in Oslo and Rome?"),
    assistant(
        None, tool_calls=[call("rain", "old1", '{"in":"Oslo"}'), call("rain", "old2", '{"in":"Rome"}')]
    ),
    result("yes", "old1"),
    result("no", "old2"),
    assistant("Only in Oslo."),
    user("Thanks."),
    assistant("Welcome."),
]


def test_results_of_tools_go_in_with_the_ids_of_the_new_calls():
    new = [call("rain", "n1", '{"in": "Oslo"}'), call("rain", "n2", '{"in": "Rom"}')]
    play = Play(WEATHER, calling(*new), "In Oslo.", "Bye.")
    history = [WEATHER[0], assistant(None, tool_calls=new), result("yes", "n1"), result("no", "n2")]

    assert play.sent == [WEATHER[:1], history, [*history, assistant("In Oslo."), user("Thanks.")]]
    assert [len(each["response"]["tool_calls"] or ()) for each in play.final.steps] == [2, 0, 0]


def test_results_find_their_calls_by_id_whatever_their_order():
    old = [*WEATHER[:2], WEATHER[3], WEATHER[2]]
    play = Play(old, calling(call("rain", "n1"), call("rain", "n2")), "1")

    assert play.sent[1][2:] == [result("no", "n2"), result("yes", "n1")]


def test_results_without_ids_belong_to_the_calls_in_order():
    bare = [{key: value for key, value in each.items() if key != "tool_call_id"} for each in WEATHER[2:4]]
    play = Play([*WEATHER[:2], *bare], calling(call("rain", "n1"), call("rain", "n2")), "1")

    assert play.sent[1][2:] == [result("yes", "n1"), result("no", "n2")]


def test_calls_without_ids_are_given_some():
    play = Play(WEATHER[:4], calling(call("rain", None), call("rain", "")), "1")
    said, *results = play.sent[1][1:]

    assert [each["id"] for each in said["tool_calls"]] == ["call_1_0", "call_1_1"]
    assert [each["tool_call_id"] for each in results] == ["call_1_0", "call_1_1"]


def test_calls_that_follow_on_results_find_theirs():
    old = [
        user("a"),
        assistant("", tool_calls=[call("find", "1")]), result("x", "1"), system("careful"),
        assistant("", tool_calls=[call("read", "2")]), result("y", "2"),
        assistant("done"), user("b"),
    ]  # fmt: skip
    play = Play(old, calling(call("find", "n1")), calling(call("read", "n2"), content="wait"), "1", "2")
    calls = [
        assistant(None, tool_calls=[call("find", "n1")]),
        assistant("wait", tool_calls=[call("read", "n2")]),
    ]
    history = [user("a"), calls[0], result("x", "n1"), system("careful"), calls[1], result("y", "n2")]

    assert play.sent[2] == history
    assert play.sent[3] == [*history, assistant("1"), user("b")]


def test_each_turn_has_calls_of_its_own():
    play = Play(
        [*WEATHER[:5], user("And now?"), *WEATHER[1:5]],
        calling(call("rain", "a1"), call("rain", "a2")), "1",
        calling(call("rain", "b1"), call("rain", "b2")), "2",
    )  # fmt: skip

    assert play.sent[3][-2:] == [result("yes", "b1"), result("no", "b2")]


def test_where_the_new_answer_calls_nothing_the_results_are_left_out_and_system_messages_stay():
    old = [*WEATHER[:4], system("careful"), *WEATHER[4:]]
    play = Play(old, "No idea.", "Bye.")

    assert play.sent[1] == [WEATHER[0], assistant("No idea."), system("careful"), user("Thanks.")]


def test_calls_written_as_plain_text_are_no_structure_to_splice_into():
    old = [user("a"), assistant('{"name": "f"}'), {"role": "tool", "content": "r"}, assistant("x"), user("b")]

    assert Play(old, "1", "2").sent[1] == [user("a"), assistant("1"), user("b")]


ODD_CALLS = [5, True, "x", {"a": 1}, [5], [None, "x"]]


@pytest.mark.parametrize("calls", ODD_CALLS)
def test_calls_that_are_none_fail_a_conversation_or_end_it(calls):
    odd = answer(response={"content": "hm", "reasoning_content": None, "tool_calls": calls})
    for old in (WEATHER, [user("a"), user("b")]):
        with pytest.raises(PromptFault, match=r"^turn 1 calls tools in a form that is not known$") as caught:
            step(start_of(old), odd)
        assert json.loads(b"{%s}" % caught.value.made_json)["steps"][0]["response"] == odd.response

    assert Play(WEATHER[:5], odd).final.response == odd.response
    assert Play([user("a")], odd).final.steps[0]["response"] == odd.response


@pytest.mark.parametrize("calls", [None, [], {}, "", 0, False])
def test_what_is_no_call_at_all_is_gone_on_from(calls):
    given = answer(response={"content": "hm", "reasoning_content": None, "tool_calls": calls})

    assert Play([user("a"), user("b")], given, "2").sent[1] == [user("a"), assistant("hm"), user("b")]


OTHERS = [
    pytest.param([call("snow", "n1"), call("rain", "n2")], id="another function"),
    pytest.param([call("rain", "n1")], id="fewer"),
    pytest.param([call("rain", "n1")] * 3, id="more"),
    pytest.param([{"id": "n1"}, {"id": "n2"}], id="no functions"),
]


@pytest.mark.parametrize("calls", OTHERS)
def test_other_calls_in_mid_conversation_fail_it_with_what_was_made(calls):
    start = start_of(WEATHER)
    with pytest.raises(PromptFault) as caught:
        step(start, calling(*calls))
    made = json.loads(b"{%s}" % caught.value.made_json)

    form = (
        "whose results the original does not have"
        if "function" in calls[0]
        else "in a form that is not known"
    )
    assert str(caught.value) == f"turn 1 calls tools {form}"
    assert (caught.value.status, caught.value.wire_s) == (None, 10.5)
    assert made["messages"] == WEATHER[:1]
    assert len(made["steps"][0]["response"]["tool_calls"]) == len(calls)


@pytest.mark.parametrize("calls", OTHERS)
def test_other_calls_in_the_last_turn_are_its_answer(calls):
    assert Play(WEATHER[:5], calling(*calls)).final.response["tool_calls"][0]["id"] == "n1"


@pytest.mark.parametrize(
    "results",
    [[], [result("yes", "old1")], [result("yes", "old1"), result("no", "lost")]],
    ids=["none", "one is missing", "of another call"],
)
def test_calls_whose_results_are_not_all_there_cannot_be_gone_on_from(results):
    start = start_of([*WEATHER[:2], *results, *WEATHER[4:]])
    with pytest.raises(PromptFault, match="turn 1 calls tools"):
        step(start, calling(call("rain", "n1"), call("rain", "n2")))


def test_several_samples_are_nothing_to_go_on_from():
    with pytest.raises(PromptFault, match="goes on from one answer, and the reply holds 2"):
        step(start_of([user("a")]), answer(response=[THOUGHT, THOUGHT]))


# ---- what is kept ----


def test_a_finished_conversation_has_its_steps_and_their_sums():
    usage: dict[str, Any] = {"prompt_tokens": 3, "completion_tokens": 7, "prompt_tokens_details": None}
    first = answer("1", usage=usage, flags=("cut",), rid="r1", token_ids={"prompt": [1], "output": [2]})
    usage = {"prompt_tokens": 20, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}}
    ids = {"prompt": None, "output": [3]}
    second = answer("2", usage=usage, output_tokens=5, flags=("empty", "cut"), rid="r2", token_ids=ids)
    final = Play([user("a"), user("b")], first, second).final

    assert final.usage == {
        "prompt_tokens": 23, "completion_tokens": 12, "prompt_tokens_details": {"cached_tokens": 8}
    }  # fmt: skip
    assert (final.output_tokens, final.flags, final.rid, final.size_bytes) == (
        12,
        ("empty", "cut"),
        "r2",
        400,
    )
    assert (final.token_ids, final.more) == (None, None)
    assert final.steps[0] == {
        "response": first.response, "finish_reason": "stop", "usage": first.usage, "flags": ["cut"],
        "server": "http://s0", "latency_s": 2.0, "rid": "r1", "token_ids": first.token_ids,
    }  # fmt: skip
    assert (final.steps[1]["server"], final.steps[1]["token_ids"]) == ("http://s1", ids)


def test_sums_are_unknown_where_a_part_is():
    parts = [answer("1", output_tokens=None), answer("2"), answer("3", usage={"completion_tokens": 7})]
    for order in (parts[:2], parts[1::-1]):
        final = Play([user("a"), user("b")], *order).final

        assert (final.usage, final.output_tokens) == (None, None)
    assert Play([user("a"), user("b")], *parts[1:]).final.usage == {
        "prompt_tokens": None, "completion_tokens": 14
    }  # fmt: skip


def nested(depth):
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def test_usage_nested_deeply_is_summed_as_far_as_it_counts():
    odd = {
        "completion_tokens": 7,
        "deep": nested(3_000),
        "details": {"n": 2, "deep": nested(3_000)},
        "x": "y",
    }
    final = Play([user("a"), user("b"), user("c")], *(answer("1", usage=odd) for _ in range(3))).final

    assert final.usage == {
        "completion_tokens": 21, "deep": {"a": None}, "details": {"n": 6, "deep": None}, "x": None
    }  # fmt: skip


def test_a_step_that_no_record_could_hold_is_refused_when_it_comes():
    with pytest.raises(ValueError, match="nested too deeply"):
        step(start_of([user("a")]), answer("1", usage=nested(9_999)))


def test_flags_stand_in_one_order_whichever_came_first():
    parts = [answer("1", flags=(flag,)) for flag in ("unclosed_think", "looping", "cut", "empty")]
    final = Play([user(each) for each in "abcd"], *parts).final

    assert final.flags == FLAGS[:4]


def test_a_conversation_of_one_turn_has_one_step():
    final = Play([user("a"), assistant("old")], "1").final

    assert len(final.steps) == 1
    assert (final.output_tokens, final.usage) == (7, answer("1").usage)


def test_what_was_made_so_far_goes_along_for_a_turn_that_fails():
    start = start_of([user("a"), user("b"), user("c")])
    assert start.prompt.made is None
    more = step(start, answer("1")).more
    more = step(replace(start, prompt=more), answer("2")).more
    made = json.loads(b"{%s}" % more.made())

    assert made["messages"] == json.loads(more.payload)
    assert [each["response"]["content"] for each in made["steps"]] == ["1", "2"]


def test_what_was_encoded_is_not_encoded_again(monkeypatch):
    """A step costs the joining of bytes, and not the encoding of a history that grows."""
    sizes = []

    def dumps(value):
        data = strict_json.dumps(value)
        sizes.append(len(data))
        return data

    turns, text = 60, "x" * 1000
    start = start_of([user(text) for _ in range(turns)])
    monkeypatch.setattr(conversation, "dumps", dumps)
    for _ in range(turns - 1):
        start = replace(start, prompt=step(start, answer(text)).more)

    assert len(start.prompt.payload) > 2 * (turns - 1) * len(text)
    assert sum(sizes) < (turns - 1) * 3 * len(text)
