"""CPU per request of ``genpipe run`` beside a bare aiohttp loop that sends the same requests.

Both run in turn, several rounds in one go, against the same simulated servers in another process, with 128
slots and 12 KB answers that come at once. The marginal cost is the difference between a long and a short run
of each, so that start-up drops out; the whole-process figure keeps it in. What is compared is CPU time of the
client (user and system), which other work on the machine disturbs least; read the ratios.

    python scripts/bench_client.py [--rounds 5] [--requests 12000]
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SERVERS, SLOTS = 4, 32
REPLY_BYTES = 12_000
PROMPT_BYTES = 600


def main() -> None:
    """Compare, and print a line a round and the medians."""
    parser = argparse.ArgumentParser(description="CPU per request beside a bare aiohttp loop.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--requests", type=int, default=12_000, help="of the short run; the long one has twice"
    )
    parser.add_argument("--bare", nargs=2, metavar=("URLS", "PROMPTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        import uvloop

        uvloop.run(bare(options.bare[0].split(","), Path(options.bare[1])))
        return
    compare(options.rounds, options.requests)


def compare(rounds: int, requests: int) -> None:
    """Run both clients in turn."""
    with tempfile.TemporaryDirectory(prefix="genpipe-bench-") as place:
        folder = Path(place)
        inputs = {
            count: write_prompts(folder / f"{count}.jsonl", count) for count in (requests, 2 * requests)
        }
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "genpipe", "sim-server", "--ports", f"free:{SERVERS}"),
                *("--reply-bytes", str(REPLY_BYTES)),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            urls = server.stdout.readline().split()[2:]
            figures = [one_round(folder, urls, inputs, number) for number in range(rounds)]
        finally:
            server.terminate()
            server.communicate()
    marginal = statistics.median(row["genpipe_us"] / row["bare_us"] for row in figures)
    whole = statistics.median(row["genpipe_whole_us"] / row["bare_whole_us"] for row in figures)
    print(
        f"marginal CPU per request: {marginal:.2f} x the bare loop (median of {rounds}; wanted: at most 1.6)"
    )
    print(f"whole process, {requests * 2:,} requests: {whole:.2f} x (wanted: at most 2.0)")


def one_round(folder: Path, urls: list[str], inputs: dict[int, Path], number: int) -> dict[str, float]:
    """Bare and genpipe, short and long, in turn."""
    cpu_s: dict[tuple[str, int], float] = {}
    wall_s: dict[str, float] = {}
    for count, path in inputs.items():
        command = [sys.executable, __file__, "--bare", ",".join(urls), str(path)]
        cpu_s["bare", count], wall_s["bare"] = cpu_of(command)
        out = folder / f"run-{number}-{count}"
        command = [
            sys.executable,
            "-m",
            "genpipe",
            "run",
            "--quiet",
            "--prompts",
            str(path),
            "--out",
            str(out),
        ]
        command += [*("--concurrency", str(SLOTS)), "--set", "start.ramp_s=0"]
        for url in urls:
            command += ["--servers", url]
        cpu_s["genpipe", count], wall_s["genpipe"] = cpu_of(command)
    short, long = sorted(inputs)
    row = {
        f"{name}_us": 1e6 * (cpu_s[name, long] - cpu_s[name, short]) / (long - short)
        for name in ("bare", "genpipe")
    }
    row |= {f"{name}_whole_us": 1e6 * cpu_s[name, long] / long for name in ("bare", "genpipe")}
    print(
        f"round {number + 1}: bare {row['bare_us']:.0f} us ({long / wall_s['bare']:,.0f}/s), "
        f"genpipe {row['genpipe_us']:.0f} us ({long / wall_s['genpipe']:,.0f}/s), "
        f"ratio {row['genpipe_us'] / row['bare_us']:.2f}; "
        f"whole {row['bare_whole_us']:.0f} and {row['genpipe_whole_us']:.0f} us",
        flush=True,
    )
    return row


def cpu_of(command: list[str]) -> tuple[float, float]:
    """CPU and wall seconds of a command, which must succeed."""
    began_s = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert process.stderr is not None
    told = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {told.decode()}")
    return usage.ru_utime + usage.ru_stime, time.monotonic() - began_s


def write_prompts(path: Path, count: int) -> Path:
    """An input of made-up prompts of one size."""
    filler = "word " * (PROMPT_BYTES // 5)
    with open(path, "w", encoding="utf-8") as out:
        out.writelines(json.dumps({"prompt": f"{number} {filler}"}) + "\n" for number in range(count))
    return path


def bodies(path: Path) -> Iterator[bytes]:
    """The requests that genpipe makes of these prompts."""
    import orjson

    with open(path, "rb") as lines:
        for line in lines:
            messages = [{"role": "user", "content": orjson.loads(line)["prompt"]}]
            yield orjson.dumps({"messages": messages, "model": "tiny-model"})


async def bare(urls: list[str], path: Path) -> None:
    """As many workers as slots, each sending one request after the other; answers are read and dropped."""
    import aiohttp

    left = bodies(path)
    headers = {"Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def work(url: str) -> None:
            for body in left:
                async with session.post(url, data=body, headers=headers) as response:
                    assert response.status == 200
                    await response.read()

        async with asyncio.TaskGroup() as group:
            for url in urls:
                for _ in range(SLOTS):
                    group.create_task(work(f"{url}/v1/chat/completions"))


if __name__ == "__main__":
    main()
