"""HTTP to servers, over real sockets: what is sent, what is made of each reply, and who is blamed."""

import asyncio
import gzip
import json
import logging
import re
import shutil
import socket
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from aiohttp.abc import ResolveResult

from genpipe.core.errors import ConfigError, FaultKind, PromptFault, ServerFault
from genpipe.core.values import Prompt, Reply, Start
from genpipe.edges import strict_json
from genpipe.edges.answers import examine
from genpipe.edges.connections import Names
from genpipe.edges.replies import REPLY_BYTES_MAX
from genpipe.edges.requests import Bodies
from genpipe.edges.sglang import IDLE_RACE_S, Endpoint, Monotonic, SglangTransport, open_session
from genpipe.sim.orders import parse_mode
from genpipe.sim.server import SimConfig, SimFleet
from tests.edges.raw_server import (
    GOOD,
    KEY,
    LOOPS,
    RawServer,
    always,
    free_port,
    http,
    on,
    reset,
    unanswered,
    until,
)

# ---- helpers ----


def start_of(text="hello", *, attempt=1, server=0):
    payload = strict_json.dumps([{"role": "user", "content": text}])
    return Start(
        attempt=attempt, prompt=Prompt(index=0, payload=payload), server=server, tries=1, started_s=0.0
    )


def transport_to(*urls, members=None, timeout_s=None, **endpoint):
    endpoints = [Endpoint(url=url, **endpoint) for url in urls]
    bodies = Bodies(model="m", extra_body=members)
    return SglangTransport(endpoints, bodies=bodies, timeout_s=timeout_s)


def with_fleet(test, *, timeout_s=None, members=None, loop=None, **config):
    """Run ``test(transport, fleet)`` against a simulated server that obeys orders."""

    async def main():
        settings = SimConfig(**{"health_delay_s": 0.0, "orders": True, **config})
        async with (
            SimFleet(settings, [0]) as fleet,
            transport_to(*fleet.urls, timeout_s=timeout_s, members=members) as transport,
        ):
            return await test(transport, fleet)

    return on(main, loop)


def with_raw(act, test, *, timeout_s=None, members=None, loop=None, **endpoint):
    """Run ``test(transport, server)`` against a hand-written server."""

    async def main():
        async with (
            RawServer(act) as server,
            transport_to(server.url, timeout_s=timeout_s, members=members, **endpoint) as transport,
        ):
            return await test(transport, server)

    return on(main, loop)


def fault_of(act, *, start=None, kind=ServerFault, **options):
    """The fault that one request to a hand-written server ends with."""

    async def test(transport, server):
        sent = start or start_of()
        with pytest.raises(kind) as caught:
            transport.examine(sent, await transport.generate(sent))
        return caught.value

    return with_raw(act, test, **options)


def ordered(orders, **options):
    """The reply to a prompt with these orders."""

    async def test(transport, fleet):
        start = start_of(f"Do. <<{orders}>>")
        return transport.examine(start, await transport.generate(start))

    return with_fleet(test, **options)


def reply_of(data):
    return Reply(body=data if isinstance(data, bytes) else json.dumps(data).encode(), wire_s=3.0, last_s=4.0)


# ---- what is sent ----


def test_the_body_holds_messages_model_members_and_an_id_of_fixed_width_in_this_order():
    async def test(transport, server):
        for attempt in (1, 2, 10**12):
            await transport.generate(start_of(attempt=attempt))
        return server.requests

    requests = with_raw(always(http(GOOD)), test, members={"temperature": 0.5, "stop": ["é"]})
    shape = re.compile(
        r'\{"messages":\[\{"role":"user","content":"hello"\}\],"model":"m","temperature":0\.5,"stop":\["é"\],'
        r'"rid":"([0-9a-f]{32})"\}'
    )
    matches = [shape.fullmatch(body.decode()) for _, body, _ in requests]
    rids = [match[1] for match in matches if match]

    assert None not in matches
    assert len(set(rids)) == 3
    assert len({rid[:16] for rid in rids}) == 1


def test_two_transports_never_use_the_same_ids():
    async def test(transport, server):
        async with transport_to(server.url) as other:
            for sender in (transport, other):
                await sender.generate(start_of())
        return [json.loads(body)["rid"] for _, body, _ in server.requests]

    first, second = with_raw(always(http(GOOD)), test)

    assert first[:16] != second[:16]


def test_a_server_of_another_kind_gets_no_id():
    async def test(transport, server):
        await transport.generate(start_of())
        return json.loads(server.requests[0][1])

    body = with_raw(always(http(GOOD)), test, takes_rid=False, members={"max_tokens": 7})

    assert body == {"messages": [{"role": "user", "content": "hello"}], "model": "m", "max_tokens": 7}


def test_the_head_names_json_and_the_key_and_nothing_of_this_machine():
    async def test(transport, server):
        await transport.generate(start_of())
        return server.requests[0][0]

    head = with_raw(always(http(GOOD, Set_Cookie="a=b")), test, api_key=f"{KEY}\n")
    lines = dict(line.lower().split(": ", 1) for line in head.strip().split("\r\n")[1:])

    assert head.startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    assert lines["content-type"] == "application/json"
    assert lines["authorization"] == f"bearer {KEY}"
    assert "cookie" not in lines


def test_without_a_key_no_key_is_sent():
    async def test(transport, server):
        await transport.generate(start_of())
        return server.requests[0][0]

    assert "authorization" not in with_raw(always(http(GOOD)), test).lower()


