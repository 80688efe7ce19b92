"""Orders in prompts and modes at ``/_fake``: how they are read, and what they do on the wire."""

import asyncio
import errno
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from genpipe.sim.orders import NO_ORDERS, Modes, OrderError, Orders, parse_mode, parse_orders
from genpipe.sim.server import SimConfig, SimFleet


class Client:
    """Asks one fleet, and remembers nothing."""

    def __init__(self, fleet: SimFleet, session: aiohttp.ClientSession) -> None:
        self.fleet = fleet
        self._session = session

    async def chat(self, text, port=0, timeout_s=5.0, **fields):
        """Status, headers and body of one chat."""
        request = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
        url = self.fleet.urls[port] + "/v1/chat/completions"
        limit = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.post(url, data=json.dumps(request), headers=JSON, timeout=limit) as reply:
            return reply.status, reply.headers, await reply.read()

    async def answer(self, text, **fields):
        """The parsed reply of a chat that has to be good."""
        status, _, body = await self.chat(text, **fields)
        assert status == 200, body
        return json.loads(body)

    async def get(self, path, port=0, timeout_s=5.0):
        limit = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.get(self.fleet.urls[port] + path, timeout=limit) as reply:
            return reply.status, await reply.read()

    async def mode(self, at=0, **change):
        """Post a mode to one port, perhaps for another."""
        async with self._session.post(self.fleet.urls[at] + "/_fake", json=change) as reply:
            return reply.status, await reply.json()


JSON = {"Content-Type": "application/json"}


def with_fleet(test, ports=1, **config):
    """Run ``test(client)`` against a fresh fleet that takes orders."""

    async def main():
        settings = SimConfig(**{"orders": True, "health_delay_s": 0.0, "disconnect_notice_s": 0.2, **config})
        async with SimFleet(settings, [0] * ports) as fleet, aiohttp.ClientSession() as session:
            return await test(Client(fleet, session))

    return asyncio.run(main())


def test_orders_are_read_from_between_the_brackets():
    text = "Tell me. <<tokens=25 delay=0.5 status=503 why=queue_full times=3 retry_after=2 reason=7>> Thanks."

    assert parse_orders(text) == Orders(
        tokens=25, delay_s=0.5, status=503, why="queue_full", times=3, retry_after_s=2.0, reason_tokens=7
    )


@pytest.mark.parametrize(
    "text", ["plain", "1 << 2 and 4 >> 1", "48/2 = <<48/2=24>>24", "<<>>", "cout << x=1;", "std::cout<<a=b"]
)
def test_other_brackets_are_no_orders(text):
    assert parse_orders(text) is NO_ORDERS


@pytest.mark.parametrize(
    "order",
    [
        "die=-1",
        "die=soon",
        "speed=3",
        "tokens=-1",
        "tokens=many",
        "delay=nan",
        "finish=never",
        "body=x",
        "status=200",
    ],
)
def test_an_order_that_cannot_be_followed_is_named(order):
    with pytest.raises(OrderError, match=order.split("=")[0]):
        parse_orders(f"<<{order}>>")


def test_faults_wear_off_and_the_answer_keeps_its_size():
    orders = parse_orders("<<status=500 times=2 tokens=9 delay=1>>")

    assert orders.at_attempt(2) == orders
    assert orders.at_attempt(3) == Orders(tokens=9, delay_s=1.0, times=2)
    assert parse_orders("<<die=2>>").at_attempt(3).die_s == 2.0
    assert parse_orders("<<die=2 times=1>>").at_attempt(2).die_s is None
    assert [parse_orders("<<reset=1>>").at_attempt(n).reset for n in (1, 2)] == [True, False]


def test_modes_are_read_and_undone():
    configured = Modes(queue_limit=None, keepalive_s=5.0, slots=64)
    change = parse_mode({"mode": "slots", "value": 2, "seconds": 3})
    changed = change.apply(configured, configured)

    assert (changed.slots, change.seconds) == (2, 3)
    assert change.undo(changed, configured) == configured
    assert (
        parse_mode({"mode": "up"}).apply(parse_mode({"mode": "down"}).apply(changed, configured), configured)
        == changed
    )
    assert parse_mode({"mode": "normal"}).apply(changed, configured) == configured
    assert parse_mode({"mode": "busy_health", "seconds": 1}).value == "503"
    assert not parse_mode({"mode": "dead_scheduler", "value": False}).value
    assert parse_mode({"mode": "hung"}).apply(configured, configured).hung_s == 20.0
    assert parse_mode({"mode": "hung", "value": 1.5}).apply(configured, configured).hung_s == 1.5
    assert parse_mode({"mode": "hung", "value": False}).value is None
    assert parse_mode({"mode": "revive_s", "value": 3}).apply(configured, configured).revive_s == 3.0
    assert parse_mode({"mode": "revive_s", "value": None}).value is None


