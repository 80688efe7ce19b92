"""Asking servers how they are, over real sockets: probes, the model they serve, what a silent one says."""

import asyncio
import json
import math
import time
from typing import Any

import pytest

from genpipe.core.values import Checkup, Probe, Vitals
from genpipe.edges.connections import Endpoint, open_session
from genpipe.edges.health import RunModel, inquire, probe
from genpipe.edges.requests import Bodies
from genpipe.edges.sglang import SglangTransport
from genpipe.sim.orders import parse_mode
from genpipe.sim.server import SimConfig, SimFleet
from tests.edges.raw_server import GOOD, KEY, LOOPS, RawServer, always, free_port, http, on, reset


async def asked(session, url, *, ask=False, model_path=None, **endpoint):
    """What a probe of that address finds."""
    model = RunModel(path=model_path, is_compared=model_path is not None)
    return await probe(session, Endpoint(url=url, **endpoint), name="m", model=model, ask=ask)


def probe_of(act, *, loop=None, **options):
    """What a probe of a hand-written server finds, and what it asked for."""

    async def main():
        async with RawServer(act) as server, open_session(reuse=False) as session:
            found = await asked(session, server.url, **options)
            return found, [head.split()[:2] for head, *_ in server.requests]

    return on(main, loop)


def with_fleet(test, *, loop=None, **config):
    """Run ``test(session, fleet)`` against a simulated server that obeys orders."""

    async def main():
        settings = SimConfig(**{"health_delay_s": 0.0, "orders": True, "disconnect_notice_s": 0.0, **config})
        async with SimFleet(settings, [0]) as fleet, open_session(reuse=False) as session:
            return await test(session, fleet)

    return on(main, loop)


def by_route(**replies):
    """A server that gives each route its bytes; with ``None`` it says nothing, and others are 404."""

    async def act(reader, writer, head, number):
        route = head.split()[1].decode().strip("/").replace("/", "_")
        if route in replies and replies[route] is None:
            await reader.read()
        return replies.get(route, http({"detail": "Not Found"}, "404 Not Found"))

    return act


# ---- probes ----


def test_a_healthy_server_is_well():
    async def test(session, fleet):
        return [await asked(session, fleet.urls[0], ask=ask) for ask in (False, True)]

    assert with_fleet(test, health_delay_s=0.1) == [Checkup(), Checkup(asked=True)]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("503 Service Unavailable", "/health says 503"),
        ("302 Found", "/health says 302"),
        ("401 Unauthorized", "/health says 401"),
        ("404 Not Found", None),
    ],
)
def test_a_probe_says_what_health_says(status, said):
    found, requests = probe_of(always(http(b"", status, Location="/elsewhere")))

    assert found == Checkup(trouble=said)
    assert requests == [["GET", "/health"]]


def test_a_probe_of_a_server_that_refuses_says_so():
    async def main():
        async with open_session(reuse=False) as session:
            return await asked(session, f"http://127.0.0.1:{free_port()}")

    found = on(main)

    assert found == Checkup(trouble=found.trouble, refused=True)
    assert "refused" in found.trouble


@LOOPS
def test_a_name_with_two_addresses_at_which_nobody_listens_is_refused_too(loop):
    async def main():
        async with open_session(reuse=False) as session:
            return await asked(session, f"http://localhost:{free_port()}")

    found = on(main, loop)

    assert found == Checkup(trouble=found.trouble, refused=True)


@LOOPS
@pytest.mark.parametrize("how", ["close", "reset", "in the middle"])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_connection_that_breaks_while_a_server_is_asked_is_a_bad_sign(loop, how, step):
    async def act(reader, writer, head, number):
        if number < step:
            return http({"model_path": "a"})
        if how == "in the middle":
            writer.write(http(b"{", Content_Length=500))
            await writer.drain()
        elif how == "reset":
            reset(writer)
        return None

    found, _ = probe_of(act, ask=True, loop=loop, model_path="a")

    assert found == Checkup(trouble=found.trouble)
    assert found.trouble
    assert found.trouble.isprintable()