@pytest.mark.parametrize("key", ["", " ", "a\nb", "a\r\nX: y", "ключ", "a\x00b"])
def test_a_key_that_no_header_can_carry_is_refused_without_being_shown(key):
    with pytest.raises(ConfigError) as caught:
        Endpoint(url="http://a:1", api_key=key)

    assert str(caught.value).startswith("server http://a:1: its key ")
    assert not key.strip() or key not in str(caught.value)


def test_an_endpoint_does_not_show_its_key():
    assert KEY not in repr(Endpoint(url="http://a:1", api_key=KEY))


def test_a_prompt_of_5_mb_is_sent_whole():
    text = "päng " * 1_000_000

    async def test(transport, server):
        await transport.generate(start_of(text))
        return json.loads(server.requests[0][1])

    assert with_raw(always(http(GOOD)), test)["messages"][0]["content"] == text


# ---- instants ----


@LOOPS
def test_a_reply_delayed_by_200_ms_spent_them_on_the_wire(loop):
    async def test(transport, fleet):
        before_s = Monotonic().now_s()
        reply = await transport.generate(start_of("<<delay=0.2>>"))
        return before_s, reply, Monotonic().now_s()

    before_s, reply, after_s = with_fleet(test, loop=loop)

    assert before_s <= reply.wire_s < reply.last_s <= after_s
    assert 0.2 <= reply.last_s - reply.wire_s < 0.35


def test_the_last_byte_counts_and_not_the_first():
    async def act(reader, writer, head, number):
        data = http(GOOD)
        writer.write(data[:-5])
        await asyncio.sleep(0.2)
        return data[-5:]

    async def test(transport, server):
        return await transport.generate(start_of())

    reply = with_raw(act, test)

    assert 0.2 <= reply.last_s - reply.wire_s < 0.35


def test_time_to_connect_is_not_time_on_the_wire():
    """With its queue of connections full a server does not take the first try; the next comes after 1 s."""

    async def main():
        with unanswered() as (url, listener):
            before_s = time.monotonic()
            async with transport_to(url) as transport:
                sending = asyncio.ensure_future(transport.generate(start_of()))
                await asyncio.sleep(0.2)
                async with RawServer(always(http(GOOD)), sock=listener):
                    return before_s, await sending

    before_s, reply = on(main)

    assert reply.wire_s - before_s > 0.5
    assert reply.last_s - reply.wire_s < 0.3


# ---- statuses ----


@pytest.mark.parametrize("status", [400, 406, 413, 415, 422])
def test_a_refused_prompt_is_to_blame_itself(status):
    body = {"object": "error", "message": "too long", "type": "BadRequest", "param": None, "code": status}
    fault = fault_of(always(http(body, f"{status} No")), kind=PromptFault)

    assert str(fault) == f"{status}: too long"
    assert fault.status == status
    assert fault.wire_s is not None


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (429, FaultKind.BUSY),
        (503, FaultKind.BUSY),
        (401, FaultKind.MISROUTED),
        (402, FaultKind.MISROUTED),
        (403, FaultKind.MISROUTED),
        (404, FaultKind.MISROUTED),
        (405, FaultKind.MISROUTED),
        (407, FaultKind.MISROUTED),
        (301, FaultKind.MISROUTED),
        (302, FaultKind.MISROUTED),
        (304, FaultKind.MISROUTED),
        (307, FaultKind.MISROUTED),
        (500, FaultKind.BROKEN),
        (502, FaultKind.BROKEN),
        (504, FaultKind.BROKEN),
        (408, FaultKind.BROKEN),
        (204, FaultKind.BROKEN),
        (206, FaultKind.BROKEN),
    ],
)
def test_a_server_that_cannot_or_will_not_is_to_blame_for_it(status, kind):
    body = b"" if status in (204, 304) else b'{"error":"Why"}'
    data = http(body, f"{status} Reason", Location="http://127.0.0.1:1/elsewhere")
    fault = fault_of(always(data))

    assert fault.kind is kind
    assert fault.status == status
    assert str(fault) == f"{status}: {'Why' if body else 'Reason'}"
    assert fault.wire_s is not None


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        (" 0 ", 0.0),
        ("1.5", 1.5),
        (None, None),
        ("Wed, 21 Oct 2026 07:28:00 GMT", None),
        ("-3", None),
        ("nan", None),
        ("1e9", None),
        ("9" * 400, None),
        ("²", None),
    ],
)
def test_retry_after_is_taken_where_it_is_a_number_of_seconds(header, seconds):
    data = http({"error": "busy"}, "429 Too Many Requests", Retry_After=header)

    assert fault_of(always(data)).retry_after_s == seconds


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"object": "error", "message": "flat", "code": 500}, "flat"),
        ({"error": {"message": "nested"}}, "nested"),
        ({"error": "text"}, "text"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"detail": [{"loc": ["body"], "msg": "missing"}]}, '[{"loc":["body"],"msg":"missing"}]'),
        (b"Internal Server Error\n", "Internal Server Error"),
        (b"", "Reason"),
        (b"null", "Reason"),
        ({}, "Reason"),
        ({"error": {}}, "Reason"),
        ({"error": None, "message": None}, "Reason"),
        ([], "[]"),
        (b'{"message":"a\\ud800b"}', "a\N{REPLACEMENT CHARACTER}b"),
        (b"\xff\xfe bytes", "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} bytes"),
        ({"message": "two\r\nlines\tand \x1b[2J a screen"}, "two lines and [2J a screen"),
        ({"message": "x" * 2_000_000}, "x" * 300),
    ],
)
def test_a_server_s_own_words_are_one_line_whatever_shape_they_come_in(body, message):
    assert str(fault_of(always(http(body, "500 Reason")))) == f"500: {message}"


