"""A proxy between a client and an S3 server over plain HTTP, that makes trouble to order and keeps a log.

Path style only: the key of ``/bucket/a/b`` is ``a/b``. Each request takes the first fault that matches it::

    with FaultProxy(server.url) as proxy:
        place = server.place("run1", endpoint_url=proxy.url)
        proxy.answer("SlowDown", method="PUT", share=0.3)           # 503, for three puts in ten
        proxy.answer("ExpiredToken", when=lambda request: request.access_key == "OLD")
        proxy.answer("RequestTimeTooSkewed", method="PUT", times=2, date=time.time() + 3600)
        proxy.drop_reply(method="PUT", key=r"/commits/", times=1)   # carried out, and nobody hears of it
        proxy.reset(method="PUT", after_bytes=1000, times=1)        # in the middle of the body
        proxy.black_hole(key=r"/shards/")                           # takes everything, answers nothing
        proxy.delay(20, method="PUT", key=r"/shards/")              # before it is passed on
        proxy.cut_reply(1000, method="GET", times=1)                # so much of the body, then no more
        proxy.truncate(10, method="PUT", times=1)                   # the server is given so many bytes
        proxy.corrupt(method="PUT", times=1)                        # the server is given other bytes
        proxy.strip_headers("x-amz-meta-.*", method="PUT")          # the server is not given these headers
        proxy.clear()                                               # no faults from now on
        proxy.refuse()                                              # nobody listens, all connections reset
        proxy.accept()                                              # it listens again, on the same port
        proxy.latency_s = 0.1                                       # added to each request
        proxy.rate_bytes_per_s = 100_000                            # of each body, either way
        proxy.requests                                              # what came: method, key, at_s, status
        proxy.count("PUT", r"/commits/"), proxy.most_puts_of_a_key(within_s=1.0)

Of each fault: ``method`` and ``key`` (a regular expression, searched in ``bucket/key``) and ``when`` (a
function of the request) say which requests; ``skip`` of those are let through first; ``times`` is how many
are hit, all if None; ``share`` is the chance of each, from a seed. Signatures stay good: ``Host`` stays.
"""

import asyncio
import contextlib
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from email.utils import formatdate
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit
from xml.sax.saxutils import escape

from tests.s3.servers import free_ports

CHUNK_BYTES = 1 << 16
CHECKSUMS = r"content-md5|x-amz-checksum[^:]*|x-amz-sdk-checksum[^:]*"

STATUS_OF = {
    "AccessDenied": 403,
    "AuthorizationHeaderMalformed": 400,
    "BadRequest": 400,
    "ConditionalRequestConflict": 409,
    "ExpiredToken": 400,
    "InternalError": 500,
    "InvalidAccessKeyId": 403,
    "InvalidArgument": 400,
    "InvalidToken": 400,
    "MissingContentLength": 411,
    "NoSuchBucket": 404,
    "NotImplemented": 501,
    "PermanentRedirect": 301,
    "PreconditionFailed": 412,
    "RequestTimeTooSkewed": 403,
    "SignatureDoesNotMatch": 403,
    "SlowDown": 503,
    "TooManyRequests": 429,
}
"""The HTTP status that an error code comes with, where none is given."""


@dataclass(slots=True, kw_only=True)
class Request:
    """One request as it came.

    Attributes:
        method: such as ``PUT``.
        path: with its query, as sent.
        key: ``bucket/key``, unquoted.
        headers: names in lower case.
        at_s: when it came (seconds, monotonic).
        body_bytes: length of its body, once that was read.
        status: what was answered by whomever, or None.
    """

    method: str
    path: str
    key: str
    headers: dict[str, str]
    at_s: float
    body_bytes: int = 0
    status: int | None = None

    @property
    def access_key(self) -> str:
        """The key id it is signed with, or ""."""
        found = re.search(r"Credential=([^/]+)/", self.headers.get("authorization", ""))
        return found[1] if found else ""

    @property
    def has_checksum(self) -> bool:
        """Whether it carries one of the SDK's checksums, as a header or as a trailer."""
        return "aws-chunked" in self.headers.get("content-encoding", "") or any(
            name.startswith(("x-amz-checksum-", "x-amz-sdk-checksum", "x-amz-trailer"))
            for name in self.headers
        )


