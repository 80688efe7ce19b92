"""A proxy between genpipe and a server that forwards bytes, or does to connections what bad networks do.

::

    with TcpProxy(fleet.ports[0]) as proxy:
        run(proxy.url)
        proxy.black_hole(new=False)   # no byte passes either way on what is open now; connections stay open
        proxy.black_hole()            # likewise on connections to come: they are accepted, and that is all
        proxy.forward()               # what was held back flows, as after a rerouting
        proxy.reset()                 # every connection ends with a RST, those to come at once
        proxy.close_reused = True     # a connection is closed as its second request comes, without a byte
        proxy.reset_posts = True      # a connection ends with a RST as a POST comes; GET passes
        proxy.accepted, proxy.closed  # connections that came; those that were closed for that
"""

import asyncio
import contextlib
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Self

CHUNK_BYTES = 1 << 16
START_TIMEOUT_S = 10.0


class _Link:
    """One connection of a client, and the one to the server that goes with it."""

    def __init__(self, writer: asyncio.StreamWriter, *, passing: bool) -> None:
        self.writer = writer
        self.answered = False
        self.gate = asyncio.Event()
        if passing:
            self.gate.set()

    def reset(self) -> None:
        """End the client's connection with a RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class TcpProxy:
    """See the module. Use as a context manager; all connections have ended afterwards.

    Attributes:
        port: where it listens.
        close_reused: whether a connection is closed as its second request comes.
        reset_posts: whether a connection is reset as a POST comes.
        accepted: connections that came (count).
        closed: connections that were closed as their second request came (count).
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._links: dict[asyncio.Task[None], _Link] = {}
        self._writers: weakref.WeakSet[asyncio.StreamWriter] = weakref.WeakSet()
        self._new_pass, self._new_reset = True, False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="tcp-proxy", daemon=True)
        self._ready = threading.Event()
        self._end: asyncio.Event | None = None
        self.close_reused = self.reset_posts = False
        self.accepted = self.closed = 0
        self.port = 0

    @property
    def url(self) -> str:
        """Base address."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(START_TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._end is not None
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(START_TIMEOUT_S)
        assert not self._thread.is_alive()

    # What it does to connections; each is in force on return

    def forward(self) -> None:
        """Pass everything on, what was held back too."""

        def act() -> None:
            self._new_pass, self._new_reset = True, False
            for link in self._links.values():
                link.gate.set()

        self._do(act)

    def black_hole(self, *, new: bool = True) -> None:
        """Pass nothing on any more, either way, and leave every connection open.

        Args:
            new: connections to come as well.
        """

        def act() -> None:
            self._new_pass = not new
            for link in self._links.values():
                link.gate.clear()

        self._do(act)

    def reset(self) -> None:
        """End every connection with a RST, and those to come at once."""

        def act() -> None:
            self._new_reset = True
            for link in self._links.values():
                link.reset()

        self._do(act)

    def _do(self, act: Callable[[], None]) -> None:
        done = threading.Event()

        def both() -> None:
            act()
            done.set()

        self._loop.call_soon_threadsafe(both)
        assert done.wait(START_TIMEOUT_S)

    # Its own thread

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._end = asyncio.Event()
        server = await asyncio.start_server(self._came, "127.0.0.1", 0, backlog=4096)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._end.wait()
        server.close()
        tasks = list(self._links)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        # What is closed and not all sent would keep its socket.
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        link = self._links[task] = _Link(writer, passing=self._new_pass)
        self._writers.add(writer)
        self.accepted += 1
        try:
            if self._new_reset:
                link.reset()
            else:
                await self._carry(link, reader, writer)
        except (OSError, asyncio.CancelledError):
            # The library tells of a handler that was cancelled as if it were a bug.
            writer.transport.abort()
        finally:
            del self._links[task]
            writer.close()

    async def _carry(self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await link.gate.wait()
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers.add(to_server)
        ways = [
            asyncio.ensure_future(self._pass(link, reader, to_server, asks=True)),
            asyncio.ensure_future(self._pass(link, from_server, writer, asks=False)),
        ]
        try:
            # HTTP's clients and servers close both ways at once.
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)
            to_server.close()

    async def _pass(
        self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, asks: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await link.gate.wait()
                if asks and self.reset_posts and data.startswith(b"POST "):
                    link.reset()
                    return
                if asks and link.answered and self.close_reused:
                    self.closed += 1
                    return
                link.answered = link.answered or not asks
                writer.write(data)
                await writer.drain()
        await link.gate.wait()
