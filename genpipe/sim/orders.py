"""Orders in a prompt, and modes of a running server: how a test says what a simulated server shall do wrong.

An order stands in the last user text between ``<<`` and ``>>`` as ``key=value`` words, so that one input file
scripts a whole run. A mode is a small JSON object posted to ``/_fake`` of any port of the same process.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_GROUP = re.compile(r"<<\s*((?:[a-z][a-z0-9_]*=[^\s<>]+\s*)+)>>")

_CHOICES: Mapping[str, frozenset[str]] = {
    "finish": frozenset({"stop", "length", "abort", "null"}),
    "body": frozenset({"error200", "nochoices", "truncated", "html"}),
    "usage": frozenset({"none", "null", "zero"}),
    "content": frozenset({"empty", "null", "replacement", "surrogate", "nul"}),
    "hang": frozenset({"headers", "body", "never"}),
}
_FLAGS = frozenset({"split_utf8", "reset", "loop"})
_WHOLE: Mapping[str, str] = {
    "tokens": "tokens",
    "status": "status",
    "times": "times",
    "reason": "reason_tokens",
    "huge": "huge_bytes",
    "deep": "deep_levels",
}
_SECONDS: Mapping[str, str] = {"delay": "delay_s", "retry_after": "retry_after_s", "die": "die_s"}


HUNG_HEALTH_S = 20.0
"""How long the real server's health check waits for a scheduler that hangs (seconds)."""


class OrderError(ValueError):
    """An order or a mode that no server could follow; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What one prompt asks for.

    Attributes:
        delay_s: time before the first byte, spent in a running slot (seconds).
        tokens: tokens of the answer's content, or None for the server's law.
        finish: ``stop``, ``length``, ``abort``, or ``null`` for JSON's null.
        status: HTTP status of an error reply.
        why: ``too_long``, ``queue_full``, or any words joined by ``_`` for the error's message.
        retry_after_s: value of a ``Retry-After`` header (seconds).
        times: the fault hits only this many first attempts of the text; None for all of them.
        body: ``error200``, ``nochoices``, ``truncated`` or ``html``.
        usage: ``none`` leaves it out, ``null``, ``zero``.
        reason_tokens: tokens of ``reasoning_content``, counted on top of ``tokens``.
        content: ``empty``, ``null``, or a text with an odd character: ``replacement`` (a genuine U+FFFD),
            ``surrogate`` (half of a pair), ``nul`` (U+0000).
        huge_bytes: size of the whole reply body.
        split_utf8: send the body in pieces that cut characters.
        reset: RST before any byte; the first attempt only, unless ``times`` says otherwise.
        hang: stop for ever before the ``headers`` (``never`` is the same here), or in mid-``body``.
        die_s: its server dies so long after it came, with all that is open there (seconds).
        loop: the text repeats one phrase to its end.
        tools: instead of a text these functions are called, in a chat that does not end in a tool's result.
        deep_levels: log probabilities are lists nested so deeply (count).
    """

    delay_s: float = 0.0
    tokens: int | None = None
    finish: str | None = None
    status: int | None = None
    why: str | None = None
    retry_after_s: float | None = None
    times: int | None = None
    body: str | None = None
    usage: str | None = None
    reason_tokens: int = 0
    content: str | None = None
    huge_bytes: int | None = None
    split_utf8: bool = False
    reset: bool = False
    hang: str | None = None
    die_s: float | None = None
    loop: bool = False
    tools: tuple[str, ...] = ()
    deep_levels: int = 0

    def at_attempt(self, attempt: int) -> "Orders":
        """The orders of this attempt (from 1) at the text: without the faults that are used up."""
        if self.times is not None and attempt > self.times:
            return replace(
                self,
                finish=None,
                status=None,
                body=None,
                usage=None,
                content=None,
                reset=False,
                hang=None,
                die_s=None,
                loop=False,
            )
        if self.times is None and self.reset and attempt > 1:
            return replace(self, reset=False)
        return self


NO_ORDERS = Orders()


def parse_orders(text: str) -> Orders:
    """Read the first group of orders in ``text``; without one, the plain answer.

    Angle brackets around anything but ``key=value`` words are no orders.

    Raises:
        OrderError: an unknown key, or a value it cannot take.
    """
    found = _GROUP.search(text) if "<<" in text else None
    if found is None:
        return NO_ORDERS
    fields: dict[str, Any] = {}
    for word in found[1].split():
        key, _, value = word.partition("=")
        if key in _CHOICES:
            if value not in _CHOICES[key]:
                raise OrderError(f"{word}: must be one of {', '.join(sorted(_CHOICES[key]))}")
            fields[key] = value
        elif key in _FLAGS:
            fields[key] = value != "0"
        elif key in _WHOLE:
            fields[_WHOLE[key]] = _whole(word, value)
        elif key in _SECONDS:
            fields[_SECONDS[key]] = _seconds(word, value)
        elif key == "why":
            fields["why"] = value
        elif key == "tools":
            fields["tools"] = tuple(value.split(","))
        else:
            raise OrderError(f"{word}: no such order")
    if "status" in fields and not 400 <= fields["status"] <= 599:
        raise OrderError(f"status={fields['status']}: must be 400 to 599")
    return Orders(**fields)


def _whole(word: str, value: str) -> int:
    if not value.isascii() or not value.isdigit():
        raise OrderError(f"{word}: must be a whole number >= 0")
    return int(value)