@dataclass(kw_only=True)
class Fault:
    """What is done to which requests; ``hits`` counts them."""

    action: str
    amount: float = 0
    reply: bytes = b""
    names: str = ""
    status: int = 0
    method: str | None = None
    key: str | None = None
    when: Callable[[Request], bool] | None = None
    skip: int = 0
    times: int | None = None
    share: float = 1.0
    hits: int = 0

    def takes(self, request: Request, rng: random.Random) -> bool:
        if self.method is not None and request.method != self.method:
            return False
        if self.key is not None and re.search(self.key, request.key) is None:
            return False
        if self.when is not None and not self.when(request):
            return False
        if self.times is not None and self.hits >= self.times:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if rng.random() >= self.share:
            return False
        self.hits += 1
        return True


@dataclass
class FaultProxy:
    """See the top of this file."""

    upstream_url: str
    seed: int = 7
    latency_s: float = 0.0
    rate_bytes_per_s: float | None = None
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        to = urlsplit(self.upstream_url)
        assert to.scheme == "http"
        self._to = (to.hostname or "", to.port or 80)
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._rng = random.Random(self.seed)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._port = free_ports(1)[0]

    def __enter__(self) -> Self:
        self._thread.start()
        self.accept()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    # ---- faults ----

    def answer(
        self,
        code: str,
        *,
        status: int | None = None,
        date: float | None = None,
        headers: dict[str, str] | None = None,
        fields: dict[str, str] | None = None,
        body: bytes | None = None,
        **which: Any,
    ) -> Fault:
        """Answer by itself, without the server: an error document, or ``body``.

        Args:
            code: the error's code; its status is known for the usual ones.
            status: the HTTP status.
            date: what the ``Date`` header says (seconds, Unix time); now if None.
            headers: more headers.
            fields: more elements of the error document, such as ``Region``.
            body: sent instead of an error document.
            which: see the top of this file.
        """
        number = status or STATUS_OF[code]
        more = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in (fields or {}).items())
        document = (
            f'<?xml version="1.0"?>\n<Error><Code>{code}</Code><Message>{code} says the proxy'
            f"</Message>{more}<RequestId>0</RequestId></Error>"
        ).encode()
        data = document if body is None else body
        lines = {
            "Date": formatdate(date, usegmt=True),
            "Content-Type": "application/xml",
            "Content-Length": str(len(data)),
            "Connection": "close",
            **(headers or {}),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        reply = f"HTTP/1.1 {number} {code}\r\n{head}\r\n".encode() + data
        return self._add(Fault(action="answer", reply=reply, status=number, **which))

    def drop_reply(self, **which: Any) -> Fault:
        """Let the server do it, and close the connection without a word."""
        return self._add(Fault(action="drop_reply", **which))

    def reset(self, *, after_bytes: int = 0, **which: Any) -> Fault:
        """Reset the connection after so many bytes of the request's body."""
        return self._add(Fault(action="reset", amount=after_bytes, **which))

    def black_hole(self, **which: Any) -> Fault:
        """Take the request and never answer."""
        return self._add(Fault(action="black_hole", **which))

    def delay(self, delay_s: float, **which: Any) -> Fault:
        """Pass the request on after so long (seconds)."""
        return self._add(Fault(action="delay", amount=delay_s, **which))

    def cut_reply(self, after_bytes: int, **which: Any) -> Fault:
        """Close the connection after so many bytes of the reply's body."""
        return self._add(Fault(action="cut_reply", amount=after_bytes, **which))

    def truncate(self, to_bytes: int, **which: Any) -> Fault:
        """Give the server so many bytes of the body alone; for a server that checks no signatures."""
        return self._add(Fault(action="truncate", amount=to_bytes, **which))

    def corrupt(self, **which: Any) -> Fault:
        """Give the server a body with its first byte changed; for a server that checks no signatures."""
        return self._add(Fault(action="corrupt", **which))

    def strip_headers(self, names: str, **which: Any) -> Fault:
        """Take headers away, by a regular expression; for a server that checks no signatures."""
        return self._add(Fault(action="strip", names=names, **which))

    def clear(self) -> None:
        """No faults from now on; requests that are in one stay in it."""
        with self._lock:
            self._faults.clear()

    def refuse(self) -> None:
        """Listen no more, and reset all connections."""
        self._run(self._close())

    def accept(self) -> None:
        """Listen again, on the same port as before."""
        self._run(self._open())

    # ---- the log ----

    def seen(self, method: str | None = None, key: str = "") -> list[Request]:
        """The requests of this method whose ``bucket/key`` holds that expression."""
        return [
            request
            for request in list(self.requests)
            if method in (None, request.method) and re.search(key, request.key)
        ]

    def count(self, method: str | None = None, key: str = "") -> int:
        """How many :meth:`seen`."""
        return len(self.seen(method, key))

    def most_puts_of_a_key(self, *, within_s: float, key: str = "") -> int:
        """The most puts of one key within so long."""
        most = 0
        times: dict[str, list[float]] = {}
        for request in self.seen("PUT", key):
            of_key = times.setdefault(request.key, [])
            of_key.append(request.at_s)
            most = max(most, sum(1 for at_s in of_key if at_s > request.at_s - within_s))
        return most

    # ---- inside, on the loop's own thread ----

    def _add(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault

    def _run(self, step: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(step, self._loop).result(10)

    async def _open(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, limit=1 << 20)

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            _reset(writer)

    async def _end(self) -> None:
        await self._close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._serve_one(reader, writer)
        finally:
            writer.close()
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        request = _parse(head)
        self.requests.append(request)
        fault = self._fault_of(request)
        action = fault.action if fault else "pass"
        if action == "black_hole":
            while await reader.read(CHUNK_BYTES):
                pass
            return
        if "100-continue" in request.headers.get("expect", ""):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        stop_at = int(fault.amount) if fault and action == "reset" else None
        body = await self._body(reader, request, stop_at)
        if stop_at is not None:
            _reset(writer)
            return
        await asyncio.sleep(self.latency_s + (fault.amount if fault and action == "delay" else 0))
        if fault and action == "answer":
            request.status = fault.status
            writer.write(fault.reply)
            await writer.drain()
            return
        if fault and action in ("truncate", "corrupt"):
            changed = bytes([body[0] ^ 1]) + body[1:] if action == "corrupt" else body[: int(fault.amount)]
            head, body = _without(head, rf"content-length|{CHECKSUMS}"), changed
            head = head[:-2] + f"Content-Length: {len(body)}\r\n\r\n".encode()
        if fault and action == "strip":
            head = _without(head, fault.names)
        await self._pass_on(request, head, body, writer, fault)

    async def _pass_on(
        self,
        request: Request,
        head: bytes,
        body: bytes,
        writer: asyncio.StreamWriter,
        fault: Fault | None,
    ) -> None:
        try:
            reader, upstream = await asyncio.open_connection(*self._to, limit=1 << 20)
        except OSError:
            _reset(writer)
            return
        self._writers.add(upstream)
        try:
            # The end of the reply is the end of the connection: nothing has to be known of its framing.
            head = _without(head, r"expect|connection")[:-2] + b"Connection: close\r\n\r\n"
            upstream.write(head + body)
            await upstream.drain()
            reply_head = await reader.readuntil(b"\r\n\r\n")
            request.status = int(reply_head.split(b" ", 2)[1])
            if fault and fault.action == "drop_reply":
                return
            writer.write(_without(reply_head, "connection")[:-2] + b"Connection: close\r\n\r\n")
            left = int(fault.amount) if fault and fault.action == "cut_reply" else None
            while data := await reader.read(CHUNK_BYTES):
                writer.write(data if left is None else data[:left])
                await writer.drain()
                await self._pause(len(data))
                if left is not None:
                    left -= len(data)
                    if left <= 0:
                        return
        finally:
            self._writers.discard(upstream)
            upstream.close()

    async def _body(self, reader: asyncio.StreamReader, request: Request, stop_at: int | None) -> bytes:
        parts: list[bytes] = []
        if "chunked" in request.headers.get("transfer-encoding", ""):
            while True:
                line = await reader.readuntil(b"\r\n")
                size = int(line.split(b";")[0], 16)
                parts += [line, await reader.readexactly(size + 2)]
                if size == 0:
                    break
        else:
            left = int(request.headers.get("content-length", "0"))
            if stop_at is not None:
                left = min(left, stop_at)
            while left > 0:
                data = await reader.read(min(left, CHUNK_BYTES))
                if not data:
                    raise asyncio.IncompleteReadError(b"", left)
                left -= len(data)
                parts.append(data)
                await self._pause(len(data))
        body = b"".join(parts)
        request.body_bytes = len(body)
        return body

    async def _pause(self, size: int) -> None:
        if self.rate_bytes_per_s is not None:
            await asyncio.sleep(size / self.rate_bytes_per_s)

    def _fault_of(self, request: Request) -> Fault | None:
        with self._lock:
            return next((fault for fault in self._faults if fault.takes(request, self._rng)), None)


def _parse(head: bytes) -> Request:
    first, *rest = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    method, path, _ = first.split(" ")
    headers = {}
    for line in rest:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    key = unquote(urlsplit(path).path).lstrip("/")
    return Request(method=method, path=path, key=key, headers=headers, at_s=time.monotonic())


def _without(head: bytes, names: str) -> bytes:
    return re.sub(rf"(?im)^(?:{names}):[^\r\n]*\r\n".encode(), b"", head)


def _reset(writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
