"""Paths that stand for several files."""

import pytest

from genpipe.core.errors import ConfigError
from genpipe.edges.prompts.patterns import head_of, local_files, matching

TREE = [
    "b.jsonl",
    "a.jsonl",
    "part-10.jsonl",
    "part-2.jsonl",
    "deep/x.jsonl",
    "deep/er/y.jsonl",
    ".hidden.jsonl",
]


@pytest.fixture
def tree(tmp_path):
    for name in TREE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.jsonl", ["a.jsonl", "b.jsonl", "part-10.jsonl", "part-2.jsonl"]),
        ("part-?.jsonl", ["part-2.jsonl"]),
        ("[ab].jsonl", ["a.jsonl", "b.jsonl"]),
        ("deep/*", ["deep/x.jsonl"]),
        ("deep/**/*.jsonl", ["deep/er/y.jsonl", "deep/x.jsonl"]),
        ("**/*.jsonl", sorted(name for name in TREE if name != ".hidden.jsonl")),
    ],
)
def test_a_pattern_stands_for_the_files_that_match_sorted_and_as_it_is_written(
    tree, monkeypatch, pattern, found
):
    assert local_files(f"{tree}/{pattern}") == [f"{tree}/{name}" for name in found]
    monkeypatch.chdir(tree)
    assert local_files(f"./{pattern}") == [f"./{name}" for name in found]


def test_keys_match_as_files_do(tree):
    keys = [name for name in TREE if name != ".hidden.jsonl"]
    for pattern in ("*.jsonl", "part-?.jsonl", "[ab].jsonl", "deep/*", "deep/**/*.jsonl", "**/*.jsonl"):
        assert [f"{tree}/{key}" for key in matching(keys, pattern)] == local_files(f"{tree}/{pattern}")


def test_a_name_that_is_there_wins_over_its_being_a_pattern(tree):
    odd = tree / "[ab].jsonl"
    odd.write_bytes(b"")

    assert local_files(str(odd)) == [str(odd)]
    assert matching(["a.jsonl", "[ab].jsonl", "b.jsonl"], "[ab].jsonl") == ["[ab].jsonl"]


def test_a_pattern_without_a_match_is_named_and_a_plain_name_is_left_to_others(tree):
    with pytest.raises(ConfigError, match=r"no file matches '.*/\*\.json'"):
        local_files(f"{tree}/*.json")
    assert local_files(f"{tree}/none.jsonl") == [f"{tree}/none.jsonl"]
    (tree / "z.jsonl").mkdir()
    assert f"{tree}/z.jsonl" not in local_files(f"{tree}/*")


def test_what_is_listed_is_what_stands_before_the_first_wildcard():
    assert [head_of(path) for path in ("a/part-*.x", "*/b", "a/b", "a[1]")] == ["a/part-", "", "a/b", "a"]
