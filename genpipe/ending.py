"""How a run ended: its exit code, and the line for people."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genpipe.core import wording
from genpipe.core.flow import Core

EXIT_DONE, EXIT_SOME_MISSING, EXIT_GUARD = 0, 1, 3

_SHARDS_NAMED_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended.

    Attributes:
        exit_code: 0 done, 1 done but for prompts that failed or shards that are not in S3, 3 stopped by a
            guard or for want of servers, 129, 130 or 143 stopped by a signal.
        message: one line for people; what is wrong with the answers, or why it was stopped, comes first.
        progress: the last snapshot, or None where nothing was begun.
    """

    exit_code: int
    message: str
    progress: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """What an ending leaves undone beside the prompts themselves.

    Attributes:
        failed_for_good: prompts that only ``--retry-failed`` asks again.
        not_uploaded: sealed shards that are not in S3, by number.
        uri: where they should be, or None where nothing is uploaded.
        trouble: why they are not there, as far as is known.
    """

    failed_for_good: int = 0
    not_uploaded: tuple[int, ...] = ()
    uri: str | None = None
    trouble: str | None = None

    def uploads_text(self) -> str:
        """What is missing in S3, and what to do about it."""
        if not self.not_uploaded:
            return ""
        named = ", ".join(map(str, self.not_uploaded[:_SHARDS_NAMED_MAX]))
        more = len(self.not_uploaded) - _SHARDS_NAMED_MAX
        named += f" and {more} more" if more > 0 else ""
        why = f" ({self.trouble})" if self.trouble else ""
        return (
            f"; {_shards(len(self.not_uploaded))} on this disk and NOT in {self.uri}: "
            f"{named}{why}. The same command uploads them, without asking any model"
        )


def _shards(count: int) -> str:
    return "1 shard is" if count == 1 else f"{wording.number(count)} shards are"


def ending(
    core: Core, last: dict[str, Any], out: Path, *, stopped_by: signal.Signals | None, leftover: Leftover
) -> Ending:
    """How a run ended.

    Args:
        core: the scheduler at its end.
        last: the last snapshot.
        out: the run folder.
        stopped_by: the signal that came, or None.
        leftover: what is left undone.
    """
    done, failed = wording.number(last["completed"]), last["failed"]
    total = wording.number(last["total"])
    uploads = leftover.uploads_text()
    if core.complete:
        took = wording.duration(last["elapsed_s"])
        message = f"done: {done} of {total} prompts answered, in {took}"
        if failed:
            message += f"; {wording.number(failed)} failed, listed in {out / 'failed.jsonl'}"
            if for_good := leftover.failed_for_good:
                message += f" ({wording.number(for_good)} for good: only --retry-failed asks them again)"
        if odd := wording.oddities(last):
            message += f"; of the answers {odd}"
        message += uploads
        code = EXIT_SOME_MISSING if failed or uploads else EXIT_DONE
        if stopped_by is not None and uploads:
            code, message = 128 + stopped_by, f"stopped by {stopped_by.name}: {message}"
    elif core.refusal:
        code = EXIT_GUARD
        message = (
            f"stopped by {core.refusal}; {done} of {total} prompts done and on disk; the same command "
            f"goes on from there{uploads}"
        )
    else:
        assert stopped_by is not None
        code = 128 + stopped_by
        message = (
            f"stopped by {stopped_by.name}: {done} of {total} prompts done and on disk; the same "
            f"command goes on from there{uploads}"
        )
    warnings = "".join(f"warning: {text}; " for text in last.get("warnings") or ())
    return Ending(exit_code=code, message=warnings + message, progress=last)
