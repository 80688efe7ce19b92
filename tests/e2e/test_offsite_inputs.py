"""Prompts in S3 under a pattern: what matches is listed, copied into the run folder, and read in order."""

import gzip

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.e2e.harness import assert_one_error, audit, genpipe, servers
from tests.e2e.offsite import connection, environment


def lines(texts):
    return "".join(f'{{"prompt": "{text}"}}\n' for text in texts).encode()


@pytest.mark.timeout(120)
def test_objects_that_match_are_read_in_sorted_order_and_listed_again_on_a_resume(tmp_path, weed):
    texts, env, how = [f"Row {place}." for place in range(40)], environment(weed), connection(weed.place("p"))
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table({"prompt": texts[20:30]}), sink)
    weed.write("pattern/b.jsonl", gzip.compress(lines(texts[10:20])))
    weed.write("pattern/c.parquet", sink.getvalue().to_pybytes())
    weed.write("pattern/a.jsonl", lines(texts[:10]))
    weed.write("pattern/_SUCCESS", b"")
    weed.write("pattern/deep/d.jsonl", lines(["not this one"]))
    with servers(tmp_path, 1, orders=False) as fleet:
        where = ["--servers", fleet.address, "--out", tmp_path / "out", *how]
        command = ["run", "--prompts", "s3://runs/pattern/*", *where]
        first = genpipe(*command, env=env)
        weed.write("pattern/d.jsonl", lines(texts[30:]))
        more = genpipe(*command, env=env)
        weed.write("pattern/aa.jsonl", lines(["in between"]))
        between = genpipe(*command, env=env)
        none = genpipe(
            "run", "--prompts", "s3://runs/pattern/*.json", *where, "--out", tmp_path / "no", env=env
        )
    checked = genpipe("check", "s3://runs/pattern/**/*.jsonl", *how, env=env)

    assert first.code == 0, first.err
    assert "done: 30 of 30" in first.err
    assert more.code == 0, more.err
    audit(tmp_path / "out", texts)
    # What stands between others changes their numbers.
    assert between.code == 2, between.err
    assert "differs from what this run began with, in records 10-19" in between.err
    assert_one_error(none, 2, "no file matches 's3://runs/pattern/*.json'")
    assert not (tmp_path / "no").exists()
    assert checked.code == 0, checked.err
    assert "32 records" in checked.out
