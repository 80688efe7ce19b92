"""HTTP to SGLang, and to other servers with OpenAI's API: request bodies, replies, and who is to blame."""

import asyncio
import secrets
import socket
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from genpipe.core.errors import AttemptError, ConfigError, FaultKind, PromptFault, ServerFault
from genpipe.core.values import Answer, Reply, Start
from genpipe.edges import strict_json

CONNECT_TIMEOUT_S = 10.0
HEALTH_TIMEOUT_S = 5.0
"""SGLang's own health check takes a second when all is well, and twenty when it is not."""

ASK_TIMEOUT_S = 60.0
"""Limit of the one token that a probe asks for, where it asks (seconds)."""

KEEP_ALIVE_S = 4.0
"""Idle connections are closed before the server's uvicorn does so, which is after 5 s."""

REPLY_BYTES_MAX = 256 << 20
"""A longer reply is none (bytes)."""

_PROMPT_FAULTS = {400, 413, 422}
_BUSY = {429, 503}
_MISROUTED = {401, 403, 404, 405, 407}


class Monotonic:
    """The run's clock: this machine's monotonic one."""

    def now_s(self) -> float:
        """Seconds since an arbitrary moment."""
        return time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One server's address.

    Attributes:
        url: base address without a trailing slash.
        api_key: sent as a bearer token, or None.
        takes_rid: it knows SGLang's request field ``rid``.
    """

    url: str
    api_key: str | None = None
    takes_rid: bool = True


class _Body(aiohttp.BytesPayload):
    """A request body that notes when it was handed to the socket, and on which connection."""

    wire_s: float | None = None
    reused = False

    def __init__(self, value: bytes, seen: "weakref.WeakSet[Any]") -> None:
        super().__init__(value, content_type="application/json")
        self._seen = seen

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """Write the body, which goes out with the headers."""
        transport = getattr(writer, "transport", None)
        if transport is not None:
            self.reused = transport in self._seen
            self._seen.add(transport)
        await super().write_with_length(writer, content_length)
        self.wire_s = time.monotonic()


class SglangTransport:
    """Chat completions over HTTP, one session for all servers. Use as an async context manager.

    Each attempt carries an id of its own and of fixed width (``rid``), since SGLang aborts by prefix.
    A connection that the server closed before it sent a byte, and that had been used before, was closed for
    idleness in that very moment; the request is sent once more, on a new one, and nobody is charged.

    Attributes:
        reconnects: how often that happened, by server.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        model: str,
        members: dict[str, Any],
        timeout_s: float | None = None,
    ) -> None:
        """Prepare what is the same for all requests.

        Args:
            endpoints: the servers, in the run's order.
            model: sent as ``model``.
            members: further members of the request body.
            timeout_s: limit of one request; passing it is the prompt's fault. None: no limit.
        """
        self._endpoints = list(endpoints)
        self._urls = [URL(f"{endpoint.url}/v1/chat/completions") for endpoint in endpoints]
        self._headers = [_auth(endpoint) for endpoint in endpoints]
        self._members = {"model": model, **members}
        shared = b"," + orjson.dumps(self._members)[1:-1]
        self._tails = [shared + (b',"rid":"' if endpoint.takes_rid else b"}") for endpoint in endpoints]
        self._rid_head = secrets.token_hex(8)
        self._timeout_s = timeout_s
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self.reconnects = [0] * len(self._endpoints)

    async def __aenter__(self) -> Self:
        self._session = open_session()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def generate(self, start: Start) -> Reply:
        """Send one prompt to one server; see the port."""
        body = _Body(self._encode(start), self._seen)
        if self._timeout_s is None:
            return await self._post(start.server, body)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._post(start.server, body)
        except TimeoutError:
            message = f"no answer within request.timeout_s = {self._timeout_s:g} s"
            raise PromptFault(message, wire_s=body.wire_s) from None

    async def _post(self, server: int, body: "_Body") -> Reply:
        try:
            return await self._exchange(server, body)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if isinstance(error, aiohttp.ClientConnectorError) or not body.reused:
                raise _unreachable(error, body.wire_s) from None
            self.reconnects[server] += 1
        except aiohttp.ClientError as error:
            raise _broken(error, body.wire_s) from None
        # The connection had been idle and was closed as the request went out: once more, on another.
        try:
            return await self._exchange(server, body)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            raise _unreachable(error, body.wire_s) from None
        except aiohttp.ClientError as error:
            raise _broken(error, body.wire_s) from None

    async def _exchange(self, server: int, body: "_Body") -> Reply:
        async with self._session.post(
            self._urls[server], data=body, headers=self._headers[server], allow_redirects=False
        ) as response:
            if response.status != 200:
                raise await _refusal(response, body.wire_s)
            if response.content_length is None:
                data = await _read_bounded(response)
            else:
                _check_length(response.content_length)
                data = await response.read()
            last_s = time.monotonic()
        # A server may answer before it has read all of a request.
        return Reply(body=data, wire_s=last_s if body.wire_s is None else body.wire_s, last_s=last_s)

    def _encode(self, start: Start) -> bytes:
        head, tail = b'{"messages":', self._tails[start.server]
        if not self._endpoints[start.server].takes_rid:
            return b"".join((head, start.prompt.payload, tail))
        rid = f'{self._rid_head}{start.attempt:016x}"}}'.encode()
        return b"".join((head, start.prompt.payload, tail, rid))

    def examine(self, reply: Reply) -> Answer:
        """Look whether a 200 is an answer; see the port."""
        return examine(reply)

    async def probe(self, server: int, *, ask: bool) -> str | None:
        """Ask a benched server whether it is well; see the port."""
        endpoint = self._endpoints[server]
        try:
            async with (
                asyncio.timeout(HEALTH_TIMEOUT_S),
                self._session.get(f"{endpoint.url}/health", headers=self._headers[server]) as response,
            ):
                # A server with OpenAI's API need not have this route; then the trial prompt decides.
                if response.status not in (200, 404):
                    return f"/health says {response.status}"
            if ask:
                await self._ask(server)
        except TimeoutError:
            return "/health gave no answer in time" if not ask else "gave no token in time"
        except AttemptError as error:
            return str(error)
        except (aiohttp.ClientError, OSError) as error:
            return _words(error)
        return None

    async def _ask(self, server: int) -> None:
        """Have one token made of a prompt of our own."""
        body = {"messages": [{"role": "user", "content": "Hi"}], **self._members, "max_tokens": 1}
        async with (
            asyncio.timeout(ASK_TIMEOUT_S),
            self._session.post(
                self._urls[server],
                data=orjson.dumps(body),
                headers={**(self._headers[server] or {}), "Content-Type": "application/json"},
            ) as response,
        ):
            if response.status != 200:
                raise await _refusal(response, None)
            examine(Reply(body=await response.read(), wire_s=0.0, last_s=0.0))


