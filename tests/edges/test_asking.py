"""Prompts over each endpoint of simulated servers: what comes back of answers, samples, ids and odd text."""

import asyncio
import json
import re
from dataclasses import replace

import pytest

from genpipe.core.errors import FaultKind, PromptFault, ServerFault
from genpipe.core.values import Answer, Checkup, Probe, Prompt, Reply, Start
from genpipe.edges.conversation import begin
from genpipe.edges.requests import Bodies
from genpipe.edges.sglang import Endpoint, SglangTransport
from genpipe.sim.server import SimConfig, SimFleet
from tests.edges.raw_server import GOOD, RawServer, always, http, on


def ask_fleet(prompts, *, token_ids=False, told=None, fleet=None, **options):
    """The answers to prompts, from a simulated server that is asked with these options."""

    async def main():
        settings = SimConfig(
            **{"health_delay_s": 0.0, "orders": True, "lengths": "fixed:40", **(fleet or {})}
        )
        warn = (lambda _: None) if told is None else told.append
        bodies = Bodies(model="m", token_ids=token_ids, **options)
        async with SimFleet(settings, [0]) as servers:
            endpoints = [Endpoint(url=url) for url in servers.urls]
            async with SglangTransport(endpoints, bodies=bodies, warn=warn) as transport:
                answers = []
                for attempt, prompt in enumerate(prompts, 1):
                    start = Start(attempt=attempt, prompt=prompt, server=0, tries=1, started_s=0.0)
                    answers.append(transport.examine(start, await transport.generate(start)))
                return answers

    return asyncio.run(main())


def prompt_of(payload, member, **own):
    return Prompt(index=0, payload=json.dumps(payload).encode(), member=member, **own)


CHAT = prompt_of([{"role": "user", "content": "hello"}], "messages")
WAYS = [
    ("chat", CHAT),
    ("completions", prompt_of("hello", "prompt")),
    ("completions", prompt_of([5, 6, 7], "prompt")),
    ("generate", prompt_of("hello", "text")),
    ("generate", prompt_of([5, 6, 7], "input_ids")),
]


@pytest.mark.parametrize(("api", "prompt"), WAYS)
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("snapshot_loads", [True, False], ids=["0.5.17", "0.5.11"])
def test_each_way_of_asking_gives_whole_answers(api, prompt, samples, snapshot_loads):
    limit = "max_new_tokens" if api == "generate" else "max_tokens"
    (answer,) = ask_fleet(
        [prompt], api=api, sampling={"n": samples, limit: 30}, fleet={"snapshot_loads": snapshot_loads}
    )
    parts = [answer.response] if samples == 1 else answer.response

    assert len(parts) == samples
    assert all(part["content"].startswith("echo ") for part in parts)
    assert (answer.finish_reason, answer.flags) == ("length", ("cut",))
    assert answer.output_tokens == answer.usage["completion_tokens"] == 30 * samples
    assert answer.usage["prompt_tokens"] > 0
    assert answer.model == (None if api == "generate" else "m")
    assert re.fullmatch("[0-9a-f]{32}", answer.rid)


@pytest.mark.parametrize(("api", "prompt"), WAYS)
def test_ids_come_from_each_endpoint_of_a_server_that_has_them(api, prompt):
    told: list[str] = []
    one, several = ask_fleet(
        [prompt, replace(prompt, sampling_json=b'"n":2')], api=api, token_ids=True, told=told
    )

    assert len(one.token_ids["output"]) == one.output_tokens > 0
    assert [len(ids) for ids in several.token_ids["output"]] == [one.output_tokens] * 2
    for answer in (one, several):
        assert len(answer.token_ids["prompt"]) == answer.usage["prompt_tokens"]
    if b"[5, 6, 7]" in prompt.payload:
        assert one.token_ids["prompt"] == [5, 6, 7]
    assert told == []


