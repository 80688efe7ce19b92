"""What a simulated server is told at its start, and how long its answers are."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from genpipe.core.errors import ConfigError

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLaw:
    """How many tokens an answer without orders has: a function of the prompt's hash and a seed alone.

    Attributes:
        median_tokens: the middle of the law (tokens, > 0).
        sigma: standard deviation of the logarithm; 0 makes every answer the same (>= 0).
        max_tokens: longest answer (tokens, >= 1).
    """

    median_tokens: float
    sigma: float
    max_tokens: int

    @classmethod
    def parse(cls, text: str) -> "LengthLaw":
        """Read ``fixed:N`` or ``lognormal:mean=M,sigma=S[,max=N]``; M is the mean of the law before the cut.

        Raises:
            ConfigError: it reads neither way, or a number is out of range.
        """
        name, _, rest = text.partition(":")
        try:
            if name == "fixed":
                tokens = int(rest)
                if tokens >= 0:
                    return cls(median_tokens=float(tokens), sigma=0.0, max_tokens=max(1, tokens))
            if name == "lognormal":
                given = dict(part.split("=", 1) for part in rest.split(","))
                mean, sigma = float(given.pop("mean")), float(given.pop("sigma"))
                limit = int(given.pop("max", "1000000"))
                if not given and mean > 0.0 and sigma >= 0.0 and limit >= 1:
                    median = math.exp(math.log(mean) - sigma * sigma / 2)
                    return cls(median_tokens=median, sigma=sigma, max_tokens=limit)
        except (ValueError, KeyError):
            pass
        raise ConfigError(f"lengths must be fixed:N or lognormal:mean=M,sigma=S[,max=N], got {text!r}")

    def tokens(self, row: str, seed: int) -> int:
        """Length for the prompt whose hash is ``row``; the same on every server with the same seed."""
        if self.sigma == 0.0:
            return round(self.median_tokens)
        digest = hashlib.blake2b(f"{seed}:{row}".encode(), digest_size=8).digest()
        uniform = (int.from_bytes(digest, "big") + 0.5) / 2**64
        drawn = self.median_tokens * math.exp(self.sigma * _NORMAL.inv_cdf(min(uniform, 1 - 1e-15)))
        return min(max(1, round(drawn)), self.max_tokens)


def step_times_s(
    *, alone_tokens_per_s: float, full_tokens_per_s: float, max_running: int
) -> tuple[float, float]:
    """Turn two measured speeds into ``(step_fixed_s, step_per_request_s)``.

    An 8B model on one H200 made 199 tokens/s alone and 17,517 tokens/s in a batch of 256.

    Args:
        alone_tokens_per_s: speed of a single request (tokens/s).
        full_tokens_per_s: speed of a whole batch of ``max_running`` (tokens/s).
        max_running: size of that batch (count, >= 2).

    Raises:
        ConfigError: no step times give these speeds.
    """
    if max_running < 2 or alone_tokens_per_s <= 0.0 or full_tokens_per_s <= 0.0:
        raise ConfigError("speeds must be > 0 and max_running >= 2")
    alone_s, full_s = 1.0 / alone_tokens_per_s, max_running / full_tokens_per_s
    per_request_s = (full_s - alone_s) / (max_running - 1)
    if per_request_s < 0.0 or per_request_s > alone_s:
        raise ConfigError(
            f"a batch of {max_running} must make between {alone_tokens_per_s:g} and "
            f"{alone_tokens_per_s * max_running:g} tokens/s, got {full_tokens_per_s:g}"
        )
    return alone_s - per_request_s, per_request_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """How a simulated server behaves. With the step times left at 0 it answers at once.

    Attributes:
        model: name under ``/v1/models``; requests may use any name.
        model_path: path in ``/model_info``; None for the name.
        context_tokens: context length (tokens).
        kv_tokens: size of the KV pool as reported by ``/v1/loads``; not enforced (tokens).
        max_running: requests that generate at once (count).
        max_queued: requests that may wait for that, more get a 503; None for no limit (count).
        step_fixed_s: part of a decode step that does not depend on the batch (seconds).
        step_per_request_s: part of a decode step that each running request adds (seconds).
        prefill_per_token_s: time that each prompt token adds before the first answer token (seconds).
        lengths: length of an answer without an order: ``fixed:N`` or
            ``lognormal:mean=M,sigma=S[,max=N]`` (tokens).
        seed: second input of that law beside the prompt's hash.
        reply_bytes: size of every answer's text, whatever its token count; None for four characters a
            token (bytes).
        health_delay_s: how long ``/health`` takes (seconds).
        disconnect_notice_s: how long a request goes on after its client has left (seconds).
        keepalive_s: how long an idle connection is kept (seconds).
        api_key: Bearer token that all but ``/health`` asks for; None for open access.
        snapshot_loads: ``/v1/loads`` is of each rank's last step and says when that was, as in SGLang 0.5.13
            and later; else it is asked of the scheduler, as before, and has no such times.
        revive_s: how soon a server that died by an order is started again; None for never (seconds).
        enable_metrics: as the server's flag: timings in ``/generate``, throughput in ``/v1/loads``.
        orders: read orders from the prompts and take modes at ``/_fake``.
        log_path: file that gets one JSON line per request; None for no log.
    """

    model: str = "tiny-model"
    model_path: str | None = None
    context_tokens: int = 32768
    kv_tokens: int = 458_000
    max_running: int = 256
    max_queued: int | None = None
    step_fixed_s: float = 0.0
    step_per_request_s: float = 0.0
    prefill_per_token_s: float = 0.0
    lengths: str = "fixed:16"
    seed: int = 0
    reply_bytes: int | None = None
    health_delay_s: float = 1.0
    disconnect_notice_s: float = 2.5
    keepalive_s: float = 5.0
    api_key: str | None = None
    snapshot_loads: bool = True
    revive_s: float | None = None
    enable_metrics: bool = True
    orders: bool = False
    log_path: Path | None = None

    def __post_init__(self) -> None:
        """Refuse what no server could be.

        Raises:
            ConfigError: a value is out of range; the message names it.
        """
        LengthLaw.parse(self.lengths)
        for name in ("context_tokens", "kv_tokens", "max_running"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("max_queued", "reply_bytes"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ConfigError(f"{name} must be >= 0 or None, got {getattr(self, name)}")
        for name in (
            "step_fixed_s",
            "step_per_request_s",
            "prefill_per_token_s",
            "health_delay_s",
            "disconnect_notice_s",
            "keepalive_s",
        ):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0.0):
                raise ConfigError(f"{name} must be finite and >= 0, got {getattr(self, name)}")
        if self.revive_s is not None and not (math.isfinite(self.revive_s) and self.revive_s > 0.0):
            raise ConfigError(f"revive_s must be finite and > 0, or None, got {self.revive_s}")
