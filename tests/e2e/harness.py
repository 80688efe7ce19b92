"""Runs genpipe and simulated servers as processes of their own, and audits what they leave behind.

Nothing here looks inside genpipe: what is asserted on is what a user could see, in files, in the servers' own
log, on stderr, and in exit codes.
"""

import contextlib
import hashlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.edges.audit import whole_lines

GENPIPE = (sys.executable, "-m", "genpipe")
INPUTS = Path(__file__).parents[1] / "cases" / "inputs"
CHAT = "/v1/chat/completions"
START_TIMEOUT_S = 20.0
BIND_TRIES = 20


# ---- prompts ----


def row_of(text: str) -> str:
    """The hash by which a server's log and its echo name a prompt."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def write_prompts(path: Path, texts: Sequence[str], *, field: str = "prompt") -> Path:
    """An input file, one record a text."""
    lines = [json.dumps({"id": f"p-{place}", field: text}) for place, text in enumerate(texts)]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


# ---- genpipe as a process ----


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str
    took_s: float


def genpipe(*args: object, timeout_s: float = 60.0, env: dict[str, str] | None = None) -> Ended:
    """Run a command to its end."""
    began_s = time.monotonic()
    done = subprocess.run(
        [*GENPIPE, *map(str, args)],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        env=env,
    )
    return Ended(code=done.returncode, out=done.stdout, err=done.stderr, took_s=time.monotonic() - began_s)


class Running:
    """A command under way, its stderr in a file."""

    def __init__(self, process: subprocess.Popen[bytes], err_path: Path, began_s: float) -> None:
        self.process = process
        self.pid = process.pid
        self.err_path = err_path
        self.began_s = began_s

    @property
    def err(self) -> str:
        """Its stderr so far."""
        # Not as text: a carriage return would be read as a newline.
        return self.err_path.read_bytes().decode("utf-8", "surrogateescape")

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit code, once it has ended by itself."""
        return self.process.wait(timeout_s)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; nothing of it runs any more on return."""
        self.process.kill()
        self.process.wait(10)

    def memory_mb(self, key: str) -> float:
        """``VmRSS`` or ``VmHWM``, as the kernel tells it."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) / 1024
        raise AssertionError(f"no {key}")