@pytest.mark.parametrize(("api", "prompt"), WAYS)
def test_an_older_server_that_gives_none_is_named_once(api, prompt):
    told: list[str] = []
    answers = ask_fleet([prompt] * 3, api=api, token_ids=True, told=told, fleet={"snapshot_loads": False})

    if api == "generate":
        sent = [5, 6, 7] if prompt.member == "input_ids" else None
        assert [answer.token_ids["prompt"] for answer in answers] == [sent] * 3
        assert told == []
    else:
        assert [answer.token_ids for answer in answers] == [None] * 3
        assert len(told) == 1
        assert re.fullmatch(
            rf"http://\S+ gives no token ids: SGLang has them for .* = {api} from 0.5.17 on", told[0]
        )


def test_of_a_server_of_another_kind_one_answer_of_many_is_taken_and_said():
    told: list[str] = []

    async def main():
        async with RawServer(always(http(GOOD))) as server:
            for takes_rid in (False, True):
                endpoints = [Endpoint(url=server.url, takes_rid=takes_rid)]
                bodies = Bodies(model="m", sampling={"n": 3})
                async with SglangTransport(endpoints, bodies=bodies, warn=told.append) as transport:
                    for attempt in (1, 2):
                        start = Start(attempt=attempt, prompt=CHAT, server=0, tries=1, started_s=0.0)
                        transport.examine(start, await transport.generate(start))

    with pytest.raises(ServerFault, match="200 with 1 of the 3 answers that n asks for"):
        on(main)
    assert len(told) == 1
    assert told[0].endswith(" gives 1 of the 3 answers that n asks for")


def test_thinking_stands_apart_in_chat_and_between_its_marks_elsewhere():
    asked = "<<reason=30 tokens=40>>"
    (chat,) = ask_fleet([prompt_of([{"role": "user", "content": asked}], "messages")])
    (text,) = ask_fleet([prompt_of(asked, "text")], api="generate", sampling={"max_new_tokens": 500})

    assert chat.response["reasoning_content"].startswith("thinking ")
    assert text.response["content"].startswith("<think>\nthinking ")
    assert "</think>\n\necho " in text.response["content"]
    assert chat.output_tokens == text.output_tokens == 70


