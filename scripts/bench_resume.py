"""How long a resume takes from the start of the process to its first request.

    python scripts/bench_resume.py [--prompts 10000000] [--done 1000000] [--rounds 3]

A run over prompts of 200 bytes against simulated servers is killed with SIGKILL once so many are done. The
same command is then started again and again, each time until the servers get its first request. The servers
note when a request came on the clock that this script reads too. A minute or two for a million.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SERVERS, SLOTS = 4, 64
LIMIT_S = 3_600.0


def main() -> None:
    """Make the run, kill it, and time its resumes."""
    parser = argparse.ArgumentParser(description="Seconds from a resume to its first request.")
    parser.add_argument("--prompts", type=int, default=10_000_000)
    parser.add_argument("--done", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="genpipe-bench-") as place:
        folder = Path(place)
        write_prompts(folder / "in.jsonl", options.prompts)
        log = folder / "requests.log"
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "genpipe", "sim-server", "--ports", f"free:{SERVERS}"),
                *("--log", str(log)),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            urls = server.stdout.readline().split()[-SERVERS:]
            run = start(folder, urls)
            wait_for(lambda: completed(folder) >= options.done, run)
            kill(run)
            took_s = [time_resume(folder, urls, log) for _ in range(options.rounds)]
        finally:
            server.terminate()
            server.wait()
        print(
            f"{completed(folder):,} done of {options.prompts:,}: first request after "
            f"{statistics.median(took_s):.2f} s (of {', '.join(f'{one_s:.2f}' for one_s in took_s)})"
        )


def time_resume(folder: Path, urls: list[str], log: Path) -> float:
    """Seconds from the start of the process to its first request."""
    # The servers hold lines of their log back for half a second: those of the killed run come first.
    time.sleep(1.0)
    size_bytes = log.stat().st_size
    began_s = time.monotonic()
    run = start(folder, urls)
    wait_for(lambda: log.stat().st_size > size_bytes, run)
    time.sleep(0.5)
    kill(run)
    with open(log, "rb") as lines:
        lines.seek(size_bytes)
        first_s = min(json.loads(line)["arrival_s"] for line in lines if line.endswith(b"\n"))
    return float(first_s) - began_s


def start(folder: Path, urls: list[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "genpipe", "run", "--quiet", "--prompts", str(folder / "in.jsonl")),
            *(option for url in urls for option in ("--servers", url)),
            *("--concurrency", str(SLOTS), "--out", str(folder / "out")),
        ]
    )


def kill(run: "subprocess.Popen[bytes]") -> None:
    os.kill(run.pid, signal.SIGKILL)
    run.wait()


def wait_for(happened: Callable[[], bool], run: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not happened():
        assert run.poll() is None, f"the run ended with {run.returncode}"
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def completed(folder: Path) -> int:
    try:
        return int(json.loads((folder / "out" / "progress.json").read_bytes())["completed"])
    except FileNotFoundError:
        return 0


def write_prompts(path: Path, count: int) -> None:
    """Records of 200 bytes."""
    with open(path, "w", encoding="ascii") as out:
        for number in range(count):
            text = f'{{"prompt": "question {number} '
            out.write(f'{text}{"x" * (197 - len(text))}"}}\n')


if __name__ == "__main__":
    main()
