"""The HTTP of one simulated server: its routes, and how generations and ordered faults reach the wire."""

import asyncio
import math
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from uuid import uuid4

from aiohttp import web

from genpipe.sim import replies
from genpipe.sim.asks import Ask, Text, from_json, read_ask
from genpipe.sim.batching import Job
from genpipe.sim.config import LengthLaw
from genpipe.sim.journal import Visit
from genpipe.sim.orders import NO_ORDERS, OrderError, Orders, parse_orders
from genpipe.sim.port import TIMER_STEP_S, SimPort
from genpipe.sim.refusals import Api, Refusal, flat_error, refuse
from genpipe.sim.telling import BARE, JSON, TEXT, Telling, for_ever, reply

_HTML = {"Server": "uvicorn", "Content-Type": "text/html; charset=utf-8"}
_NEEDS_NO_KEY = frozenset({"/health", "/health_generate", "/_fake", "/_fake/stats"})

_Handler = Callable[[web.BaseRequest, Visit], Awaitable[web.StreamResponse]]


class Fleet(Protocol):
    """What a server knows of its siblings."""

    async def control(self, port: SimPort, given: object) -> bytes:
        """Carry out one request to ``/_fake``, made at ``port``: the reply's body.

        Raises:
            OrderError: it is none, or names no port of this fleet.
        """
        ...

    def stats_body(self) -> bytes:
        """The reply of ``/_fake/stats``."""
        ...

    def doom(self, port: SimPort, in_s: float) -> None:
        """Have a port die in so many seconds, unless it dies before that."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class _Sequence:
    """One answer on its way.

    Attributes:
        text: what it answers.
        row: hash of that.
        reason_tokens: its tokens of thinking; the others are content (count).
        cut: the limit ends it.
        job: its place in the batch.
    """

    text: Text
    row: str
    reason_tokens: int
    cut: bool
    job: Job


class Handlers:
    """The routes of one port; ``handle`` is the only way in."""

    def __init__(self, port: SimPort, fleet: Fleet) -> None:
        self._port = port
        self._config = port.config
        self._fleet = fleet
        self._law = LengthLaw.parse(port.config.lengths)
        self._telling = telling = Telling(port)
        get, post = ("GET",), ("POST",)
        self._routes: dict[str, tuple[tuple[str, ...], _Handler]] = {
            "/v1/chat/completions": (post, partial(self._generation, Api.CHAT)),
            "/v1/completions": (post, partial(self._generation, Api.COMPLETIONS)),
            "/generate": (("POST", "PUT"), partial(self._generation, Api.GENERATE)),
            "/health": (get, telling.health),
            "/health_generate": (get, telling.health),
            "/v1/models": (get, telling.models),
            "/model_info": (get, telling.model_info),
            "/get_model_info": (get, telling.model_info),
            "/server_info": (get, telling.server_info),
            "/get_server_info": (get, telling.server_info),
            "/v1/loads": (get, telling.loads),
            "/get_load": (get, telling.get_load),
            "/ping": (get, telling.ping),
            "/flush_cache": (("GET", "POST"), telling.flush_cache),
            "/abort_request": (post, self._abort_request),
            "/_fake/stats": (get, self._fake_stats),
        }
        if port.config.orders:
            self._routes["/_fake"] = (post, self._fake)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, and log it."""
        visit = self._port.arrive(request.path)
        try:
            response = await self._answer(request, visit)
        except (asyncio.CancelledError, web.RequestPayloadError, ConnectionError):
            self._port.lose(visit)
            raise
        except Refusal as refusal:
            headers = {**(TEXT if refusal.plain else JSON), **refusal.headers}
            response = reply(refusal.status, refusal.body, headers)
            if "Connection" in refusal.headers:
                response.force_close()
        visit.status = response.status
        self._port.close(visit)
        if self._port.modes.keepalive_s == 0.0:
            response.force_close()
        return response

    async def _answer(self, request: web.BaseRequest, visit: Visit) -> web.StreamResponse:
        key = self._config.api_key
        if (
            key is not None
            and visit.path not in _NEEDS_NO_KEY
            and request.headers.get("Authorization") != f"Bearer {key}"
        ):
            return reply(401, b'{"error":"Unauthorized"}')
        route = self._routes.get(visit.path)
        if route is None:
            if request.method == "GET" and visit.path.startswith("/v1/models/"):
                return self._telling.model(visit.path.removeprefix("/v1/models/"))
            return reply(404, b'{"detail":"Not Found"}')
        methods, handler = route
        if request.method not in methods:
            headers = {**JSON, "Allow": ", ".join(methods)}
            return reply(405, b'{"detail":"Method Not Allowed"}', headers)
        return await handler(request, visit)

    # Generation

    async def _generation(self, api: Api, request: web.BaseRequest, visit: Visit) -> web.StreamResponse:
        self._port.count_in(visit)
        content_type = request.headers.get("Content-Type", "")
        ask = read_ask(api, content_type, await request.read(), self._config.context_tokens)
        rid = ask.rid or uuid4().hex
        if not self._port.identify(visit, ask.texts[0].row, rid):
            raise refuse(api, f"Duplicate request ID detected: {rid}")
        orders = NO_ORDERS
        if self._config.orders:
            orders = self._read_orders(ask, visit.attempt)
            await self._misbehave_before(request, visit, ask, orders)
        sequences = [self._sequence(text, ask, orders) for text in ask.texts for _ in range(ask.count)]
        if not await self._port.generate(visit, tuple(sequence.job for sequence in sequences)):
            raise refuse(api, "The request queue is full.", status=503, type_="503")
        answers = [self._finish(sequence, ask, orders) for sequence in sequences]
        visit.tokens = sum(answer.tokens for answer in answers)
        timing = _timing(visit)
        body = replies.body_of(
            ask,
            rid,
            answers,
            orders,
            timing,
            metrics=self._config.enable_metrics,
            is_newer=self._config.snapshot_loads,
        )
        if orders is NO_ORDERS:
            return reply(200, body)
        return await self._deliver(request, visit, orders, body)

    def _sequence(self, text: Text, ask: Ask, orders: Orders) -> _Sequence:
        row = text.row
        content = self._law.tokens(row, self._config.seed) if orders.tokens is None else orders.tokens
        if orders.content in ("empty", "null"):
            content = 0
        reason_tokens = orders.reason_tokens if ask.thinks else 0
        wanted = ask.max_tokens if ask.ignore_eos else content + reason_tokens
        made = min(wanted, ask.max_tokens)
        return _Sequence(
            text=text,
            row=row,
            reason_tokens=min(made, reason_tokens),
            cut=wanted > ask.max_tokens or ask.ignore_eos or ask.max_tokens == 0,
            job=Job(
                tokens=made,
                prompt_tokens=text.tokens,
                hold_s=orders.delay_s + text.tokens * self._config.prefill_per_token_s,
            ),
        )

    def _finish(self, sequence: _Sequence, ask: Ask, orders: Orders) -> replies.Answer:
        job, text = sequence.job, ""
        content_tokens = job.tokens - sequence.reason_tokens
        if content_tokens:
            text = replies.answer_text(
                sequence.row, content_tokens, self._config.reply_bytes, orders, sequence.text.user
            )
        if job.aborted:
            return replies.aborted(job.prompt_tokens, job.made_tokens, text, was_queued=job.was_queued)
        return replies.finished(
            row=sequence.row,
            prompt_tokens=job.prompt_tokens,
            tokens=job.tokens,
            reason_tokens=sequence.reason_tokens,
            cut=sequence.cut,
            orders=orders,
            text=text,
            calls=() if ask.has_tool_result else orders.tools,
        )

    # What orders do to the wire

    def _read_orders(self, ask: Ask, attempt: int) -> Orders:
        try:
            return parse_orders(ask.texts[0].user).at_attempt(attempt)
        except OrderError as error:
            raise refuse(ask.api, f"Bad order: {error}".encode("utf-8", "replace").decode()) from None

    async def _misbehave_before(
        self, request: web.BaseRequest, visit: Visit, ask: Ask, orders: Orders
    ) -> None:
        """Faults that come instead of a generation."""
        if orders.reset:
            await _reset(request, visit)
        if orders.die_s is not None:
            # Whether its client waits for that or not; until then it runs like any other.
            self._fleet.doom(self._port, orders.die_s)
            await self._port.generate(visit, (Job(tokens=0, hold_s=math.inf),))
            await for_ever()
        if not ask.has_user:
            message = "Internal server error: No user query found in messages."
            raise refuse(ask.api, message, status=500, type_="InternalServerError")
        if orders.hang in ("headers", "never"):
            # An order stands in the body, so ``never`` has been read as well; the client sees no difference.
            await for_ever()
        if orders.status is not None:
            await asyncio.sleep(orders.delay_s * self._port.modes.slow)
            message, kind = replies.error_of(orders, ask.texts[0].tokens, self._config.context_tokens)
            refusal = refuse(ask.api, message, status=orders.status, type_=kind)
            if orders.retry_after_s is not None:
                refusal.headers["Retry-After"] = f"{orders.retry_after_s:g}"
            raise refusal

    async def _deliver(
        self, request: web.BaseRequest, visit: Visit, orders: Orders, body: bytes
    ) -> web.StreamResponse:
        """Send a reply as its orders want it."""
        if orders.body == "error200":
            return reply(200, replies.ERROR_IN_200)
        if orders.body == "html":
            return reply(200, replies.HTML_PAGE, _HTML)
        if orders.body != "truncated" and orders.hang != "body" and not orders.split_utf8:
            return reply(200, body)
        response = web.StreamResponse(status=200, headers={**JSON, "Content-Length": str(len(body))})
        await response.prepare(request)
        if orders.split_utf8:
            for piece in replies.split_characters(body):
                await response.write(piece)
                await asyncio.sleep(TIMER_STEP_S)
            return response
        await response.write(body[: max(1, len(body) // 2)])
        visit.status = 200
        visit.cut = orders.body == "truncated"
        if visit.cut and request.transport is not None:
            request.transport.close()
        await for_ever()
        return response

    # What changes a server

    async def _abort_request(self, request: web.BaseRequest, _visit: Visit) -> web.StreamResponse:
        try:
            given = from_json(await request.read() or b"{}")
        except ValueError:
            given = None
        if not isinstance(given, dict):
            return reply(400, flat_error(400, "The body must be a JSON object", "Bad Request"))
        self._port.abort(given.get("rid"), every=bool(given.get("abort_all")))
        return reply(200, b"", BARE)

    async def _fake(self, request: web.BaseRequest, _visit: Visit) -> web.StreamResponse:
        try:
            body = await self._fleet.control(self._port, from_json(await request.read()))
        except ValueError as error:
            return reply(400, flat_error(400, str(error), "BadRequestError"))
        return reply(200, body)

    async def _fake_stats(self, _request: web.BaseRequest, _visit: Visit) -> web.StreamResponse:
        return reply(200, self._fleet.stats_body())


def _timing(visit: Visit) -> replies.Timing:
    now_s = time.monotonic()
    started_s = visit.jobs[0].started_s
    ready_s = now_s if started_s is None else max(started_s, visit.arrival_s)
    return replies.Timing(
        arrival_s=visit.arrival_s, queue_s=ready_s - visit.arrival_s, elapsed_s=now_s - visit.arrival_s
    )


async def _reset(request: web.BaseRequest, visit: Visit) -> None:
    """End the connection with a RST."""
    visit.cut = True
    if request.transport is not None:
        sock = request.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()
    await for_ever()