def test_a_call_of_a_tool_comes_whole_and_no_text_with_it():
    (answer,) = ask_fleet([prompt_of([{"role": "user", "content": "<<tools=look,find>>"}], "messages")])

    calls = answer.response["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["look", "find"]
    assert json.loads(calls[0]["function"]["arguments"])
    assert (answer.response["content"], answer.finish_reason, answer.flags) == (None, "tool_calls", ())


@pytest.mark.parametrize(
    ("orders", "text"), [("content=surrogate", "\ufffd"), ("content=nul", "\0"), ("deep=3000", "echo")]
)
@pytest.mark.parametrize("api", ["chat", "completions", "generate"])
def test_odd_answers_come_whole(api, orders, text):
    asked = f"<<{orders}>>"
    prompt = {
        "chat": prompt_of([{"role": "user", "content": asked}], "messages"),
        "completions": prompt_of(asked, "prompt"),
        "generate": prompt_of(asked, "text"),
    }[api]
    (answer,) = ask_fleet([prompt], api=api)

    assert text in answer.response["content"]


def test_a_record_s_own_option_reaches_the_server():
    long, short = ask_fleet(
        [CHAT, replace(CHAT, sampling_json=b'"max_tokens":5')], sampling={"max_tokens": 20}
    )

    assert (long.output_tokens, short.output_tokens) == (20, 5)


def test_a_record_whose_option_cannot_be_sent_is_to_blame_itself():
    with pytest.raises(PromptFault, match="is set by genpipe itself"):
        ask_fleet([prompt_of("x", "text", sampling_json=b'"stream":true')], api="generate")


def test_what_generate_does_not_know_is_an_error_as_with_the_real_one():
    with pytest.raises(ServerFault, match="500"):
        ask_fleet([prompt_of("x", "text")], api="generate", sampling={"nope": 1})


@pytest.mark.parametrize(
    ("api", "route", "body"),
    [
        ("completions", "/v1/completions", {"prompt": "Hi", "model": "m", "max_tokens": 1}),
        ("generate", "/generate", {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}),
    ],
)
def test_a_probe_asks_the_endpoint_of_the_run(api, route, body):
    good = {"text": "x", "meta_info": {}} if api == "generate" else {"choices": [{"text": "x"}]}

    async def main():
        async with (
            RawServer(always(http(good))) as server,
            SglangTransport([Endpoint(url=server.url)], bodies=Bodies(model="m", api=api)) as transport,
        ):
            return await transport.probe(Probe(server=0, ask=True)), server.requests

    found, requests = on(main)

    assert found == Checkup(asked=True)
    assert requests[-1][0].startswith(f"POST {route} ")
    assert json.loads(requests[-1][1]) == body


@pytest.mark.parametrize("keep_reasoning", [True, False])
def test_a_turn_of_a_conversation_is_followed_and_its_answer_looked_at_first(keep_reasoning):
    told: list[str] = []
    payload, talk = begin([{"role": "user", "content": text} for text in ("<<reason=20>> one", "two")])

    async def main():
        bodies = Bodies(model="m", token_ids=True)
        settings = SimConfig(health_delay_s=0.0, orders=True, snapshot_loads=False)
        async with (
            SimFleet(settings, [0]) as fleet,
            SglangTransport(
                [Endpoint(url=url) for url in fleet.urls],
                bodies=bodies,
                keep_reasoning=keep_reasoning,
                warn=told.append,
            ) as transport,
        ):
            prompt: Prompt | None = Prompt(index=0, payload=payload, conversation=talk)
            steps: list[Answer] = []
            while prompt is not None:
                start = Start(attempt=1 + len(steps), prompt=prompt, server=0, tries=1, started_s=0.0)
                steps.append(transport.examine(start, await transport.generate(start)))
                prompt, last = steps[-1].more, prompt
            assert last is not None
            return steps, json.loads(last.payload), fleet.urls[0]

    steps, messages, url = asyncio.run(main())

    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert ("thinking" in messages[1].get("reasoning_content", "") + messages[1]["content"]) is keep_reasoning
    assert [step["server"] for step in steps[-1].steps] == [url, url]
    assert len(told) == 1


@pytest.mark.parametrize("has_turns", [True, False])
def test_a_reply_that_nobody_thought_of_is_a_fault_with_a_trace_in_the_log(caplog, monkeypatch, has_turns):
    endpoint = Endpoint(url="http://odd", api_key="secret-key")
    transport = SglangTransport([endpoint], bodies=Bodies(model="m"))
    payload, talk = begin([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    prompt = Prompt(index=7, payload=payload, conversation=talk if has_turns else None)
    start = Start(attempt=1, prompt=prompt, server=0, tries=1, started_s=0.0)
    body = b'{"choices":[{"message":{"content":"x"}}],"usage":%s}' % (b'{"a":' * 9_998 + b"1" + b"}" * 9_998)
    if not has_turns:
        monkeypatch.setattr("genpipe.edges.answers.flags_of", lambda *_: dict[str, int]()["secret-key\n"])

    with pytest.raises(ServerFault) as caught:
        transport.examine(start, Reply(body=body, wire_s=1.0, last_s=2.0))

    fault = caught.value
    assert (fault.kind, fault.status, fault.wire_s) == (FaultKind.BROKEN, 200, 1.0)
    words = "ValueError: JSON nested too deeply" if has_turns else "KeyError: "
    assert str(fault).startswith(f"200 with a reply that cannot be read: {words}")
    assert "secret-key" not in str(fault)
    (record,) = caplog.records
    assert (record.levelname, record.exc_info is not None) == ("ERROR", True)
    assert record.getMessage() == "reply_unreadable index=7 server=http://odd"