def _seconds(word: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0.0):
        raise OrderError(f"{word}: must be seconds >= 0")
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """How one port behaves now, beyond its config.

    Attributes:
        down: nothing listens, every connection was dropped.
        dead_scheduler: ``/health`` and model info answer, ``/health_generate`` is 503, generation hangs.
        hung_s: the scheduler hangs, and ``/health`` says so after this time; None for well (seconds).
        revive_s: how soon the port listens again after it died; None for never (seconds).
        busy_health: ``503`` or ``slow``: what ``/health`` does while generation goes on; None for well.
        queue_limit: requests that may wait, or None for no limit (count).
        keepalive_s: idle limit of connections made from now on (seconds).
        slow: factor on all times of generation (> 0).
        no_metrics: ``/metrics`` is 404.
        slots: requests that generate at once (count).
    """

    down: bool = False
    dead_scheduler: bool = False
    hung_s: float | None = None
    revive_s: float | None = None
    busy_health: str | None = None
    queue_limit: int | None
    keepalive_s: float
    slow: float = 1.0
    no_metrics: bool = False
    slots: int

    @property
    def frozen(self) -> bool:
        """Nothing is generated."""
        return self.dead_scheduler or self.hung_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeChange:
    """One request to ``/_fake``.

    Attributes:
        name: field of ``Modes`` to change, or None to go back to the config in everything.
        value: its new value, or None for the configured one where the field knows no null.
        seconds: after which the field goes back to what the config says; None for never.
        port: the port it is for; None for the port that was asked.
    """

    name: str | None
    value: bool | int | float | str | None = None
    seconds: float | None = None
    port: int | None = None

    def apply(self, modes: Modes, configured: Modes) -> Modes:
        """The modes after this change."""
        if self.name is None:
            return configured
        return _with(modes, self.name, self.value)

    def undo(self, modes: Modes, configured: Modes) -> Modes:
        """The modes after ``seconds`` have passed."""
        if self.name is None:
            return modes
        return _with(modes, self.name, getattr(configured, self.name))


def _with(modes: Modes, name: str, value: object) -> Modes:
    fields: dict[str, Any] = {name: value}
    return replace(modes, **fields)


_MODE_KEYS = frozenset({"mode", "value", "seconds", "port"})
_SWITCHES = frozenset({"down", "dead_scheduler", "no_metrics"})


def parse_mode(given: object) -> ModeChange:
    """Read a mode: ``{"mode": NAME, "value": V, "seconds": S, "port": N}``.

    ================== ======================================================================
    ``down``           stop listening and drop all connections
    ``up``             listen again (ask another port of the process, and name the port)
    ``dead_scheduler`` generation hangs, ``/health_generate`` is 503, the others answer
    ``hung``           as a stopped scheduler does it: generation, ``/server_info`` and ``/get_load``
                       hang, the others answer at once with what was true before, and ``/health``
                       is 503 after ``value`` S (default 20); ends with ``false`` or ``normal``,
                       and what was in flight goes on
    ``revive_s``       ``value`` S: a port that died by an order listens again S later; null never
    ``busy_health``    ``value`` "503" (default) or "slow"; needs ``seconds``
    ``queue_limit``    ``value`` Q requests may wait, more get 503; null for no limit
    ``keepalive``      ``value`` S: new connections are closed after S idle seconds
    ``slow``           ``value`` F: everything takes F times as long
    ``slots``          ``value`` M requests generate at once, the others wait
    ``no_metrics``     ``/metrics`` is 404
    ``normal``         back to the config in everything, ``up`` included
    ================== ======================================================================

    ``seconds`` (optional): after that the mode alone goes back to what the config says. ``port`` (optional):
    the port it is for; without it, the one that was asked. The switches ``down``, ``dead_scheduler`` and
    ``no_metrics`` end with ``"value": false``.

    Raises:
        OrderError: it is not of this form.
    """
    if not isinstance(given, dict) or not set(given) <= _MODE_KEYS:
        raise OrderError(f"a mode is a JSON object with the keys {', '.join(sorted(_MODE_KEYS))}")
    mode, value, seconds, port = (given.get(key) for key in ("mode", "value", "seconds", "port"))
    if seconds is not None and not (_is_number(seconds) and seconds > 0):
        raise OrderError("seconds must be a number > 0")
    if port is not None and not (isinstance(port, int) and not isinstance(port, bool)):
        raise OrderError("port must be a whole number")
    name, value = _mode_value(mode, value, seconds)
    return ModeChange(name=name, value=value, seconds=seconds, port=port)


def _mode_value(
    mode: object,
    value: Any,
    seconds: float | None,
) -> tuple[str | None, Any]:
    match mode:
        case "normal":
            return None, None
        case "up":
            return "down", False
        case str() if mode in _SWITCHES and value in (None, True, False):
            return mode, value is not False
        case "hung" if value is None or isinstance(value, bool):
            return "hung_s", None if value is False else HUNG_HEALTH_S
        case "hung" | "revive_s" if _is_number(value) and value > 0:
            return "hung_s" if mode == "hung" else "revive_s", float(value)
        case "revive_s" if value is None:
            return "revive_s", None
        case "busy_health" if value in (None, "503", "slow") and seconds is not None:
            return "busy_health", value or "503"
        case "queue_limit" if value is None or (_is_count(value) and value >= 0):
            return "queue_limit", value
        case "slots" if _is_count(value) and value >= 1:
            return "slots", value
        case "keepalive" if _is_number(value) and value >= 0:
            return "keepalive_s", float(value)
        case "slow" if _is_number(value) and value > 0:
            return "slow", float(value)
    raise OrderError(f"mode {mode!r} is unknown, or cannot have the value {value!r} with seconds {seconds!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
