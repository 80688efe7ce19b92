"""The same command once more: goes on where it was, and never doubles or deletes anything."""

from tests.e2e.harness import assert_one_error, audit, contents, genpipe, servers, shard_paths, write_prompts


def test_the_same_command_after_the_end_asks_nothing_and_changes_no_record(tmp_path):
    texts = [f"Basic question {place:03d}. <<tokens={20 + place}>>" for place in range(20)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        command = ["run", "--prompts", source, "--servers", fleet.address, "--out", out]
        first = genpipe(*command)
        before = {path.name: path.read_bytes() for path in shard_paths(out)}
        again = genpipe(*command)
        fleet.stop()
        visits = fleet.visits()

    assert (first.code, again.code) == (0, 0), again.err
    audit(out, texts)
    assert {path.name: path.read_bytes() for path in shard_paths(out)} == before
    assert len(visits) == len(texts)


def test_a_folder_with_somebody_elses_files_is_refused_and_left_as_it_was(tmp_path):
    texts = [f"Basic question {place:03d}." for place in range(20)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    (out / "shards").mkdir(parents=True)
    (out / "thesis.txt").write_text("the only copy")
    (out / "shards" / "part-000000.jsonl").write_text('{"index":0}\n')
    before = contents(out)
    with servers(tmp_path) as fleet:
        ended = genpipe("run", "--prompts", source, "--servers", fleet.address, "--out", out)
        fleet.stop()
        visits = fleet.visits()

    assert_one_error(ended, 2, str(out), "thesis.txt", "nothing was changed")
    assert contents(out) == before
    assert visits == []
