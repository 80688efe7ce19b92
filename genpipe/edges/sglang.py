"""HTTP to SGLang, and to other servers with OpenAI's API: connections and requests."""

import asyncio
import secrets
import socket
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
from genpipe.edges import replies
from genpipe.edges.replies import CONNECT_TIMEOUT_S, RID_HEAD_CHARS, fault_of, read_answer, refusal, words

HEALTH_TIMEOUT_S = 5.0
"""SGLang's own health check takes a second when all is well, and twenty when it is not."""

ASK_TIMEOUT_S = 60.0
"""Limit of the one token that a probe asks for, where it asks (seconds)."""

KEEP_ALIVE_S = 4.0
"""Idle connections are closed before the server's uvicorn does so, which is after 5 s."""

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

    @property
    def rid(self) -> str:
        """The id at the end of a body that carries one."""
        return bytes(self._value[-34:-2]).decode()

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
        self._headers = [auth_header(endpoint) for endpoint in endpoints]
        self._model = model
        shared = b"," + orjson.dumps({"model": model, **members})[1:-1]
        self._tails = [shared + (b',"rid":"' if endpoint.takes_rid else b"}") for endpoint in endpoints]
        self._rid_head = secrets.token_hex(RID_HEAD_CHARS // 2)
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
                raise fault_of(error, body.wire_s) from None
        # The connection had been idle and was closed as the request went out: once more, on another.
        self.reconnects[start.server] += 1
        body.renew(self._encode(start, start.attempt | _RESENT))
        try:
            return await self._exchange(start.server, body)
        except aiohttp.ClientError as error:
            raise fault_of(error, body.wire_s) from None

    async def _exchange(self, server: int, body: "_Body") -> Reply:
        async with self._session.post(
            self._urls[server], data=body, headers=self._headers[server], allow_redirects=False
        ) as response:
            body.replied = True
            if response.status != 200:
                raise await refusal(response, body.wire_s)
            data = await read_answer(response, body.wire_s)
            last_s = time.monotonic()
        return Reply(
            body=data,
            # A server may answer before it has read all of a request.
            wire_s=last_s if body.wire_s is None else body.wire_s,
            last_s=last_s,
            rid=body.rid if self._endpoints[server].takes_rid else None,
        )

    def _encode(self, start: Start, number: int) -> bytes:
        head, tail = b'{"messages":', self._tails[start.server]
        if not self._endpoints[start.server].takes_rid:
            return b"".join((head, start.prompt.payload, tail))
        rid = f'{self._rid_head}{number:016x}"}}'.encode()
        return b"".join((head, start.prompt.payload, tail, rid))

    def examine(self, reply: Reply) -> Answer:
        """Look whether a 200 is an answer; see the port."""
        try:
            return replies.examine(reply)
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
            return words(error)
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
                    raise await refusal(response, None)
                replies.examine(Reply(body=await read_answer(response, None), wire_s=0.0, last_s=0.0))
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


def _was_idle(error: aiohttp.ClientError, body: "_Body") -> bool:
    """Whether a connection that had served before was closed before a byte of this reply came."""
    if body.replied or not body.reused:
        return False
    if isinstance(error, aiohttp.ServerDisconnectedError):
        # The library puts what it has of a reply's head in place of a message.
        return isinstance(error.message, str)
    return isinstance(error, aiohttp.ClientOSError | aiohttp.ClientConnectionResetError)


def auth_header(endpoint: Endpoint) -> dict[str, str] | None:
    """How a request to this server shows its key, or None where there is none."""
    if endpoint.api_key is None:
        return None
    return {"Authorization": f"Bearer {endpoint.api_key.strip()}"}
