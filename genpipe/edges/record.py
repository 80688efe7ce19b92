"""What stands in a line of the journal and of ``failed.jsonl``.

The keys, their order and their meaning are described in ``FORMAT.md``.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import orjson

from genpipe.core.values import Finished, GivenUp
from genpipe.edges import lines, strict_json

MESSAGE_CHARS_MAX = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Wall:
    """One moment on both clocks, taken once a process: a later jump of the wall clock changes no record.

    Attributes:
        wall_s: seconds since 1970 (UTC) at that moment.
        run_s: the run clock at that moment.
    """

    wall_s: float
    run_s: float

    def text(self, run_s: float) -> str:
        """The moment ``run_s`` of the run clock as ISO 8601 in UTC, to the millisecond."""
        second, milliseconds = divmod(int((self.wall_s + (run_s - self.run_s)) * 1000), 1000)
        return f"{_second_text(second)}.{milliseconds:03d}Z"


@lru_cache(maxsize=64)
def _second_text(second: int) -> str:
    """A whole second since 1970; a group's records share a few."""
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def encode_finished(finished: Finished, wall: Wall, settings: str | None) -> bytes:
    """The journal's line of one answered prompt.

    The prompt's own JSON (``payload`` and what ends in ``_json``) is copied byte for byte. Text that is no
    Unicode is mended (a lone surrogate becomes U+FFFD), so that one odd answer cannot cost a group.

    Args:
        finished: the prompt and its answer.
        wall: the process's anchor of the wall clock.
        settings: digest of the settings where they are not those of ``run.json``, else None.
    """
    prompt, answer = finished.prompt, finished.answer
    parts = [b'{"index":%d' % prompt.index]
    if prompt.id_json:
        parts += (b',"id":', prompt.id_json)
    parts += (b',"%s":' % prompt.member.encode(), prompt.payload)
    several = isinstance(answer.response, list)
    parts += (b',"responses":' if several else b',"response":', _dumps(answer.response))
    facts: dict[str, Any] = {"finish_reason": answer.finish_reason, "usage": answer.usage}
    if answer.output_tokens != _tokens_in(answer.usage):
        facts["output_tokens"] = answer.output_tokens
    if answer.token_ids is not None:
        facts["token_ids"] = answer.token_ids
    facts["flags"] = list(answer.flags)
    if answer.steps is not None:
        facts["steps"] = answer.steps
    if prompt.sampling_json or prompt.body_json:
        parts += (b",", _dumps(facts)[1:-1])
        facts = {}
        if prompt.sampling_json:
            parts += (b',"sampling":{', prompt.sampling_json, b"}")
        if prompt.body_json:
            parts += (b',"body":{', prompt.body_json, b"}")
    facts["model"] = answer.model
    facts["server"] = finished.server
    facts["attempts"] = finished.tries
    facts["started_at"] = wall.text(finished.started_s)
    facts["latency_s"] = round(finished.latency_s, 3)
    if answer.rid is not None:
        facts["rid"] = answer.rid
    parts += (b",", _dumps(facts)[1:-1])
    if prompt.keep_json:
        parts += (b",", prompt.keep_json)
    if settings is not None:
        parts += (b',"settings":', _dumps(settings))
    line = lines.encode(*parts)
    assert line.find(b"\n") == len(line) - 1, f"prompt {prompt.index} holds a raw line feed"
    return line


def encode_given_up(given_up: GivenUp) -> bytes:
    """The line in ``failed.jsonl`` of one prompt that ended without an answer."""
    members = _dumps(
        {
            "index": given_up.index,
            "attempts": given_up.tries,
            "error_class": given_up.error_class,
            "message": " ".join(given_up.message.split())[:MESSAGE_CHARS_MAX],
            "last_status": given_up.last_status,
            "for_good": given_up.for_good,
        }
    )
    if given_up.made_json:
        return lines.encode(members[:-1], b",", given_up.made_json)
    return lines.encode(members[:-1])


def facts_of(body: bytes) -> tuple[int | None, tuple[str, ...]]:
    """Output tokens and flags of a record, as they were counted when it was written.

    Args:
        body: the record as :func:`genpipe.edges.lines.decode` gives it.
    """
    try:
        record = strict_json.loads(body)
    except ValueError:
        # The checksum is right, so these are the bytes that were acknowledged: they count, unread.
        return None, ()
    usage = record.get("usage")
    tokens = record["output_tokens"] if "output_tokens" in record else _tokens_in(usage)
    return tokens, tuple(record.get("flags", ()))


def _tokens_in(usage: object) -> int | None:
    """The answer's length as a usage object has it."""
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0 else None


def _dumps(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:
        return strict_json.dumps(value)
