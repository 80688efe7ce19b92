"""A server that gives each request for an answer the bytes that a test says."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
Act = Callable[[dict[str, Any]], tuple[int, bytes]]


class Scripted:
    """A server, and what it was asked.

    Attributes:
        url: its base address.
        bodies: bodies of the requests for answers.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.bodies: list[bytes] = []


@contextmanager
def scripted(act: Act) -> Iterator[Scripted]:
    """A server that answers with what ``act`` makes of a request's body: a status and the reply's bytes."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            known = self.path in ("/v1/models", "/health")
            self._reply(200 if known else 404, MODEL if self.path == "/v1/models" else b"")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            this.bodies.append(body)
            self._reply(*act(json.loads(body)))

        def _reply(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    this = Scripted(f"http://127.0.0.1:{listener.server_address[1]}")
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield this
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()


def answer(message: bytes, more: bytes = b"") -> bytes:
    """A chat completion around a message's JSON, with further members of its choice."""
    return (
        b'{"model":"m","choices":[{"index":0,"message":%s,"finish_reason":"stop"%s}],'
        b'"usage":{"prompt_tokens":3,"completion_tokens":5}}' % (message, more)
    )


def verdicts(expected: list[dict[str, Any]], name: str) -> dict[int, dict[str, Any]]:
    """What is to become of each line of a case's file, by the record's index."""
    rows = next(entry for entry in expected if entry["file"] == name)["rows"]
    return {row["ordinal"]: row for row in rows if "ordinal" in row}
