"""What the servers serve: asked of all of them at the start, for as long as none can be asked."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from genpipe.core.errors import ConfigError, ServerFault
from genpipe.edges.sglang import Endpoint, open_session, served_model

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
