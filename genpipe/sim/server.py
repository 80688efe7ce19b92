"""Simulated SGLang servers over real HTTP: many ports, one process, one event loop.

The endpoints, reply shapes and manners are those of SGLang 0.5.11, and of 0.5.17 where a scheduler hangs;
the speed is a model of continuous batching. Behind ``SimConfig.orders`` a prompt may order faults,
and ``POST /_fake`` changes how a port behaves (``orders.parse_mode``); ``GET /_fake/stats`` tells what really
happened.
"""

import asyncio
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, cast

import orjson
from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage

from genpipe.core.errors import ConfigError
from genpipe.sim.config import LengthLaw, SimConfig, step_times_s
from genpipe.sim.handlers import Handlers
from genpipe.sim.journal import Journal
from genpipe.sim.orders import ModeChange, Modes, OrderError, parse_mode
from genpipe.sim.port import SimPort

__all__ = ["LengthLaw", "SimConfig", "SimFleet", "serve", "step_times_s"]

BODY_BYTES_MAX = 256 * 1024 * 1024
BACKLOG = 4096
DOWN_AFTER_S = 0.02
"""Time for the reply to whoever told its own port to go down (seconds)."""


class SimFleet:
    """Some simulated servers, one per port, in the running event loop.

    All share one log (the first config's) and one count of attempts per text. Use it as an async context
    manager, or with ``start`` and ``stop``. Port 0 is any free port. A port number is kept for the fleet's
    whole life, also while that port is down.

    Attributes:
        urls: base addresses, in the order of the ports; empty before the start.
        ports: port numbers, likewise.
    """

    def __init__(
        self, config: SimConfig | Sequence[SimConfig], ports: Iterable[int], host: str = "127.0.0.1"
    ) -> None:
        self._asked = list(ports)
        configs = [config] * len(self._asked) if isinstance(config, SimConfig) else list(config)
        if not self._asked or len(configs) != len(self._asked):
            raise ConfigError(f"{len(configs)} configs for {len(self._asked)} ports: one each, at least one")
        self._configs = configs
        self._host = host
        self._listeners: dict[int, _Listener] = {}
        self._journal: Journal | None = None
        self._flusher: asyncio.TimerHandle | None = None
        self.ports: list[int] = []
        self.urls: list[str] = []

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen on all ports.

        Raises:
            ConfigError: a port cannot be had, or the log file cannot be opened; nothing listens then.
        """
        first = self._configs[0]
        try:
            self._journal = Journal(
                first.log_path, count_attempts=any(config.orders for config in self._configs)
            )
        except OSError as error:
            raise ConfigError(f"cannot write the request log {first.log_path}: {error.strerror}") from error
        try:
            for number, config in zip(self._asked, self._configs, strict=True):
                listener = _Listener(self, config, self._host, number, self._journal)
                self._listeners[listener.number] = listener
                await listener.open()
        except OSError as error:
            await self.stop()
            raise ConfigError(f"cannot listen on {self._host}:{number}: {error.strerror}") from error
        self.ports = list(self._listeners)
        shown = f"[{self._host}]" if ":" in self._host else self._host
        self.urls = [f"http://{shown}:{number}" for number in self.ports]
        self._flush()

    async def stop(self) -> None:
        """Drop every connection, free the ports, and write the rest of the log. Safe to repeat."""
        for listener in self._listeners.values():
            await listener.end()
        self._listeners.clear()
        if self._flusher is not None:
            self._flusher.cancel()
            self._flusher = None
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    async def change_mode(self, port: int, change: ModeChange) -> None:
        """Change how one port behaves; returns when it does.

        Raises:
            OrderError: the fleet has no such port.
        """
        if port not in self._listeners:
            raise OrderError(f"no port {port} here; there are {', '.join(map(str, self._listeners))}")
        await self._listeners[port].change(change)

    def stats(self) -> list[dict[str, Any]]:
        """Live figures of every port; see ``SimPort.figures``."""
        return [listener.port.figures() for listener in self._listeners.values()]

    async def control(self, port: SimPort, given: object) -> bytes:
        """Carry out one request to ``/_fake``: the reply's body.

        Raises:
            OrderError: it is none, or names no port of this fleet.
        """
        change = parse_mode(given)
        number = port.number if change.port is None else change.port
        if number == port.number and change.name == "down" and change.value:
            # The asker's own connection is among those that are dropped: it is answered first.
            self._listeners[number].go_down_soon(change)
        else:
            await self.change_mode(number, change)
        return orjson.dumps({"port": number, "mode": change.name or "normal", "value": change.value})

    def doom(self, port: SimPort, in_s: float) -> None:
        """Have a port die in so many seconds, unless it dies before that."""
        self._listeners[port.number].doom(in_s)

    def stats_body(self) -> bytes:
        """The reply of ``/_fake/stats``."""
        return orjson.dumps({"ports": self.stats()})

    def _flush(self) -> None:
        if self._journal is not None and self._journal.wanted:
            self._journal.flush()
            self._flusher = asyncio.get_running_loop().call_later(self._journal.flush_s, self._flush)


class _Connection(web.RequestHandler):
    """One client's connection; its port can drop it at any moment."""

    __slots__ = ("_listener", "_wire")

    def __init__(
        self, listener: "_Listener", manager: web.Server, keepalive_s: float, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(
            manager,
            loop=loop,
            keepalive_timeout=keepalive_s,
            access_log=None,  # type: ignore[arg-type]  # aiohttp takes None for none
            lingering_time=0.0,
        )
        self._listener = listener
        self._wire: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._wire = cast("asyncio.Transport", transport)
        self._listener.came(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._listener.left(self)

    def drop(self) -> None:
        """Close at once, whatever is unsent."""
        if self._wire is not None:
            self._wire.abort()


class _Listener:
    """The socket of one port, and what opens and closes it."""

    def __init__(self, fleet: SimFleet, config: SimConfig, host: str, number: int, journal: Journal) -> None:
        self._loop = asyncio.get_running_loop()
        self._host = host
        # A bound socket that never listens keeps the number while the port is down: otherwise somebody's
        # outgoing connection might be given it.
        self._holder = _bound(host, number)
        self.number: int = self._holder.getsockname()[1]
        self.port = SimPort(self.number, config, journal)
        self.connections: set[_Connection] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._manager = web.Server(
            Handlers(self.port, fleet).handle, handler_cancellation=True, request_factory=self._request
        )
        self._server: asyncio.Server | None = None
        self._changing = asyncio.Lock()
        self._undo: dict[str | None, asyncio.TimerHandle] = {}
        self._death: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen, if it does not yet."""
        if self._server is not None:
            return
        sock = _bound(self._host, self.number)
        try:
            self._server = await self._loop.create_server(self._protocol, sock=sock, backlog=BACKLOG)
        except BaseException:
            sock.close()
            raise

    async def close(self) -> None:
        """Stop listening and drop every connection; nothing is open on return."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        self.port.drop_all()
        for connection in list(self.connections):
            connection.drop()
        await self._none_left.wait()
        if server is not None:
            await server.wait_closed()

    async def end(self) -> None:
        """Close for good, and give the number back."""
        for handle in self._undo.values():
            handle.cancel()
        if self._death is not None:
            self._death.cancel()
        for task in list(self._tasks):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self.close()
        self.port.stop_timers()
        self._holder.close()

    async def change(self, change: ModeChange) -> None:
        """Enter a mode, and arrange its end."""
        if (old := self._undo.pop(change.name, None)) is not None:
            old.cancel()
        busy_s = change.seconds if change.name == "busy_health" else None
        await self._enter(change.apply(self.port.modes, self.port.configured), busy_s)
        if change.seconds is not None:
            self._undo[change.name] = self._loop.call_later(change.seconds, self._start_undo, change)

    def go_down_soon(self, change: ModeChange) -> None:
        """Go down when the present request has been answered."""
        self._undo[None] = self._loop.call_later(DOWN_AFTER_S, self._start, self.change, change)

    def doom(self, in_s: float) -> None:
        """Die in so many seconds: what kills the process first, does."""
        at_s = self._loop.time() + in_s
        if self._death is not None:
            if self._death.when() <= at_s:
                return
            self._death.cancel()
        self._death = self._loop.call_at(at_s, self._die)

    def _die(self) -> None:
        self._death = None
        if not self.port.modes.down:
            self.port.deaths += 1
            self._start(self.change, ModeChange(name="down", value=True, seconds=self.port.modes.revive_s))

    def _start_undo(self, change: ModeChange) -> None:
        self._undo.pop(change.name, None)
        self._start(self._enter_undone, change)

    def _start(self, act: Callable[[ModeChange], Coroutine[Any, Any, None]], change: ModeChange) -> None:
        task = self._loop.create_task(act(change))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _enter_undone(self, change: ModeChange) -> None:
        await self._enter(change.undo(self.port.modes, self.port.configured), None)

    async def _enter(self, modes: Modes, busy_s: float | None) -> None:
        async with self._changing:
            self.port.enter(modes, busy_s)
            if modes.down:
                if self._death is not None:
                    # Who was to die of it is dead, and whoever starts next has not had that prompt.
                    self._death.cancel()
                    self._death = None
                await self.close()
            else:
                await self.open()

    def came(self, connection: _Connection) -> None:
        """A connection is there; one that was accepted while the port was closing is dropped again."""
        self.connections.add(connection)
        self._none_left.clear()
        if self._server is None:
            connection.drop()

    def left(self, connection: _Connection) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        if not self.connections:
            self._none_left.set()

    def _protocol(self) -> _Connection:
        return _Connection(self, self._manager, self.port.modes.keepalive_s, self._loop)

    def _request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: "asyncio.Task[None]",
    ) -> web.BaseRequest:
        return web.BaseRequest(
            message, payload, protocol, writer, task, self._loop, client_max_size=BODY_BYTES_MAX
        )


def _bound(host: str, number: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        sock.bind((host, number))
    except OSError:
        sock.close()
        raise
    return sock


def serve(config: SimConfig | Sequence[SimConfig], ports: Iterable[int], host: str = "127.0.0.1") -> None:
    """Run simulated servers until SIGTERM or SIGINT; one line on stdout says when they listen.

    Uses uvloop where it is installed, and takes as many open files as the system gives: a port needs two of
    them, a connection one.

    Raises:
        ConfigError: a port cannot be had, or the log file cannot be opened.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    _run(_serve(SimFleet(config, ports, host)))


async def _serve(fleet: SimFleet) -> None:
    loop = asyncio.get_running_loop()
    asked_to_stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_stop.set)
    async with fleet:
        with suppress(BrokenPipeError):
            print("sim-server ready", *fleet.urls, flush=True)  # noqa: T201 - the ready line is this command's result
        await asked_to_stop.wait()


def _run(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)
