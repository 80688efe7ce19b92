"""A first try without a GPU: simulated servers, a run killed half-way, its resume, and an audit of the shards."""

import contextlib
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from genpipe.core import wording
from genpipe.core.errors import ConfigError
from genpipe.edges import lines
from genpipe.edges.report import PROGRESS
from genpipe.ui import terminal

SERVERS = 4
SLOTS = 24
KILL_AT_SHARE = 0.5
SIM_ARGUMENTS = (
    "--tokens-per-s=180",
    "--tokens-per-s-full=2600",
    f"--max-running={SLOTS}",
    "--lengths=lognormal:mean=110,sigma=0.8,max=900",
    "--health-delay-s=0.2",
)
TIMEOUT_S = 85.0
"""The demo ends itself after this long, whatever happens (seconds)."""

_SUBJECTS = ("a lighthouse", "two trains", "a bakery", "the tide", "an orchard", "a clockmaker", "the north wind")
_TASKS = ("Tell a short story about", "Write three facts about", "Explain to a child", "Set a sum that is about")


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What the shards hold, checked line by line.

    Attributes:
        records: lines with a good checksum.
        lost: prompts without a record.
        doubled: prompts with more than one.
        wrong: records whose answer belongs to another prompt.
    """

    records: int
    lost: int
    doubled: int
    wrong: int

    @property
    def good(self) -> bool:
        """Nothing lost, doubled or mixed up."""
        return not (self.lost or self.doubled or self.wrong)


def play(*, prompts: int, seed: int, keep: Path | None) -> int:
    """Play the demo and print what it shows.

    Args:
        prompts: how many.
        seed: of the prompts and the lengths.
        keep: where the run folder is to stay; None for a temporary one.

    Returns:
        The exit code: 0 if nothing was lost or doubled.

    Raises:
        ConfigError: ``keep`` is there already.
    """
    if prompts < 1:
        raise ConfigError("--prompts must be at least 1")
    if keep is not None and keep.exists():
        raise ConfigError(f"{keep} is there already: name a folder that is not")
    with tempfile.TemporaryDirectory(prefix="genpipe-demo-") as place:
        folder = Path(place)
        source = folder / "prompts.jsonl"
        texts = _write_prompts(source, prompts, seed)
        out = folder / "run"
        with _servers(seed) as urls:
            code = _watch(urls, source, out, texts)
        if keep is not None:
            shutil.copytree(out, keep)
            typer.echo(f"The run folder is kept in {keep}.")
    return code


def _watch(urls: list[str], source: Path, out: Path, texts: list[str]) -> int:
    total = len(texts)
    deadline_s = time.monotonic() + TIMEOUT_S
    command = [
        *(sys.executable, "-m", "genpipe", "run", "--quiet", "--prompts", str(source), "--out", str(out)),
        *("--servers", urls[0].rsplit(":", 1)[0] + f":{_port(urls[0])}-{_port(urls[-1])}"),
        *("--concurrency", str(SLOTS)),
    ]
    typer.echo(f"{len(urls)} simulated servers of {SLOTS} slots, {total:,} prompts. The command is\n")
    typer.echo("  genpipe run --prompts prompts.jsonl --servers http://127.0.0.1:… --concurrency 24 --out run\n")
    kill_at = math.ceil(total * KILL_AT_SHARE)
    first = _follow(subprocess.Popen(command), out, deadline_s, kill_at=kill_at)
    at_kill = _indices(out)
    typer.echo(f"\nSIGKILL to the driver at {first:,} done: no warning, no clean-up. On disk: {len(at_kill):,}.")
    typer.echo("The same command again goes on from there:\n")
    second = subprocess.Popen(command)
    done = _follow(second, out, deadline_s, kill_at=None)
    if second.returncode != 0:
        typer.echo(f"\nthe resumed run ended with exit code {second.returncode} at {done:,} done")
        return 1
    typer.echo("")
    progress = json.loads((out / PROGRESS).read_bytes())
    return _conclude(out, texts, at_kill, progress)


def _conclude(out: Path, texts: list[str], at_kill: Counter[int], progress: dict[str, Any]) -> int:
    audit = audit_shards(out, texts)
    verdict = "nothing was lost, doubled or mixed up" if audit.good else "SOMETHING IS WRONG"
    typer.echo(
        f"Audit of {len(list((out / 'shards').iterdir()))} shards, line by line: {audit.records:,} records for "
        f"{len(texts):,} prompts, {audit.lost} lost, {audit.doubled} doubled, {audit.wrong} with the answer of "
        f"another prompt: {verdict}."
    )
    typer.echo(
        f"After the kill {len(at_kill):,} answers were there and were not asked again; the resumed run asked for "
        f"{len(texts) - len(at_kill):,}, at {wording.number(progress['rate_per_sec_segment'])} prompts/s and "
        f"{wording.number(progress['output_tokens_per_sec_whole'])} tokens/s.\n"
    )
    typer.echo("Where the slots' time went in the resumed run:\n")
    typer.echo("\n".join(terminal.slot_time(progress["slot_time"])))
    typer.echo("\n".join(["", *terminal.servers(progress["servers"])]))
    return 0 if audit.good else 1


def audit_shards(out: Path, texts: list[str]) -> Audit:
    """Hold the shards of a run against its prompts; the simulated servers echo a hash of what they were asked."""
    from genpipe.sim.replies import row_hash

    found: Counter[int] = Counter()
    wrong = 0
    for path in sorted((out / "shards").iterdir()):
        for line in path.read_bytes().splitlines(keepends=True):
            body = lines.decode(line)
            if body is None:
                continue
            record = json.loads(body)
            found[record["index"]] += 1
            wrong += f"echo {row_hash(texts[record['index']])}" not in record["response"]["content"]
    return Audit(
        records=found.total(),
        lost=len(texts) - len(found),
        doubled=sum(count - 1 for count in found.values()),
        wrong=wrong,
    )


def _indices(out: Path) -> Counter[int]:
    """The indices of whole lines in the shards."""
    found: Counter[int] = Counter()
    for path in (out / "shards").iterdir():
        for line in path.read_bytes().splitlines(keepends=True):
            index = lines.index_of(line) if lines.decode(line) is not None else None
            if index is not None:
                found[index] += 1
    return found


def _follow(process: subprocess.Popen[bytes], out: Path, deadline_s: float, *, kill_at: int | None) -> int:
    """Show the run's own progress.json as a bar until the run ends, or is killed; how many were done then."""
    done = 0
    try:
        while process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.1)
            progress = _peek(out, process.pid)
            if progress is None:
                continue
            done = progress["completed"]
            _draw(progress)
            if kill_at is not None and done >= kill_at:
                break
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL if kill_at is not None else signal.SIGTERM)
        process.wait()
    progress = _peek(out, None)
    if progress is not None and kill_at is None:
        done = progress["completed"]
        _draw(progress)
    return int(done)


_seen: dict[str, Any] = {}


def _peek(out: Path, pid: int | None) -> dict[str, Any] | None:
    """The run's last snapshot, or None before it has one of its own."""
    with contextlib.suppress(FileNotFoundError):
        if pid is not None and json.loads((out / ".lock").read_bytes())["pid"] != pid:
            return None
        return dict(json.loads((out / PROGRESS).read_bytes()))
    return None


def _draw(progress: dict[str, Any]) -> None:
    """One line a snapshot: redrawn on a terminal, a line every few seconds elsewhere."""
    raise NotImplementedError
