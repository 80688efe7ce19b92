"""Asking servers how they are: whether one is well, what a silent one has, which model it serves."""

import asyncio
import errno
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import aiohttp
import orjson

from genpipe.core.errors import AttemptError, FaultKind, ServerFault
from genpipe.core.values import ApiName, Checkup, Reply, Vitals
from genpipe.edges import strict_json
from genpipe.edges.answers import examine
from genpipe.edges.connections import Endpoint
from genpipe.edges.known_options import PATHS
from genpipe.edges.replies import BUSY, SIDE_BYTES_MAX, beginning, one_line, read_answer, refusal, words

HEALTH_TIMEOUT_S = 5.0
"""SGLang's own health check takes a second when all is well, and twenty when it is not."""

ASK_TIMEOUT_S = 60.0
"""Limit of the one token that a probe asks for, where it asks (seconds)."""

REQUESTS_MAX = 1 << 30
"""A server that has more has not counted (count)."""

_HEALTHY = {200, 404}
"""A server with OpenAI's API need not have the route; then its answers decide."""

_ABSENT = {404, 405, 501}


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One side request's reply: its status, and as much of its body as is wanted."""

    status: int
    body: bytes


@dataclass(slots=True, kw_only=True)
class RunModel:
    """What every server of a run has to serve; where nothing is known yet, what the first one does.

    Attributes:
        path: of the model, or None while nobody has said it.
        is_compared: servers of another model are not used.
    """

    path: str | None = None
    is_compared: bool = True

    def agrees(self, path: str) -> bool:
        """Whether a server that has loaded this one may join."""
        if not self.is_compared:
            return True
        if self.path is None:
            self.path = path
        return path.rstrip("/") == self.path.rstrip("/")


async def probe(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    *,
    name: str,
    model: RunModel,
    ask: bool,
    api: ApiName = "chat",
) -> Checkup:
    """Find out whether a server is well: its health, its model, and a token of our own where asked.

    Args:
        session: best one whose connections are new, so that they show whether somebody listens.
        endpoint: the server.
        name: sent as ``model`` with the token's request.
        model: what it has to serve.
        ask: have one token made.
        api: how it is asked for that.
    """
    try:
        trouble = await _ask_health(session, endpoint)
        if trouble is None and model.is_compared:
            path = await served_path(session, endpoint)
            if path is not None and not model.agrees(path):
                said = f"serves {one_line(path)}, and the run's model is {one_line(model.path or '')}"
                return Checkup(trouble=endpoint.hushed(f"{said}: it gets none of the prompts"), alien=True)
        if trouble is None and ask:
            trouble = await _ask_token(session, endpoint, name, api)
    except AttemptError as fault:
        # What is below a fault of ours is the library's own, where there was one.
        return _broken(endpoint.hushed(str(fault)), fault.__cause__)
    except (aiohttp.ClientError, OSError) as error:
        return _broken(endpoint.hushed(words(error)), error)
    return Checkup(trouble=trouble, asked=ask and trouble is None)


def _broken(trouble: str, error: BaseException | None) -> Checkup:
    refused = isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno == errno.ECONNREFUSED
    return Checkup(trouble=trouble, refused=refused)


async def _ask_health(session: aiohttp.ClientSession, endpoint: Endpoint) -> str | None:
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            status = (await _get(session, endpoint, "/health")).status
    except TimeoutError:
        return f"/health gave no answer within {HEALTH_TIMEOUT_S:g} s"
    return None if status in _HEALTHY else f"/health says {status}"


async def _ask_token(
    session: aiohttp.ClientSession, endpoint: Endpoint, model: str, api: ApiName
) -> str | None:
    """Have one token made of a prompt of our own; the run's own sampling may demand more of them."""
    question: dict[str, Any] = {"model": model, "max_tokens": 1}
    match api:
        case "chat":
            question = {"messages": [{"role": "user", "content": "Hi"}], **question}
        case "completions":
            question = {"prompt": "Hi", **question}
        case "generate":
            # As SGLang's own health check does: a server may have no tokenizer.
            question = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
    try:
        async with (
            asyncio.timeout(ASK_TIMEOUT_S),
            session.post(
                f"{endpoint.url}{PATHS[api]}",
                data=orjson.dumps(question),
                headers={**(endpoint.headers or {}), "Content-Type": "application/json"},
                allow_redirects=False,
            ) as response,
        ):
            if response.status != 200:
                raise await refusal(response, None)
            examine(Reply(body=await read_answer(response, None), wire_s=0.0, last_s=0.0), api=api)
    except aiohttp.ServerTimeoutError as error:
        return words(error)
    except TimeoutError:
        return f"made no token within {ASK_TIMEOUT_S:g} s"
    return None


