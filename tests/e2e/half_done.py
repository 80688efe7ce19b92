"""Half-done runs that a test damages, and what the same command then makes of them."""

import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.e2e.harness import (
    Ended,
    Fleet,
    asked_after,
    assert_manifest_agrees,
    assert_one_error,
    audit,
    contents,
    failures,
    genpipe,
    listed,
    progress,
    row_of,
    run_command,
    running,
    saved,
    servers,
    wait_for,
    write_prompts,
)

LIMIT = 256
"""More than all prompts that never end, or they would hold up the others (requests)."""
OPTIONS = (
    *("--set", "output.shard_records=10", "--set", "retry.prompt_attempts=1"),
    *("--set", "start.ramp_s=0", "--set", "request.grace_s=0.1"),
)


def begin(
    folder: Path,
    texts: Sequence[str],
    *,
    records: int,
    failed: int = 0,
    stop: signal.Signals = signal.SIGKILL,
) -> None:
    """Run ``folder/in.jsonl`` into ``folder/out`` until so many prompts have ended, and stop it there.

    The other prompts must order delays that never end; only so is what is done the same each time.
    """
    source, out = write_prompts(folder / "in.jsonl", texts), folder / "out"
    with (
        servers(folder) as fleet,
        running(*run_command(fleet, source, out, LIMIT, *OPTIONS), err=folder / "run.err") as run,
    ):
        # The list comes last: with it, all that the start of a run has to do has been done.
        wait_for(lambda: len(listed(out)) >= records and len(failures(out)) == failed, "all quick answers")
        run.send(stop)
        run.wait()
    assert len(saved(out)) == records


def failed_for_good(out: Path) -> list[int]:
    """Indices that only ``--retry-failed`` would ask again."""
    return [index for index, line in failures(out).items() if line["for_good"]]


class Again:
    """The same command on a copy of a half-done run, with servers that answer everything at once.

    Attributes:
        out: the copy.
        ended: how the command ended.
        asked: the rows that it asked.
        before: the copy as it was before the command.
    """

    def __init__(self, begun: Path, out: Path, fleet: Fleet, texts: Sequence[str]) -> None:
        shutil.copytree(begun / "out", out)
        self.out = out
        self._source = begun / "in.jsonl"
        self._fleet = fleet
        self._texts = texts
        self.before: dict[str, bytes | None] = {}
        self.asked: set[str] = set()
        self.ended: Ended

    def run(self, *options: object) -> None:
        """Run it to its end."""
        self.before = contents(self.out)
        began_s = time.monotonic()
        self.ended = genpipe(*run_command(self._fleet, self._source, self.out, LIMIT, *OPTIONS, *options))
        self.asked = asked_after(self._fleet.visits_until_now(), began_s)

    @property
    def warnings(self) -> list[str]:
        """The lines in which it warned."""
        return [line for line in self.ended.err.splitlines() if "warning: " in line]

    def warned_of(self, path: Path) -> bool:
        """Whether it warned of this file, by its whole name."""
        return any(f"{path} " in line for line in self.warnings)

    def rows_but(self, *indices: int) -> set[str]:
        """All rows but these."""
        return {row_of(text) for place, text in enumerate(self._texts) if place not in indices}

    def assert_refused(self, code: int, *words: str) -> None:
        """In one line, with nothing changed, but that the lock counts each claim."""
        after = contents(self.out)
        changed = {name for name in self.before | after if self.before.get(name, 0) != after.get(name, 0)}

        assert_one_error(self.ended, code, *words)
        assert self.asked == set()
        assert changed <= {".lock"}

    def assert_completed(
        self, there: dict[int, dict[str, Any]], still_failed: Sequence[int] = (), *, gone: Sequence[str] = ()
    ) -> None:
        """Each prompt has its record; those that had one were not asked, and all others were.

        Args:
            there: the records that were whole before.
            still_failed: prompts that had failed for good, and are not asked again.
            gone: sealed shards that are missing: the manifest keeps what it knew of them.
        """
        records, state = audit(self.out, self._texts, but=still_failed), progress(self.out)

        assert self.ended.code == (1 if still_failed else 0), self.ended.err
        assert self.asked == self.rows_but(*there, *still_failed)
        assert {index: records[index] for index in there} == there
        assert_manifest_agrees(self.out, gone=gone)
        assert state is not None
        assert (state["state"], state["completed"]) == ("done", len(records))
        assert (state["failed"], state["total"]) == (len(still_failed), len(self._texts))