def test_a_probe_of_a_server_that_talks_nonsense_is_one_line():
    async def act(reader, writer, head, number):
        writer.write(b"garbage\r\n\r\n")

    found, _ = probe_of(act)

    assert found == Checkup(trouble=found.trouble)
    assert found.trouble
    assert found.trouble.isprintable()


@pytest.mark.slow
@pytest.mark.parametrize("ask", [False, True])
def test_a_probe_of_a_server_that_hangs_ends_after_5_s_and_names_the_health_check(ask):
    async def act(reader, writer, head, number):
        await reader.read()

    began_s = time.monotonic()
    found, requests = probe_of(act, ask=ask)

    assert found == Checkup(trouble="/health gave no answer within 5 s")
    assert time.monotonic() - began_s < 7
    assert requests == [["GET", "/health"]]


def test_a_probe_that_asks_wants_one_token_whatever_the_run_asks_for():
    members = {"min_tokens": 50, "n": 8, "max_tokens": 4000}

    async def main():
        async with (
            RawServer(always(http(GOOD))) as server,
            SglangTransport(
                [Endpoint(url=server.url)], bodies=Bodies(model="m", extra_body=members)
            ) as transport,
        ):
            found = await transport.probe(Probe(server=0, ask=True))
            return found, [json.loads(body) for _, body, _ in server.requests if body]

    found, bodies = on(main)

    assert found == Checkup(asked=True)
    assert bodies == [{"messages": [{"role": "user", "content": "Hi"}], "model": "m", "max_tokens": 1}]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (http({"error": "no memory"}, "500 Internal Server Error"), "500: no memory"),
        (http({"choices": []}), "200 without choices"),
        (http(b"", "302 Found", Location="/"), "302: Found"),
        (http({"error": f"key {KEY}"}, "401 Unauthorized"), "401: key [key]"),
    ],
)
def test_a_server_that_is_healthy_and_makes_no_token_is_not_well(data, said):
    async def act(reader, writer, head, number):
        return http(b"") if head.startswith(b"GET") else data

    assert probe_of(act, ask=True, api_key=KEY)[0] == Checkup(trouble=said)


def test_a_dead_scheduler_is_well_by_its_health_and_not_by_its_tokens():
    async def test(session, fleet):
        await fleet.change_mode(fleet.ports[0], parse_mode({"mode": "dead_scheduler"}))
        healthy = await asked(session, fleet.urls[0])
        asking = asyncio.ensure_future(asked(session, fleet.urls[0], ask=True))
        await asyncio.sleep(0.3)
        hanging = not asking.done()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        return healthy, hanging

    assert with_fleet(test) == (Checkup(), True)


# ---- the model that a server has loaded ----


def test_a_server_that_has_loaded_another_model_than_the_run_s_is_named_with_both():
    async def test(session, fleet):
        return [
            await asked(session, fleet.urls[0], ask=True, model_path=path)
            for path in ("org/tiny", "org/tiny/", "org/large")
        ]

    same, slash, other = with_fleet(test, model="served", model_path="org/tiny")

    assert same == slash == Checkup(asked=True)
    said = "serves org/tiny, and the run's model is org/large: it gets none of the prompts"
    assert other == Checkup(trouble=said, alien=True)


def test_the_older_route_is_asked_only_where_there_is_no_other():
    old = {"health": http(b""), "get_model_info": http({"model_path": "a"})}
    new = {**old, "model_info": http({"model_path": "b"})}

    assert probe_of(by_route(**old), model_path="a") == (
        Checkup(),
        [["GET", "/health"], ["GET", "/model_info"], ["GET", "/get_model_info"]],
    )
    assert probe_of(by_route(**new), model_path="b") == (
        Checkup(),
        [["GET", "/health"], ["GET", "/model_info"]],
    )


