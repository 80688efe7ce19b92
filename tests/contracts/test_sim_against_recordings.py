"""The simulated server answers as the recorded SGLang 0.5.11 did: status, headers, shape of every body."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from genpipe.sim.server import SimConfig, SimFleet

RECORDED = json.loads((Path(__file__).parent.parent / "recordings" / "sglang_0.5.11.json").read_text())
LIKE_RECORDED: dict[str, Any] = {
    "model": "tiny",
    "context_tokens": 2048,
    "health_delay_s": 0.05,
    "snapshot_loads": False,
}

NULL_HERE = {"cached_tokens_details"}
"""A dict where the real server's prefix cache was hit; the simulated server has no cache."""

UNTYPED = "get_flush_cache"
"""A text without a content type, which the simulated server's HTTP library cannot send."""

SAME_VALUES = {"object", "type", "code", "param", "finish_reason", "role", "index", "model", "owned_by"}
"""Keys whose value, where it is a plain one, is as recorded too."""


def shape(value: Any) -> Any:
    """Keys and JSON types of a value; a list is the shapes that occur in it."""
    if isinstance(value, dict):
        return {key: None if key in NULL_HERE else shape(item) for key, item in value.items()}
    if isinstance(value, list):
        shapes = [shape(item) for item in value]
        return [item for place, item in enumerate(shapes) if item not in shapes[:place]]
    return type(value).__name__


def fixed(value: Any) -> Any:
    """The values that have to agree, at their places."""
    if isinstance(value, dict):
        return {
            key: item if key in SAME_VALUES and not isinstance(item, dict | list) else fixed(item)
            for key, item in value.items()
            if key not in NULL_HERE
        }
    return [fixed(item) for item in value if isinstance(item, dict)] if isinstance(value, list) else None


def compare(case: dict[str, Any], status: int, headers: Any, body: bytes) -> None:
    assert status == case["status"], body[:300]
    assert {key: headers.get(key) for key in case["headers"]} == case["headers"]
    if case["name"] != UNTYPED:
        assert ("Content-Type" in headers) is ("Content-Type" in case["headers"])
    assert int(headers["Content-Length"]) == len(body)
    if "text" in case:
        assert body.decode() == case["text"]
        return
    given = json.loads(body)
    assert shape(given) == shape(case["body"])
    assert fixed(given) == fixed(case["body"])


def request_body(case: dict[str, Any]) -> bytes | None:
    if "raw" in case:
        return bytes(case["raw"], "utf-8")
    request = case.get("request")
    if request is None:
        return None
    if "long_words" in request:
        text = "word " * request["long_words"]
        if request["api"] == "generate":
            request = {"text": text}
        else:
            request = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
    return json.dumps(request).encode()


async def ask(session: aiohttp.ClientSession, url: str, case: dict[str, Any]) -> tuple[int, Any, bytes]:
    headers = {"Content-Type": case.get("content_type", "application/json")}
    async with session.request(
        case["method"], url + case["path"], data=request_body(case), headers=headers
    ) as reply:
        return reply.status, reply.headers, await reply.read()


@pytest.mark.parametrize("case", RECORDED["plain"], ids=lambda case: case["name"])
def test_replies_as_recorded(case):
    async def main():
        config = SimConfig(**LIKE_RECORDED, lengths="fixed:4000")
        async with SimFleet(config, [0]) as fleet, aiohttp.ClientSession() as session:
            return await ask(session, fleet.urls[0], case)

    compare(case, *asyncio.run(main()))


@pytest.mark.parametrize("case", RECORDED["abort_running"], ids=lambda case: case["name"])
def test_running_request_that_is_aborted_replies_as_recorded(case):
    async def main():
        config = SimConfig(**LIKE_RECORDED, lengths="fixed:4000", step_fixed_s=0.004)
        async with SimFleet(config, [0]) as fleet, aiohttp.ClientSession() as session:
            asked = asyncio.create_task(ask(session, fleet.urls[0], case))
            await asyncio.sleep(0.15)
            rid = {"rid": case["request"]["rid"]}
            async with session.post(fleet.urls[0] + "/abort_request", json=rid) as reply:
                assert (reply.status, await reply.read()) == (200, b"")
            return await asked

    compare(case, *asyncio.run(main()))


def test_full_queue_replies_as_recorded():
    (case,) = (case for case in RECORDED["limits"] if case["name"] == "queue_full")

    async def main():
        config = SimConfig(**LIKE_RECORDED, max_running=1, max_queued=0, step_fixed_s=1.0)
        async with SimFleet(config, [0]) as fleet, aiohttp.ClientSession() as session:
            request = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
            first = asyncio.create_task(ask(session, fleet.urls[0], {**case, "request": request}))
            await asyncio.sleep(0.1)
            second = await ask(session, fleet.urls[0], {**case, "request": request})
            first.cancel()
            return second

    compare(case, *asyncio.run(main()))


@pytest.mark.parametrize(
    "case",
    [case for case in RECORDED["limits"] if case["name"].startswith("no_key")],
    ids=lambda case: case["name"],
)
def test_missing_key_replies_as_recorded(case):
    async def main():
        config = SimConfig(**LIKE_RECORDED, api_key="secret")
        async with SimFleet(config, [0]) as fleet, aiohttp.ClientSession() as session:
            return await ask(session, fleet.urls[0], case)

    compare(case, *asyncio.run(main()))
