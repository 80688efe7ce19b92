"""``genpipe verify`` and ``genpipe export`` on folders and prefixes, as the command line calls them."""

import json

import pytest

from genpipe import folder_commands
from genpipe.core.errors import ConfigError
from genpipe.edges.files import OsFiles
from genpipe.edges.s3.place import Place
from tests.edges.s3 import sent

PLACE = Place(uri="s3://memory/run")


@pytest.fixture
def folder(tmp_path):
    folder = sent.make(tmp_path / "run")
    PLACE.write(folder, OsFiles())
    return folder


@pytest.fixture
def opened():
    return []


@pytest.fixture
def open_objects(folder, opened):
    objects = sent.send(folder)

    def open_objects(place):
        opened.append(place)
        return objects

    return open_objects


def verify(target, open_objects):
    told: list[str] = []
    code = folder_commands.verify(
        target, repair=False, as_json=True, say=told.append, open_objects=open_objects
    )
    return code, json.loads(told[0])


def export(target, open_objects, out):
    told: list[str] = []
    code = folder_commands.export(target, str(out), force=True, tell=told.append, open_objects=open_objects)
    return code, told, out.read_bytes()


def test_a_prefix_is_verified_and_exported_like_its_folder(folder, open_objects, opened, tmp_path):
    code, report = verify(PLACE, open_objects)
    assert (code, report["folder"], report["records"], report["done"]) == (0, PLACE.uri, 11, [])
    code, told, data = export(PLACE, open_objects, tmp_path / "a.jsonl")
    assert (code, told) == (0, ["genpipe: 11 records exported"])
    assert opened == [PLACE, PLACE]
    assert export(folder, open_objects, tmp_path / "b.jsonl")[2] == data


def test_a_folder_is_held_against_the_place_that_it_names(folder, open_objects, opened):
    code, report = verify(folder, open_objects)
    assert (code, report["findings"], opened) == (0, [], [PLACE])
    (folder / "s3.json").unlink()
    assert verify(folder, open_objects)[0] == 0
    assert opened == [PLACE]


def test_shards_that_are_in_s3_only_are_fetched_from_there(folder, open_objects, opened, tmp_path):
    whole = export(folder, open_objects, tmp_path / "a.jsonl")
    assert opened == []
    sent.lose_here(folder, 1)
    assert export(folder, open_objects, tmp_path / "b.jsonl") == whole
    assert opened == [PLACE]


def test_a_place_that_is_not_to_be_understood_is_told_where_it_matters(folder, open_objects, tmp_path):
    (folder / "s3.json").write_text("{")
    code, report = verify(folder, open_objects)
    assert code == 1
    assert "s3.json is damaged" in report["findings"][0]["what"]
    assert export(folder, open_objects, tmp_path / "a.jsonl")[0] == 0
    sent.lose_here(folder, 1)
    with pytest.raises(ConfigError, match=r"s3\.json is damaged"):
        export(folder, open_objects, tmp_path / "a.jsonl")


def test_damage_in_s3_makes_the_exit_code_one(open_objects, tmp_path):
    objects = open_objects(PLACE)
    objects.delete(objects.keys("w00/shards/")[0])

    assert verify(PLACE, open_objects)[0] == 1
    assert export(PLACE, open_objects, tmp_path / "a.jsonl")[0] == 1