def test_where_nobody_says_which_model_it_is_nothing_is_compared():
    assert probe_of(by_route(health=http(b"")), model_path="a")[0] == Checkup()
    other_kind = probe_of(
        by_route(health=http(b""), model_info=http({"model_path": "b"})), model_path="a", takes_rid=False
    )
    assert other_kind == (Checkup(), [["GET", "/health"]])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (http(b"", "500 Oh"), "/model_info says 500"),
        (http(b"", "401 No"), "/model_info says 401"),
        (b"garbage\r\n\r\n", None),
    ],
)
def test_a_server_that_cannot_say_its_model_now_is_in_trouble_and_no_alien(data, said):
    found, _ = probe_of(by_route(health=http(b""), model_info=data), model_path="a")

    assert found == Checkup(trouble=said or found.trouble)
    assert found.trouble
    assert found.trouble.isprintable()


@pytest.mark.parametrize("body", [b"<html>", [], {"model_path": None}, {"model_path": ""}])
def test_a_server_that_names_no_model_path_is_not_compared(body):
    found, _ = probe_of(by_route(health=http(b""), model_info=http(body)), model_path="a")

    assert found == Checkup()


def test_what_an_alien_says_of_itself_shows_no_key_and_moves_no_cursor():
    data = http({"model_path": f"a\x1b[2J\n{KEY}" + "x" * 5000})
    found, _ = probe_of(by_route(health=http(b""), model_info=data), model_path="a", api_key=KEY)

    assert found.alien
    assert found.trouble.isprintable()
    assert "[key]" in found.trouble
    assert KEY not in found.trouble
    assert len(found.trouble) < 500


# ---- what a silent one says ----


def inquiry_of(act, *, timeout_s=5.0, loop=None, **endpoint):
    """What two inquiries at a hand-written server find, and which routes they asked."""

    async def main():
        async with RawServer(act) as server, open_session(reuse=False) as session:
            url = Endpoint(url=server.url, **endpoint)
            found = [await inquire(session, url, timeout_s=timeout_s) for _ in range(2)]
            return *found, [head.split()[1] for head, *_ in server.requests]

    return on(main, loop)


def loads(*ranks, at="2026-11-29T23:42:22.076049+00:00", **members):
    """A reply of ``/v1/loads``; a rank is a time, or None, and its two counts."""
    entries = [
        {"num_running_reqs": running, "num_waiting_reqs": waiting}
        | ({} if stamp is None else {"timestamp": stamp})
        for stamp, running, waiting in ranks
    ]
    return http({"timestamp": at, "loads": entries, **members})


TAKEN_S = 1795995742.0205941
"""When the recorded server published what it said 55 ms later."""


def test_a_snapshot_counts_all_ranks_and_is_as_old_as_the_oldest():
    first, second, routes = inquiry_of(by_route(v1_loads=loads((TAKEN_S, 512, 188), (TAKEN_S - 40, 0, 3))))

    assert (first.trouble, first.known) == (None, 703)
    assert first.age_s == pytest.approx(40.055, abs=0.001)
    assert first.mark == second.mark is not None
    assert routes == ["/v1/loads"] * 2


@pytest.mark.parametrize("change", [(TAKEN_S + 0.4, 1, 0), (TAKEN_S, 2, 0), (TAKEN_S, 1, 1)])
def test_a_mark_changes_with_any_time_and_any_count(change):
    before = inquiry_of(by_route(v1_loads=loads((TAKEN_S, 1, 0), (TAKEN_S, 5, 5))))[0]
    after = inquiry_of(by_route(v1_loads=loads(change, (TAKEN_S, 5, 5))))[0]

    assert before.mark != after.mark


def test_a_rank_whose_clock_is_ahead_is_not_younger_than_now():
    assert inquiry_of(by_route(v1_loads=loads((TAKEN_S + 500, 1, 0))))[0].age_s == 0.0


def test_a_time_without_a_zone_is_universal():
    found = inquiry_of(by_route(v1_loads=loads((TAKEN_S, 1, 0), at="2026-11-29T23:42:22.076049")))[0]

    assert found.age_s == pytest.approx(0.055, abs=0.001)


def test_loads_without_times_are_asked_of_the_scheduler_so_that_each_reply_is_proof():
    first, second, _ = inquiry_of(by_route(v1_loads=loads((None, 40, 24), (None, 1, 0), dp_rank_count=2)))

    assert (first.known, first.age_s, second.known) == (65, 0.0, 65)
    assert None not in (first.mark, second.mark)
    assert first.mark != second.mark


