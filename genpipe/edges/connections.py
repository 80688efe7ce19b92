"""Connections to servers: addresses and keys, sessions for thousands of slow requests, sockets, names."""

import asyncio
import contextlib
import errno
import math
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from threading import BoundedSemaphore, Thread
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from genpipe.core.errors import ConfigError
from genpipe.edges.replies import CONNECT_TIMEOUT_S

KEEP_ALIVE_S = 4.0
"""Idle connections are closed before the server's uvicorn does so, which is after 5 s."""

NAMES_KEPT_S = 300
"""A name is looked up again after this time (seconds)."""

_NAME_THREADS = 4

_KEEP_ALIVE_PROBES = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
_UNACKNOWLEDGED_MAX_MS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One server's address.

    Attributes:
        url: base address without a trailing slash.
        api_key: sent as a bearer token, or None.
        takes_rid: it is SGLang: it knows the request field ``rid``, and has routes of its own.
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

    @property
    def headers(self) -> dict[str, str] | None:
        """How a request to this server shows its key, or None where there is none."""
        return None if self.api_key is None else {"Authorization": f"Bearer {self.api_key.strip()}"}

    def hushed(self, text: str) -> str:
        """The text without the key: some servers repeat it in their errors."""
        return text if self.api_key is None else text.replace(self.api_key.strip(), "[key]")


LookUp = Callable[[str, int, int], list[ResolveResult]]
_Name = tuple[str, int, int]


class Names(AbstractResolver):
    """Looks names up in a few threads of its own, and remembers what each one was.

    The threads that a process shares may all be busy with uploads for as long as a slow store likes. A name
    that was known once stays usable while nobody can look it up.
    """

    def __init__(self, look_up: LookUp | None = None) -> None:
        """Prepare; the threads are started as they are needed.

        Args:
            look_up: what is done in a thread, given host, port and family; None: ask the system.
        """
        self._look_up = _ask_the_system if look_up is None else look_up
        self._turns = BoundedSemaphore(_NAME_THREADS)
        self._known: dict[_Name, tuple[float, list[ResolveResult]]] = {}
        self._asked: dict[_Name, asyncio.Future[list[ResolveResult]]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of a host.

        Raises:
            OSError: nobody knows it, or nobody said so in time, and it was never known.
        """
        name = (host, port, family)
        known_s, known = self._known.get(name, (-math.inf, []))
        if time.monotonic() < known_s + NAMES_KEPT_S:
            return list(known)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                # Whoever has no time to wait for it leaves the answer to the next one.
                return list(await asyncio.shield(self._ask(name)))
        except (OSError, UnicodeError) as error:
            if known:
                return list(known)
            # A bare TimeoutError would pass for the limit of the whole request.
            raise OSError(getattr(error, "errno", None) or errno.EHOSTUNREACH, str(error)) from None

    def _ask(self, name: "_Name") -> "asyncio.Future[list[ResolveResult]]":
        """One look-up of a name at a time, whoever waits for it."""
        if name not in self._asked:
            loop = asyncio.get_running_loop()
            asked = self._asked[name] = loop.create_future()
            # Whatever the system takes, the process does not wait for these threads at its end.
            Thread(target=self._work, args=(name, loop, asked), name="names", daemon=True).start()
        return self._asked[name]

    def _work(
        self, name: "_Name", loop: asyncio.AbstractEventLoop, asked: "asyncio.Future[list[ResolveResult]]"
    ) -> None:
        found: list[ResolveResult] | Exception
        with self._turns:
            try:
                found = self._look_up(*name)
            except Exception as error:  # whatever it is, whoever waits for it is to have it
                found = error
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._keep, name, asked, found)

    def _keep(
        self,
        name: "_Name",
        asked: "asyncio.Future[list[ResolveResult]]",
        found: list[ResolveResult] | Exception,
    ) -> None:
        del self._asked[name]
        if isinstance(found, Exception):
            asked.set_exception(found)
            # It may be that nobody waits for it any more.
            asked.exception()
        else:
            self._known[name] = (time.monotonic(), found)
            asked.set_result(found)

    async def close(self) -> None:
        """Part of the library's interface; nothing is to be done."""


def _ask_the_system(host: str, port: int, family: int) -> list[ResolveResult]:
    found: list[ResolveResult] = []
    infos = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    for family_, _, proto, _, address in infos:
        # The scope of a link-local address is part of what getnameinfo writes.
        numeric, _ = socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
        found.append(
            ResolveResult(
                hostname=host,
                host=numeric,
                port=port,
                family=family_,
                proto=proto,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
        )
    return found


@asynccontextmanager
async def open_session(
    names: Names | None = None, *, reuse: bool = True
) -> AsyncIterator[aiohttp.ClientSession]:
    """A session for thousands of slow requests: no limit, no total timeout, no cookies, no proxies.

    Args:
        names: looks names up, and stays open; None: one of its own.
        reuse: a connection may carry a second request.
    """
    own = Names() if names is None else names
    connector = aiohttp.TCPConnector(
        limit=0,
        use_dns_cache=False,
        resolver=own,
        socket_factory=_socket,
        **({"keepalive_timeout": KEEP_ALIVE_S} if reuse else {"force_close": True}),
    )
    try:
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            read_bufsize=1 << 20,
        ) as session:
            yield session
    finally:
        if names is None:
            await own.close()


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket whose dead peer is noticed within a minute, though no byte is expected for long."""
    family, kind, proto, _, _ = address
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE_PROBES:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Probes are sent only while nothing else is under way; this bounds what was sent and not received.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MAX_MS)
    return sock