def test_a_reason_that_is_not_text_can_still_be_written_down():
    fault = fault_of(always(b"HTTP/1.1 500 caf\xe9\r\nContent-Length: 0\r\n\r\n"))

    assert str(fault).startswith("500: caf")
    str(fault).encode()


def test_an_error_in_many_pieces_is_read_to_its_end():
    async def act(reader, writer, head, number):
        data = http({"object": "error", "message": "in pieces"}, "400 Bad Request")
        for place in range(0, len(data), 20):
            writer.write(data[place : place + 20])
            await asyncio.sleep(0.002)
        return b""

    assert str(fault_of(act, kind=PromptFault)) == "400: in pieces"


def test_a_status_counts_though_its_body_is_cut_short():
    async def act(reader, writer, head, number):
        writer.write(http(b"{", "400 Bad Request", Content_Length=500))
        await writer.drain()

    assert str(fault_of(act, kind=PromptFault)) == "400: Bad Request"


def test_the_key_is_not_in_an_error_though_the_server_repeats_it():
    for data in (
        http({"error": {"message": f"Incorrect API key: {KEY}"}}, "401 Unauthorized"),
        http({"error": {"message": f"Incorrect API key: {KEY}"}}),
        http(f"Bearer {KEY}".encode(), "400 Bad Request"),
    ):
        fault = fault_of(always(data), kind=(ServerFault, PromptFault), api_key=KEY)

        assert KEY not in str(fault)
        assert "[key]" in str(fault)
        assert fault.__cause__ is None
        assert fault.__suppress_context__


# ---- a 200 that is no answer ----


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        ("body=error200", "200 with an error: "),
        ("body=nochoices", "200 without choices"),
        ("body=html", "200 with a body that is not JSON: "),
        ("finish=abort tokens=3", "200 with finish_reason abort"),
    ],
)
def test_a_200_that_is_no_answer_is_the_server_s_fault(orders, words):
    with pytest.raises(ServerFault) as caught:
        ordered(orders)

    assert str(caught.value).startswith(words)
    assert caught.value.kind is FaultKind.BROKEN
    assert caught.value.wire_s is not None


@pytest.mark.parametrize("delay", ["5", "0.001 tokens=100000"])
def test_a_request_aborted_while_it_runs_is_no_answer(delay):
    async def test(transport, fleet):
        start = start_of(f"<<delay={delay}>>")
        sending = asyncio.ensure_future(transport.generate(start))
        await until(lambda: fleet.stats()[0]["in_flight"])
        async with (
            open_session() as session,
            session.post(f"{fleet.urls[0]}/abort_request", data=b'{"abort_all":true}'),
        ):
            pass
        transport.examine(start, await sending)

    with pytest.raises(ServerFault, match=r"^200 with finish_reason abort$"):
        with_fleet(test, step_fixed_s=0.01)


def test_a_request_aborted_in_the_queue_is_no_answer():
    aborted = {
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": None}, "finish_reason": "abort"}
        ],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }

    with pytest.raises(ServerFault, match=r"^200 with finish_reason abort$"):
        examine(reply_of(aborted))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"17",
        b"{",
        b'{"choices":[{"message":{"content":"a',
        b"<html></html>",
        b"\xff\xfe",
        b"\x1f\x8b\x08",
        b"data: {}\n\ndata: [DONE]\n",
        b"[" * 100_000,
        b'{"choices":[' * 5000,
        {},
        {"choices": None},
        {"choices": []},
        {"choices": {}},
        {"choices": {"0": {"message": {"content": "x"}}}},
        {"choices": "text"},
        {"choices": [None]},
        {"choices": ["text"]},
        {"choices": [[]]},
        {"choices": [{}]},
        {"choices": [{"message": None}]},
        {"choices": [{"message": "text"}]},
        {"choices": [{"message": ["text"]}]},
        {"choices": [{"delta": {"content": "x"}}]},
        {"choices": [GOOD["choices"][0], {"message": None}]},
        {"choices": [GOOD["choices"][0], {"message": {}, "finish_reason": "abort"}]},
        {"choices": [{"message": {"content": "x"}, "finish_reason": {"type": "abort"}}]},
        {"error": {"message": "no"}},
        {"error": "no", **GOOD},
        {"object": "error", "message": "no", **GOOD},
    ],
)
def test_of_any_other_shape_it_is_the_server_s_fault_in_one_line(body):
    with pytest.raises(ServerFault) as caught:
        examine(reply_of(body))

    assert caught.value.kind is FaultKind.BROKEN
    assert caught.value.status == 200
    assert caught.value.wire_s == 3.0
    assert str(caught.value).startswith("200 with")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


# ---- a 200 that is one ----


def test_an_answer_is_taken_with_all_that_the_server_says_of_it():
    answer = ordered("tokens=25")

    assert answer.response["content"].startswith("echo ")
    assert answer.response.keys() == {"content", "reasoning_content", "tool_calls"}
    assert answer.finish_reason == "stop"
    assert answer.output_tokens == answer.usage["completion_tokens"] == 25
    assert answer.model == "m"
    assert answer.flags == ()
    assert answer.size_bytes > 100


@pytest.mark.parametrize(("orders", "usage"), [("usage=none", None), ("usage=null", None), ("usage=zero", 0)])
def test_unknown_usage_is_unknown_and_not_zero(orders, usage):
    answer = ordered(f"tokens=25 {orders}")

    assert answer.output_tokens is None
    assert (answer.usage or {}).get("completion_tokens") == usage
    assert answer.response["content"].startswith("echo ")


