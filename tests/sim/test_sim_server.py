"""The simulated server over real HTTP: its answers, its pace, its log, and how it starts and stops."""

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import aiohttp
import pytest

from genpipe.core.errors import ConfigError
from genpipe.sim.server import SimConfig, SimFleet

CHAT = "/v1/chat/completions"


def with_fleet(test, config=None, ports=1, **changes):
    """Run ``test(fleet, session)`` against a fresh fleet."""

    async def main():
        settings = config or SimConfig(**{"health_delay_s": 0.0, **changes})
        async with SimFleet(settings, [0] * ports) as fleet, aiohttp.ClientSession() as session:
            return await test(fleet, session)

    return asyncio.run(main())


def chat_of(text, **fields):
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


async def post(session, url, request):
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as reply:
        return reply.status, json.loads(await reply.read())


async def chat(fleet, session, text, port=0, **fields):
    status, reply = await post(session, fleet.urls[port] + CHAT, chat_of(text, **fields))
    assert status == 200, reply
    return reply


def row_of(text):
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def text_of(reply):
    return reply["choices"][0]["message"]["content"]


def read_log(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("messages", "user"),
    [
        ([{"role": "user", "content": "hällo"}], "hällo"),
        ([{"role": "user", "content": "a\ud800b"}], "a\ud800b"),
        (
            [
                {"role": "user", "content": "first"},
                {"role": "assistant", "content": None, "tool_calls": []},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}],
                },
                {"role": "tool", "content": "x", "tool_call_id": "c"},
            ],
            "one two",
        ),
    ],
)
def test_the_answer_echoes_the_last_user_text(messages, user):
    async def test(fleet, session):
        return await post(session, fleet.urls[0] + CHAT, {"model": "m", "messages": messages})

    status, reply = with_fleet(test)

    assert status == 200
    assert text_of(reply).startswith(f"echo {row_of(user)} ")
    assert reply["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("path", "request_", "user"),
    [
        ("/v1/completions", {"model": "m", "prompt": "abc"}, "abc"),
        ("/generate", {"text": "abc"}, "abc"),
        ("/generate", {"input_ids": [5, 6, 7]}, "5,6,7"),
    ],
)
def test_the_other_endpoints_echo_too(path, request_, user):
    async def test(fleet, session):
        return await post(session, fleet.urls[0] + path, request_)

    status, reply = with_fleet(test)

    assert status == 200
    assert (reply.get("text") or reply["choices"][0]["text"]).startswith(f"echo {row_of(user)} ")


