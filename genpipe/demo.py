"""A first try without a GPU: simulated servers, a run killed half-way, its resume, and an audit."""

import contextlib
import hashlib
import json
import random
import shutil
import signal
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
SIM_ARGUMENTS = (
    *("--tokens-per-s", "180", "--tokens-per-s-full", "2600", "--max-running", str(SLOTS)),
    *("--lengths", "lognormal:mean=110,sigma=0.8,max=900", "--health-delay-s", "0.2"),
)

LOG_EVERY_S = 3.0
"""Elsewhere than on a terminal a line comes this often (seconds)."""

RUN_LIMIT_S = 300.0
"""Longest that one of the two runs may take (seconds)."""

_SUBJECTS = ("a lighthouse", "two trains", "a bakery", "the tide", "an orchard", "a clock", "the north wind")
_TASKS = ("Tell a short story about", "Write three facts about", "Explain to a child", "Make a riddle about")


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What the shards hold, checked line by line.

    Attributes:
        records: lines with a good checksum.
        damaged: lines without one.
        lost: prompts without a record.
        doubled: records too many.
        wrong: records whose answer belongs to another prompt.
    """

    records: int
    damaged: int
    lost: int
    doubled: int
    wrong: int

    @property
    def good(self) -> bool:
        """Nothing lost, doubled, damaged or mixed up."""
        return not (self.lost or self.doubled or self.wrong or self.damaged)


def play(*, prompts: int, seed: int, keep: Path | None) -> int:
    """Play the demo and print what it shows.

    Args:
        prompts: how many.
        seed: of the prompts and the lengths.
        keep: where the run folder is to stay; None for a temporary one.

    Returns:
        The exit code: 0 if nothing was lost or doubled.

    Raises:
        ConfigError: ``keep`` is there already, or there are no prompts.
    """
    if prompts < 1:
        raise ConfigError("--prompts must be at least 1")
    if keep is not None and keep.exists():
        raise ConfigError(f"{keep} is there already: name a folder that is not")
    with tempfile.TemporaryDirectory(prefix="genpipe-demo-") as place:
        out = Path(place) / "run"
        source = Path(place) / "prompts.jsonl"
        texts = _texts(prompts, seed)
        source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
        log_path = Path(place) / "servers.log"
        with _servers(seed, log_path) as urls:
            demo = _Demo(urls, source, out, texts, log_path)
            code = demo.play()
        if code == 0:
            # Only servers that have ended have written all of their log.
            code = demo.conclude()
        if keep is not None:
            shutil.copytree(out, keep)
            typer.echo(f"\nThe run folder is in {keep}; look at it with: genpipe status {keep}")
    return code


def audit(out: Path, texts: list[str]) -> Audit:
    """Hold a run's shards against its prompts.

    Simulated servers begin each answer with ``echo`` and a hash of what they were asked.
    """
    found: Counter[int] = Counter()
    damaged = wrong = 0
    for record in _records(out):
        if record is None:
            damaged += 1
            continue
        found[record["index"]] += 1
        wrong += not record["response"]["content"].startswith(f"echo {_row(texts[record['index']])}")
    return Audit(
        records=found.total(),
        damaged=damaged,
        lost=len(texts) - len(found),
        doubled=found.total() - len(found),
        wrong=wrong,
    )


def _texts(prompts: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [f"{rng.choice(_TASKS)} {rng.choice(_SUBJECTS)}, number {number}." for number in range(prompts)]


@contextlib.contextmanager
def _servers(seed: int, log_path: Path) -> Iterator[list[str]]:
    """Simulated servers in a process of their own, on ports that are free; their addresses."""
    command = [sys.executable, "-m", "genpipe", "sim-server", "--ports", f"free:{SERVERS}"]
    command += [*SIM_ARGUMENTS, "--seed", str(seed), "--log", str(log_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline().split()
        if ready[:2] != ["sim-server", "ready"]:
            raise ConfigError("the simulated servers did not start; their own message stands above")
        yield ready[2:]
    finally:
        process.terminate()
        process.communicate()


class _Demo:
    """The play itself."""

    def __init__(self, urls: list[str], source: Path, out: Path, texts: list[str], log_path: Path) -> None:
        self.urls = urls
        self.out = out
        self.texts = texts
        self.log_path = log_path
        self.is_terminal = sys.stdout.isatty()
        self.next_line_s = 0.0
        self.last_line = ""
        self.killed_s = 0.0
        self.on_disk: set[str] = set()
        self.command = ["run", "--quiet", "--prompts", str(source), "--out", str(out)]
        for url in urls:
            self.command += ["--servers", url]
        self.command += ["--concurrency", str(SLOTS)]

    def play(self) -> int:
        """Run, kill, resume; the exit code."""
        total = len(self.texts)
        typer.echo(f"{len(self.urls)} simulated servers of {SLOTS} slots, {total:,} prompts; answers of very")
        typer.echo("different lengths. The driver will be killed with SIGKILL half-way.\n")
        code = self._follow(kill_at=(total + 1) // 2)
        self.killed_s = time.monotonic()
        if code not in (0, -signal.SIGKILL):
            typer.echo(f"\nThe run ended with exit code {code}; its own message stands above.")
            return 1
        self.on_disk = on_disk = _rows(self.out)
        how = "No warning, no clean-up" if code else "Not killed, it was too quick for that"
        typer.echo(f"\n{'Killed. ' if code else ''}{how}; {len(on_disk):,} answers are on disk.")
        typer.echo("The same command again:\n")
        code = self._follow(kill_at=None)
        typer.echo("")
        if code != 0:
            typer.echo(f"The resumed run ended with exit code {code}; its own message stands above.")
            return 1
        return 0

    def _follow(self, *, kill_at: int | None) -> int:
        """Carry out one run and show its progress.json; the exit code."""
        process = subprocess.Popen([sys.executable, "-m", "genpipe", *self.command])
        deadline_s = time.monotonic() + RUN_LIMIT_S
        try:
            while process.poll() is None and time.monotonic() < deadline_s:
                time.sleep(0.1)
                progress = self._peek(process.pid)
                if progress is not None:
                    self._show(progress)
                    if kill_at is not None and progress["completed"] >= kill_at:
                        break
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
        progress = self._peek(process.pid)
        if progress is not None:
            self._show(progress, last=True)
        return process.returncode

    def _peek(self, pid: int) -> dict[str, Any] | None:
        """The snapshot of this very process, or None before it has one."""
        try:
            owner = json.loads((self.out / ".lock").read_bytes())["pid"]
            began = (self.out / ".lock").stat().st_mtime_ns
            if owner != pid or (self.out / PROGRESS).stat().st_mtime_ns < began:
                return None
            return dict(json.loads((self.out / PROGRESS).read_bytes()))
        except (FileNotFoundError, ValueError):
            return None

    def _show(self, progress: dict[str, Any], *, last: bool = False) -> None:
        """Redraw the line on a terminal; elsewhere print one now and then."""
        rate, tokens = (
            wording.number(progress["rate_per_sec"]),
            wording.number(progress["output_tokens_per_sec"]),
        )
        line = f"{terminal.bar(progress)}, {rate}/s, {tokens} tok/s"
        if progress["eta_hours"]:
            line += f", eta {wording.duration(3600 * progress['eta_hours'])}"
        if self.is_terminal:
            typer.echo(f"\r\x1b[K{line}", nl=last)
        elif line != self.last_line and (last or time.monotonic() >= self.next_line_s):
            self.next_line_s = time.monotonic() + LOG_EVERY_S
            self.last_line = line
            typer.echo(line)

    def conclude(self) -> int:
        """Audit what is on disk and what the servers were asked; the exit code."""
        found, on_disk = audit(self.out, self.texts), self.on_disk
        asked = self._asked_since(self.killed_s)
        again = sum(count for row, count in asked.items() if row in on_disk)
        good = found.good and again == 0
        progress = json.loads((self.out / PROGRESS).read_bytes())
        verdict = "All is well." if good else "SOMETHING IS WRONG."
        typer.echo(
            f"Every line of every shard: {found.records:,} records for {len(self.texts):,} prompts,\n"
            f"{found.lost} lost, {found.doubled} doubled, {found.wrong} with another prompt's answer, "
            f"{found.damaged} damaged.\n"
            f"By the servers' log the resumed run sent {asked.total():,} requests, {again} of them\n"
            f"for one of the {len(on_disk):,} that were on disk. {verdict}\n"
        )
        rate = wording.number(progress["rate_per_sec_segment"])
        tokens = wording.number(progress["output_tokens_per_sec_whole"])
        typer.echo(f"The resumed run did {rate} prompts/s and {tokens} tokens/s. Its slots' time:\n")
        typer.echo("\n".join(terminal.slot_time(progress["slot_time"])))
        typer.echo("\n".join(["", *terminal.servers(progress["servers"])]))
        return 0 if good else 1

    def _asked_since(self, killed_s: float) -> Counter[str]:
        """What the servers were asked after the kill, by the hash of the prompt; it is all one clock."""
        asked: Counter[str] = Counter()
        for line in self.log_path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry["path"] == "/v1/chat/completions" and entry["arrival_s"] > killed_s:
                asked[entry["row"]] += 1
        return asked


def _rows(out: Path) -> set[str]:
    """The hashes of the prompts whose records are whole on disk."""
    rows = set()
    for record in _records(out):
        if record is not None:
            rows.add(_row(record["messages"][-1]["content"]))
    return rows


def _records(out: Path) -> Iterator[dict[str, Any] | None]:
    """Each line of each shard as a record, or None for a damaged one."""
    for path in sorted((out / "shards").iterdir()):
        for line in path.read_bytes().split(b"\n")[:-1]:
            body = lines.decode(line + b"\n")
            yield None if body is None else json.loads(body)


def _row(text: str) -> str:
    """The hash that simulated servers put into their answers and their log."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
