"""HTTP to SGLang, and to other servers with OpenAI's API: request bodies, replies, and who is to blame."""

import asyncio
import errno
import os
import re
import secrets
import socket
import ssl
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
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

SIDE_BYTES_MAX = 16 << 20
"""What is read of a reply that is no answer (bytes): of an error, in which servers echo whole prompts."""

OUTPUT_TOKENS_MAX = 1 << 40
"""A server that counts more has not counted (count)."""

_BUSY = {429, 503}
_MISROUTED = {401, 402, 403, 404, 405, 407}
_RETRIED = {408, 425}
_RESENT = 1 << 63
"""Added to an attempt's number in the id of its second sending: a server may still know the first one's."""


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
    api_key: str | None = field(default=None, repr=False)
    takes_rid: bool = True

    def __post_init__(self) -> None:
        key = None if self.api_key is None else self.api_key.strip()
        if key is not None and not (key and key.isascii() and key.isprintable()):
            raise ConfigError(
                f"server {self.url}: its key is blank, or holds a line break or another character that no "
                "header can carry"
            )


class _Body(aiohttp.BytesPayload):
    """A request body that notes what becomes of it.

    Attributes:
        wire_s: when it was handed to the socket, or None (seconds, run clock).
        begun: a connection is there.
        reused: that connection has carried a request before.
        replied: the head of a reply has come.
    """

    wire_s: float | None = None
    begun = reused = replied = False

    def __init__(self, value: bytes, seen: "weakref.WeakSet[Any]") -> None:
        # The library warns of large bodies; it writes them in pieces all the same.
        super().__init__(b"", content_type="application/json")
        self._seen = seen
        self.renew(value)

    def renew(self, value: bytes) -> None:
        """Be about to be sent, with this content."""
        self._value = value
        self._size = len(value)
        self.wire_s = None
        self.begun = self.reused = self.replied = False

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """Write the body, which goes out with the headers."""
        self.begun = True
        # The protocol stands for the connection: not every loop lets its transports be weakly referenced.
        connection = getattr(writer, "protocol", None)
        if connection is not None:
            self.reused = connection in self._seen
            self._seen.add(connection)
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
        self._model = model
        shared = b"," + orjson.dumps({"model": model, **members})[1:-1]
        self._tails = [shared + (b',"rid":"' if endpoint.takes_rid else b"}") for endpoint in endpoints]
        self._rid_head = secrets.token_hex(8)
        self._keys = {endpoint.api_key.strip() for endpoint in endpoints if endpoint.api_key is not None}
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
        body = _Body(self._encode(start, start.attempt), self._seen)
        try:
            if self._timeout_s is None:
                return await self._post(start, body)
            async with asyncio.timeout(self._timeout_s):
                return await self._post(start, body)
        except TimeoutError:
            within = f"within request.timeout_s = {self._timeout_s:g} s"
            if not body.begun:
                # The prompt has never been sent: it is not to blame.
                raise ServerFault(f"no connection {within}", kind=FaultKind.UNREACHABLE) from None
            raise PromptFault(f"no answer {within}", wire_s=body.wire_s) from None
        except AttemptError as fault:
            raise self._hushed(fault) from None

    async def _post(self, start: Start, body: "_Body") -> Reply:
        try:
            return await self._exchange(start.server, body)
        except aiohttp.ClientError as error:
            if not _was_idle(error, body):
                raise _fault(error, body.wire_s) from None
        # The connection had been idle and was closed as the request went out: once more, on another.
        self.reconnects[start.server] += 1
        body.renew(self._encode(start, start.attempt | _RESENT))
        try:
            return await self._exchange(start.server, body)
        except aiohttp.ClientError as error:
            raise _fault(error, body.wire_s) from None

    async def _exchange(self, server: int, body: "_Body") -> Reply:
        async with self._session.post(
            self._urls[server], data=body, headers=self._headers[server], allow_redirects=False
        ) as response:
            body.replied = True
            if response.status != 200:
                raise await _refusal(response, body.wire_s)
            data = await _read(response, body.wire_s)
            last_s = time.monotonic()
        # A server may answer before it has read all of a request.
        return Reply(body=data, wire_s=last_s if body.wire_s is None else body.wire_s, last_s=last_s)

    def _encode(self, start: Start, number: int) -> bytes:
        head, tail = b'{"messages":', self._tails[start.server]
        if not self._endpoints[start.server].takes_rid:
            return b"".join((head, start.prompt.payload, tail))
        rid = f'{self._rid_head}{number:016x}"}}'.encode()
        return b"".join((head, start.prompt.payload, tail, rid))

    def examine(self, reply: Reply) -> Answer:
        """Look whether a 200 is an answer; see the port."""
        try:
            return examine(reply)
        except ServerFault as fault:
            raise self._hushed(fault) from None

    async def probe(self, server: int, *, ask: bool) -> str | None:
        """Ask a benched server whether it is well; see the port."""
        try:
            trouble = await self._ask_health(server)
            if trouble is None and ask:
                trouble = await self._ask_token(server)
        except AttemptError as fault:
            return str(self._hushed(fault))
        except (aiohttp.ClientError, OSError) as error:
            return _words(error)
        return trouble

    async def _ask_health(self, server: int) -> str | None:
        try:
            async with (
                asyncio.timeout(HEALTH_TIMEOUT_S),
                self._session.get(
                    f"{self._endpoints[server].url}/health",
                    headers=self._headers[server],
                    allow_redirects=False,
                ) as response,
            ):
                # A server with OpenAI's API need not have this route; then the trial prompt decides.
                return None if response.status in (200, 404) else f"/health says {response.status}"
        except TimeoutError:
            return f"/health gave no answer within {HEALTH_TIMEOUT_S:g} s"

    async def _ask_token(self, server: int) -> str | None:
        """Have one token made of a prompt of our own; the run's own sampling may demand more of them."""
        question = {"messages": [{"role": "user", "content": "Hi"}], "model": self._model, "max_tokens": 1}
        try:
            async with (
                asyncio.timeout(ASK_TIMEOUT_S),
                self._session.post(
                    self._urls[server],
                    data=_Body(orjson.dumps(question), self._seen),
                    headers=self._headers[server],
                    allow_redirects=False,
                ) as response,
            ):
                if response.status != 200:
                    raise await _refusal(response, None)
                examine(Reply(body=await _read(response, None), wire_s=0.0, last_s=0.0))
        except TimeoutError:
            return f"made no token within {ASK_TIMEOUT_S:g} s"
        return None

    def _hushed(self, fault: AttemptError) -> AttemptError:
        """The fault without any server's key: some servers repeat it in their errors."""
        message = str(fault)
        for key in self._keys:
            message = message.replace(key, "[key]")
        fault.args = (message,)
        return fault


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
            status = response.status
            data = await _beginning(response, SIDE_BYTES_MAX)
    except TimeoutError:
        message = f"no answer within {HEALTH_TIMEOUT_S:g} s"
        raise ServerFault(message, kind=FaultKind.UNREACHABLE) from None
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
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
    parts: list[dict[str, Any]] = []
    reasons: list[str | None] = []
    for choice in choices:
        message = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(message, dict):
            raise _no_answer(reply, "200 with a choice without a message")
        reasons.append(_finish_reason(choice.get("finish_reason")))
        if reasons[-1] == "abort":
            raise _no_answer(reply, "200 with finish_reason abort")
        parts.append({key: message.get(key) for key in ("content", "reasoning_content", "tool_calls")})
    usage = data.get("usage") if isinstance(data.get("usage"), dict) else None
    model = data.get("model")
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


