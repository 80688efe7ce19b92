"""Whatever people have as ids, fields and texts comes back, and reaches a server, as it was."""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genpipe.core.values import Answer, Finished, Start
from genpipe.edges import lines, strict_json
from genpipe.edges.prompts.dialects import Dialect
from genpipe.edges.record import Wall, encode_finished
from genpipe.edges.requests import Bodies
from genpipe.edges.sglang import Endpoint, SglangTransport
from tests.edges.raw_server import GOOD, RawServer, http

ODD = "\u2028\u2029\x85\0\x7f\ufeff\ufffd\U0001f600\"\\/\n\r\t}{][,:' "
characters = st.sampled_from(ODD) | st.characters(codec="utf-8") | st.characters(categories=["Cs"])
texts = st.text(characters, max_size=12)
numbers = (
    st.integers()
    | st.integers(min_value=2**53, max_value=2**400)
    | st.floats()
    | st.sampled_from([0, -0.0, 2**63, -(2**63) - 1, 2**64, 1e308, 5e-324, 0.1 + 0.2])
)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
depths = st.sampled_from([0, 0, 0, 1, 300, 1_100, 3_000])


class Digits(str):
    """A number as it is written."""

    __slots__ = ()


def mended(value):
    """What is to come back of a value: itself, but for what strict JSON in UTF-8 does not have."""
    if isinstance(value, str):
        # Two halves side by side are a character, in JSON's escapes and so here.
        whole = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in whole)
    if isinstance(value, list):
        return [mended(item) for item in value]
    if isinstance(value, dict):
        return {mended(key): mended(item) for key, item in value.items()}
    if isinstance(value, float) and not -1e309 < value < 1e309:
        return None
    return None if value != value else value


def as_written(data):
    """JSON with each number as its digits: 7, 7.0 and 70e-1 are three things."""
    return json.loads(data, parse_int=Digits, parse_float=Digits, parse_constant=Digits)


def record_of(line, **options):
    """The line that is written for an input line, once it is answered."""
    prompt = Dialect(keep=("kept",), **options).prompt(5, line)
    answer = Answer(
        response={"content": "a"},
        finish_reason="stop",
        usage=None,
        output_tokens=None,
        model="m",
        size_bytes=9,
    )
    finished = Finished(prompt=prompt, answer=answer, server="s", tries=1, started_s=0.0, latency_s=1.0)
    written = encode_finished(finished, Wall(wall_s=1e9, run_s=0.0), None)
    assert written.count(b"\n") == 1
    body = lines.decode(written)
    assert body is not None
    return body


@given(value=values, kept=values, depth=depths, ascii_=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_value_as_id_and_as_a_kept_field_comes_back(value, kept, depth, ascii_):
    around = "[" * depth, "]" * depth
    id_text = json.dumps(value) if ascii_ else json.dumps(mended(value), ensure_ascii=False)
    line = f'{{"kept": {json.dumps(kept)}, "id": {around[0]}{id_text}{around[1]}, "prompt": "p"}}'

    written = record_of(line.encode("utf-8"))

    # No deeper than the standard library reads: the brackets are taken off again.
    start = written.index(b'"id":') + len(b'"id":')
    assert written[start : start + depth] == b"[" * depth
    flat = written.replace(b'"id":' + b"[" * depth, b'"id":', 1).replace(
        b"]" * depth + b',"messages"', b',"messages"', 1
    )
    record = as_written(flat)
    assert record["id"] == as_written(json.dumps(mended(value)))
    assert record["kept"] == as_written(json.dumps(mended(kept)))
    assert strict_json.loads(written)["index"] == 5


@given(st.from_regex(r"\A-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,2})?\Z"), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_number_comes_back_digit_for_digit(digits, nested):
    shape = '{"a": [%s, "x"]}' if nested else "%s"
    line = f'{{"prompt": "{digits}", "id": {shape % digits}, "other": 1.5, "kept": {shape % digits}}}'

    record = as_written(record_of(line.encode()))

    for name in ("id", "kept"):
        found = record[name]["a"][0] if nested else record[name]
        assert type(found) is Digits
        assert found == digits


# ---- what reaches a server ----

SHAPES = {
    "prompt": lambda text: {"prompt": text},
    "alpaca": lambda text: {"instruction": text, "input": " "},
    "turns": lambda text: {"turns": [text]},
    "messages": lambda text: {"messages": [{"role": "user", "content": text}]},
    "sharegpt": lambda text: {
        "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "x"}]
    },
}
APIS = {
    "chat": ("/v1/chat/completions", lambda body: body["messages"][-1]["content"]),
    "completions": ("/v1/completions", lambda body: body["prompt"]),
    "generate": ("/generate", lambda body: body["text"]),
}
REPLIES = {
    "chat": GOOD,
    "completions": {**GOOD, "choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}]},
    "generate": {"text": "hi", "output_ids": [1], "meta_info": {"finish_reason": {"type": "stop"}}},
}


@pytest.mark.parametrize("api", list(APIS))
def test_any_text_reaches_the_server_unchanged(api):
    path, text_in = APIS[api]
    shapes = list(SHAPES.values()) if api == "chat" else [SHAPES["prompt"], SHAPES["alpaca"], SHAPES["turns"]]

    async def send(url, server, batch):
        async with SglangTransport([Endpoint(url=url)], bodies=Bodies(api=api, model="m")) as transport:
            for number, (text, shape, ascii_) in enumerate(batch, 1):
                line = json.dumps(shape(text), ensure_ascii=ascii_).encode()
                prompt = Dialect(api=api).prompt(0, line)
                await transport.generate(
                    Start(attempt=number, prompt=prompt, server=0, tries=1, started_s=0.0)
                )

    async def act(reader, writer, head, number):
        return http(REPLIES[api])

    plain = st.text(st.sampled_from(ODD) | st.characters(codec="utf-8"), min_size=1, max_size=40)

    @given(st.lists(st.tuples(plain, st.sampled_from(shapes), st.booleans()), min_size=1, max_size=20))
    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def check(batch):
        async def main():
            async with RawServer(act) as server:
                await send(server.url, server, batch)
                return server.requests

        requests = asyncio.run(main())
        assert [text_in(json.loads(body)) for _, body, _ in requests] == [text for text, _, _ in batch]
        assert {head.split(" ")[1] for head, _, _ in requests} == {path}

    check()


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=30))
@settings(max_examples=30, deadline=None)
def test_token_ids_become_the_payload_unchanged(ids):
    prompt = Dialect(api="generate").prompt(0, json.dumps({"input_ids": ids}).encode())

    assert (prompt.member, json.loads(prompt.payload)) == ("input_ids", ids)
