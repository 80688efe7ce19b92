"""What the servers serve: their names and paths, asked of all of them, and that it is one model."""

import asyncio

import pytest

from genpipe.core.errors import ConfigError, FaultKind, ServerFault
from genpipe.edges.connections import Endpoint, open_session
from genpipe.edges.discovery import Served, one_model, served_model, survey
from genpipe.edges.health import served_version
from genpipe.sim.server import SimConfig, SimFleet
from tests.edges.raw_server import KEY, RawServer, always, free_port, http, on

# ---- one server's name ----


def model_of(act, **endpoint):
    async def main():
        async with RawServer(act) as server, open_session() as session:
            return await served_model(session, Endpoint(url=server.url, **endpoint))

    return on(main)


def test_the_model_s_name_is_the_server_s_own():
    async def main():
        async with (
            SimFleet(SimConfig(model="org/tiny", api_key=KEY), [0]) as fleet,
            open_session() as session,
        ):
            return await served_model(session, Endpoint(url=fleet.urls[0], api_key=KEY))

    assert on(main) == "org/tiny"


def test_a_list_of_models_that_comes_in_pieces_is_read_to_its_end():
    async def act(reader, writer, head, number):
        data = http({"data": [{"id": "first"}, *({"id": f"model {n}"} for n in range(20_000))]})
        for place in range(0, len(data), 100_000):
            writer.write(data[place : place + 100_000])
            await asyncio.sleep(0.005)
        return b""

    assert model_of(act) == "first"


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (http({"error": "Unauthorized"}, "401 Unauthorized"), ConfigError, "servers.api_key_env"),
        (http(b"", "403 Forbidden"), ConfigError, "servers.api_key_env"),
        (http({"detail": "Not Found"}, "404 Not Found"), ConfigError, "is this a server with OpenAI's API?"),
        (http(b"", "302 Found", Location="/login"), ConfigError, "says 302"),
        (http({"data": []}), ConfigError, "names no model"),
        (http({"data": [{"id": 7}]}), ConfigError, "names no model"),
        (http([]), ConfigError, "names no model"),
        (http(b"<html>"), ConfigError, "names no model"),
        (http(b"\xff"), ConfigError, "names no model"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", ConfigError, "does not speak HTTP"),
        (http(b"", "503 Service Unavailable"), ServerFault, "/v1/models says 503"),
        (http(b"", "500 Oh"), ServerFault, "/v1/models says 500"),
        (http(b"", "429 Slow"), ServerFault, "/v1/models says 429"),
    ],
)
def test_a_server_that_names_no_model_is_wrong_or_not_ready(data, error, words):
    with pytest.raises(error) as caught:
        model_of(always(data), api_key=KEY)

    assert words in str(caught.value)
    assert str(caught.value).isprintable()
    assert KEY not in str(caught.value)


def test_a_server_that_cannot_be_asked_for_its_model_may_be_asked_later():
    async def main():
        async with open_session() as session:
            await served_model(session, Endpoint(url=f"http://127.0.0.1:{free_port()}"))

    with pytest.raises(ServerFault, match="refused"):
        on(main)


def test_a_list_of_models_that_breaks_off_may_be_whole_later():
    async def act(reader, writer, head, number):
        writer.write(http(b'{"data":', Content_Length=500))
        await writer.drain()

    with pytest.raises(ServerFault, match="cut short"):
        model_of(act)


# ---- all of them ----


def nobody():
    return Endpoint(url=f"http://127.0.0.1:{free_port()}")


def test_each_server_is_asked_for_its_name_and_path_and_one_that_is_away_says_why_not():
    configs = [SimConfig(model="small", model_path="org/small"), SimConfig(model="large")]

    async def main():
        async with SimFleet(configs, [0, 0]) as fleet:
            endpoints = [nobody(), *(Endpoint(url=url) for url in fleet.urls)]
            openai = Endpoint(url=fleet.urls[0], takes_rid=False)
            return (
                list((await survey(endpoints, wait=False, note=print)).values()),
                list((await survey([openai], wait=True, note=print)).values()),
            )

    (away, small, large), (openai,) = on(main)

    assert isinstance(away, ServerFault)
    assert "refused" in str(away)
    assert small == Served(name="small", path="org/small")
    assert large == Served(name="large", path="large")
    assert openai == Served(name="small", path=None)


def test_a_server_that_names_itself_and_cannot_say_its_path_now_has_not_said_what_it_serves():
    async def act(reader, writer, head, number):
        return http({"data": [{"id": "a"}]}) if b"/v1/models" in head else http(b"", "503 Oh")

    async def main():
        async with RawServer(act) as server:
            return list((await survey([Endpoint(url=server.url)], wait=False, note=print)).values())

    (answer,) = on(main)

    assert isinstance(answer, ServerFault)
    assert str(answer) == "/model_info says 503"


def test_without_waiting_nobody_is_asked_twice():
    notes: list[str] = []

    async def main():
        return await survey([nobody()], wait=False, note=notes.append)

    answers = on(main)

    assert [type(answer) for answer in answers.values()] == [ServerFault]
    assert notes == []