@pytest.mark.parametrize("tokens", [None, "25", 25.0, True, -1, [], {}, 10**30])
def test_a_count_of_tokens_that_is_none_is_unknown(tokens):
    answer = examine(reply_of({**GOOD, "usage": {"completion_tokens": tokens}}))

    assert answer.output_tokens is None


@pytest.mark.parametrize("usage", [[], "25", 25, True])
def test_usage_of_another_shape_is_none(usage):
    answer = examine(reply_of({**GOOD, "usage": usage}))

    assert answer.usage is None
    assert answer.output_tokens is None


@pytest.mark.parametrize(
    ("orders", "flags", "reasoning"),
    [
        ("reason=300 content=empty finish=length", ("empty", "cut", "unclosed_think"), True),
        ("reason=300 content=null finish=stop", ("empty",), True),
        ("reason=50 tokens=20", (), True),
        ("tokens=20 finish=length", ("cut",), False),
        ("content=empty", ("empty",), False),
        ("tokens=20 finish=null", (), False),
    ],
)
def test_empty_and_cut_answers_are_flagged_and_thinking_is_kept(orders, flags, reasoning):
    answer = ordered(orders)

    assert answer.flags == flags
    assert bool(answer.response["reasoning_content"]) is reasoning


def test_a_call_of_a_tool_is_not_empty():
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    message = {"content": None, "tool_calls": calls}
    answer = examine(reply_of({"choices": [{"message": message, "finish_reason": "tool_calls"}]}))

    assert answer.flags == ()
    assert answer.response["tool_calls"] == calls


def test_several_samples_become_a_list_and_one_that_was_cut_speaks_for_all():
    choices = [
        {"message": {"content": "a"}, "finish_reason": "stop"},
        {"message": {"content": "b"}, "finish_reason": "length"},
    ]
    answer = examine(reply_of({"choices": choices, "usage": {"completion_tokens": 9}}))

    assert [part["content"] for part in answer.response] == ["a", "b"]
    assert answer.finish_reason == "length"
    assert answer.flags == ("cut",)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("stop", "stop"),
        (None, None),
        ({"type": "length", "length": 5}, "length"),
        (7, None),
        ([], None),
        ({}, None),
    ],
)
def test_a_finish_reason_is_text_or_none(given, taken):
    choices = [{"message": {"content": "a"}, "finish_reason": given}]

    assert examine(reply_of({"choices": choices})).finish_reason == taken


def test_what_json_does_not_know_is_taken_as_far_as_it_can_be():
    choices = b'[{"message":{"content":"a\\ud800b","score":NaN}}]'
    body = b'{"choices":' + choices + b',"usage":{"completion_tokens":NaN},"x":1e999}'
    answer = examine(reply_of(body))

    assert answer.response["content"] == "a\N{REPLACEMENT CHARACTER}b"
    assert answer.output_tokens is None
    strict_json.dumps(answer.response)


# ---- bytes ----


def test_a_reply_of_5_mb_comes_whole():
    answer = ordered("huge=5000000")

    assert answer.size_bytes == 5_000_000


def test_characters_cut_in_transit_are_put_together_again():
    answer = ordered("tokens=200 split_utf8=1")

    assert "\N{REPLACEMENT CHARACTER}" not in answer.response["content"]
    assert not answer.response["content"].isascii()


def test_a_replacement_character_of_the_server_s_own_is_kept():
    assert "\N{REPLACEMENT CHARACTER}" in ordered("content=replacement tokens=20").response["content"]


def test_a_reply_without_a_length_comes_whole():
    text = "π" * 100_000
    body = json.dumps({"choices": [{"message": {"content": text}}]}, ensure_ascii=False).encode()

    async def act(reader, writer, head, number):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for place in range(0, len(body), 9999):
            piece = body[place : place + 9999]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        return b"0\r\n\r\n"

    async def test(transport, server):
        start = start_of()
        return transport.examine(start, await transport.generate(start))

    assert with_raw(act, test).response["content"] == text


def test_a_packed_reply_is_unpacked():
    async def test(transport, server):
        start = start_of()
        return transport.examine(start, await transport.generate(start))

    data = http(gzip.compress(json.dumps(GOOD).encode()), Content_Encoding="gzip")

    assert with_raw(always(data), test).response["content"] == "hi"


def test_a_packed_reply_that_cannot_be_unpacked_is_the_server_s_fault():
    fault = fault_of(always(http(b"no gzip at all", Content_Encoding="gzip")))

    assert fault.kind is FaultKind.BROKEN


def test_a_reply_longer_than_any_answer_is_not_read():
    async def act(reader, writer, head, number):
        writer.write(http(b"{", Content_Length=REPLY_BYTES_MAX + 1))
        await reader.read()

    fault = fault_of(act)

    assert str(fault) == f"200 with a body of more than {REPLY_BYTES_MAX} bytes"
    assert fault.kind is FaultKind.BROKEN


# ---- no reply ----


@LOOPS
def test_a_refused_connection_is_nobody_s_fault_but_the_server_s(loop):
    async def main():
        async with transport_to(f"http://127.0.0.1:{free_port()}") as transport:
            await transport.generate(start_of())

    with pytest.raises(ServerFault) as caught:
        on(main, loop)

    assert caught.value.kind is FaultKind.UNREACHABLE
    assert caught.value.wire_s is None
    assert "refused" in str(caught.value)