@pytest.mark.parametrize(
    "given",
    [
        {},
        [],
        {"mode": "sideways"},
        {"mode": "slots", "value": 0},
        {"mode": "slow", "value": "2"},
        {"mode": "busy_health"},
        {"mode": "hung", "value": 0},
        {"mode": "hung", "value": "long"},
        {"mode": "revive_s", "value": -1},
        {"mode": "revive_s", "value": True},
        {"mode": "down", "seconds": 0},
        {"mode": "down", "second": 1},
        {"mode": "down", "port": "a"},
    ],
)
def test_modes_that_are_none_are_refused(given):
    with pytest.raises(OrderError):
        parse_mode(given)


def test_tokens_finish_usage_and_reasoning():
    async def test(client):
        plain = await client.answer("<<tokens=25>>")
        short = await client.answer("<<tokens=25>> cut", max_tokens=10)
        thought = await client.answer("<<reason=50 tokens=20 finish=null>>")
        empty = await client.answer("<<reason=300 content=empty finish=length>>")
        null = await client.answer("<<reason=30 content=null>>")
        cut_thought = await client.answer("<<reason=50 tokens=20>>", max_tokens=40)
        usages = [
            (await client.answer(f"<<usage={how}>>")).get("usage", "none") for how in ("none", "null", "zero")
        ]
        return plain, short, thought, empty, null, cut_thought, usages

    plain, short, thought, empty, null, cut_thought, usages = with_fleet(test)

    def seen(reply):
        (choice,) = reply["choices"]
        usage = reply["usage"]
        return (choice["finish_reason"], usage["completion_tokens"], usage["reasoning_tokens"])

    def message(reply):
        return reply["choices"][0]["message"]

    assert seen(plain) == ("stop", 25, 0)
    assert len(message(plain)["content"]) == 100
    assert seen(short) == ("length", 10, 0)
    assert seen(thought) == (None, 70, 50)
    assert len(message(thought)["reasoning_content"]) == 200
    assert (seen(empty), message(empty)["content"]) == (("length", 300, 300), "")
    assert (seen(null), message(null)["content"]) == (("stop", 30, 30), None)
    assert (seen(cut_thought), message(cut_thought)["content"]) == (("length", 40, 40), None)
    assert usages == ["none", None, {**dict.fromkeys(usages[2], 0), "prompt_tokens_details": None}]


def test_status_orders_use_the_flat_envelope_and_wear_off_across_ports():
    async def test(client):
        text = "x <<status=429 retry_after=2 times=2>>"
        replies = [await client.chat(text, port=port) for port in (0, 1, 0)]
        too_long = await client.chat("<<status=400 why=too_long>>")
        words = await client.chat("<<status=418 why=a_small_pot>>")
        return replies, too_long, words

    replies, too_long, words = with_fleet(test, ports=2)

    assert [reply[0] for reply in replies] == [429, 429, 200]
    assert replies[0][1]["Retry-After"] == "2"
    assert "longer than the model's context length" in json.loads(too_long[2])["message"]
    assert json.loads(words[2]) == {
        "object": "error",
        "message": "a small pot",
        "type": "418",
        "param": None,
        "code": 418,
    }


def test_bodies_that_are_no_answers():
    async def test(client):
        error = await client.chat("<<body=error200>>")
        choiceless = await client.answer("<<body=nochoices>>")
        page = await client.chat("<<body=html>>")
        with pytest.raises(aiohttp.ClientPayloadError):
            await client.chat("<<body=truncated>>")
        bad_order = await client.chat("<<tokens=no>>")
        return error, choiceless, page, bad_order

    error, choiceless, page, bad_order = with_fleet(test)

    assert (error[0], json.loads(error[2])["object"]) == (200, "error")
    assert choiceless["choices"] == []
    assert page[1]["Content-Type"].startswith("text/html")
    assert bad_order[0] == 400