@pytest.mark.parametrize(
    "status", ["404 Not Found", "401 Unauthorized", "403 Forbidden", "405 No", "500 Oh", "302 Found"]
)
def test_where_loads_cannot_be_had_health_is_asked(status):
    act = by_route(v1_loads=http(b"", status, Location="/login"), health=http(b""))
    first, second, routes = inquiry_of(act)

    assert (first.trouble, first.known) == (None, None)
    assert first.mark is not None
    assert first.mark != second.mark
    assert routes == ["/v1/loads", "/health"] * 2


def test_a_server_of_another_kind_is_asked_for_its_health_alone():
    first, _, routes = inquiry_of(by_route(health=http(b"")), takes_rid=False)

    assert (first.trouble, first.known, routes) == (None, None, ["/health"] * 2)
    assert first.mark is not None


def test_one_that_answers_and_has_neither_route_cannot_be_called_silent():
    first, second, _ = inquiry_of(by_route())

    assert (first.trouble, first.known) == (None, None)
    assert first.mark != second.mark


@pytest.mark.parametrize("status", ["503 Service Unavailable", "401 No", "302 Found", "500 Oh"])
def test_a_health_that_is_none_is_trouble(status):
    found = inquiry_of(by_route(health=http(b"", status, Location="/login")))[0]

    assert found == Vitals(trouble=f"/health says {status[:3]}")


def test_a_health_that_takes_long_is_waited_for_up_to_the_limit():
    async def act(reader, writer, head, number):
        if b"/health" not in head:
            return http(b"", "404 Not Found")
        await asyncio.sleep(0.5)
        return http(b"")

    assert inquiry_of(act, timeout_s=0.7)[0].trouble is None
    assert inquiry_of(act, timeout_s=0.3)[0] == Vitals(trouble="said nothing within 0.3 s")


@LOOPS
@pytest.mark.parametrize("route", ["v1_loads", "health"])
def test_a_server_that_says_nothing_is_given_up_in_time(route, loop):
    began_s = time.monotonic()
    found = inquiry_of(by_route(**{route: None}), timeout_s=0.2, loop=loop)[0]

    assert found == Vitals(trouble="said nothing within 0.2 s")
    assert time.monotonic() - began_s < 1.0


GOOD_LOAD = {"num_running_reqs": 1, "num_waiting_reqs": 0, "timestamp": TAKEN_S}
ODD_NUMBERS: list[Any] = [-1, -0.5, math.nan, math.inf, 10**30, "1", None, [], True]
ODD_TIMES: list[Any] = [None, 7, "", "yesterday", "2026-13-40", "9999999999", [], {}]
ODD_LOADS: list[Any] = [
    b"",
    b"<html><body>Welcome</body></html>",
    b"\xff\xfe",
    b"[" * 100_000,
    b"{}",
    b"[]",
    b"null",
    {"loads": []},
    {"loads": None},
    {"loads": {}},
    {"loads": "text"},
    {"loads": 7},
    {"loads": [None]},
    {"loads": [[]]},
    {"loads": [{}]},
    *(
        {"timestamp": "2026-11-29T23:42:22+00:00", "loads": [{**GOOD_LOAD, key: value}]}
        for key in GOOD_LOAD
        for value in (*ODD_NUMBERS, 1e300 if key != "timestamp" else 0)
        if (key, value) != ("timestamp", 10**30)
    ),
    *({"timestamp": at, "loads": [GOOD_LOAD]} for at in ODD_TIMES),
    {"loads": [GOOD_LOAD]},
    {"timestamp": "2026-11-29T23:42:22+00:00", "loads": [GOOD_LOAD, {**GOOD_LOAD, "timestamp": None}]},
    {"timestamp": "2026-11-29T23:42:22+00:00", "loads": [GOOD_LOAD, dict(list(GOOD_LOAD.items())[:2])]},
]