def test_lengths_follow_the_prompt_and_the_limit_cuts_them():
    async def test(fleet, session):
        prompts = [f"prompt {n}" for n in range(30)] * 2
        replies = [await chat(fleet, session, prompt, port=n % 2) for n, prompt in enumerate(prompts)]
        cut = await chat(fleet, session, "prompt 0", max_tokens=3)
        full = await chat(fleet, session, "prompt 0", max_tokens=900, ignore_eos=True)
        return [reply["usage"]["completion_tokens"] for reply in replies], cut, full

    lengths, cut, full = with_fleet(test, ports=2, lengths="lognormal:mean=200,sigma=0.8")

    assert lengths[:30] == lengths[30:]
    assert len(set(lengths)) > 20
    assert (cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == ("length", 3)
    assert (full["choices"][0]["finish_reason"], full["usage"]["completion_tokens"]) == ("length", 900)


def test_replies_can_have_one_size():
    async def test(fleet, session):
        return [text_of(await chat(fleet, session, f"p{n}")) for n in range(3)]

    texts = with_fleet(test, reply_bytes=12_000, lengths="lognormal:mean=50,sigma=1")

    assert [len(text) for text in texts] == [12_000] * 3
    assert len(set(texts)) == 3


@pytest.mark.parametrize(
    ("path", "request_", "words"),
    [
        (CHAT, chat_of("x", stream=True), "does not stream"),
        (CHAT, chat_of("x", top_p=0), "top_p"),
        (CHAT, chat_of("x", max_tokens=1.5), "valid integer"),
        (CHAT, chat_of("x", max_tokens=1000), "Requested token count exceeds"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "content"),
        (CHAT, {"messages": "[]"}, "valid list"),
        (CHAT, b"[1]", "valid object"),
        (CHAT, b"\xff\xfe", "JSON"),
        ("/v1/completions", {"prompt": ""}, None),
        ("/v1/completions", {}, "prompt"),
        ("/generate", {"text": "x", "stream": True}, "does not stream"),
        ("/generate", {"text": []}, "should be provided"),
    ],
)
def test_what_cannot_be_answered_is_a_400_that_says_why(path, request_, words):
    async def test(fleet, session):
        return await post(session, fleet.urls[0] + path, request_)

    status, reply = with_fleet(test, context_tokens=1000)

    if words is None:
        assert status == 200
        return
    assert status == 400
    assert words in (reply["error"]["message"] if "error" in reply else reply["message"])


def test_speed_falls_with_the_batch_as_the_model_says():
    """Twelve requests of 20 tokens on 8 slots: 8 at 12 ms a step, then 4 at 10 ms."""

    async def test(fleet, session):
        begun_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for n in range(12):
                group.create_task(chat(fleet, session, f"p{n}"))
            await asyncio.sleep(0.1)
            async with session.get(fleet.urls[0] + "/v1/loads?include=core") as reply:
                loads = (await reply.json())["loads"][0]
        return time.monotonic() - begun_s, loads, fleet.stats()[0]

    took_s, loads, figures = with_fleet(
        test, max_running=8, step_fixed_s=0.008, step_per_request_s=0.0005, lengths="fixed:20"
    )

    assert took_s == pytest.approx(20 * 0.012 + 20 * 0.010, abs=0.1)
    assert (loads["num_running_reqs"], loads["num_waiting_reqs"]) == (8, 4)
    assert loads["gen_throughput"] == pytest.approx(8 / 0.012, rel=0.01)
    assert figures["running_integral_s"] == pytest.approx(8 * 20 * 0.012 + 4 * 20 * 0.010, rel=0.02)
    assert figures["queued_integral_s"] == pytest.approx(4 * 20 * 0.012, rel=0.1)
    assert (figures["arrivals"], figures["answered"], figures["in_flight_max"]) == (12, 12, 12)
    assert figures["tokens"] == 240


def test_ids_are_honoured_and_refused_twice_at_a_time():
    async def test(fleet, session):
        first = asyncio.create_task(chat(fleet, session, "a", rid="job-1"))
        await asyncio.sleep(0.05)
        second = await post(session, fleet.urls[0] + CHAT, chat_of("b", rid="job-1"))
        reply = await first
        return reply, second, await chat(fleet, session, "c", rid="job-1")

    reply, (status, refusal), again = with_fleet(test, step_fixed_s=0.01)

    assert (reply["id"], again["id"]) == ("job-1", "job-1")
    assert (status, refusal["message"]) == (400, "Duplicate request ID detected: job-1")


def test_abort_takes_every_id_with_that_beginning():
    async def test(fleet, session):
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(chat(fleet, session, rid, rid=rid, max_tokens=200))
                for rid in ("job-1", "job-10", "other")
            ]
            await asyncio.sleep(0.1)
            url = fleet.urls[0] + "/abort_request"
            async with session.post(url, json={"rid": "job"}) as reply:
                assert await reply.read() == b""
            await asyncio.sleep(0.05)
            done = [[task.done() for task in asked]]
            await session.post(url, json={"rid": "job-1"})
            await asyncio.sleep(0.05)
            done.append([task.done() for task in asked])
            await session.post(url, json={"abort_all": True})
        return [task.result() for task in asked], done

    replies, done = with_fleet(test, max_running=2, step_fixed_s=0.01, lengths="fixed:500")
    ends = [reply["choices"][0]["finish_reason"] for reply in replies]

    assert done == [[False] * 3, [True, True, False]]
    assert ends == ["abort"] * 3
    assert 5 <= replies[0]["usage"]["completion_tokens"] <= 30
    assert text_of(replies[0])
    # The third waited for a slot until the others were gone: it had 50 ms.
    assert replies[2]["usage"]["completion_tokens"] < 15