def _finish_reason(given: Any) -> str | None:
    """As chat completions give it; SGLang's own endpoint puts it into an object."""
    if isinstance(given, dict):
        given = given.get("type")
    return given if isinstance(given, str) else None


def _output_tokens(usage: dict[str, Any] | None, parts: list[dict[str, Any]]) -> int | None:
    """What the server counted; zero for an answer with text in it means that it did not count."""
    tokens = usage.get("completion_tokens") if usage is not None else None
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 <= tokens <= OUTPUT_TOKENS_MAX:
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


async def _read(response: aiohttp.ClientResponse, wire_s: float | None) -> bytes:
    """The whole body of a 200."""
    length = response.content_length
    if length is not None and length <= REPLY_BYTES_MAX and "Content-Encoding" not in response.headers:
        return await response.read()
    if length is None or length <= REPLY_BYTES_MAX:
        data = await _beginning(response, REPLY_BYTES_MAX + 1)
        if len(data) <= REPLY_BYTES_MAX:
            return data
    message = f"200 with a body of more than {REPLY_BYTES_MAX} bytes"
    raise ServerFault(message, kind=FaultKind.BROKEN, status=200, wire_s=wire_s)


async def _beginning(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """The body of a reply, or as much of it as is wanted."""
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) >= bytes_max:
            break
    return bytes(data[:bytes_max])


