"""HTTP to SGLang, and to other servers with OpenAI's API: connections and requests."""

import asyncio
import logging
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from genpipe.core.errors import AttemptError, FaultKind, PromptFault, ServerFault
from genpipe.core.values import Answer, ApiName, Checkup, Inquire, Probe, Reply, Start, Vitals
from genpipe.edges import answers, health
from genpipe.edges.connections import Endpoint, Names, open_session
from genpipe.edges.conversation import follow
from genpipe.edges.replies import RID_HEAD_CHARS, fault_of, one_line, read_answer, refusal
from genpipe.edges.requests import Bodies

__all__ = ["Endpoint", "Monotonic", "SglangTransport", "open_session"]

log = logging.getLogger(__name__)

IDLE_RACE_S = 3.0
"""A kept connection that breaks this long after a request went out was not closed for idleness (seconds)."""

IDS_SINCE: Mapping[ApiName, str] = {
    "chat": "SGLang has them for request.api = chat from 0.5.17 on",
    "completions": "SGLang has them for request.api = completions from 0.5.17 on",
    "generate": "SGLang has them in every reply from 0.5.0 on",
}
"""Which servers have token ids."""

_RESENT = 1 << 63
"""Added to an attempt's number in the id of its second sending: a server may still know the first one's."""


class Monotonic:
    """The run's clock: this machine's monotonic one."""

    def now_s(self) -> float:
        """Seconds since an arbitrary moment."""
        return time.monotonic()


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
    _wire: asyncio.Transport | None = None

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
        self._wire = None

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
            self._wire = connection.transport
        await super().write_with_length(writer, content_length)
        self.wire_s = time.monotonic()

    def let_go(self) -> None:
        """Its reply is there: the connection may be another's by now."""
        self._wire = None

    def abort(self) -> None:
        """Close the connection at once, whatever is unsent: the peer may have stopped to read."""
        if self._wire is not None:
            self._wire.abort()