def test_aborted_in_the_queue_has_no_content_and_no_usage():
    async def test(fleet, session):
        running = asyncio.create_task(chat(fleet, session, "a", rid="a"))
        await asyncio.sleep(0.02)
        queued = asyncio.create_task(chat(fleet, session, "b", rid="b"))
        await asyncio.sleep(0.02)
        await session.post(fleet.urls[0] + "/abort_request", json={"rid": "b"})
        reply = await queued
        await running
        return reply

    reply = with_fleet(test, max_running=1, step_fixed_s=0.01)

    assert text_of(reply) is None
    assert reply["choices"][0]["finish_reason"] == "abort"
    assert [reply["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")] == [
        0,
        0,
        0,
    ]


def test_a_client_that_leaves_keeps_its_slot_until_it_is_noticed(tmp_path):
    log = tmp_path / "log.jsonl"

    async def test(fleet, session):
        task = asyncio.create_task(chat(fleet, session, "gone", rid="gone"))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.sleep(0.15)
        before = fleet.stats()[0]
        await asyncio.sleep(0.3)
        return before, fleet.stats()[0]

    before, after = with_fleet(
        test, step_fixed_s=0.01, lengths="fixed:1000", disconnect_notice_s=0.3, log_path=log
    )
    (line,) = read_log(log)

    assert (before["running"], before["in_flight"]) == (1, 1)
    assert (after["running"], after["in_flight"], after["client_gone"]) == (0, 0, 1)
    assert (line["rid"], line["client_gone"], line["status"]) == ("gone", True, None)
    assert line["end_s"] - line["gone_s"] == pytest.approx(0.3, abs=0.05)
    assert 30 <= line["completion_tokens"] <= 45


def test_the_log_tells_what_happened_and_appends(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"earlier": true}\n')

    async def test(fleet, session):
        async with asyncio.TaskGroup() as group:
            for n in range(3):
                group.create_task(chat(fleet, session, f"p{n}", rid=f"r{n}"))
        await chat(fleet, session, "p0", port=1, rid="again")
        await session.get(fleet.urls[1] + "/health")
        await session.get(fleet.urls[1] + "/nothing")
        await asyncio.sleep(0.6)
        flushed = len(read_log(log))
        await session.get(fleet.urls[1] + "/ping")
        return flushed, list(fleet.ports)

    flushed, ports = with_fleet(test, ports=2, max_running=2, step_fixed_s=0.01, log_path=log)
    lines = read_log(log)[1:]
    chats = {line["rid"]: line for line in lines if line["path"] == CHAT}

    assert flushed == 7
    assert [line["path"] for line in lines[4:]] == ["/health", "/nothing", "/ping"]
    assert [line["status"] for line in lines[4:]] == [200, 404, 200]
    assert (chats["r0"]["attempt"], chats["again"]["attempt"], chats["again"]["port"]) == (1, 2, ports[1])
    assert chats["r2"]["row"] == row_of("p2")
    assert sorted(chats[f"r{n}"]["in_flight"] for n in range(3)) == [1, 2, 3]
    assert sorted(chats[f"r{n}"]["running"] for n in range(3)) == [1, 2, 2]
    last = max((chats[f"r{n}"] for n in range(3)), key=lambda line: line["end_s"])
    assert last["start_s"] - last["arrival_s"] == pytest.approx(0.16, abs=0.03)
    assert last["end_s"] - last["start_s"] == pytest.approx(0.16, abs=0.03)
    assert last["completion_tokens"] == 16
    assert abs(time.monotonic() - last["end_s"]) < 10


