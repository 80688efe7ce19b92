"""A run of more than a thousand objects goes on from S3 alone, whatever the accelerator says."""

import shutil

import pytest

from tests.e2e.harness import asked_by_process, genpipe, row_of, run_command, servers, write_prompts
from tests.e2e.offsite import Stored, environment, indices_of, options

PARTS, LAST_INDEX, SHARD, MORE = 1_030, 1_000, 5, 10
TEXTS = [f"Row {place} of many small parts." for place in range(PARTS * SHARD + 3 * MORE)]


@pytest.mark.timeout(300)
def test_no_row_is_asked_again_and_none_is_skipped_without_data(tmp_path, weed):
    env, place = environment(weed), weed.place("many")

    def run(folder, rows):
        """On a machine of its own, on an input that has grown at its end."""
        source = write_prompts(tmp_path / "in.jsonl", TEXTS[:rows])
        ended = genpipe(
            *run_command(fleet, source, tmp_path / folder, 32, *options(place, tail_s=60, uploads=8)),
            f"--set=output.shard_records={SHARD}",
            env=env,
            timeout_s=200,
        )
        assert ended.code == 0, ended.err
        return asked_by_process(fleet.visits_until_now())[-1]

    with servers(tmp_path, 2, orders=False) as fleet:
        run("first", PARTS * SHARD)
        shutil.rmtree(tmp_path / "first")
        begun = Stored(weed, place)
        keys, index = begun.keys("w00/shards/"), begun.keys("w00/index/")
        assert (begun.count, len(keys)) == (PARTS, PARTS)
        assert index == [f"w00/index/{number:06d}.jsonl.zst" for number in range(0, LAST_INDEX, 100)]

        # The accelerator is older than the last commits, as it always is.
        asked = run("second", PARTS * SHARD + MORE)
        assert sorted(visit["row"] for visit in asked) == sorted(map(row_of, TEXTS[PARTS * SHARD :][:MORE]))

        # The last three parts of those that the accelerator tells of are gone, with their commits.
        stored = Stored(weed, place)
        lines = [stored.read(f"w00/commits/{number:06d}.json") for number in range(LAST_INDEX, stored.count)]
        weed.write(place.prefix + f"w00/index/{LAST_INDEX:06d}.jsonl.zst", pack(b"".join(lines)))
        lost: set[int] = set()
        gone = []
        for number in range(stored.count - 3, stored.count):
            commit = stored.commit(number)
            gone += [commit["key"], f"w00/commits/{number:06d}.json"]
            lost |= set(indices_of(commit))
        for key in gone:
            weed.delete(place.prefix + key)
        asked = run("third", PARTS * SHARD + 2 * MORE)
        fresh = {*lost, *range(PARTS * SHARD + MORE, PARTS * SHARD + 2 * MORE)}
        assert sorted(visit["row"] for visit in asked) == sorted(row_of(TEXTS[index]) for index in fresh)

        # Without any accelerator.
        for key in stored.keys("w00/index/"):
            weed.delete(place.prefix + key)
        asked = run("fourth", PARTS * SHARD + 3 * MORE)
        assert sorted(visit["row"] for visit in asked) == sorted(
            map(row_of, TEXTS[PARTS * SHARD + 2 * MORE :])
        )

    stored = Stored(weed, place)
    stored.assert_whole(TEXTS)
    # No name was given twice: what was there still is, but for what was taken away.
    named = {commit["key"] for commit in stored.commits}
    assert set(keys) - set(gone) <= named
    assert not set(gone) & named


def pack(data):
    import zstandard

    return zstandard.ZstdCompressor().compress(data)
