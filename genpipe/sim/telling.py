"""What a simulated server says of itself: health, model, loads, and the shapes of its replies."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import orjson
from aiohttp import web

from genpipe.sim.journal import Visit
from genpipe.sim.port import SimPort, Snapshot

BARE = {"Server": "uvicorn"}
JSON = {**BARE, "Content-Type": "application/json"}
TEXT = {**BARE, "Content-Type": "text/plain; charset=utf-8"}
_FLUSHED = (
    b"Cache flushed.\nPlease check backend logs for more details. "
    b"(When there are running or waiting requests, the operation will not be performed.)\n"
)


def reply(status: int, body: bytes, headers: Mapping[str, str] = JSON) -> web.Response:
    """A reply with its length, as uvicorn sends it."""
    return web.Response(status=status, body=body, headers=headers)


async def for_ever() -> None:
    """Wait for the end of the connection, which cancels its handler."""
    await asyncio.get_running_loop().create_future()


class Telling:
    """The routes of one port that generate nothing.

    Some ask the scheduler, and wait for it where it hangs; the others know, and answer at once.
    """

    def __init__(self, port: SimPort) -> None:
        self._port = port
        self._config = port.config
        self._path = port.config.model_path or port.config.model
        self._created = int(time.time())

    async def health(self, _request: web.BaseRequest, visit: Visit) -> web.StreamResponse:
        """``/health`` and ``/health_generate``."""
        busy = self._port.modes.busy_health
        if busy == "503":
            return reply(503, b"", BARE)
        if not await self._scheduler_moves():
            return reply(503, b"", BARE)
        wait_s = self._config.health_delay_s
        if busy == "slow":
            wait_s += max(0.0, self._port.busy_until_s - time.monotonic())
        if wait_s > 0.0:
            await asyncio.sleep(wait_s)
        dead = self._port.modes.dead_scheduler and visit.path == "/health_generate"
        return reply(503 if dead else 200, b"", BARE)

    async def _scheduler_moves(self) -> bool:
        """Wait for a scheduler that hangs, as long as the health check does."""
        begun_s = time.monotonic()
        while (hung_s := self._port.modes.hung_s) is not None:
            left_s = begun_s + hung_s - time.monotonic()
            if left_s <= 0.0:
                return False
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._port.changed.wait()
        return True

    async def _ask_scheduler(self) -> None:
        """Go on only once it moves."""
        while self._port.modes.hung_s is not None:
            await self._port.changed.wait()

    async def models(self, _request: web.BaseRequest, _visit: Visit) -> web.StreamResponse:
        """``/v1/models``."""
        return reply(200, orjson.dumps({"object": "list", "data": [self._card()]}))

    def model(self, name: str) -> web.StreamResponse:
        """``/v1/models/NAME``."""
        if name == self._config.model:
            return reply(200, orjson.dumps(self._card()))
        error = {
            "message": f"The model '{name}' does not exist",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        return reply(404, orjson.dumps({"error": error}))

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._config.model,
            "object": "model",
            "created": self._created,
            "owned_by": "sglang",
            "root": self._config.model,
            "parent": None,
            "max_model_len": self._config.context_tokens,
        }

    async def model_info(self, _request: web.BaseRequest, _visit: Visit) -> web.StreamResponse:
        """``/model_info`` and its older name."""
        info = {
            "model_path": self._path,
            "tokenizer_path": self._path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
        }
        return reply(200, orjson.dumps(info))

    async def server_info(self, _request: web.BaseRequest, _visit: Visit) -> web.StreamResponse:
        """``/server_info``: a little of what the real one says."""
        await self._ask_scheduler()
        now = self._port.snapshot()
        state = {
            "last_gen_throughput": now.tokens_per_s,
            "effective_max_running_requests_per_dp": self._port.batch.running_max,
        }
        info = {
            "model_path": self._path,
            "served_model_name": self._config.model,
            "status": "ready",
            "max_total_num_tokens": self._config.kv_tokens,
            "internal_states": [state],
            "version": self._version,
        }
        return reply(200, orjson.dumps(info))

    @property
    def _version(self) -> str:
        return "0.5.17" if self._config.snapshot_loads else "0.5.11"

    async def loads(self, request: web.BaseRequest, _visit: Visit) -> web.StreamResponse:
        """``/v1/loads``."""
        include = request.query.getall("include", ["all"])
        core_only = {part.strip() for value in include for part in value.split(",")} <= {"core"}
        if not self._config.snapshot_loads:
            await self._ask_scheduler()
        now = self._port.snapshot()
        body: dict[str, Any] = {
            "timestamp": datetime.now(UTC).isoformat(timespec="microseconds"),
            "version": self._version,
        }
        if self._config.snapshot_loads:
            body |= {"accelerator": None, "num_accelerators": 1}
            body["loads"] = [{"timestamp": now.taken_s, "dp_rank": 0, **self._load(now, core_only)}]
        else:
            total = {"num_total_reqs": now.running + now.waiting}
            body["dp_rank_count"] = 1
            body["loads"] = [{**self._load(now, core_only), **total}]
            body["aggregate"] = self._aggregate(now)
        return reply(200, orjson.dumps(body))

    def _load(self, now: Snapshot, core_only: bool) -> dict[str, Any]:
        """What one rank says of itself."""
        load: dict[str, Any] = {
            "num_running_reqs": now.running,
            "num_waiting_reqs": now.waiting,
            "num_used_tokens": now.used_tokens,
            "num_total_tokens": now.used_tokens,
            "max_total_num_tokens": self._config.kv_tokens,
            "token_usage": self._usage(now),
            "gen_throughput": round(now.tokens_per_s, 2),
            "cache_hit_rate": 0.0,
            "utilization": 0.0,
            "max_running_requests": self._port.batch.running_max,
        }
        if not core_only:
            sizes = {"weight_gb": 0.002, "kv_cache_gb": 0.01, "graph_gb": 0}
            load["memory"] = {**sizes, "token_capacity": self._config.kv_tokens}
            load["disaggregation"] = _NO_DISAGGREGATION
            load["queues"] = {"waiting": now.waiting, "grammar": 0, "paused": 0, "retracted": 0}
        return load

    def _aggregate(self, now: Snapshot) -> dict[str, Any]:
        return {
            "total_running_reqs": now.running,
            "total_waiting_reqs": now.waiting,
            "total_reqs": now.running + now.waiting,
            "total_used_tokens": now.used_tokens,
            "total_tokens": now.used_tokens,
            "avg_token_usage": self._usage(now),
            "avg_throughput": round(now.tokens_per_s, 2),
            "avg_utilization": 0.0,
        }

    def _usage(self, now: Snapshot) -> float:
        return round(min(1.0, now.used_tokens / self._config.kv_tokens), 4)

    async def get_load(self, _request: web.BaseRequest, _visit: Visit) -> web.StreamResponse:
        """``/get_load``, of which newer servers warn."""
        await self._ask_scheduler()
        now = self._port.snapshot()
        load = {
            "dp_rank": None,
            "num_reqs": now.running + now.waiting,
            "num_waiting_reqs": now.waiting,
            "num_tokens": now.used_tokens,
            "num_pending_tokens": 0,
            "ts_tic": time.monotonic(),
        }
        return reply(200, orjson.dumps([load]))

    async def ping(self, _request: web.BaseRequest, _visit: Visit) -> web.StreamResponse:
        """``/ping``."""
        return reply(200, b"", BARE)

    async def flush_cache(self, _request: web.BaseRequest, _visit: Visit) -> web.StreamResponse:
        """``/flush_cache``, where there is no cache."""
        idle = not (self._port.batch.running or self._port.batch.queued)
        return reply(200 if idle else 400, _FLUSHED, TEXT)


_NO_DISAGGREGATION = {
    "mode": "null",
    "prefill_prealloc_queue_reqs": 0,
    "prefill_inflight_queue_reqs": 0,
    "decode_prealloc_queue_reqs": 0,
    "decode_transfer_queue_reqs": 0,
    "decode_retracted_queue_reqs": 0,
    "kv_transfer_speed_gb_s": 0.0,
    "kv_transfer_latency_ms": 0.0,
}
