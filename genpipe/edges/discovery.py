"""What the servers serve: asked of all of them at once, if need be for as long as none can be asked."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from genpipe.core.errors import ConfigError, FaultKind, ServerFault
from genpipe.edges import strict_json
from genpipe.edges.connections import Endpoint, Names, open_session
from genpipe.edges.health import fetch, served_path, served_version
from genpipe.edges.replies import BUSY, words

PAUSE_MAX_S = 5.0
"""Longest wait between two looks for a first server (seconds)."""

TELL_EVERY_S = 15.0
"""While no server can be reached, that is said this often (seconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What one server serves.

    Attributes:
        name: of the model, in its API.
        path: of the model that it has loaded, or None where that kind of server does not say.
        version: of SGLang, or None where it was not asked for or is not said.
    """

    name: str
    path: str | None
    version: str | None = None


async def survey(
    endpoints: Sequence[Endpoint],
    *,
    wait: bool,
    note: Callable[[str], None],
    names: Names | None = None,
    versions: bool = False,
) -> dict[str, Served | ServerFault]:
    """What each server serves, by address, or why it did not say.

    Args:
        endpoints: the servers.
        wait: go on until one of them can be asked; else each is asked once.
        note: told now and then, in one line, that none can be reached yet.
        names: looks names up, and stays open; None: one that asks the system.
        versions: ask for their versions, too.

    Raises:
        ConfigError: one of them is no such server, or wants another key.
    """
    pause_s, tell_s = 0.25, time.monotonic()
    async with open_session(names) as session:
        while True:
            answers = await _ask_all(session, endpoints, versions=versions)
            if not wait or any(isinstance(answer, Served) for answer in answers.values()):
                return answers
            if time.monotonic() >= tell_s:
                tell_s = time.monotonic() + TELL_EVERY_S
                url, fault = next(iter(answers.items()))
                note(f"no server can be reached yet ({url}: {fault}); waiting for one, Ctrl-C ends it")
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_MAX_S, 2 * pause_s)


def one_model(
    answers: Mapping[str, Served | ServerFault],
    *,
    configured: str | None,
    any_model: bool,
    note: Callable[[str], None],
) -> Served | None:
    """The one model of all servers that could be asked, or None if none could be.

    Models are told apart by their paths, where a server has none by the names.

    Args:
        answers: what :func:`survey` found.
        configured: the name that requests will carry, or None for the servers' own.
        any_model: they may serve different ones; the first counts.
        note: told, in one line, what is odd.

    Raises:
        ConfigError: they serve different models.
    """
    served = [(url, answer) for url, answer in answers.items() if isinstance(answer, Served)]
    if not served:
        return None
    if not any_model:
        for one, other, what in _differing(served):
            raise ConfigError(
                f"the servers serve different models: {one[0]} has {what(one[1])!r}, "
                f"{other[0]} has {what(other[1])!r}"
            )
    first = served[0][1]
    if configured is not None and configured != first.name:
        note(f"warning: request.model is {configured!r}, and the servers serve {first.name!r}")
    return first


_Named = tuple[str, Served]


def _differing(
    served: Sequence[_Named],
) -> Iterator[tuple[_Named, _Named, Callable[[Served], str | None]]]:
    """Pairs of servers with different models, and in what they differ."""
    with_path = [one for one in served if one[1].path is not None]
    for other in with_path[1:]:
        if _path(other[1]) != _path(with_path[0][1]):
            yield with_path[0], other, _path
    for other in served[1:]:
        if None in (served[0][1].path, other[1].path) and other[1].name != served[0][1].name:
            yield served[0], other, _name


def _path(served: Served) -> str | None:
    return None if served.path is None else served.path.rstrip("/")


def _name(served: Served) -> str | None:
    return served.name


async def _ask_all(
    session: aiohttp.ClientSession, endpoints: Sequence[Endpoint], *, versions: bool
) -> dict[str, Served | ServerFault]:
    async def one(endpoint: Endpoint) -> Served | ServerFault:
        try:
            name = await served_model(session, endpoint)
            path = await _path_of(session, endpoint)
            version = await served_version(session, endpoint) if versions else None
            return Served(name=name, path=path, version=version)
        except ServerFault as fault:
            return fault

    try:
        async with asyncio.TaskGroup() as group:
            tasks = {endpoint.url: group.create_task(one(endpoint)) for endpoint in endpoints}
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return {url: task.result() for url, task in tasks.items()}


async def served_model(session: aiohttp.ClientSession, endpoint: Endpoint) -> str:
    """The name under which a server serves its model.

    Raises:
        ServerFault: it cannot be reached, or is not ready.
        ConfigError: it is something else than a server with OpenAI's API, or wants another key.
    """
    url = f"{endpoint.url}/v1/models"
    try:
        page = await fetch(session, endpoint, "/v1/models")
    except aiohttp.ClientError as error:
        raise ConfigError(f"{endpoint.url} does not speak HTTP: {words(error)}") from None
    status = page.status
    if status in (401, 403):
        raise ConfigError(f"{url} says {status}: name the key's environment variable in servers.api_key_env")
    if status >= 500 or status in BUSY:
        raise ServerFault(f"/v1/models says {status}", kind=FaultKind.BUSY, status=status)
    try:
        name = strict_json.loads(page.body)["data"][0]["id"]
    except (ValueError, KeyError, IndexError, TypeError):
        name = None
    if status != 200 or not isinstance(name, str):
        raise ConfigError(f"{url} says {status} and names no model: is this a server with OpenAI's API?")
    return name


async def _path_of(session: aiohttp.ClientSession, endpoint: Endpoint) -> str | None:
    try:
        return await served_path(session, endpoint)
    except aiohttp.ClientError as error:
        raise ServerFault(words(error), kind=FaultKind.BROKEN) from None