def test_texts_that_are_hard_to_read():
    async def test(client):
        huge = await client.chat("<<huge=131073>>")
        split = await client.answer("<<split_utf8=1 tokens=40>>")
        loop = await client.answer("<<loop=1 tokens=200>>")
        replaced = await client.answer("<<content=replacement>>")
        separated = await client.answer("a\u2028b")
        return huge, *(r["choices"][0]["message"]["content"] for r in (split, loop, replaced, separated))

    huge, split, loop, replaced, separated = with_fleet(test)

    assert len(huge[2]) == 131073
    assert json.loads(huge[2])["choices"][0]["message"]["content"].startswith("echo ")
    assert "海" in split
    assert "\ufffd" not in split
    assert loop.count(loop[100:133]) > 10
    assert "\ufffd" in replaced
    assert all(mark in separated for mark in "\u2028\u2029\x85")


def test_reset_comes_before_any_byte_and_only_once(tmp_path):
    async def test(client):
        with pytest.raises(aiohttp.ClientOSError) as caught:
            await client.chat("<<reset=1>>")
        return caught.value, await client.chat("<<reset=1>>")

    log = tmp_path / "log.jsonl"
    error, again = with_fleet(test, log_path=log)

    assert error.errno == errno.ECONNRESET
    assert again[0] == 200
    assert [(line["attempt"], line["status"], line["client_gone"]) for line in read_log(log)] == [
        (1, None, False),
        (2, 200, False),
    ]


@pytest.mark.parametrize("where", ["headers", "body", "never"])
def test_hangs_end_with_the_client(where):
    async def test(client):
        with pytest.raises(TimeoutError):
            await client.chat(f"<<hang={where}>>", timeout_s=0.15)
        await asyncio.sleep(0.3)
        return client.fleet.stats()[0]

    figures = with_fleet(test)

    assert (figures["in_flight"], figures["client_gone"]) == (0, 1)


def test_delay_holds_a_slot_and_slots_are_counted():
    async def test(client):
        await client.mode(mode="slots", value=1)
        begun_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for n in range(3):
                group.create_task(client.chat(f"{n} <<delay=0.1>>"))
            await asyncio.sleep(0.05)
            loads = json.loads((await client.get("/v1/loads"))[1])["loads"][0]
        return time.monotonic() - begun_s, loads, client.fleet.stats()[0]

    took_s, loads, figures = with_fleet(test)

    assert 0.3 <= took_s < 0.6
    assert (loads["num_running_reqs"], loads["num_waiting_reqs"], loads["max_running_requests"]) == (1, 2, 1)
    assert figures["running_integral_s"] == pytest.approx(0.3, abs=0.03)
    assert figures["in_flight_integral_s"] == pytest.approx(0.1 + 0.2 + 0.3, abs=0.1)


def test_queue_limit_and_slow_end_by_themselves():
    async def test(client):
        await client.mode(mode="slots", value=1)
        await client.mode(mode="slow", value=3.0, seconds=0.4)
        await client.mode(mode="queue_limit", value=1)
        begun_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(client.chat(f"{n} <<delay=0.1>>")) for n in range(3)]
        took_s = time.monotonic() - begun_s
        begun_s = time.monotonic()
        await client.chat("after <<delay=0.1>>")
        return [task.result()[0] for task in asked], took_s, time.monotonic() - begun_s

    statuses, took_s, after_s = with_fleet(test)

    assert sorted(statuses) == [200, 200, 503]
    assert 0.6 <= took_s < 0.9
    assert 0.1 <= after_s < 0.25


def test_down_refuses_and_drops_and_up_serves_on_the_same_port():
    async def test(client):
        number = client.fleet.ports[1]
        running = asyncio.create_task(client.chat("<<delay=5>>", port=1))
        await asyncio.sleep(0.05)
        assert (await client.mode(mode="down", port=number))[0] == 200
        with pytest.raises(aiohttp.ClientError):
            await running
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get("/ping", port=1)
        assert (await client.mode(mode="up", port=number))[0] == 200
        return await client.get("/ping", port=1), client.fleet.stats()[1]

    ping, figures = with_fleet(test, ports=2)

    assert ping[0] == 200
    assert (figures["in_flight"], figures["running"], figures["client_gone"]) == (0, 0, 0)


def test_down_for_some_seconds_is_answered_by_the_port_itself():
    async def test(client):
        accepted = await client.mode(mode="down", seconds=0.3)
        await asyncio.sleep(0.1)
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get("/ping")
        await asyncio.sleep(0.3)
        return accepted, await client.get("/ping")

    accepted, ping = with_fleet(test)

    assert accepted == (200, {"port": accepted[1]["port"], "mode": "down", "value": True})
    assert ping[0] == 200


