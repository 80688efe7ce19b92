"""What the servers serve: asked of all of them at the start, for as long as none can be asked."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from genpipe.core.errors import ConfigError, FaultKind, ServerFault
from genpipe.edges import strict_json
from genpipe.edges.replies import BUSY, SIDE_BYTES_MAX, beginning, words
from genpipe.edges.sglang import HEALTH_TIMEOUT_S, Endpoint, auth_header, open_session

PAUSE_MAX_S = 5.0
"""Longest wait between two looks for a first server (seconds)."""

TELL_EVERY_S = 15.0
"""While no server can be reached, that is said this often (seconds)."""


async def find_model(
    endpoints: Sequence[Endpoint], *, configured: str | None, note: Callable[[str], None]
) -> str:
    """The one model that the servers serve, by their own name; waits until one of them can be asked.

    Servers that cannot be reached while another can are left to the scheduler.

    Args:
        endpoints: the servers.
        configured: the name that requests will carry, or None for the servers' own.
        note: told, in one line each, what is odd.

    Raises:
        ConfigError: they serve different models, or one of them is no such server.
    """
    pause_s, tell_s = 0.25, time.monotonic()
    async with open_session() as session:
        while True:
            answers = await _ask_all(endpoints, lambda endpoint: served_model(session, endpoint))
            names = {url: name for url, name in answers.items() if isinstance(name, str)}
            if names:
                return _one_name(names, configured, note)
            if time.monotonic() >= tell_s:
                tell_s = time.monotonic() + TELL_EVERY_S
                url, fault = next(iter(answers.items()))
                note(f"no server can be reached yet ({url}: {fault}); waiting for one, Ctrl-C ends it")
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_MAX_S, 2 * pause_s)


def _one_name(names: dict[str, str], configured: str | None, note: Callable[[str], None]) -> str:
    url, name = next(iter(names.items()))
    for other_url, other in names.items():
        if other != name:
            raise ConfigError(
                f"the servers serve different models: {url} has {name!r}, {other_url} has {other!r}"
            )
    if configured is not None and configured != name:
        note(f"warning: request.model is {configured!r}, and the servers serve {name!r}")
    return name


async def _ask_all(
    endpoints: Sequence[Endpoint], ask: Callable[[Endpoint], Awaitable[str]]
) -> dict[str, str | ServerFault]:
    """Ask all servers at once: by address, what each said, or why it said nothing.

    Raises:
        ConfigError: one of them is not what it should be.
    """

    async def one(endpoint: Endpoint) -> str | ServerFault:
        try:
            return await ask(endpoint)
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
        async with (
            asyncio.timeout(HEALTH_TIMEOUT_S),
            session.get(url, headers=auth_header(endpoint), allow_redirects=False) as response,
        ):
            status = response.status
            data = await beginning(response, SIDE_BYTES_MAX)
    except TimeoutError:
        message = f"no answer within {HEALTH_TIMEOUT_S:g} s"
        raise ServerFault(message, kind=FaultKind.UNREACHABLE) from None
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
        raise ServerFault(words(error), kind=FaultKind.UNREACHABLE) from None
    except aiohttp.ClientError as error:
        raise ConfigError(f"{endpoint.url} does not speak HTTP: {words(error)}") from None
    if status in (401, 403):
        raise ConfigError(f"{url} says {status}: name the key's environment variable in servers.api_key_env")
    if status >= 500 or status in BUSY:
        raise ServerFault(f"/v1/models says {status}", kind=FaultKind.BUSY, status=status)
    try:
        name = strict_json.loads(data)["data"][0]["id"]
    except (ValueError, KeyError, IndexError, TypeError):
        name = None
    if status != 200 or not isinstance(name, str):
        raise ConfigError(f"{url} says {status} and names no model: is this a server with OpenAI's API?")
    return name
