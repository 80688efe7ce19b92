"""Hand-written servers on real sockets, and what tests of HTTP need beside them."""

import asyncio
import contextlib
import json
import re
import socket
import ssl
import struct
from typing import Any

import pytest
import uvloop

KEY = "sk-very-secret"
GOOD: dict[str, Any] = {
    "model": "m",
    "choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1},
}
LOOPS = pytest.mark.parametrize(
    "loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


def on(main, loop=None):
    """Run a coroutine function to its end."""
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(main())


def http(body=b"", status="200 OK", **headers):
    """A reply's bytes, with its length unless another one is given."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {
        "Content-Length": len(data),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode("latin-1") + data


class RawServer:
    """A server that does with each request what a test says, byte for byte.

    ``act(reader, writer, request, number)`` gets the connection, the request's head and body, and how many
    requests came before it. What it returns is sent; None closes the connection.

    Attributes:
        requests: heads and bodies that came, and on which connection (from 0).
        gone: set when a client has closed a connection.
    """

    def __init__(self, act, **options):
        self._act = act
        self._options = options
        self._tasks = set()
        self._connections = 0
        self.requests = []
        self.gone = asyncio.Event()

    async def __aenter__(self):
        if "sock" not in self._options:
            self._options |= {"host": "127.0.0.1", "port": 0}
        self._server = await asyncio.start_server(self._serve, **self._options)
        scheme = "https" if "ssl" in self._options else "http"
        self.url = f"{scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._server.wait_closed()

    async def _serve(self, reader, writer):
        task = asyncio.current_task()
        self._tasks.add(task)
        number, self._connections = self._connections, self._connections + 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                self.requests.append((head.decode(), body, number))
                data = await self._act(reader, writer, head, len(self.requests) - 1)
                if data is None:
                    break
                writer.write(data)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            self.gone.set()
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()


def always(data):
    """A server that gives each request the same bytes."""

    async def act(reader, writer, head, number):
        return data

    return act


def reset(writer):
    """End a connection with a RST."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def until(condition, timeout_s=5.0):
    """Wait for something that tells nobody."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # counters have no event
            await asyncio.sleep(0.01)


@contextlib.contextmanager
def unanswered():
    """An address at which connections are neither taken nor refused, and its socket."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as stack:
        for _ in range(2):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", listener


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