async def _refusal(response: aiohttp.ClientResponse, wire_s: float | None) -> AttemptError:
    """What a status other than 200 means."""
    status = response.status
    try:
        text = await _beginning(response, SIDE_BYTES_MAX)
    except aiohttp.ClientPayloadError:
        # The status has come, and says enough.
        text = b""
    try:
        message = _message(strict_json.loads(text))
    except ValueError:
        message = _one_line(text.decode("utf-8", "replace"))
    message = f"{status}: {message or _one_line(response.reason or '') or 'no message'}"
    if status in _BUSY:
        kind = FaultKind.BUSY
    elif status in _MISROUTED or 300 <= status < 400:
        kind = FaultKind.MISROUTED
    elif 400 <= status < 500 and status not in _RETRIED:
        return PromptFault(message, status=status, wire_s=wire_s)
    else:
        kind = FaultKind.BROKEN
    retry_after_s = _retry_after_s(response.headers.get("Retry-After"))
    return ServerFault(message, kind=kind, status=status, wire_s=wire_s, retry_after_s=retry_after_s)


def _retry_after_s(value: str | None) -> float | None:
    """Seconds, where the header gives them; the form with a date is left alone."""
    if value is None or not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value.strip()):
        return None
    return float(value)


def _message(data: Any) -> str:
    """The message of an error body, in any of the shapes that servers use; empty where there is none."""
    if isinstance(data, dict):
        error = data.get("error")
        if isinstance(error, dict):
            error = error.get("message") or error.get("detail")
        data = error or data.get("message") or data.get("detail")
    if data is None:
        return ""
    return _one_line(data if isinstance(data, str) else strict_json.dumps(data).decode())


def _one_line(text: str) -> str:
    """The beginning, since servers echo whole prompts in their errors; nothing in it moves a cursor."""
    shown = "".join(char if char.isprintable() else " " for char in text[:2000])
    return " ".join(shown.split())[:300]


def _was_idle(error: aiohttp.ClientError, body: "_Body") -> bool:
    """Whether a connection that had served before was closed before a byte of this reply came."""
    if body.replied or not body.reused:
        return False
    if isinstance(error, aiohttp.ServerDisconnectedError):
        # The library puts what it has of a reply's head in place of a message.
        return isinstance(error.message, str)
    return isinstance(error, aiohttp.ClientOSError | aiohttp.ClientConnectionResetError)


def _fault(error: aiohttp.ClientError, wire_s: float | None) -> ServerFault:
    """Who did not answer, or answered with something else than HTTP."""
    lost = isinstance(error, aiohttp.ClientConnectionError) or wire_s is None
    kind = FaultKind.UNREACHABLE if lost else FaultKind.BROKEN
    return ServerFault(_words(error), kind=kind, wire_s=wire_s)


def _words(error: Exception) -> str:
    """What a library's error says, in one line for people."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"the name {error.host} cannot be resolved"
    if isinstance(error, aiohttp.ClientConnectorError):
        return _one_line(f"cannot connect: {_reason(error.os_error)}")
    if isinstance(error, aiohttp.ServerTimeoutError):
        return f"cannot connect within {CONNECT_TIMEOUT_S:g} s"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "closed the connection without a reply"
    if isinstance(error, OSError):
        return _one_line(f"the connection broke: {_reason(error)}")
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the reply was cut short, or is damaged"
    if isinstance(error, aiohttp.ClientResponseError):
        return _one_line(f"the reply is no HTTP: {error.message}")
    return _one_line(f"{type(error).__name__}: {error}")


def _reason(error: OSError) -> str:
    """The system's own words; event loops put others in their place."""
    if error.errno is not None and error.errno in errno.errorcode and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno)
    return error.strerror or str(error)


def _auth(endpoint: Endpoint) -> dict[str, str] | None:
    if endpoint.api_key is None:
        return None
    return {"Authorization": f"Bearer {endpoint.api_key.strip()}"}
