"""Neither memory nor the wait for the first request grows with the input; a million rows in the soak."""

import contextlib
import gzip
import json
import time

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.e2e.harness import (
    asked_by_process,
    audit,
    progress,
    running,
    saved,
    servers,
    wait_for,
    write_prompts,
)
from tests.faults.soak import SOAK

ROWS = 1_000_000 if SOAK > 1 else 40_000
LIMIT = 64


def completed(out):
    return (progress(out) or {"completed": 0})["completed"]


def peak_of_a_small_run(tmp_path, fleet, texts):
    """What a process needs that has hardly any input (MB)."""
    source, out = write_prompts(tmp_path / "small.jsonl", texts), tmp_path / "small"
    command = ["run", "--prompts", source, "--servers", fleet.address, "--concurrency", LIMIT, "--out", out]
    peaks_mb = []
    with running(*command, err=tmp_path / "small.err") as run:
        while not run.over:
            with contextlib.suppress(AssertionError, OSError):
                peaks_mb.append(run.memory_mb("VmHWM"))
            time.sleep(0.05)
    assert run.wait() == 0
    return max(peaks_mb)


@pytest.mark.slow
@pytest.mark.timeout(2400 if SOAK > 1 else 240)
def test_many_rows_start_and_resume_in_seconds_and_in_flat_memory(tmp_path):
    texts = [f"Row {place}: one word about item {place % 977}? <<tokens=5 delay=0>>" for place in range(ROWS)]
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text(
        "".join(f'{{"id": "m-{place:07d}", "prompt": "{text}"}}\n' for place, text in enumerate(texts))
    )
    with servers(tmp_path, 4) as fleet:
        small_mb = peak_of_a_small_run(tmp_path, fleet, texts[:2_000])
        command = [
            "run",
            "--prompts",
            source,
            "--servers",
            fleet.address,
            "--concurrency",
            LIMIT,
            "--out",
            out,
        ]
        with running(*command, err=tmp_path / "1.err") as first:
            wait_for(lambda: completed(out) >= ROWS // 2, "half of the rows", 100 * SOAK)
            late_mb = first.memory_mb("VmHWM")
            first.kill()
        before = len(saved(out))
        with running(*command, err=tmp_path / "2.err") as second:
            # The peak of a resumed process: read again and again, for it is gone with the process.
            peaks_mb = []
            while completed(out) < 0.95 * ROWS:
                peaks_mb.append(second.memory_mb("VmHWM"))
                time.sleep(0.3)
            code = second.wait()
        fleet.stop()
        asked = asked_by_process(fleet.visits())[1:]
    first_s, resumed_s = asked[0][0]["arrival_s"] - first.began_s, asked[1][0]["arrival_s"] - second.began_s
    print(
        f"first request after {first_s:.2f} s, resumed after {resumed_s:.2f} s; peak of "
        f"memory {small_mb:.0f} MB with 2,000 rows, {late_mb:.0f} MB at half, {max(peaks_mb):.0f} MB resumed"
    )

    assert code == 0
    assert ROWS // 2 <= before < ROWS
    assert first_s < 5
    assert resumed_s < 5
    assert max(late_mb, *peaks_mb) < small_mb + 25
    audit(out, texts)
    assert len(asked[1]) <= ROWS - before


def write_form(folder, form, texts):
    """The same rows as JSON Lines in gzip, or as Parquet with row groups of 10,000."""
    ids = [f"m-{place:07d}" for place in range(len(texts))]
    path = folder / f"in.{form}"
    if form == "gz":
        with gzip.open(path, "wb", compresslevel=1) as file:
            for ident, text in zip(ids, texts, strict=True):
                file.write(json.dumps({"id": ident, "prompt": text}).encode() + b"\n")
    else:
        parquet.write_table(pa.table({"id": ids, "prompt": texts}), path, row_group_size=10_000)
    return path


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("form", ["gz", "parquet"])
def test_other_forms_start_and_resume_as_fast_and_in_flat_memory(tmp_path, form):
    """A tenth of 200 MB is asked, in two processes; it is the input that counts, which is read ahead."""
    rows, first_rows = 60_000, 1_000
    texts = [f"Row {place}: one word? <<tokens=5>> {'pad ' * 800}" for place in range(rows)]
    source, few, out = write_form(tmp_path, form, texts), tmp_path / "few", tmp_path / "out"
    few.mkdir()
    small = write_form(few, form, texts[:first_rows])
    with servers(tmp_path, 4) as fleet:

        def command(path, folder):
            where = ["run", "--prompts", path, "--servers", fleet.address]
            return [*where, "--concurrency", LIMIT, "--out", folder]

        def peak_of(run, until):
            peaks_mb = []
            while not until() and not run.over:
                with contextlib.suppress(AssertionError, OSError):
                    peaks_mb.append(run.memory_mb("VmHWM"))
                time.sleep(0.05)
            return max(peaks_mb)

        with running(*command(small, tmp_path / "small"), err=tmp_path / "0.err") as smallest:
            small_mb = peak_of(smallest, lambda: False)
            assert smallest.wait() == 0, smallest.err
        with running(*command(source, out), err=tmp_path / "1.err") as first:
            first_mb = peak_of(first, lambda: completed(out) >= 3_000)
            first.kill()
        before = len(saved(out))
        with running(*command(source, out), err=tmp_path / "2.err") as second:
            second_mb = peak_of(second, lambda: completed(out) >= 6_000)
            second.kill()
        fleet.stop()
        asked = asked_by_process(fleet.visits())
    small_s, first_s, resumed_s = (
        visits[0]["arrival_s"] - run.began_s
        for visits, run in zip(asked, (smallest, first, second), strict=True)
    )
    print(f"{form}: first requests {small_s:.2f}, {first_s:.2f}, {resumed_s:.2f} s")
    print(f"peaks {small_mb:.0f}, {first_mb:.0f}, {second_mb:.0f} MB")

    assert before < rows
    assert max(first_s, resumed_s) < small_s + 3
    assert max(first_mb, second_mb) < small_mb + 150
    records = saved(out)
    assert len(records) >= 6_000
    assert all(record["id"] == f"m-{index:07d}" for index, record in records.items())
    assert all(record["messages"][-1]["content"] == texts[index] for index, record in records.items())