async def served_path(session: aiohttp.ClientSession, endpoint: Endpoint) -> str | None:
    """Path of the model that a server has loaded, or None where it is one that does not say.

    Raises:
        ServerFault: it cannot say now.
    """
    if not endpoint.takes_rid:
        return None
    # The older route writes a warning into the logs of newer servers: it comes second.
    for route in ("/model_info", "/get_model_info"):
        page = await fetch(session, endpoint, route)
        if page.status not in _ABSENT:
            break
    else:
        return None
    if page.status != 200:
        kind = FaultKind.BUSY if page.status in BUSY or page.status >= 500 else FaultKind.MISROUTED
        raise ServerFault(f"{route} says {page.status}", kind=kind, status=page.status)
    try:
        path = strict_json.loads(page.body)["model_path"]
    except (ValueError, KeyError, TypeError):
        path = None
    return path if isinstance(path, str) and path else None


async def served_version(session: aiohttp.ClientSession, endpoint: Endpoint) -> str | None:
    """Version of a server, or None where it does not say: only a few things are told by it."""
    if not endpoint.takes_rid:
        return None
    # Older servers have their version in the second one alone.
    for route in ("/v1/loads?include=core", "/server_info"):
        try:
            page = await fetch(session, endpoint, route)
            version = strict_json.loads(page.body)["version"] if page.status == 200 else None
        except (AttemptError, aiohttp.ClientError, ValueError, KeyError, TypeError):
            return None
        if page.status not in _ABSENT:
            return one_line(version) if isinstance(version, str) else None
    return None


async def fetch(session: aiohttp.ClientSession, endpoint: Endpoint, route: str) -> Page:
    """GET a route of a server within ``HEALTH_TIMEOUT_S``.

    Raises:
        ServerFault: it cannot be reached, or not in time; the library's error is its cause.
        aiohttp.ClientError: it does not speak HTTP.
    """
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            return await _get(session, endpoint, route)
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
        raise ServerFault(words(error), kind=FaultKind.UNREACHABLE) from error
    except TimeoutError:
        message = f"{route} gave no answer within {HEALTH_TIMEOUT_S:g} s"
        raise ServerFault(message, kind=FaultKind.UNREACHABLE) from None
    except OSError as error:
        raise ServerFault(words(error), kind=FaultKind.UNREACHABLE) from error


async def _get(session: aiohttp.ClientSession, endpoint: Endpoint, route: str) -> Page:
    async with session.get(
        f"{endpoint.url}{route}", headers=endpoint.headers, allow_redirects=False
    ) as response:
        status = response.status
        return Page(status=status, body=await beginning(response, SIDE_BYTES_MAX) if status == 200 else b"")


async def inquire(session: aiohttp.ClientSession, endpoint: Endpoint, *, timeout_s: float) -> Vitals:
    """Find out what a silent server is doing, without work for it; never raises a fault.

    A status alone proves little: a server whose scheduler hangs answers ``/v1/loads`` at once, with what it
    had when that began. Where that route is missing, ``/health`` is asked, whose 200 needs a scheduler that
    moves; a server without that route either says nothing of itself, and is taken at its word.
    """
    try:
        async with asyncio.timeout(timeout_s):
            if endpoint.takes_rid:
                page = await _get(session, endpoint, "/v1/loads")
                if page.status == 200:
                    return _vitals(page.body)
            status = (await _get(session, endpoint, "/health")).status
    except aiohttp.ServerTimeoutError as error:
        return Vitals(trouble=words(error))
    except TimeoutError:
        return Vitals(trouble=f"said nothing within {timeout_s:.2g} s")
    except (aiohttp.ClientError, OSError) as error:
        return Vitals(trouble=endpoint.hushed(words(error)))
    if status in _HEALTHY:
        return Vitals(mark=_fresh_mark())
    return Vitals(trouble=f"/health says {status}")


def _fresh_mark() -> str:
    """The reply is proof by itself: no other is like it."""
    return uuid4().hex


def _vitals(body: bytes) -> Vitals:
    """What ``/v1/loads`` says: of this moment (SGLang 0.5.9 to 0.5.12), or of each rank's last step."""
    try:
        data = strict_json.loads(body)
        loads: list[dict[str, Any]] = data["loads"]
        # Some rank there is, and if one of them says when it wrote this, then all do.
        dated = "timestamp" in loads[0]
        counts = [_count(load[key]) for load in loads for key in ("num_running_reqs", "num_waiting_reqs")]
        stamps = [_seconds(load["timestamp"]) for load in loads if dated]
        if not dated:
            return Vitals(known=sum(counts), mark=_fresh_mark())
        now = datetime.fromisoformat(data["timestamp"])
        now_s = now.replace(tzinfo=now.tzinfo or UTC).timestamp()
    except (ValueError, LookupError, TypeError, OverflowError, OSError):
        return Vitals(trouble="/v1/loads says nothing that makes sense")
    # Ranks on other machines have other clocks, which may be ahead: what they say is then of now.
    return Vitals(known=sum(counts), age_s=max(0.0, now_s - min(stamps)), mark=f"{stamps} {counts}")


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= REQUESTS_MAX:
        raise ValueError("no count")
    return value


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError("no time")
    return float(value)