def test_a_name_that_cannot_be_resolved_is_named():
    async def main():
        async with transport_to("http://no-such-host.invalid:30000") as transport:
            await transport.generate(start_of())

    with pytest.raises(ServerFault, match=r"^the name no-such-host\.invalid cannot be resolved$") as caught:
        on(main)

    assert caught.value.kind is FaultKind.UNREACHABLE
    assert caught.value.wire_s is None


@LOOPS
def test_a_reset_before_any_byte_of_a_reply_may_be_a_server_that_died_of_the_prompt(loop):
    async def act(reader, writer, head, number):
        reset(writer)

    fault = fault_of(act, loop=loop)

    assert fault.kind is FaultKind.LOST
    assert fault.wire_s is not None
    assert "reset" in str(fault)


@LOOPS
def test_and_so_may_a_close_be(loop):
    async def act(reader, writer, head, number):
        return None

    fault = fault_of(act, loop=loop)

    assert fault.kind is FaultKind.LOST
    assert fault.wire_s is not None
    assert str(fault) == "closed the connection without a reply"


@LOOPS
@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize(
    "data",
    [
        http(b'{"choices":', Content_Length=500),
        b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n99\r\n{"choices"',
        http(gzip.compress(bytes(99))[:20], Content_Encoding="gzip", Content_Length=500),
    ],
    ids=["length", "chunked", "gzip"],
)
def test_a_reply_that_breaks_off_is_lost_with_its_connection(loop, how, data):
    async def act(reader, writer, head, number):
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(0.02)
        if how == "reset":
            reset(writer)

    fault = fault_of(act, loop=loop)

    assert fault.kind is FaultKind.LOST
    assert str(fault) == "the reply was cut short"


def test_a_simulated_server_cuts_a_reply_short_too():
    with pytest.raises(ServerFault, match=r"^the reply was cut short$") as caught:
        ordered("body=truncated")

    assert caught.value.kind is FaultKind.LOST


@pytest.mark.parametrize(
    "data",
    [
        http(b"no gzip at all", Content_Encoding="gzip"),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}zz",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n{}",
    ],
)
@pytest.mark.parametrize("closes", [False, True])
def test_a_reply_that_is_damaged_is_a_broken_one_though_the_connection_ends_with_it(data, closes):
    async def act(reader, writer, head, number):
        writer.write(data)
        await writer.drain()
        if not closes:
            await reader.read()

    fault = fault_of(act)

    assert fault.kind is FaultKind.BROKEN
    assert str(fault).isprintable()


@pytest.mark.parametrize(
    "data", [b"SSH-2.0-OpenSSH_9.6\r\n", b"\x15\x03\x01\x00\x02\x02\x16", b"HTTP/9.9 x y\r\n\r\n"]
)
def test_what_is_not_http_is_the_server_s_fault(data):
    async def act(reader, writer, head, number):
        writer.write(data)
        await writer.drain()

    fault = fault_of(act)

    assert str(fault).isprintable()
    assert len(str(fault)) < 400


@pytest.mark.slow
def test_a_server_that_takes_no_connections_is_given_up_after_10_s():
    async def main():
        with unanswered() as (url, _):
            async with transport_to(url, timeout_s=30) as transport:
                await transport.generate(start_of())

    began_s = time.monotonic()
    with pytest.raises(ServerFault, match=r"^cannot connect within 10 s$") as caught:
        on(main)

    assert caught.value.kind is FaultKind.UNREACHABLE
    assert caught.value.wire_s is None
    assert 9.5 < time.monotonic() - began_s < 14


# ---- the time limit ----


@LOOPS
@pytest.mark.parametrize("orders", ["hang=headers", "hang=body", "delay=3"])
def test_the_time_limit_ends_the_prompt_and_names_the_setting(orders, loop):
    began_s = time.monotonic()
    with pytest.raises(PromptFault) as caught:
        ordered(orders, timeout_s=0.2, loop=loop)

    assert str(caught.value) == "no answer within request.timeout_s = 0.2 s"
    assert caught.value.status is None
    assert caught.value.wire_s is not None
    assert began_s < caught.value.wire_s < began_s + 0.2
    assert time.monotonic() - began_s < 1.5


def test_a_prompt_that_was_never_sent_is_not_to_blame_for_the_time():
    async def main():
        with unanswered() as (url, _):
            async with transport_to(url, timeout_s=0.2) as transport:
                await transport.generate(start_of())

    with pytest.raises(ServerFault, match=r"^no connection within request\.timeout_s = 0\.2 s$") as caught:
        on(main)

    assert caught.value.kind is FaultKind.UNREACHABLE


def test_without_a_limit_none_of_the_library_s_applies():
    async def main():
        async with open_session() as session:
            return session.timeout

    limits = on(main)

    assert limits.total is None
    assert limits.sock_read is None
    assert limits.sock_connect == 10


# ---- connections ----


@LOOPS
def test_a_kept_connection_that_was_just_closed_costs_nobody_anything(loop):
    async def act(reader, writer, head, number):
        return None if number == 1 else http(GOOD)

    async def test(transport, server):
        replies = [await transport.generate(start_of(attempt=attempt)) for attempt in (1, 2, 3)]
        return replies, server.requests, transport.reconnects

    replies, requests, reconnects = with_raw(act, test, loop=loop)
    rids = [json.loads(body)["rid"] for _, body, _ in requests]

    assert [json.loads(reply.body) for reply in replies] == [GOOD] * 3
    assert reconnects == [1]
    # The second sending has a connection of its own, for others may be just as stale.
    assert [connection for *_, connection in requests] == [0, 0, 1, 2]
    # A server that knows the first sending's id would call it a duplicate, and the prompt would be blamed.
    assert len(set(rids)) == 4
    assert {len(rid) for rid in rids} == {32}