def test_whatever_else_loads_are_is_trouble_in_one_line_and_never_an_error():
    odd = [http(data) for data in ODD_LOADS]

    async def act(reader, writer, head, number):
        return odd[number]

    async def main():
        async with RawServer(act) as server, open_session(reuse=False) as session:
            return [await inquire(session, Endpoint(url=server.url), timeout_s=5.0) for _ in odd]

    found = on(main)

    assert [
        (vitals, data) for vitals, data in zip(found, ODD_LOADS, strict=True) if vitals.trouble is None
    ] == []
    assert {vitals.trouble for vitals in found} == {"/v1/loads says nothing that makes sense"}


@pytest.mark.parametrize(
    "data",
    [
        b"garbage\r\n\r\n",
        http(b"{", Content_Length=500),
        http(b"no gzip", Content_Encoding="gzip"),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"",
    ],
)
def test_a_reply_that_is_none_is_trouble_in_one_line(data):
    async def act(reader, writer, head, number):
        writer.write(data)
        await writer.drain()

    found = inquiry_of(act)[0]

    assert found == Vitals(trouble=found.trouble)
    assert found.trouble
    assert found.trouble.isprintable()


def test_nobody_reads_loads_without_an_end():
    async def act(reader, writer, head, number):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(40):
            writer.write(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
            await writer.drain()
        return b"0\r\n\r\n"

    assert inquiry_of(act)[0] == Vitals(trouble="/v1/loads says nothing that makes sense")


def test_one_at_whose_address_nobody_listens_says_so():
    async def main():
        async with open_session(reuse=False) as session:
            return await inquire(session, Endpoint(url=f"http://127.0.0.1:{free_port()}"), timeout_s=5.0)

    found = on(main)

    assert found == Vitals(trouble=found.trouble)
    assert "refused" in found.trouble


def test_an_inquiry_shows_its_key_to_the_server_and_to_nobody_else():
    async def test(session, fleet):
        urls = [Endpoint(url=fleet.urls[0], api_key=key) for key in (KEY, "wrong")]
        return [await inquire(session, url, timeout_s=5.0) for url in urls]

    right, wrong = with_fleet(test, api_key=KEY)

    assert (right.known, right.trouble) == (0, None)
    assert (wrong.known, wrong.trouble) == (None, None)


@pytest.mark.parametrize("snapshot", [True, False])
def test_a_scheduler_that_hangs_stands_still_where_one_that_works_or_idles_goes_on(snapshot):
    """It says so at once and with 200, as recorded; before there were snapshots it said nothing."""

    async def test(session, fleet):
        server, port = Endpoint(url=fleet.urls[0]), fleet.ports[0]

        async def looks():
            first = await inquire(session, server, timeout_s=0.3)
            await asyncio.sleep(0.15)
            return first, await inquire(session, server, timeout_s=0.3)

        idle = await looks()
        async with asyncio.TaskGroup() as group:
            group.create_task(ask_of(session, fleet, "<<delay=0.6>>"))
            await asyncio.sleep(0.05)
            working = await looks()
            await fleet.change_mode(port, parse_mode({"mode": "hung"}))
            hanging = await looks()
            await fleet.change_mode(port, parse_mode({"mode": "normal"}))
        return idle, working, hanging

    idle, working, hanging = with_fleet(test, snapshot_loads=snapshot)

    assert [vitals.known for vitals in (*idle, *working)] == [0, 0, 1, 1]
    for first, second in (idle, working):
        assert first.mark != second.mark
        assert second.age_s < 0.1
    if not snapshot:
        assert hanging == (Vitals(trouble="said nothing within 0.3 s"),) * 2
        return
    first, second = hanging
    assert (first.trouble, first.known) == (None, 1)
    assert first.mark == second.mark is not None
    assert second.age_s - first.age_s == pytest.approx(0.15, abs=0.1)


async def ask_of(session, fleet, text):
    question = {"model": "m", "messages": [{"role": "user", "content": text}]}
    async with session.post(f"{fleet.urls[0]}/v1/chat/completions", json=question) as response:
        return response.status