def open_session() -> aiohttp.ClientSession:
    """A session for thousands of slow requests: no limit, no total timeout, no cookies, no proxies."""
    connector = aiohttp.TCPConnector(
        limit=0,
        keepalive_timeout=KEEP_ALIVE_S,
        ttl_dns_cache=300,
        socket_factory=_socket,
    )
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        read_bufsize=1 << 20,
    )


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket whose dead peer is noticed within two minutes though no byte is expected for long."""
    family, kind, proto, _, _ = address
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 30), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


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
            session.get(url, headers=_auth(endpoint), allow_redirects=False) as response,
        ):
            data = await response.content.read(1 << 20)
            status = response.status
    except TimeoutError:
        raise ServerFault("no answer in time", kind=FaultKind.UNREACHABLE) from None
    except (aiohttp.ClientConnectionError, OSError) as error:
        raise ServerFault(_words(error), kind=FaultKind.UNREACHABLE) from None
    except aiohttp.ClientError as error:
        raise ConfigError(f"{endpoint.url} does not speak HTTP: {_words(error)}") from None
    if status in (401, 403):
        raise ConfigError(f"{url} says {status}: name the key's environment variable in servers.api_key_env")
    if status >= 500 or status in _BUSY:
        raise ServerFault(f"/v1/models says {status}", kind=FaultKind.BUSY, status=status)
    try:
        name = strict_json.loads(data)["data"][0]["id"]
    except (ValueError, KeyError, IndexError, TypeError):
        name = None
    if status != 200 or not isinstance(name, str):
        raise ConfigError(f"{url} says {status} and names no model: is this a server with OpenAI's API?")
    return name


def examine(reply: Reply) -> Answer:
    """Look whether a 200 is an answer.

    Raises:
        ServerFault: it was aborted, has no choices, is no JSON, or is an error object.
    """
    try:
        data = strict_json.loads(reply.body)
    except ValueError:
        raise _no_answer(reply, f"200 with a body that is not JSON: {reply.body[:60]!r}") from None
    if not isinstance(data, dict):
        raise _no_answer(reply, "200 with JSON that is no object")
    if data.get("error") or data.get("object") == "error":
        raise _no_answer(reply, f"200 with an error: {_message(data)}")
    choices = data.get("choices")
    if not isinstance(choices, list) or not choices:
        raise _no_answer(reply, "200 without choices")
    parts = []
    for choice in choices:
        message = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(message, dict):
            raise _no_answer(reply, "200 with a choice without a message")
        if choice.get("finish_reason") == "abort":
            raise _no_answer(reply, "200 with finish_reason abort")
        parts.append({key: message.get(key) for key in ("content", "reasoning_content", "tool_calls")})
    usage = data.get("usage") if isinstance(data.get("usage"), dict) else None
    model = data.get("model")
    reasons = [choice.get("finish_reason") for choice in choices]
    # Of several samples the one that was cut off says most.
    finish_reason = "length" if "length" in reasons else reasons[0]
    return Answer(
        response=parts[0] if len(parts) == 1 else parts,
        finish_reason=finish_reason,
        usage=usage,
        output_tokens=_output_tokens(usage, parts),
        flags=_flags(finish_reason, parts),
        model=model if isinstance(model, str) else None,
        size_bytes=len(reply.body),
    )


def _output_tokens(usage: dict[str, Any] | None, parts: list[dict[str, Any]]) -> int | None:
    """What the server counted; zero for an answer with text in it means that it did not count."""
    tokens = usage.get("completion_tokens") if usage is not None else None
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
        return None
    if tokens == 0 and any(value for part in parts for value in part.values()):
        return None
    return tokens


def _flags(finish_reason: str | None, parts: list[dict[str, Any]]) -> tuple[str, ...]:
    """What is odd about an answer; nearly always nothing."""
    empty = not any(part["content"] or part["tool_calls"] for part in parts)
    cut = finish_reason == "length"
    if not empty and not cut:
        return ()
    return ("empty",) * empty + ("cut",) * cut


def _no_answer(reply: Reply, message: str) -> ServerFault:
    return ServerFault(message, kind=FaultKind.BROKEN, status=200, wire_s=reply.wire_s)


def _check_length(length: int) -> None:
    if length > REPLY_BYTES_MAX:
        raise aiohttp.ClientPayloadError(f"a reply of {length} bytes is too long")


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    """The whole body of a reply that did not say how long it is."""
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        _check_length(len(data))
    return bytes(data)


async def _refusal(response: aiohttp.ClientResponse, wire_s: float | None) -> AttemptError:
    """What a status other than 200 means."""
    status = response.status
    text = await response.content.read(1 << 16)
    try:
        message = _message(strict_json.loads(text))
    except ValueError:
        message = text.decode("utf-8", "replace").strip()
    message = f"{status}: {_one_line(message) or response.reason or 'no message'}"
    if status in _PROMPT_FAULTS:
        return PromptFault(message, status=status, wire_s=wire_s)
    if status in _BUSY:
        kind = FaultKind.BUSY
    elif status in _MISROUTED or 300 <= status < 400:
        kind = FaultKind.MISROUTED
    elif status >= 500:
        kind = FaultKind.BROKEN
    else:
        return PromptFault(message, status=status, wire_s=wire_s)
    retry_after_s = _retry_after_s(response.headers.get("Retry-After"))
    return ServerFault(message, kind=kind, status=status, wire_s=wire_s, retry_after_s=retry_after_s)


def _retry_after_s(value: str | None) -> float | None:
    """Seconds, where the header gives them; the form with a date is left alone."""
    return float(value) if value is not None and value.strip().isdigit() else None


def _message(data: Any) -> str:
    """The message of an error body, in any of the shapes that servers use."""
    if isinstance(data, dict):
        error = data.get("error", data)
        if isinstance(error, dict):
            error = error.get("message") or error.get("detail")
        data = error or data.get("detail") or data.get("message")
    return _one_line(data if isinstance(data, str) else str(data))


def _one_line(text: str) -> str:
    """Servers echo whole prompts in their errors; the beginning is enough."""
    return " ".join(text.split())[:300]


def _unreachable(error: Exception, wire_s: float | None) -> ServerFault:
    return ServerFault(_words(error), kind=FaultKind.UNREACHABLE, wire_s=wire_s)


def _broken(error: Exception, wire_s: float | None) -> ServerFault:
    kind = FaultKind.BROKEN if wire_s is not None else FaultKind.UNREACHABLE
    return ServerFault(_words(error), kind=kind, wire_s=wire_s)


def _words(error: Exception) -> str:
    """What a library's error says, in one line for people."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"the name {error.host} cannot be resolved"
    if isinstance(error, aiohttp.ClientConnectorError):
        reason = error.os_error.strerror or str(error.os_error)
        return f"cannot connect: {reason}"
    if isinstance(error, aiohttp.ServerTimeoutError):
        return f"cannot connect within {CONNECT_TIMEOUT_S:g} s"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "closed the connection without a reply"
    return _one_line(f"{type(error).__name__}: {error}")


def _auth(endpoint: Endpoint) -> dict[str, str] | None:
    return None if endpoint.api_key is None else {"Authorization": f"Bearer {endpoint.api_key}"}