def test_waiting_goes_on_until_somebody_can_be_asked_and_says_so():
    notes: list[str] = []

    async def main():
        endpoint = nobody()
        asking = asyncio.ensure_future(survey([endpoint], wait=True, note=notes.append))
        await asyncio.sleep(0.4)
        assert not asking.done()
        async with SimFleet(SimConfig(), [int(endpoint.url.rpartition(":")[2])]):
            return list((await asking).values())

    assert on(main) == [Served(name="tiny-model", path="tiny-model")]
    assert len(notes) == 1
    assert notes[0].startswith("no server can be reached yet (http://127.0.0.1:")


def test_one_that_wants_another_key_ends_the_survey():
    async def main():
        async with SimFleet(SimConfig(api_key=KEY), [0]) as fleet:
            await survey([nobody(), Endpoint(url=fleet.urls[0])], wait=True, note=print)

    with pytest.raises(ConfigError, match="api_key_env"):
        on(main)


# ---- one model ----

AWAY = ServerFault("refused", kind=FaultKind.UNREACHABLE)


def judged(*answers, configured=None, any_model=False):
    """The one model of servers a, b, …, and what was noted."""
    notes: list[str] = []
    by_url = {chr(ord("a") + place): answer for place, answer in enumerate(answers)}
    found = one_model(by_url, configured=configured, any_model=any_model, note=notes.append)
    return found, notes


def served(name, path=None):
    return Served(name=name, path=path)


@pytest.mark.parametrize(
    "answers",
    [
        (served("m", "p"), served("m", "p")),
        (served("m", "p"), served("other name", "p")),
        (served("m", "p"), served("m", "p/")),
        (served("m"), served("m")),
        (served("m", "p"), served("m")),
        (AWAY, served("m", "p"), AWAY, served("m", "p")),
    ],
)
def test_servers_that_agree_have_one_model(answers):
    first = next(answer for answer in answers if isinstance(answer, Served))

    assert judged(*answers) == (first, [])


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ((served("m", "p"), served("m", "q")), "a has 'p', b has 'q'"),
        ((served("m", "p"), AWAY, served("m", "p"), served("n", "q")), "a has 'p', d has 'q'"),
        ((served("m"), served("n")), "a has 'm', b has 'n'"),
        ((served("m", "p"), served("n")), "a has 'm', b has 'n'"),
        ((served("m"), served("m", "p"), served("m", "q")), "b has 'p', c has 'q'"),
    ],
)
def test_servers_that_differ_are_refused_by_path_or_by_name_unless_any_will_do(answers, said):
    with pytest.raises(ConfigError) as caught:
        judged(*answers)

    assert str(caught.value) == f"the servers serve different models: {said}"
    assert judged(*answers, any_model=True) == (answers[0], [])


def test_if_nobody_could_be_asked_nothing_is_known():
    assert judged(AWAY, AWAY) == (None, [])


def test_a_name_that_was_configured_need_not_be_the_servers_own_which_is_told():
    assert judged(served("m", "p"), configured="m")[1] == []
    assert judged(served("m", "p"), configured="x") == (
        served("m", "p"),
        ["warning: request.model is 'x', and the servers serve 'm'"],
    )


# ---- versions ----


def version_of(act):
    async def main():
        async with RawServer(act) as server, open_session() as session:
            version = await served_version(session, Endpoint(url=server.url))
            return version, [head.split()[1] for head, _, _ in server.requests]

    return on(main)


def test_versions_are_asked_for_only_where_they_are_wanted():
    async def main():
        configs = [SimConfig(), SimConfig(snapshot_loads=False)]
        async with SimFleet(configs, [0, 0]) as fleet:
            endpoints = [Endpoint(url=url) for url in fleet.urls]
            return [
                [
                    answer.version
                    for answer in (
                        await survey(endpoints, wait=False, note=print, versions=versions)
                    ).values()
                    if isinstance(answer, Served)
                ]
                for versions in (False, True)
            ]

    assert on(main) == [[None, None], ["0.5.17", "0.5.11"]]


@pytest.mark.parametrize("status", ["404 Not Found", "405 Method Not Allowed"])
def test_a_server_without_loads_is_asked_for_its_version_elsewhere(status):
    async def act(reader, writer, head, number):
        return http(b"", status) if b"loads" in head else http({"version": "0.5.6"})

    assert version_of(act) == ("0.5.6", ["/v1/loads?include=core", "/server_info"])


@pytest.mark.parametrize(
    "data",
    [
        http({}),
        http({"version": 5}),
        http(b"[]"),
        http(b"nonsense"),
        http(b"", "503 Busy"),
        http(b"", "404 Not Found"),
        b"nonsense",
        None,
    ],
)
def test_a_server_that_does_not_say_its_version_has_none(data):
    async def act(reader, writer, head, number):
        return data

    assert version_of(act)[0] is None