@LOOPS
@pytest.mark.parametrize("size", [10, 3_000_000])
def test_so_it_is_with_a_kept_connection_that_was_reset(loop, size):
    async def act(reader, writer, head, number):
        if number == 1:
            reset(writer)
            return None
        return http(GOOD)

    async def test(transport, server):
        for attempt in (1, 2):
            await transport.generate(start_of("x" * size, attempt=attempt))
        return server.requests, transport.reconnects

    requests, reconnects = with_raw(act, test, loop=loop)

    assert reconnects == [1]
    assert len(requests) == 3


def test_wire_time_is_that_of_the_second_sending():
    async def act(reader, writer, head, number):
        if number == 1:
            await asyncio.sleep(0.2)
            return None
        return http(GOOD)

    async def test(transport, server):
        await transport.generate(start_of(attempt=1))
        return await transport.generate(start_of(attempt=2))

    reply = with_raw(act, test)

    assert reply.last_s - reply.wire_s < 0.1


@LOOPS
def test_the_second_sending_is_the_last(loop):
    async def act(reader, writer, head, number):
        return None if number else http(GOOD)

    async def test(transport, server):
        await transport.generate(start_of(attempt=1))
        with pytest.raises(ServerFault) as caught:
            await transport.generate(start_of(attempt=2))
        return caught.value, len(server.requests), transport.reconnects

    fault, requests, reconnects = with_raw(act, test, loop=loop)

    assert fault.kind is FaultKind.LOST
    assert requests == 3
    assert reconnects == [1]


def test_a_fresh_connection_that_is_closed_is_not_tried_again():
    async def act(reader, writer, head, number):
        return None

    async def test(transport, server):
        for attempt in (1, 2):
            with pytest.raises(ServerFault):
                await transport.generate(start_of(attempt=attempt))
        return len(server.requests), transport.reconnects

    assert with_raw(act, test) == (2, [0])


@LOOPS
@pytest.mark.parametrize(
    "data",
    [b"HTTP/1.1 20", b"HTTP/1.1 200 OK\r\nContent-Le", b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"a'],
)
def test_a_kept_connection_that_dies_in_a_reply_is_not_tried_again(data, loop):
    async def act(reader, writer, head, number):
        if number == 0:
            return http(GOOD)
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(0.02)
        return None

    async def test(transport, server):
        await transport.generate(start_of(attempt=1))
        with pytest.raises(ServerFault):
            await transport.generate(start_of(attempt=2))
        return len(server.requests), transport.reconnects

    assert with_raw(act, test, loop=loop) == (2, [0])


def test_a_server_that_is_gone_when_the_request_is_sent_again_was_lost_with_the_first():
    async def act(reader, writer, head, number):
        if number == 0:
            return http(GOOD)
        servers[0]._server.close()
        return None

    servers: list[RawServer] = []

    async def test(transport, server):
        servers.append(server)
        await transport.generate(start_of(attempt=1))
        before_s = time.monotonic()
        with pytest.raises(ServerFault) as caught:
            await transport.generate(start_of(attempt=2))
        return before_s, caught.value

    before_s, fault = with_raw(act, test)

    assert fault.kind is FaultKind.LOST
    assert "refused" in str(fault)
    assert before_s <= fault.wire_s <= time.monotonic()


@pytest.mark.slow
@LOOPS
def test_a_kept_connection_that_breaks_seconds_after_the_request_was_not_idle(loop):
    """A prompt that kills servers takes some seconds to; sent again it would kill whoever comes next."""

    async def act(reader, writer, head, number):
        if number == 0:
            return http(GOOD)
        await asyncio.sleep(IDLE_RACE_S + 0.1)
        return None

    async def test(transport, server):
        await transport.generate(start_of(attempt=1))
        with pytest.raises(ServerFault) as caught:
            await transport.generate(start_of(attempt=2))
        return caught.value.kind, len(server.requests), transport.reconnects

    assert with_raw(act, test, loop=loop) == (FaultKind.LOST, 2, [0])


@LOOPS
def test_servers_that_close_idle_connections_lose_no_request(loop):
    """Idle for about as long as the server allows, some connections are closed just as they are used."""

    async def test(transport, fleet):
        await fleet.change_mode(fleet.ports[0], parse_mode({"mode": "keepalive", "value": 0.1}))
        replies = 0
        for round_ in range(8):
            pause_s = 0.094 + 0.0015 * round_
            numbers = range(20 * round_, 20 * round_ + 20)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(transport.generate(start_of("a", attempt=n + 1))) for n in numbers]
            replies += sum(task.result().body.startswith(b"{") for task in tasks)
            await asyncio.sleep(pause_s)
        return replies

    assert with_fleet(test, loop=loop) == 160


def test_a_server_that_keeps_no_connection_gets_a_new_one_for_each_request():
    async def test(transport, server):
        for attempt in range(1, 4):
            await transport.generate(start_of(attempt=attempt))
        return [connection for *_, connection in server.requests], transport.reconnects

    assert with_raw(always(http(GOOD, Connection="close")), test) == ([0, 1, 2], [0])


