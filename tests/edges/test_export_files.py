"""Where an export and its card come to be: both whole, or neither."""

import errno
import gc
import gzip
import io
import os
from pathlib import Path

import pytest
import zstandard

from genpipe.core.errors import ConfigError, DiskFull, StoreError
from genpipe.edges.export import data_card
from genpipe.edges.export import export as exporting
from genpipe.edges.export.export import CardPlace, export_to_stream
from genpipe.edges.files import OsFiles
from genpipe.edges.folder_shelf import FolderShelf
from tests.edges.export_runs import NOW, export, make_run, record


@pytest.fixture
def folder(tmp_path):
    return make_run(tmp_path / "run", *map(record, range(10)))


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("format_name", ["raw", "sharegpt"])
def test_packed_lines_are_the_same_lines(folder, format_name):
    plain = export(folder, "a.jsonl", format=format_name)[1].read_bytes()
    packed = export(folder, "a.jsonl.gz", format=format_name)[1].read_bytes()
    assert gzip.decompress(packed) == plain
    assert packed[4:8] == bytes(4), "a time stamp"
    assert packed == export(folder, "b.jsonl.gz", format=format_name)[1].read_bytes()
    packed = export(folder, "a.jsonl.zst", format=format_name)[1].read_bytes()
    assert zstandard.ZstdDecompressor().stream_reader(packed).read() == plain
    assert plain.count(b"\n") == 10


def test_the_card_stands_where_it_is_said(folder, tmp_path):
    (tmp_path / "cards").mkdir()
    export(folder, "a.jsonl", card=tmp_path / "cards" / "a.md")
    export(folder, "b.parquet", card=tmp_path / "b.md")

    assert names_in(tmp_path) == ["a.jsonl", "b.md", "b.parquet", "cards", "run"]
    assert names_in(tmp_path / "cards") == ["a.md"]


def test_a_card_that_is_there_is_replaced_only_when_that_is_asked_for(folder, tmp_path):
    card = tmp_path / "a.md"
    card.write_text("mine")
    with pytest.raises(ConfigError, match=r"a\.md exists: name another file, or replace it with --force"):
        export(folder, "a.jsonl", card=card)
    assert names_in(tmp_path) == ["a.md", "run"]
    export(folder, "a.jsonl", card=card, force=True)
    assert card.read_text().startswith("# `a.jsonl`")


def test_places_of_cards_that_cannot_be_right_are_refused(folder, tmp_path):
    for card, said in {
        tmp_path / "a.jsonl": "cannot be both the records and their card",
        folder / "a.md": "in the run folder",
        tmp_path / "nowhere" / "a.md": "is no folder",
    }.items():
        with pytest.raises(ConfigError, match=said):
            export(folder, "a.jsonl", card=card)
    assert names_in(tmp_path) == ["run"]


@pytest.mark.parametrize("force", [False, True])
def test_where_the_records_cannot_have_their_place_the_card_is_as_it_was(
    folder, tmp_path, monkeypatch, force
):
    out, card = tmp_path / "a.jsonl", tmp_path / "a.md"
    if force:
        out.write_text("old records")
        card.write_text("old card")
    for name in ("rename", "hardlink_to"):
        real = getattr(Path, name)

        def refuse(self, other, real=real):
            if out in (self, other):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(self, other)

        monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(DiskFull):
        export(folder, "a.jsonl", card=card, force=force)
    monkeypatch.undo()

    assert names_in(tmp_path) == (["a.jsonl", "a.md", "run"] if force else ["run"])
    if force:
        assert (out.read_text(), card.read_text()) == ("old records", "old card")


def test_the_records_come_last_so_that_they_are_never_without_their_card(folder, tmp_path, monkeypatch):
    real, made = Path.hardlink_to, []

    def noting(self, other):
        made.append(self.name)
        return real(self, other)

    monkeypatch.setattr(Path, "hardlink_to", noting)
    export(folder, "a.jsonl", card=tmp_path / "a.md")

    assert made == ["a.md", "a.jsonl"]


def test_without_hard_links_both_come_to_be_all_the_same(folder, tmp_path, monkeypatch):
    def refuse(self, other):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    export(folder, "a.jsonl", card=tmp_path / "a.md")

    assert names_in(tmp_path) == ["a.jsonl", "a.md", "run"]


def test_a_card_that_cannot_be_written_leaves_nothing(folder, tmp_path, monkeypatch):
    def refuse(*_: object):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(data_card, "card", refuse)
    with pytest.raises(StoreError, match=r"cannot write .*a\.md"):
        export(folder, "a.jsonl", card=tmp_path / "a.md")

    assert names_in(tmp_path) == ["run"]


@pytest.mark.parametrize("room_bytes", [0, 10, 5000])
def test_a_parquet_file_that_finds_no_room_leaves_nothing(folder, tmp_path, monkeypatch, room_bytes):
    class Full(io.FileIO):
        def write(self, data):
            if self.tell() + len(data) > room_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    def open_full(path, mode):
        return Full(path, mode) if path.name == "whole" else open(path, mode)

    monkeypatch.setattr(exporting, "open", open_full, raising=False)
    with pytest.raises(DiskFull, match=r"cannot write .*a\.parquet: No space left on device"):
        export(folder, "a.parquet", card=tmp_path / "a.md")
    gc.collect()

    assert names_in(tmp_path) == ["run"]


def test_a_stream_may_have_a_card(folder, tmp_path):
    stream = io.BytesIO()
    export_to_stream(
        FolderShelf(folder, OsFiles()),
        stream,
        OsFiles(),
        force=False,
        warn=pytest.fail,
        progress=lambda *_: None,
        card=CardPlace(path=tmp_path / "card.md", now_text=NOW),
    )

    assert stream.getvalue().count(b"\n") == 10
    assert (tmp_path / "card.md").read_text().startswith("# `stdout`")