def test_a_mode_for_a_port_of_somebody_else_is_refused():
    async def test(client):
        return await client.mode(mode="down", port=1), await client.mode(mode="sideways")

    (status, body), (second, _) = with_fleet(test)

    assert (status, second) == (400, 400)
    assert "no port 1 here" in body["message"]


def test_without_the_flag_there_are_no_orders_and_no_modes():
    async def test(client):
        return await client.chat("<<status=500>>"), await client.mode(mode="down")

    asked, mode = with_fleet(test, orders=False)

    assert (asked[0], mode[0]) == (200, 404)


def test_dead_scheduler_hangs_what_generates_and_nothing_else():
    async def test(client):
        await client.mode(mode="dead_scheduler", seconds=0.4)
        waiting = asyncio.create_task(client.chat("hello"))
        healths = [(await client.get(path))[0] for path in ("/health", "/model_info", "/health_generate")]
        assert not waiting.done()
        return healths, await waiting

    healths, (status, _, _) = with_fleet(test)

    assert healths == [200, 200, 503]
    assert status == 200


def test_hung_is_as_recorded_and_what_was_in_flight_goes_on_afterwards():
    """Old numbers at once, no word where the scheduler has to be asked, and a health that fails late."""

    async def test(client):
        running = asyncio.create_task(client.chat("a <<delay=0.3>>"))
        await asyncio.sleep(0.1)
        await client.mode(mode="hung", value=0.4)
        waiting = asyncio.create_task(client.chat("b"))
        begun_s = time.monotonic()
        quick = [(await client.get(path))[0] for path in ("/v1/models", "/model_info")]
        loads = [json.loads((await client.get("/v1/loads"))[1])["loads"] for _ in range(2)]
        quick_s = time.monotonic() - begun_s
        for path in ("/server_info", "/get_load"):
            with pytest.raises(TimeoutError):
                await client.get(path, timeout_s=0.1)
        begun_s = time.monotonic()
        health = (await client.get("/health"))[0]
        health_s = time.monotonic() - begun_s
        stuck = not running.done() and not waiting.done()
        late = asyncio.create_task(client.get("/health"))
        await asyncio.sleep(0.1)
        await client.mode(mode="normal")
        replies = [(await task)[0] for task in (running, waiting, late)]
        return quick, quick_s, loads, (health, health_s), stuck, replies, await client.get("/server_info")

    quick, quick_s, loads, (health, health_s), stuck, replies, info = with_fleet(test)

    assert quick == [200, 200]
    assert quick_s < 0.1
    assert loads[0] == loads[1]
    assert (loads[0][0]["num_running_reqs"], loads[0][0]["num_waiting_reqs"]) == (1, 0)
    assert health == 503
    assert 0.35 <= health_s < 0.7
    assert stuck
    assert replies == [200, 200, 200]
    assert (info[0], json.loads(info[1])["status"]) == (200, "ready")


def test_loads_are_of_a_moment_ago_also_where_nothing_runs():
    async def test(client):
        stamps = []
        for _ in range(2):
            stamps.append(json.loads((await client.get("/v1/loads"))[1])["loads"][0]["timestamp"])
            await asyncio.sleep(0.05)
        return stamps, time.time()

    (first, second), now_s = with_fleet(test)

    assert first < second
    assert now_s - 1.0 < second <= now_s


def test_older_loads_have_no_times_and_hang_with_the_scheduler():
    async def test(client):
        loads = json.loads((await client.get("/v1/loads"))[1])
        await client.mode(mode="hung")
        with pytest.raises(TimeoutError):
            await client.get("/v1/loads", timeout_s=0.1)
        return loads

    loads = with_fleet(test, snapshot_loads=False)

    assert "timestamp" not in loads["loads"][0]
    assert loads["aggregate"]["total_reqs"] == 0


def test_a_prompt_that_kills_takes_everything_on_its_port_along_and_up_brings_it_back():
    async def test(client):
        begun_s = time.monotonic()
        others = [asyncio.create_task(client.chat(f"{n} <<delay=9>>")) for n in range(3)]
        well = asyncio.create_task(client.chat("well <<delay=0.5>>", port=1))
        poison = asyncio.create_task(client.chat("poison <<die=0.2>>"))
        await asyncio.sleep(0.1)
        running = client.fleet.stats()[0]["running"]
        await asyncio.wait([*others, poison])
        died_s = time.monotonic() - begun_s
        errors = [task.exception() for task in (*others, poison)]
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get("/ping")
        await asyncio.sleep(0.2)
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get("/ping")
        await client.mode(at=1, mode="up", port=client.fleet.ports[0])
        ping = (await client.get("/ping"))[0]
        return running, died_s, errors, ping, (await well)[0], client.fleet.stats()

    running, died_s, errors, ping, well, figures = with_fleet(test, ports=2)

    assert running == 4
    assert 0.2 <= died_s < 0.5
    assert all(isinstance(error, aiohttp.ClientError) for error in errors)
    assert (ping, well) == (200, 200)
    assert [figure["deaths"] for figure in figures] == [1, 0]
    assert (figures[0]["in_flight"], figures[0]["running"]) == (0, 0)