@contextmanager
def running(
    *args: object, err: Path, command: Sequence[str] = GENPIPE, env: dict[str, str] | None = None
) -> Iterator[Running]:
    """A command under way; whatever happens, it has ended afterwards."""
    with open(err, "ab") as err_file:
        began_s = time.monotonic()
        process = subprocess.Popen(
            [*command, *map(str, args)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=err_file,
            env=env,
        )
    try:
        yield Running(process, err, began_s)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """Look again and again until ``condition`` gives something true, and give that."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"waited {timeout_s:g} s in vain for: {what}")


def run_command(fleet: "Fleet", source: Path, out: Path, limit: int, *options: object) -> list[object]:
    """``genpipe run`` over all servers of a fleet, with so many requests at once on each."""
    where = ["run", "--prompts", source, "--servers", fleet.address, "--out", out]
    return [*where, "--concurrency", limit, *options]


def wait_for_records(run: Running, out: Path, count: int) -> None:
    """Wait until so many records are on disk, or the run is over."""
    wait_for(lambda: run.over or len(saved(out)) >= count, f"{count} records")


def assert_one_error(ended: Ended, code: int, *words: str) -> None:
    """It ended with ``code``, and stderr is one line that names what is wrong."""
    lines = ended.err.splitlines()

    assert ended.code == code, ended.err
    assert len(lines) == 1, ended.err
    assert lines[0].startswith("genpipe: error: "), ended.err
    assert [word for word in words if word not in lines[0]] == [], ended.err


# ---- servers as a process ----


class Fleet:
    """Simulated servers on neighbouring ports, in one process, with one log.

    Attributes:
        ports: their port numbers; kept over ``stop`` and ``start``.
        log_path: one line a request; complete after ``stop``.
    """

    def __init__(self, folder: Path, count: int, options: Sequence[object], *, orders: bool) -> None:
        self._folder = folder
        self._count = count
        self._options = [*map(str, options), *(["--orders"] if orders else [])]
        self._process: subprocess.Popen[str] | None = None
        self.ports: list[int] = []
        self.log_path = folder / "servers.jsonl"

    @property
    def urls(self) -> list[str]:
        """Base addresses."""
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    @property
    def address(self) -> str:
        """All of them in genpipe's notation."""
        first, last = self.ports[0], self.ports[-1]
        return f"http://127.0.0.1:{first}-{last}" if last > first else f"http://127.0.0.1:{first}"

    def start(self) -> Self:
        """Listen on all ports: on the same ones as before, or on any that are free."""
        for _ in range(BIND_TRIES):
            ports = self.ports or _some_ports(self._count)
            if self._try(ports):
                self.ports = ports
                return self
            time.sleep(0.1)
        raise AssertionError(f"no {self._count} free ports in {BIND_TRIES} tries")

    def _try(self, ports: list[int]) -> bool:
        span = f"{ports[0]}-{ports[-1]}"
        command = [*GENPIPE, "sim-server", "--ports", span, "--health-delay-s", "0"]
        with open(self._folder / "servers.err", "ab") as err:
            process = subprocess.Popen(
                [*command, "--log", str(self.log_path), *self._options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
            )
        assert process.stdout is not None
        with process.stdout:
            ready = process.stdout.readline()
        if not ready.startswith("sim-server ready"):
            process.wait(10)
            return False
        self._process = process
        return True

    def stop(self) -> None:
        """End them; the log is complete on return. Safe to repeat."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    def kill(self) -> None:
        """SIGKILL: every connection is cut at once; what is logged of the last half second may be lost."""
        process, self._process = self._process, None
        assert process is not None
        process.kill()
        process.wait(10)

    def pause(self) -> None:
        """SIGSTOP: connections are accepted by the kernel, and nobody answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT, after :meth:`pause`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def mode(self, server: int, mode: str, *, through: int | None = None, **more: object) -> None:
        """Change how a server behaves, told through another one where it cannot be reached itself."""
        port = self.ports[server if through is None else through]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            body = json.dumps({"mode": mode, "port": self.ports[server], **more})
            connection.request("POST", "/_fake", body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            reply.read()
            assert reply.status == 200, reply.status
        finally:
            connection.close()

    def visits(self) -> list[dict[str, Any]]:
        """The requests for completions that are logged by now, by arrival."""
        logged = [visit for visit in self._logged() if visit["path"] == CHAT]
        return sorted(logged, key=lambda visit: visit["arrival_s"])

    def visits_until_now(self) -> list[dict[str, Any]]:
        """The same with every request that is over by now, though the servers go on.

        Lines are logged in order and a little late: a request of our own comes last.
        """
        path = f"/no/such/page/{uuid.uuid4().hex}"
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[0], timeout=10)
        try:
            connection.request("GET", path)
            connection.getresponse().read()
        finally:
            connection.close()
        wait_for(lambda: any(visit["path"] == path for visit in self._logged()), "the log", 10)
        return self.visits()

    def _logged(self) -> list[dict[str, Any]]:
        if not self.log_path.exists():
            return []
        data = self.log_path.read_bytes()
        return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


@contextmanager
def servers(folder: Path, count: int = 1, *options: object, orders: bool = True) -> Iterator[Fleet]:
    """Simulated servers, which have ended afterwards.

    Args:
        folder: gets their log.
        count: how many.
        options: further ones of ``genpipe sim-server``.
        orders: they do what prompts order; without, the same prompts get plain answers.
    """
    fleet = Fleet(folder, count, options, orders=orders)
    try:
        yield fleet.start()
    finally:
        fleet.stop()


def _some_ports(count: int) -> list[int]:
    """Neighbours below the range from which outgoing connections are given theirs; by test worker."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    lowest = 20_000 + 1_000 * (int(worker) % 12)
    first = random.SystemRandom().randrange(lowest, lowest + 1_000 - count)
    return list(range(first, first + count))


# ---- the servers' log ----


def asked_by_process(visits: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The requests, by the driver process that made them, in the order of their beginnings.

    A process puts the same 16 hex digits at the beginning of all its request ids.
    """
    by_process: dict[str, list[dict[str, Any]]] = {}
    for visit in visits:
        by_process.setdefault(visit["rid"][:16], []).append(visit)
    return list(by_process.values())


def asked_after(visits: Sequence[dict[str, Any]], moment_s: float) -> set[str]:
    """The rows asked by processes whose first request came after ``moment_s``, such as that of a kill."""
    later = [asked for asked in asked_by_process(visits) if asked[0]["arrival_s"] > moment_s]
    return {visit["row"] for asked in later for visit in asked}


def without_probes(visits: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The requests for prompts of the input: genpipe asks a benched server for a word of its own."""
    return [visit for visit in visits if visit["row"] != row_of("Hi")]


def in_flight(visits: Sequence[dict[str, Any]]) -> list[tuple[float, int]]:
    """The steps of one server's requests in flight over time, from arrivals and ends alone."""
    steps = [(visit["arrival_s"], 1) for visit in visits] + [(visit["end_s"], -1) for visit in visits]
    level, levels = 0, []
    for moment_s, change in sorted(steps):
        level += change
        levels.append((moment_s, level))
    return levels


def mean_in_flight(visits: Sequence[dict[str, Any]], begin_s: float, end_s: float) -> float:
    """The average of one server's requests in flight over a span of time."""
    inside_s = sum(
        max(0.0, min(visit["end_s"], end_s) - max(visit["arrival_s"], begin_s)) for visit in visits
    )
    return float(inside_s / (end_s - begin_s))


def assert_within_limit(fleet: Fleet, limit: int) -> None:
    """No server ever had more requests in flight than allowed, by its own count and by the times."""
    by_port = defaultdict(list)
    for visit in fleet.visits():
        by_port[visit["port"]].append(visit)

    for visits in by_port.values():
        assert max(visit["in_flight"] for visit in visits) <= limit
        assert max(level for _, level in in_flight(visits)) <= limit


# ---- the run folder ----


def shard_paths(folder: Path) -> list[Path]:
    """The shards, by number."""
    return sorted((folder / "shards").glob("part-*")) if (folder / "shards").is_dir() else []


def saved(folder: Path) -> dict[int, dict[str, Any]]:
    """The records that count by now, by index; the file may end in half a line, as after a kill."""
    for _ in range(100):
        # A shard that was sealed between the two looks has another name: look again.
        with contextlib.suppress(FileNotFoundError):
            parts = [path.read_bytes() for path in shard_paths(folder)]
            break
    else:
        raise AssertionError(f"the shards of {folder} have other names at each look")
    found = [record for part in parts for record in whole_lines(part)]
    assert max(Counter(record["index"] for record in found).values(), default=1) == 1
    return {record["index"]: record for record in found}


def failures(folder: Path) -> dict[int, dict[str, Any]]:
    """The last line about each index in ``failed.jsonl``."""
    path = folder / "failed.jsonl"
    return {line["index"]: line for line in whole_lines(path.read_bytes() if path.exists() else b"")}


def listed(folder: Path) -> list[int]:
    """The whole lines of ``.done_indices``; a kill may leave half a line, or no file."""
    path = folder / ".done_indices"
    text = path.read_text() if path.exists() else ""
    return [int(line) for line in text.split("\n")[:-1]]


def progress(folder: Path) -> dict[str, Any] | None:
    """``progress.json`` as it is now, None before there is one."""
    try:
        data: dict[str, Any] = json.loads((folder / "progress.json").read_bytes())
    except FileNotFoundError:
        return None
    return data


def report(folder: Path) -> dict[str, Any]:
    """``progress.json``, which is there by now."""
    data = progress(folder)
    assert data is not None
    return data


def audit(folder: Path, texts: Sequence[str], *, but: Sequence[int] = ()) -> dict[int, dict[str, Any]]:
    """At a run's end: each prompt just once, with its own answer, in strict JSON Lines, and the list agrees.

    Args:
        folder: the run folder.
        texts: the prompts, by index.
        but: indices that have no record.

    Returns:
        The records, by index.
    """
    lines = 0
    for path in shard_paths(folder):
        data = path.read_bytes()
        assert data.endswith(b"\n") or not data, path
        for line in data.split(b"\n")[:-1]:
            lines += 1
            json.loads(line.decode("utf-8"), parse_constant=_no_json)
    records = saved(folder)

    assert len(records) == lines, "a line does not count"
    assert sorted(records) == [index for index in range(len(texts)) if index not in set(but)]
    assert sorted(listed(folder)) == sorted(records)
    for index, record in records.items():
        assert record["messages"][-1]["content"] == texts[index], index
        assert record["response"]["content"].startswith(f"echo {row_of(texts[index])} "), index
    assert not list(folder.rglob("*.tmp"))
    return records


def assert_manifest_agrees(folder: Path, *, gone: Sequence[str] = ()) -> None:
    """The manifest lists just the sealed shards, and each as it is; it still knows those that are gone."""
    entries = {entry["file"]: entry for entry in whole_lines((folder / "manifest.jsonl").read_bytes())}
    sealed = [path for path in shard_paths(folder) if path.suffix == ".jsonl"]

    assert sorted(entries) == sorted([*gone, *(path.name for path in sealed)])
    for path in sealed:
        data, entry = path.read_bytes(), entries[path.name]
        indices = [index for first, last in entry["indices"] for index in range(first, last + 1)]
        assert (entry["bytes"], entry["sha256"]) == (len(data), hashlib.sha256(data).hexdigest()), path
        assert indices == sorted(record["index"] for record in whole_lines(data)), path
        assert entry["count"] == entry["sums"]["records"] == len(indices), path


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every name below a folder, with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def _no_json(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


@contextmanager
def polled(folder: Path, seconds_max: float = 60.0) -> Iterator[Callable[[], dict[str, Any]]]:
    """A process that reads ``progress.json`` in a tight loop; gives what it saw once the run is over."""
    command = [sys.executable, str(Path(__file__).with_name("poller.py"))]
    process = subprocess.Popen(
        [*command, str(folder / "progress.json"), str(seconds_max)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )

    def seen() -> dict[str, Any]:
        out, _ = process.communicate(timeout=seconds_max + 10)
        found: dict[str, Any] = json.loads(out)
        return found

    try:
        yield seen
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=10)