@pytest.mark.slow
def test_no_request_goes_out_on_a_connection_that_was_idle_for_4_s():
    async def test(transport, server):
        for pause_s in (3.0, 4.3, 0.0):
            await transport.generate(start_of())
            await asyncio.sleep(pause_s)
        return [connection for *_, connection in server.requests]

    assert with_raw(always(http(GOOD)), test) == [0, 0, 1]


def test_more_than_a_hundred_requests_are_open_at_once():
    async def test(transport, fleet):
        starts = [start_of(f"{number} <<delay=0.5>>", attempt=number + 1) for number in range(250)]
        async with asyncio.TaskGroup() as group:
            for start in starts:
                group.create_task(transport.generate(start))
        return fleet.stats()[0]

    stats = with_fleet(test)

    assert stats["in_flight_max"] == 250
    assert stats["answered"] == 250


@LOOPS
def test_a_server_sees_that_the_client_of_a_cancelled_request_has_gone(loop):
    async def test(transport, fleet):
        sending = asyncio.ensure_future(transport.generate(start_of("<<hang=headers>>")))
        await asyncio.sleep(0.1)
        assert fleet.stats()[0]["in_flight"] == 1
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await until(lambda: fleet.stats()[0]["client_gone"])
        return sending.cancelled(), fleet.stats()[0]["client_gone"]

    assert with_fleet(test, loop=loop) == (True, 1)


@LOOPS
@pytest.mark.parametrize("timeout_s", [None, 60])
@pytest.mark.parametrize(
    "sent", [b"", http(b"{", Content_Length=50), http(b"{", "400 No", Content_Length=50)]
)
def test_a_cancelled_request_closes_its_connection_however_far_the_reply_is(loop, sent, timeout_s):
    async def act(reader, writer, head, number):
        writer.write(sent)
        await writer.drain()
        assert await reader.read() == b""
        raise ConnectionError

    async def test(transport, server):
        sending = asyncio.ensure_future(transport.generate(start_of()))
        await asyncio.sleep(0.05)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        # The server's own half of this takes a turn or two of the same loop.
        async with asyncio.timeout(0.1):
            await server.gone.wait()
        return sending.cancelled()

    assert with_raw(act, test, loop=loop, timeout_s=timeout_s)


@LOOPS
@pytest.mark.parametrize("timeout_s", [None, 0.2])
def test_what_a_stopped_server_has_not_read_of_a_given_up_request_is_never_sent(loop, timeout_s):
    """Else it would find the whole request when it goes on, and the connection would stay open until then."""
    size, came = 30_000_000, 0
    ended, may_read = asyncio.Event(), asyncio.Event()

    async def serve(reader, writer):
        nonlocal came
        writer.transport.pause_reading()
        await may_read.wait()
        writer.transport.resume_reading()
        try:
            while data := await reader.read(1 << 20):
                came += len(data)
        except ConnectionError:
            pass
        ended.set()
        writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with transport_to(url, timeout_s=timeout_s) as transport:
            sending = asyncio.ensure_future(transport.generate(start_of("x" * size)))
            await asyncio.sleep(0.1)
            if timeout_s is None:
                sending.cancel()
            await asyncio.wait([sending], timeout=2)
            may_read.set()
            async with asyncio.timeout(2):
                await ended.wait()
            server.close()
            await server.wait_closed()
            return sending.cancelled() or isinstance(sending.exception(), PromptFault)

    assert on(main, loop)
    assert came < size


def test_a_cancel_while_connecting_is_let_through():
    async def main():
        with unanswered() as (url, _):
            async with transport_to(url, timeout_s=9) as transport:
                sending = asyncio.ensure_future(transport.generate(start_of()))
                await asyncio.sleep(0.05)
                sending.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await sending
                return sending.cancelled()

    assert on(main)


def test_a_peer_that_vanished_is_noticed_in_a_minute():
    async def act(reader, writer, head, number):
        return http(GOOD)

    async def test(transport, server):
        await transport.generate(start_of())
        protocol = next(iter(transport._seen))
        sock = protocol.transport.get_extra_info("socket")
        return [sock.getsockopt(*option) for option in options]

    options = [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
    ]

    assert with_raw(act, test) == [1, 30, 10, 3, 60_000]


@LOOPS
def test_https_works_and_a_certificate_that_nobody_vouches_for_is_named(loop, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))

    async def main():
        async with (
            RawServer(always(http(GOOD)), ssl=context) as server,
            transport_to(server.url) as transport,
        ):
            with pytest.raises(ServerFault) as caught:
                await transport.generate(start_of())
            transport._session.connector._ssl = trusting
            replies = [await transport.generate(start_of(attempt=attempt)) for attempt in (2, 3)]
            return caught.value, replies

    fault, replies = on(main, loop)

    assert fault.kind is FaultKind.UNREACHABLE
    assert str(fault).startswith("cannot connect: ")
    assert "certificate" in str(fault)
    assert [json.loads(reply.body) for reply in replies] == [GOOD, GOOD]


# ---- servers that join ----


def test_a_server_that_joins_is_used_like_the_others_with_its_own_key():
    async def act(reader, writer, head, number):
        return None if number == 1 else http(GOOD)

    async def test(transport, server):
        async with RawServer(act) as late:
            place = transport.add(Endpoint(url=late.url, api_key=KEY, takes_rid=False))
            for attempt in (1, 2):
                await transport.generate(start_of(attempt=attempt, server=place))
            await transport.generate(start_of(attempt=3))
            return place, late.requests, server.requests, list(transport.reconnects)

    place, late, first, reconnects = with_raw(always(http(GOOD)), test, members={"n": 1})

    assert place == 1
    assert len(late) == 3
    assert f"Bearer {KEY}" in late[0][0]
    assert json.loads(late[0][1]) == {
        "messages": [{"role": "user", "content": "hello"}],
        "model": "m",
        "n": 1,
    }
    assert len(first) == 1
    assert KEY not in first[0][0]
    assert reconnects == [0, 1]


