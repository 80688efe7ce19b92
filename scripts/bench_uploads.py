"""Uploads beside ``boto3`` alone, and what they cost the dispatching of requests.

    python scripts/bench_uploads.py [--rounds 5] [--shards 60] [--only throughput|gaps]

1. Shards of about 5 MB are uploaded to SeaweedFS by the uploader (packed, put, looked at again, committed
   one after the other), by a loop that reads, packs and puts each with ``boto3`` and does no more, and by
   such loops in as many threads as the uploader has. All in turn, the same bytes; a ratio above 1 means that
   the uploader is faster.
2. The same run with S3 off, on, and black-holed (the store takes connections and answers nothing from the
   second commit on), in turn: the dispatch gap of each, and how far those of S3 off are apart from one
   another, which is the noise.

Times are of the wall clock; these machines are shared, so read the ratios.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import zstandard

sys.path.insert(0, str(Path(__file__).parents[1]))

from genpipe.core.sums import Sums
from genpipe.edges.files import OsFiles
from genpipe.edges.s3.boto import BotoObjects
from genpipe.edges.s3.lease import Lease
from genpipe.edges.s3.troubles import Troubles
from genpipe.edges.s3.uploader import Uploader, UploadSettings
from genpipe.edges.shards import Entry, shard_name
from tests.s3.proxy import FaultProxy
from tests.s3.servers import BUCKET, Weed

SHARD_RECORDS, RECORD_BYTES = 500, 10_300
UPLOADS = 4
ROWS, SERVERS, SLOTS = 6_000, 4, 16


def main() -> None:
    """Compare, and print a line a round and the medians."""
    parser = argparse.ArgumentParser(description="Uploads beside boto3 alone, and the dispatch gap.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shards", type=int, default=60)
    parser.add_argument("--only", choices=("throughput", "gaps"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="genpipe-bench-") as place:
        folder = Path(place)
        with Weed(folder / "weed") as store:
            os.environ.update(store.env)
            if given.only != "gaps":
                throughput(store, folder, given.rounds, given.shards)
            if given.only != "throughput":
                gaps(store, folder, given.rounds)


# ---- throughput ----


def throughput(store: Weed, folder: Path, rounds: int, count: int) -> None:
    """Time all three in turn."""
    (folder / "shards").mkdir()
    entries = make_shards(folder / "shards", count)
    size_mb = sum(entry.size_bytes for entry in entries) / 1e6
    first = (folder / "shards" / shard_name(0, is_open=False)).read_bytes()
    packed = len(zstandard.ZstdCompressor(level=3).compress(first))
    ratio = len(first) / packed
    print(f"{count} shards of {size_mb / count:.1f} MB, packed {ratio:.1f} times; MB/s of plain bytes")
    seen: dict[str, list[float]] = {"uploader": [], "boto3 in a loop": [], f"in {UPLOADS} threads": []}
    for turn in range(rounds):
        ways: list[Callable[[], float]] = [
            lambda turn=turn: upload(store, folder, entries, f"up-{turn}"),  # type: ignore[misc]
            lambda turn=turn: put_all(store, folder, entries, f"bare-{turn}", threads=1),  # type: ignore[misc]
            lambda turn=turn: put_all(store, folder, entries, f"wide-{turn}", threads=UPLOADS),  # type: ignore[misc]
        ]
        for name, way in zip(seen, ways, strict=True):
            seen[name].append(size_mb / way())
        print("  " + ", ".join(f"{name} {speeds[-1]:6.1f}" for name, speeds in seen.items()))
    ours = seen.pop("uploader")
    for name, bare in seen.items():
        ratios = [mine / other for mine, other in zip(ours, bare, strict=True)]
        print(
            f"  uploader / {name}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def make_shards(shards: Path, count: int) -> list[Entry]:
    """Sealed shards of text that packs about as well as prose does."""
    rng = random.Random(7)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(2_000)]
    weights = [1 / (place + 3) for place in range(len(words))]
    entries = []
    for seq in range(count):
        text = " ".join(rng.choices(words, weights, k=SHARD_RECORDS * RECORD_BYTES // 6)).encode()
        data = b"".join(
            b'{"index":%d,"t":"%s"}\n'
            % (seq * SHARD_RECORDS + place, text[place * RECORD_BYTES : (place + 1) * RECORD_BYTES])
            for place in range(SHARD_RECORDS)
        )
        (shards / shard_name(seq, is_open=False)).write_bytes(data)
        sums = Sums(records=SHARD_RECORDS, usage_unknown=SHARD_RECORDS)
        first = seq * SHARD_RECORDS
        entries.append(
            Entry(
                seq=seq,
                size_bytes=len(data),
                digest=sha256(data).hexdigest(),
                ranges=[(first, first + SHARD_RECORDS - 1)],
                sums=sums,
                epoch=1,
            )
        )
    return entries


def upload(store: Weed, folder: Path, entries: list[Entry], prefix: str) -> float:
    """Seconds until all are committed."""
    (folder / "uploads.jsonl").unlink(missing_ok=True)
    troubles = Troubles()
    objects = BotoObjects(store.place(prefix), troubles)
    lease = Lease.claim(
        objects,
        owner={"host": "bench", "pid": os.getpid()},
        nonce="0" * 32,
        previous_nonce=None,
        epoch_min=1,
        ttl_s=30.0,
        pause=time.sleep,
        warn=print,
    )
    uploader = Uploader(
        folder,
        OsFiles(),
        objects,
        lease,
        run_id="bench",
        commits={},
        backlog=entries,
        orphans=[],
        troubles=troubles,
        settings=UploadSettings(uploads=UPLOADS),
        on_fenced=print,
    )
    began_s = time.perf_counter()
    uploader.start()
    assert uploader.drain(600.0)
    took_s = time.perf_counter() - began_s
    uploader.close(10.0)
    return took_s


def put_all(store: Weed, folder: Path, entries: list[Entry], prefix: str, *, threads: int) -> float:
    """Seconds until all are put."""
    client = store.client(max_pool_connections=threads, request_checksum_calculation="when_supported")

    def put(entry: Entry) -> None:
        data = (folder / "shards" / shard_name(entry.seq, is_open=False)).read_bytes()
        packed = zstandard.ZstdCompressor(level=3).compress(data)
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/{entry.seq:06d}.jsonl.zst", Body=packed)

    began_s = time.perf_counter()
    if threads == 1:
        for entry in entries:
            put(entry)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(put, entries))
    took_s = time.perf_counter() - began_s
    client.close()
    return took_s


# ---- the dispatch gap ----


def gaps(store: Weed, folder: Path, rounds: int) -> None:
    """Run the same prompts with S3 off, on and black-holed, in turn."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "Prompt number {row}."}}\n' for row in range(ROWS)))
    seen: dict[str, list[dict[str, float]]] = {"off": [], "on": [], "black-holed": []}
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "genpipe", "sim-server", "--ports", f"free:{SERVERS}"),
            *("--tokens-per-s", "160", "--tokens-per-s-full", str(160 * SLOTS), "--reply-bytes", "10000"),
            *("--max-running", str(SLOTS)),
        ],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            urls = server.stdout.readline().split()[2:]
            print(f"\ndispatch gap of {ROWS} requests in ms: p50 / p99, and requests/s")
            for turn in range(rounds):
                for name, runs in seen.items():
                    runs.append(one_run(store, folder, urls, prompts, name, turn))
                print("  " + "; ".join(f"{name} {shown(runs[-1])}" for name, runs in seen.items()))
        finally:
            server.terminate()
    for key in ("p50", "p99", "rate"):
        off = [run[key] for run in seen["off"]]
        print(f"  {key}: off {statistics.median(off):.3f} ({min(off):.3f} to {max(off):.3f}); ratios to off:")
        for name in ("on", "black-holed"):
            ratios = [run[key] / base for run, base in zip(seen[name], off, strict=True)]
            print(f"    {name} {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def shown(run: dict[str, float]) -> str:
    return f"{run['p50']:.3f} / {run['p99']:.3f}, {run['rate']:.0f}/s"


def one_run(
    store: Weed, folder: Path, urls: list[str], prompts: Path, name: str, turn: int
) -> dict[str, float]:
    """The figures of one run."""
    out = folder / f"out-{name}-{turn}"
    command = [sys.executable, "-m", "genpipe", "run", "--prompts", str(prompts), "--out", str(out)]
    command += [part for url in urls for part in ("--servers", url)]
    command += ["--concurrency", str(SLOTS), "--quiet", "--set", "output.shard_records=250"]
    with FaultProxy(store.url) as proxy:
        if name != "off":
            place = store.place(f"gap-{name}-{turn}", endpoint_url=proxy.url)
            settings = {
                "endpoint_url": place.endpoint_url,
                "region": place.region,
                "drain_s": 0.5,
                "tail_s": 5.0,
            }
            command += ["--s3", place.uri]
            command += [f"--set=s3.{key}={json.dumps(value)}" for key, value in settings.items()]
        if name == "black-holed":
            threading.Thread(target=close_when_begun, args=(proxy,), daemon=True).start()
        env = {**os.environ, **store.env}
        done = subprocess.run(command, check=False, env=env, capture_output=True, text=True)
    assert done.returncode == (1 if name == "black-holed" else 0), done.stderr
    last: dict[str, Any] = json.loads((out / "progress.json").read_bytes())
    gap = last["dispatch_gap_ms"]
    return {"p50": gap["p50"], "p99": gap["p99"], "rate": last["rate_per_sec_segment"]}


def close_when_begun(proxy: FaultProxy) -> None:
    """From the second commit on the store is a black hole."""
    deadline_s = time.monotonic() + 60
    while proxy.count("PUT", r"/commits/") < 2 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    proxy.black_hole()


if __name__ == "__main__":
    main()
