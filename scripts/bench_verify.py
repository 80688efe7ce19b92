"""Time of ``genpipe verify`` beside ``cat`` to /dev/null and a CRC-32 pass over the same shards.

A folder of made-up shards is written to a temporary place, of records of 10 KB as they come from a run. All
of it is read once, so that both find it in memory where there is room; then both run in turn, several rounds.
What is compared is wall time.

    python scripts/bench_verify.py [GB] [--rounds 3] [--record-bytes 10240] [--place DIR]
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from zlib import crc32

from genpipe.core.sums import Sums
from genpipe.core.values import Answer, Finished, Prompt
from genpipe.edges import done_indices
from genpipe.edges.lines import body_of
from genpipe.edges.record import Wall, encode_finished, facts_of
from genpipe.edges.shards import DONE_INDICES, MANIFEST, SHARDS, Tally, shard_name

SHARD_RECORDS = 500
WALL = Wall(wall_s=1_700_000_000.0, run_s=0.0)
RUN = {
    "format": 1,
    "run_id": "bench",
    "created_at": "",
    "inputs": [],
    "settings": {},
    "digest": "44136fa355b3678a",
    "shard_records": 500,
}
WORDS = ["the", "sum", "of", "both", "sides", "is", "then", "so", "that", "we", "équation", "∑", "therefore"]


def main() -> None:
    """Compare, and print a line a round and the median."""
    parser = argparse.ArgumentParser(description="genpipe verify beside cat and crc32.")
    parser.add_argument("gigabytes", nargs="?", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record-bytes", type=int, default=10_240)
    parser.add_argument("--place", help="where to put the shards; the system's temporary folder otherwise")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="genpipe-bench-", dir=options.place) as place:
        folder = Path(place)
        size_bytes = write_run(folder, int(options.gigabytes * 1e9), options.record_bytes)
        shards = sorted((folder / SHARDS).iterdir())
        print(f"{len(shards):,} shards, {size_bytes:,} bytes", flush=True)
        cat_and_crc(shards)
        ratios = [one_round(folder, shards, number) for number in range(options.rounds)]
    print(f"verify: {statistics.median(ratios):.2f} x cat and crc32 (median; wanted: at most 2)")


def one_round(folder: Path, shards: list[Path], number: int) -> float:
    """Both, in turn."""
    base_s = cat_and_crc(shards)
    began_s = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "genpipe", "verify", str(folder)], check=True, stdout=subprocess.DEVNULL
    )
    verify_s = time.monotonic() - began_s
    print(
        f"round {number + 1}: cat and crc32 {base_s:.2f} s, verify {verify_s:.2f} s, "
        f"ratio {verify_s / base_s:.2f}",
        flush=True,
    )
    return verify_s / base_s


def cat_and_crc(shards: list[Path]) -> float:
    """Seconds that ``cat`` to /dev/null takes, and CRC-32 of the same bytes once they have been read."""
    began_s = time.monotonic()
    with open("/dev/null", "wb") as nowhere:
        # A thousand names at a time, as xargs would give them.
        for start in range(0, len(shards), 1000):
            some = map(str, shards[start : start + 1000])
            subprocess.run(["/bin/cat", *some], check=True, stdout=nowhere)
    took_s = time.monotonic() - began_s
    for path in shards:
        data = path.read_bytes()
        began_s = time.monotonic()
        crc32(data)
        took_s += time.monotonic() - began_s
    return took_s


def write_run(folder: Path, wanted_bytes: int, record_bytes: int) -> int:
    """A sound run folder of about so many bytes; how many it has."""
    (folder / SHARDS).mkdir()
    (folder / "run.json").write_text(json.dumps(RUN))
    (folder / "failed.jsonl").touch()
    rng = random.Random(7)
    texts = [text_of(rng, record_bytes - 600) for _ in range(64)]
    size_bytes = seq = 0
    with open(folder / MANIFEST, "wb") as manifest, open(folder / DONE_INDICES, "wb") as listed:
        while size_bytes < wanted_bytes:
            # As with some hundred requests in flight: out of order, within limits.
            indices = list(range(seq * SHARD_RECORDS, (seq + 1) * SHARD_RECORDS))
            indices.sort(key=lambda index: index + rng.uniform(0, 300))
            encoded = [line_of(index, rng.choice(texts), rng) for index in indices]
            data = b"".join(encoded)
            (folder / SHARDS / shard_name(seq, is_open=False)).write_bytes(data)
            tally = Tally()
            tally.take(data, len(encoded))
            tally.count(indices, sums_of(encoded))
            manifest.write(tally.entry(seq, 1).encode())
            listed.write(done_indices.encode(indices))
            size_bytes += len(data)
            seq += 1
    return size_bytes


def text_of(rng: random.Random, size_bytes: int) -> str:
    """Made-up text of about this length."""
    words: list[str] = []
    left = size_bytes
    while left > 0:
        words.append(rng.choice(WORDS))
        left -= len(words[-1].encode()) + 1
    return " ".join(words)


def line_of(index: int, text: str, rng: random.Random) -> bytes:
    """The journal's line of one answered prompt."""
    tokens = rng.randrange(500, 4000)
    answer = Answer(
        response={"content": text, "reasoning_content": None, "tool_calls": None},
        finish_reason="stop",
        usage={"prompt_tokens": 80, "completion_tokens": tokens, "total_tokens": 80 + tokens},
        output_tokens=tokens,
        model="bench",
        size_bytes=len(text),
    )
    prompt = Prompt(index=index, payload=b'[{"role":"user","content":"What is the sum of both sides?"}]')
    finished = Finished(
        prompt=prompt,
        answer=answer,
        server="http://gpu0:30000",
        tries=1,
        started_s=index / 50,
        latency_s=tokens / 50,
    )
    return encode_finished(finished, WALL, None)


def sums_of(encoded: list[bytes]) -> Sums:
    """The totals that the manifest keeps."""
    sums = Sums()
    for line in encoded:
        sums.add(*facts_of(body_of(line)))
    return sums


if __name__ == "__main__":
    main()