# ---- ids ----


def test_an_attempts_id_comes_back_with_its_reply_and_stands_in_the_log_of_a_failure(caplog):
    caplog.set_level(logging.INFO, logger="genpipe.edges.sglang")
    bad = start_of(attempt=2)

    async def act(reader, writer, head, number):
        return http({"error": f"no {KEY}"}, "500 Oh") if number else http(GOOD)

    async def test(transport, server):
        reply = await transport.generate(start_of(attempt=1))
        with pytest.raises(ServerFault):
            await transport.generate(bad)
        sent = [json.loads(body)["rid"] for _, body, _ in server.requests]
        return reply.rid, sent

    replied, sent = with_raw(act, test, api_key=KEY)

    assert len(sent) == 2
    assert replied == sent[0]
    assert f"rid={sent[1]} error=500: no [key]" in caplog.text
    assert KEY not in caplog.text


def test_a_server_that_takes_no_id_has_none():
    async def test(transport, server):
        return (await transport.generate(start_of())).rid

    assert with_raw(always(http(GOOD)), test, takes_rid=False) is None


# ---- names ----


def found_at(host, port):
    return [
        ResolveResult(hostname=host, host="127.0.0.1", port=port, family=socket.AF_INET, proto=6, flags=0)
    ]


def named(url):
    return url.replace("127.0.0.1", "server.example")


def test_names_that_fail_at_first_are_charged_to_no_prompt_and_found_later():
    looks = 0

    def look_up(host, port, family):
        nonlocal looks
        looks += 1
        if looks <= 20:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return found_at(host, port)

    async def main():
        async with (
            RawServer(always(http(GOOD))) as server,
            SglangTransport(
                [Endpoint(url=named(server.url))], bodies=Bodies(model="m"), names=Names(look_up)
            ) as transport,
        ):
            faults = []
            for attempt in range(1, 21):
                with pytest.raises(ServerFault) as caught:
                    await transport.generate(start_of(attempt=attempt))
                faults.append(caught.value)
            for attempt in range(21, 61):
                await transport.generate(start_of(attempt=attempt))
            return faults

    faults = on(main)

    assert {fault.kind for fault in faults} == {FaultKind.UNREACHABLE}
    assert {str(fault) for fault in faults} == {"the name server.example cannot be resolved"}
    assert looks == 21


@pytest.mark.slow
@LOOPS
def test_a_name_is_looked_up_though_all_threads_that_the_process_shares_are_busy(loop):
    async def main():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        uploading = asyncio.ensure_future(asyncio.to_thread(time.sleep, 1.5))
        async with RawServer(always(http(GOOD))) as server:
            async with transport_to(server.url.replace("127.0.0.1", "localhost")) as transport:
                await asyncio.sleep(0.05)
                began_s = time.monotonic()
                await transport.generate(start_of())
                took_s = time.monotonic() - began_s
            busy = not uploading.done()
            await uploading
            return busy, took_s

    busy, took_s = on(main, loop)

    assert busy
    assert took_s < 1


@pytest.mark.parametrize(
    "trouble", [socket.gaierror(socket.EAI_NONAME, "no"), UnicodeError("label too long"), TimeoutError()]
)
def test_a_name_that_was_known_keeps_its_address_and_another_one_is_unknown(trouble):
    known = True

    def look_up(host, port, family):
        if not known:
            raise trouble
        return found_at(host, port)

    async def main():
        nonlocal known
        names = Names(look_up)
        first = await names.resolve("a", 1)
        known = False
        second = await names.resolve("a", 1)
        with pytest.raises(OSError) as caught:  # noqa: PT011  # its number is what counts
            await names.resolve("b", 1)
        await names.close()
        return first, second, caught.value

    first, second, error = on(main)

    assert first == second == found_at("a", 1)
    # Without a number the library would take it for the limit of the whole request.
    assert error.errno is not None


def _slow_look_up(host, port, family):
    time.sleep(12)
    return []


@pytest.mark.slow
def test_a_name_that_nobody_looks_up_in_time_is_unreachable():
    async def main():
        names = Names(_slow_look_up)
        server = Endpoint(url="http://server.example:1")
        async with SglangTransport([server], bodies=Bodies(model="m"), names=names) as transport:
            await transport.generate(start_of())

    began_s = time.monotonic()
    with pytest.raises(ServerFault, match=r"^the name server\.example cannot be resolved$") as caught:
        on(main)

    assert caught.value.kind is FaultKind.UNREACHABLE
    assert time.monotonic() - began_s < 11.5


def test_a_reply_to_another_request_is_no_answer():
    """Bytes left over on a connection would give each prompt the answer of the one before it."""
    body = json.dumps({**GOOD, "id": "a" * 16 + "1" * 16}).encode()
    own = Reply(body=body, wire_s=0.0, last_s=0.0, rid="a" * 16 + "1" * 16)
    other = Reply(body=body, wire_s=0.0, last_s=0.0, rid="a" * 16 + "2" * 16)
    servers_own = Reply(body=body, wire_s=0.0, last_s=0.0, rid="b" * 32)

    assert examine(own).response["content"] == "hi"
    assert examine(servers_own).response["content"] == "hi"
    with pytest.raises(ServerFault, match="another request"):
        examine(other)
