"""The store beside a bare writer that appends groups and syncs them, in turn in one run.

    python scripts/bench_store.py [FOLDER]

The bare writer makes each record a line with one ``orjson.dumps``, and writes and syncs each group, and no
more: no checksum, no digest, no shards, no list of what is done. It is also timed with lines that were made
before the clock began. All write the same records of about 10 KB in groups of the same size. Times are of
the wall clock; a ratio above 1 means that the store is faster.
"""

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import orjson

from genpipe.core.values import Answer, Finished, Group, Prompt
from genpipe.edges.files import OsFiles
from genpipe.edges.record import Wall
from genpipe.edges.store import Store
from genpipe.edges.store_thread import StoreThread

ROUNDS = 7
RECORDS = {8: 1_600, 32: 3_200, 64: 6_400, 256: 12_800}
WALL = Wall(wall_s=time.time(), run_s=0.0)


def main() -> None:
    parent = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir())
    finished = make_records(max(RECORDS.values()))
    print("us per record and, in brackets, ratios to the store: medians of the rounds")
    for size, count in RECORDS.items():
        groups = [
            Group(number=1 + start // size, finished=tuple(finished[start : start + size]), given_up=())
            for start in range(0, count, size)
        ]
        bares, readies, stores = [], [], []
        for _ in range(ROUNDS):
            bares.append(timed(write_bare, parent, groups) / count)
            readies.append(timed(write_ready, parent, groups) / count)
            stores.append(timed(write_store, parent, groups) / count)
        print(
            f"groups of {size:3d}: store {1e6 * statistics.median(stores):5.1f}, bare writer "
            f"{shown(bares, stores)}, of ready lines {shown(readies, stores)}"
        )


def shown(bares: Sequence[float], stores: Sequence[float]) -> str:
    ratios = [bare / store for bare, store in zip(bares, stores, strict=True)]
    return (
        f"{1e6 * statistics.median(bares):5.1f} ({statistics.median(ratios):.2f}; {min(ratios):.2f} to "
        f"{max(ratios):.2f})"
    )


def timed(write: Callable[[Path, Sequence[Group]], float], parent: Path, groups: Sequence[Group]) -> float:
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        return write(Path(folder), groups)


def write_bare(folder: Path, groups: Sequence[Group]) -> float:
    return append_all(folder, map(bare_lines, groups))


def write_ready(folder: Path, groups: Sequence[Group]) -> float:
    return append_all(folder, list(map(bare_lines, groups)))


def append_all(folder: Path, parts: Iterable[bytes]) -> float:
    handle = os.open(folder / "records.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    began_s = time.perf_counter()
    for part in parts:
        os.write(handle, part)
        os.fdatasync(handle)
    took_s = time.perf_counter() - began_s
    os.close(handle)
    return took_s


def bare_lines(group: Group) -> bytes:
    return b"".join([orjson.dumps(bare_record(one)) + b"\n" for one in group.finished])


def bare_record(one: Finished) -> dict[str, object]:
    answer = one.answer
    return {
        "index": one.prompt.index,
        "messages": orjson.Fragment(one.prompt.payload),
        "response": answer.response,
        "finish_reason": answer.finish_reason,
        "usage": answer.usage,
        "model": answer.model,
        "server": one.server,
        "latency_s": one.latency_s,
    }


def write_store(folder: Path, groups: Sequence[Group]) -> float:
    return asyncio.run(commit_all(folder, groups))


async def commit_all(folder: Path, groups: Sequence[Group]) -> float:
    """As the scheduler does it where there is always more to write: one group is encoded beside another."""
    pool = StoreThread.make_pool()
    store = StoreThread(Store.open(folder, OsFiles(), shard_records=500, wall=WALL, warn=print, pool=pool))
    waiting = iter(groups)

    async def commit_some() -> None:
        for group in waiting:
            await store.commit(group)

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(commit_some())
        tasks.create_task(commit_some())
    took_s = time.perf_counter() - began_s
    await store.close()
    pool.shutdown()
    return took_s


def make_records(count: int) -> list[Finished]:
    """Prose of made-up words, with what JSON must escape here and there."""
    rng = random.Random(7)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(5_000)]
    texts = [" ".join(rng.choices(words, k=1_480)) + '\n"quoted" and é\n' for _ in range(64)]
    return [
        Finished(
            prompt=Prompt(index=index, payload=b'[{"role":"user","content":"question %d"}]' % index),
            answer=Answer(
                response={"content": texts[index % 64], "reasoning_content": None, "tool_calls": None},
                finish_reason="stop",
                usage={"prompt_tokens": 5, "completion_tokens": 1_900},
                output_tokens=1_900,
                model="model",
                size_bytes=10_000,
            ),
            server="http://gpu0:30000",
            tries=1,
            started_s=1.0 + index / 1_000,
            latency_s=20.5,
        )
        for index in range(count)
    ]


if __name__ == "__main__":
    main()