def test_stopping_ends_what_is_open_and_frees_the_ports(tmp_path):
    log = tmp_path / "log.jsonl"

    async def main():
        fleet = SimFleet(SimConfig(step_fixed_s=1.0, log_path=log), [0, 0])
        await fleet.start()
        async with aiohttp.ClientSession() as session:
            asked = [asyncio.create_task(chat(fleet, session, "x", port=n)) for n in (0, 1)]
            await asyncio.sleep(0.1)
            ports = fleet.ports
            await fleet.stop()
            await fleet.stop()
            await asyncio.wait(asked)
            errors = [task.exception() for task in asked]
        async with SimFleet(SimConfig(), ports) as again:
            return errors, again.ports == ports

    errors, same = asyncio.run(main())

    assert all(isinstance(error, aiohttp.ClientError) for error in errors)
    assert same
    assert [(line["status"], line["client_gone"]) for line in read_log(log)] == [(None, False)] * 2


def test_a_port_that_is_taken_is_named():
    async def main():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            number = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{number}"):
                await SimFleet(SimConfig(), [0, number]).start()

    asyncio.run(main())


@pytest.mark.parametrize("revive_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_supervisor_that_never_or_at_once_starts_a_server_again_is_refused(revive_s):
    with pytest.raises(ConfigError, match="revive_s"):
        SimConfig(revive_s=revive_s)


def test_each_port_can_have_its_own_config():
    configs = [SimConfig(model="small", model_path="org/small"), SimConfig(model="large")]

    async def main():
        async with SimFleet(configs, [0, 0]) as fleet, aiohttp.ClientSession() as session:
            names = []
            for url in fleet.urls:
                async with session.get(url + "/v1/models") as reply:
                    names.append((await reply.json())["data"][0]["id"])
                async with session.get(url + "/model_info") as reply:
                    names.append((await reply.json())["model_path"])
            return names

    assert asyncio.run(main()) == ["small", "org/small", "large", "large"]
    with pytest.raises(ConfigError, match="2 configs for 1 ports"):
        SimFleet(configs, [0])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_says_when_it_is_ready_and_ends_on_a_signal(number, tmp_path):
    log = tmp_path / "log.jsonl"
    code = (
        "import pathlib; from genpipe.sim.server import *; "
        f"serve(SimConfig(step_fixed_s=0.01, log_path=pathlib.Path({str(log)!r})), [0, 0])"
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()

        async def ask():
            async with aiohttp.ClientSession() as session:
                begun_s = time.monotonic()
                async with session.get(words[2] + "/health") as reply:
                    health = reply.status, time.monotonic() - begun_s
                return health, await post(session, words[3] + CHAT, chat_of("x"))

        health, (status, _) = asyncio.run(ask())
        os.kill(process.pid, number)
        rest, errors = process.communicate(timeout=10)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()

    assert words[:2] == ["sim-server", "ready"]
    assert health[0] == 200
    assert 0.95 <= health[1] < 1.5
    assert status == 200
    assert (process.returncode, rest, errors) == (0, "", "")
    assert [line["path"] for line in read_log(log)] == ["/health", CHAT]


def test_answers_at_once_are_cheap():
    """A thousand requests over 32 connections, client and server together, within some seconds of CPU."""

    async def test(fleet, session):
        body = json.dumps(chat_of("x" * 300)).encode()

        async def worker():
            for _ in range(32):
                await post(session, fleet.urls[0] + CHAT, body)

        begun_s = time.process_time()
        async with asyncio.TaskGroup() as group:
            for _ in range(32):
                group.create_task(worker())
        return time.process_time() - begun_s

    # The client costs more than the server here, and machines differ: the bound is a coarse one.
    assert with_fleet(test, reply_bytes=12_000) < 3.0


# ---- what newer servers have, and what a request can ask for ----


def ask(path, request_, **config):
    async def test(fleet, session):
        return await post(session, fleet.urls[0] + path, request_)

    status, reply = with_fleet(test, orders=True, **config)
    assert status == 200, reply
    return reply


USER = {"role": "user", "content": "<<reason=10 tokens=20>>"}


def test_ids_come_from_0_5_17_on_and_only_where_they_are_asked_for():
    plain = {"model": "m", "messages": [USER]}
    asked = {**plain, "return_token_ids": True, "n": 2}

    newer = ask(CHAT, asked)["choices"]
    assert [len(choice["token_ids"]) for choice in newer] == [30, 30]
    assert len(newer[0]["prompt_token_ids"]) > 0
    assert "token_ids" not in ask(CHAT, plain)["choices"][0]
    assert "token_ids" not in ask(CHAT, asked, snapshot_loads=False)["choices"][0]
    ids = {"model": "m", "prompt": [5, 6], "return_token_ids": True}
    assert ask("/v1/completions", ids)["choices"][0]["prompt_token_ids"] == [5, 6]


def test_prompt_ids_of_generate_come_from_0_5_17_on_and_ids_of_answers_always():
    asked = {"input_ids": [5, 6], "return_prompt_token_ids": True}

    assert ask("/generate", asked)["prompt_token_ids"] == [5, 6]
    older = ask("/generate", asked, snapshot_loads=False)
    assert "prompt_token_ids" not in older
    assert len(older["output_ids"]) == 16


@pytest.mark.parametrize(("newer", "begins"), [(True, True), (False, False)])
def test_each_of_several_samples_has_an_id_of_its_own(newer, begins):
    rid = "f" * 32
    generated = ask("/generate", {"text": "x", "sampling_params": {"n": 2}, "rid": rid}, snapshot_loads=newer)
    chat = ask(CHAT, chat_of("x", n=2, rid=rid), snapshot_loads=newer)
    ids = [*(item["meta_info"]["id"] for item in generated), chat["id"]]

    assert len(set(ids)) == 3
    assert [given.startswith(rid + "_") for given in ids] == [begins] * 3
    assert ask(CHAT, chat_of("x", rid=rid), snapshot_loads=newer)["id"] == rid


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        (
            {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}, "reasoning_effort": "none"},
            True,
        ),
        ({"chat_template_kwargs": {"other": False}}, True),
    ],
)
def test_thinking_can_be_switched_off(fields, thinks):
    reply = ask(CHAT, {"model": "m", "messages": [USER], **fields})

    assert (reply["choices"][0]["message"]["reasoning_content"] is not None) is thinks
    assert reply["usage"]["completion_tokens"] == (30 if thinks else 20)