def test_a_killer_kills_though_its_client_has_left():
    async def test(client):
        with pytest.raises(TimeoutError):
            await client.chat("poison <<die=0.3>>", timeout_s=0.1)
        await asyncio.sleep(0.35)
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get("/ping")
        return client.fleet.stats()[0]["deaths"]

    assert with_fleet(test) == 1


@pytest.mark.parametrize("by_mode", [False, True])
def test_a_supervisor_starts_a_dead_server_again_and_the_first_killer_is_forgotten(by_mode):
    async def test(client):
        if by_mode:
            await client.mode(mode="revive_s", value=0.2)
        first = asyncio.create_task(client.chat("a <<die=0.1>>"))
        second = asyncio.create_task(client.chat("b <<die=0.5>>"))
        async with asyncio.timeout(0.4):
            await asyncio.wait([first, second])
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get("/ping")
        await asyncio.sleep(0.3)
        pings = [(await client.get("/ping"))[0]]
        # The second would have killed by now, had it not died with the server.
        await asyncio.sleep(0.3)
        pings.append((await client.get("/ping"))[0])
        return pings, client.fleet.stats()[0]["deaths"]

    assert with_fleet(test, revive_s=None if by_mode else 0.2) == ([200, 200], 1)


def test_a_killer_dies_with_a_server_that_is_taken_down_before():
    async def test(client):
        poison = asyncio.create_task(client.chat("a <<die=0.3>>"))
        await asyncio.sleep(0.1)
        for mode in ("down", "up"):
            await client.mode(at=1, mode=mode, port=client.fleet.ports[0])
        await asyncio.wait([poison])
        await asyncio.sleep(0.3)
        return (await client.get("/ping"))[0], client.fleet.stats()[0]["deaths"]

    assert with_fleet(test, ports=2) == (200, 0)


def test_a_killer_that_is_to_kill_once_is_answered_by_the_next_server():
    async def test(client):
        with pytest.raises(aiohttp.ClientError):
            await client.chat("a <<die=0.05 times=1>>")
        return (await client.chat("a <<die=0.05 times=1>>", port=1))[0]

    assert with_fleet(test, ports=2) == 200


def test_busy_health_fails_or_is_slow_while_answers_go_on():
    async def test(client):
        await client.mode(mode="busy_health", seconds=0.3)
        failed = (await client.get("/health"))[0], (await client.chat("hello"))[0]
        await client.mode(mode="busy_health", value="slow", seconds=0.3)
        begun_s = time.monotonic()
        slow = (await client.get("/health"))[0]
        return failed, slow, time.monotonic() - begun_s

    failed, slow, took_s = with_fleet(test)

    assert failed == (503, 200)
    assert slow == 200
    assert 0.25 <= took_s < 0.6


def test_keepalive_closes_idle_connections_and_zero_closes_each():
    async def test(client):
        await client.mode(mode="keepalive", value=0)
        closing = (await client.chat("hello"))[1].get("Connection")
        await client.mode(mode="keepalive", value=0.2)
        reader, writer = await asyncio.open_connection("127.0.0.1", client.fleet.ports[0])
        writer.write(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        begun_s = time.monotonic()
        rest = await asyncio.wait_for(reader.read(), 2.0)
        idle_s = time.monotonic() - begun_s
        writer.close()
        return closing, head, rest, idle_s

    closing, head, rest, idle_s = with_fleet(test)

    assert closing == "close"
    assert head.startswith(b"HTTP/1.1 200")
    assert rest == b""
    assert 0.15 <= idle_s < 0.6


def test_chats_without_a_user_are_the_same_500_every_time():
    async def test(client):
        request = {"model": "m", "messages": [{"role": "system", "content": "Be terse."}]}
        url = client.fleet.urls[0] + "/v1/chat/completions"
        seen = []
        for _ in range(2):
            async with aiohttp.request("POST", url, json=request) as reply:
                seen.append((reply.status, await reply.read()))
        return seen

    first, second = with_fleet(test)

    assert first == second
    assert first[0] == 500


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