class SglangTransport:
    """Prompts over HTTP, one session for all servers. Use as an async context manager.

    Each attempt carries an id of its own and of fixed width (``rid``), since SGLang aborts by prefix.
    A connection that had been used before, and that the server closed within ``IDLE_RACE_S`` without a byte,
    was closed for idleness in that very moment; the request is sent once more, on a new one, and nobody is
    charged.

    Attributes:
        reconnects: how often that happened, by server.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        bodies: Bodies,
        timeout_s: float | None = None,
        run_model: health.RunModel | None = None,
        names: Names | None = None,
        keep_reasoning: bool = False,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """Prepare what is the same for all requests.

        Args:
            endpoints: the servers, in the run's order.
            bodies: puts the requests' bodies together.
            timeout_s: limit of one request; passing it is the prompt's fault. None: no limit.
            run_model: what a server has to serve to be well; None: not compared.
            names: looks names up, and is closed with the transport; None: one that asks the system.
            keep_reasoning: the new answers of a conversation stand in it with their reasoning.
            warn: told, once a server, what it does not do of what it is asked for; None: the log is.
        """
        self._bodies = bodies
        self._run_model = run_model or health.RunModel(is_compared=False)
        self._rid_head = secrets.token_hex(RID_HEAD_CHARS // 2)
        self._timeout_s = timeout_s
        self._names = names
        self._keep_reasoning = keep_reasoning
        self._warn = log.warning if warn is None else warn
        self._warned: set[tuple[int, str]] = set()
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._endpoints: list[Endpoint] = []
        self._urls: list[URL] = []
        self._headers: list[dict[str, str] | None] = []
        self.reconnects: list[int] = []
        for endpoint in endpoints:
            self.add(endpoint)

    def add(self, endpoint: Endpoint) -> int:
        """Take one more server: its position."""
        self._endpoints.append(endpoint)
        self._urls.append(URL(f"{endpoint.url}{self._bodies.path}"))
        self._headers.append(endpoint.headers)
        self.reconnects.append(0)
        return len(self._endpoints) - 1

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            names = Names() if self._names is None else self._names
            stack.push_async_callback(names.close)
            self._session = await stack.enter_async_context(open_session(names))
            # Whoever asks how a server is wants to know whether somebody listens there now.
            self._asking = await stack.enter_async_context(open_session(names, reuse=False))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _rid(self, number: int) -> str:
        return f"{self._rid_head}{number:016x}"

    async def generate(self, start: Start) -> Reply:
        """Send one prompt to one server; see the port."""
        body = _Body(self._encode(start, start.attempt), self._seen)
        try:
            if self._timeout_s is None:
                # Most runs set none, and need no timer for each request.
                return await self._post(start, body)
            async with asyncio.timeout(self._timeout_s):
                return await self._post(start, body)
        except TimeoutError:
            raise self._told(start, body, self._out_of_time(body)) from None
        except AttemptError as fault:
            raise self._told(start, body, fault) from None

    def _out_of_time(self, body: "_Body") -> AttemptError:
        within = f"within request.timeout_s = {self._timeout_s:g} s"
        if not body.begun:
            # The prompt has never been sent: it is not to blame.
            return ServerFault(f"no connection {within}", kind=FaultKind.UNREACHABLE)
        return PromptFault(f"no answer {within}", wire_s=body.wire_s)

    def _told(self, start: Start, body: "_Body", fault: AttemptError) -> AttemptError:
        """The fault, logged, and without the server's key: some servers repeat it in their errors."""
        endpoint = self._endpoints[start.server]
        fault.args = (endpoint.hushed(str(fault)),)
        log.info(
            "request_failed index=%d server=%s rid=%s error=%s",
            start.prompt.index, endpoint.url, body.rid if endpoint.takes_rid else None, fault,
        )  # fmt: skip
        return fault

    async def _post(self, start: Start, body: "_Body") -> Reply:
        try:
            return await self._exchange(self._session, start.server, body)
        except aiohttp.ClientError as error:
            if not _was_idle(error, body):
                raise fault_of(error, body.wire_s) from None
        # The connection had been idle and was closed as the request went out: once more, on a new one, since
        # others may be just as stale.
        first_s = body.wire_s
        self.reconnects[start.server] += 1
        body.renew(self._encode(start, start.attempt | _RESENT))
        try:
            return await self._exchange(self._asking, start.server, body)
        except aiohttp.ClientError as error:
            # If nobody listens there now, the server had the prompt when it went away.
            raise fault_of(error, body.wire_s or first_s) from None

    async def _exchange(self, session: aiohttp.ClientSession, server: int, body: "_Body") -> Reply:
        endpoint = self._endpoints[server]
        try:
            async with session.post(
                self._urls[server], data=body, headers=self._headers[server], allow_redirects=False
            ) as response:
                body.replied = True
                if response.status != 200:
                    raise await refusal(response, body.wire_s)
                data = await read_answer(response, body.wire_s)
                last_s = time.monotonic()
                body.let_go()
        except asyncio.CancelledError:
            body.abort()
            raise
        return Reply(
            body=data,
            # A server may answer before it has read all of a request.
            wire_s=last_s if body.wire_s is None else body.wire_s,
            last_s=last_s,
            rid=body.rid if endpoint.takes_rid else None,
        )

    def _encode(self, start: Start, number: int) -> bytes:
        rid = self._rid(number) if self._endpoints[start.server].takes_rid else None
        return self._bodies.encode(start.prompt, rid)

    def examine(self, start: Start, reply: Reply) -> Answer:
        """Look whether a 200 is an answer; see the port."""
        endpoint = self._endpoints[start.server]
        try:
            return self._examine(start, reply)
        except AttemptError as fault:
            fault.args = (endpoint.hushed(str(fault)),)
            raise fault from None
        except Exception as error:
            # A reply that nobody thought of must not end a run of days, and end it again at each resume, when
            # its prompt is asked again. The log has the trace, so that the bug is seen.
            log.exception("reply_unreadable index=%d server=%s", start.prompt.index, endpoint.url)
            why = endpoint.hushed(one_line(f"{type(error).__name__}: {error}"))
            raise ServerFault(
                f"200 with a reply that cannot be read: {why}",
                kind=FaultKind.BROKEN, status=200, wire_s=reply.wire_s,
            ) from None  # fmt: skip

    def _examine(self, start: Start, reply: Reply) -> Answer:
        endpoint, prompt, bodies = self._endpoints[start.server], start.prompt, self._bodies
        samples = bodies.samples_of(prompt)
        answer = answers.examine(
            reply,
            api=bodies.api,
            # SGLang gives as many as it is asked for; others may not know ``n``.
            samples=samples if endpoint.takes_rid else 1,
            ids_of=prompt if bodies.wants_ids else None,
        )
        if samples > 1 or bodies.wants_ids:
            self._compare(start.server, samples, answer)
        if prompt.conversation is None:
            return answer
        return follow(start, reply, answer, server=endpoint.url, keep_reasoning=self._keep_reasoning)

    def _compare(self, server: int, samples: int, answer: Answer) -> None:
        """Say once what a server left out of what it was asked for."""
        got = len(answer.response) if isinstance(answer.response, list) else 1
        if got < samples:
            self._say(server, f"gives {got} of the {samples} answers that n asks for")
        if self._bodies.wants_ids and answer.token_ids is None:
            self._say(server, f"gives no token ids: {IDS_SINCE[self._bodies.api]}")

    def _say(self, server: int, text: str) -> None:
        if (server, text) not in self._warned:
            self._warned.add((server, text))
            self._warn(f"{self._endpoints[server].url} {text}")

    async def probe(self, probe: Probe) -> Checkup:
        """Ask a server whether it is well; see the port."""
        return await health.probe(
            self._asking,
            self._endpoints[probe.server],
            name=self._bodies.model,
            api=self._bodies.api,
            model=self._run_model,
            ask=probe.ask,
        )

    async def inquire(self, inquire: Inquire) -> Vitals:
        """Ask a silent server what it is doing; see the port."""
        endpoint = self._endpoints[inquire.server]
        return await health.inquire(self._asking, endpoint, timeout_s=inquire.timeout_s)


def _was_idle(error: aiohttp.ClientError, body: "_Body") -> bool:
    """Whether a connection that had served before was closed before a byte of this reply came.

    A request that was on the wire for longer had reached the server, which may have died of it.
    """
    if body.replied or not body.reused:
        return False
    if body.wire_s is not None and time.monotonic() - body.wire_s > IDLE_RACE_S:
        return False
    if isinstance(error, aiohttp.ServerDisconnectedError):
        # The library puts what it has of a reply's head in place of a message.
        return isinstance(error.message, str)
    return isinstance(error, aiohttp.ClientOSError | aiohttp.ClientConnectionResetError)