def test_thinking_that_is_not_taken_apart_stands_in_the_text_between_its_marks():
    whole = text_of(ask(CHAT, {"model": "m", "messages": [USER], "separate_reasoning": False}))
    cut = text_of(ask(CHAT, {"model": "m", "messages": [USER], "separate_reasoning": False, "max_tokens": 5}))

    assert whole.startswith("<think>\nthinking ")
    assert "\n</think>\n\necho " in whole
    assert cut.startswith("<think>\nthinking ")
    assert "</think>" not in cut


def test_tools_are_called_until_one_has_answered():
    user = {"role": "user", "content": "<<tools=look,find>>"}
    reply = ask(CHAT, {"model": "m", "messages": [user]})
    message = reply["choices"][0]["message"]
    result = {"role": "tool", "content": "4", "tool_call_id": message["tool_calls"][0]["id"]}
    after = ask(CHAT, {"model": "m", "messages": [user, message, result]})

    assert [call["function"]["name"] for call in message["tool_calls"]] == ["look", "find"]
    assert (message["content"], reply["choices"][0]["finish_reason"]) == (None, "tool_calls")
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert text_of(after).startswith("echo ")
    assert '"name": "find"' in ask("/generate", {"text": "<<tools=look,find>>"})["text"]


def test_log_probabilities_can_be_nested_deeply():
    async def test(fleet, session):
        async with session.post(fleet.urls[0] + CHAT, json=chat_of("<<deep=2000>>")) as reply:
            return await reply.read()

    body = with_fleet(test, orders=True)

    assert b'"logprobs":' + b"[" * 2000 + b"]" * 2000 + b"," in body
