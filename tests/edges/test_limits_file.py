"""The file that changes limits of a live run: written by the command, by hand, by scripts, and by nobody."""

import fcntl
import json
import os
import queue
import threading
import time

import pytest

from genpipe.core.errors import ConfigError, StoreError
from genpipe.edges import limits_file
from genpipe.edges.limits_file import LIMITS, Watcher

A, B = "http://a:1", "http://b:1"
EVERY_S = 0.02


@pytest.fixture
def path(tmp_path):
    return tmp_path / LIMITS


# ---- reading and writing ----


def test_what_was_written_is_read_and_stands_there_for_people(path):
    limits_file.write(path, {A: 16, B: 0})
    limits_file.write(path, {A: 8})

    assert limits_file.read(path) == {A: 8}
    assert path.read_text() == '{\n  "http://a:1": 8\n}\n'
    assert [each.name for each in path.parent.iterdir()] == [LIMITS]


def test_without_a_file_nothing_is_changed(path):
    assert limits_file.read(path) == {}


def test_addresses_are_read_as_servers_are_named(path):
    path.write_text('{"http://GPU1:80/v1/": 3, "https://gpu2:443": 4}')

    assert limits_file.read(path) == {"http://gpu1": 3, "https://gpu2": 4}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is damaged (0 bytes, no JSON object): write it anew, as in "),
        ('{"http://a:1": 1', "is damaged (16 bytes, no JSON object)"),
        ("[1]", "is damaged (3 bytes, no JSON object)"),
        ("null", "is damaged"),
        ("\xff", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ('{"gpu1": 1}', ": 'gpu1' must be an address such as http://gpu1:30000"),
        ('{"http://a:1": -1}', ": http://a:1 must have a whole number from 0 to 65,535, got -1"),
        ('{"http://a:1": 65536}', ": http://a:1 must have a whole number from 0 to 65,535, got 65536"),
        ('{"http://a:1": 1.5}', ": http://a:1 must have a whole number from 0 to 65,535, got 1.5"),
        ('{"http://a:1": true}', ": http://a:1 must have a whole number from 0 to 65,535, got true"),
        ('{"http://a:1": "8"}', ': http://a:1 must have a whole number from 0 to 65,535, got "8"'),
        ('{"http://a:1": null}', ": http://a:1 must have a whole number from 0 to 65,535, got null"),
        ('{"http://a:1": {"n": 8}}', "a whole number from 0 to 65,535, got another object"),
        (f'{{"http://a:1": {"9" * 4000}}}', "from 0 to 65,535, got a larger one"),
        (f'{{"http://a:1": {"9" * 5000}}}', "is damaged"),
        ('{"http://a:1": 1, "http://A:1/v1": 2}', ": http://a:1 stands in it twice, with 1 and 2: keep one"),
        ('{"http://a:1": 1, "http://a:1": 2}', ": http://a:1 stands in it twice, with 1 and 2: keep one"),
    ],
)  # fmt: skip
def test_what_the_file_cannot_hold_is_one_line_with_the_file_and_the_key(path, text, said):
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError) as caught:
        limits_file.read(path)

    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)
    assert str(caught.value).isprintable()


def test_the_same_said_twice_is_said_once(path):
    path.write_text('{"http://a:1": 2, "http://A:1": 2}')

    assert limits_file.read(path) == {A: 2}


def test_an_address_with_a_password_is_refused_without_being_shown(path):
    path.write_text('{"http://me:hunter2@a:1": 2}')
    with pytest.raises(ConfigError) as caught:
        limits_file.read(path)

    assert str(caught.value) == f"{path}: an address must hold no user and no password"


def test_what_is_no_file_or_no_end_of_one_is_refused(path, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"^cannot read .*folder: Is a directory$"):
        limits_file.read(tmp_path / "folder")
    path.write_bytes(b" " * (limits_file.FILE_BYTES_MAX + 1))
    with pytest.raises(ConfigError, match="is longer than"):
        limits_file.read(path)


def test_a_new_segment_takes_the_old_file_away_and_learns_what_it_said(path):
    nothing = limits_file.clear(path)
    limits_file.write(path, {A: 8})
    something = limits_file.clear(path)
    gone = not path.exists()
    path.write_text("{")
    damaged = limits_file.clear(path)

    assert (nothing, something, damaged) == ({}, {A: 8}, {})
    assert gone
    assert not path.exists()


def test_what_cannot_be_taken_away_is_an_error_with_its_name(path):
    path.mkdir()

    with pytest.raises(StoreError, match=f"cannot remove {path}"):
        limits_file.clear(path)


def test_what_a_file_says_is_told_in_a_line_however_many_servers_it_names():
    assert limits_file.described({A: 16, B: 0}) == "http://a:1=16, http://b:1=0"
    assert limits_file.described({f"http://a:{port}": 1 for port in range(1, 1_008)}).endswith(
        "http://a:5=1 and 1,002 more"
    )


def test_two_commands_do_not_change_the_file_at_once(path, monkeypatch):
    limits_file.write(path, {})

    def add(place):
        with limits_file.changing(path):
            said = limits_file.read(path)
            time.sleep(0.01)
            limits_file.write(path, {**said, f"http://a:{place}": 1})

    threads = [threading.Thread(target=add, args=[place]) for place in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    said = limits_file.read(path)
    monkeypatch.setattr(limits_file, "LOCK_WAIT_S", 0.1)
    other = os.open(path.parent, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        with pytest.raises(ConfigError, match=r"^another command is changing "):
            add(9)
    finally:
        os.close(other)

    assert len(said) == 8
    assert limits_file.read(path) == said


# ---- watching ----


class Watched:
    """What a watcher has told."""

    def __init__(self, path):
        self.changes: queue.Queue[dict[str, int]] = queue.Queue()
        self.warnings: queue.Queue[str] = queue.Queue()
        self.watcher = Watcher(path, self.changes.put, self.warnings.put, every_s=EVERY_S)

    def next(self):
        return self.changes.get(timeout=5)

    def nothing_more(self):
        time.sleep(6 * EVERY_S)
        return self.changes.empty() and self.warnings.empty()


@pytest.fixture
def watched(path):
    seen = Watched(path)
    yield seen
    seen.watcher.close()
    assert not seen.watcher._thread.is_alive()


def test_without_a_file_a_watcher_says_nothing(watched):
    assert watched.nothing_more()


def test_a_file_that_was_there_before_the_watcher_is_told(path):
    limits_file.write(path, {A: 3})
    watched = Watched(path)
    try:
        assert watched.next() == {A: 3}
        assert watched.nothing_more()
    finally:
        watched.watcher.close()


def test_each_change_is_told_whole_and_once_whether_replaced_or_edited_in_place(path, watched):
    limits_file.write(path, {A: 3})
    first = watched.next()
    path.write_text(json.dumps({A: 4, B: 0}))
    second = watched.next()
    with open(path, "r+") as file:
        file.write(json.dumps({A: 5, B: 1}))
    third = watched.next()

    assert (first, second, third) == ({A: 3}, {A: 4, B: 0}, {A: 5, B: 1})
    assert watched.nothing_more()


def test_a_file_taken_away_means_the_servers_as_configured(path, watched):
    limits_file.write(path, {A: 3})
    first = watched.next()
    path.unlink()

    assert first == {A: 3}
    assert watched.next() == {}
    assert watched.nothing_more()


def test_the_same_said_in_other_words_changes_nothing(path, watched):
    limits_file.write(path, {A: 3})
    watched.next()
    path.write_text('{ "http://A:1/" : 3 }')

    assert watched.nothing_more()


def test_a_change_that_leaves_no_mark_is_seen_all_the_same(path, watched, monkeypatch):
    """The same length, and the same times: both were written within one tick of the file system's clock."""
    monkeypatch.setattr(limits_file, "_mark_of", lambda path: (1,) if path.exists() else None)
    real = limits_file.read
    reads: list[dict[str, int]] = []

    def read(path):
        said = real(path)
        if said and not reads:
            # In the moment after it was read for the first time.
            path.write_text('{"http://a:1": 4}')
        reads.append(said)
        return said

    monkeypatch.setattr(limits_file, "read", read)
    path.with_name("new").write_text('{"http://a:1": 3}')
    path.with_name("new").replace(path)

    assert watched.next() == {A: 3}
    assert watched.next() == {A: 4}


def test_a_mistake_in_place_of_another_is_told_though_the_change_left_no_mark(path, watched, monkeypatch):
    monkeypatch.setattr(limits_file, "_mark_of", lambda path: (1,) if path.exists() else None)
    real = limits_file.read
    reads: list[str] = []

    def read(path):
        reads.append(path.read_text())
        if reads == ["{"]:
            path.write_text("{{")
            raise ConfigError("the first mistake")
        return real(path)

    monkeypatch.setattr(limits_file, "read", read)
    path.with_name("new").write_text("{")
    path.with_name("new").replace(path)

    assert "2 bytes" in watched.warnings.get(timeout=5)


def test_a_file_that_stays_the_same_is_not_read_again(path, watched, monkeypatch):
    limits_file.write(path, {A: 3})
    watched.next()
    until_s = time.monotonic() + 5
    while not watched.watcher._is_settled and time.monotonic() < until_s:
        time.sleep(EVERY_S)
    reads: list[object] = []
    monkeypatch.setattr(limits_file, "read", reads.append)
    time.sleep(5 * EVERY_S)

    assert reads == []


@pytest.mark.parametrize("damage", ["", "{", '{"a": 1}', '{"http://a:1": -4}'])
def test_bad_content_is_warned_of_once_and_changes_nothing_until_it_is_mended(path, watched, damage):
    limits_file.write(path, {A: 3})
    watched.next()
    path.write_text(damage)
    warning = watched.warnings.get(timeout=5)
    path.write_text(damage)
    quiet = watched.nothing_more()
    path.write_text(json.dumps({A: 7}))

    assert str(path) in warning
    assert warning.endswith("; until then the limits stay as they are")
    assert quiet
    assert watched.next() == {A: 7}
    assert watched.nothing_more()


def test_another_mistake_is_warned_of_again_and_so_is_the_same_one_once_it_was_mended(path, watched):
    warnings = []
    for text in ('{"http://a:1": -4}', '{"http://b:1": -4}', '{"http://a:1": 4}', '{"http://b:1": -4}'):
        path.write_text(text)
        if "-" in text:
            warnings.append(watched.warnings.get(timeout=5))
        else:
            watched.next()

    assert [warning.count(A) for warning in warnings] == [1, 0, 0]
    assert watched.nothing_more()


def test_an_editor_that_empties_the_file_before_it_writes_is_no_mistake(path, watched, monkeypatch):
    limits_file.write(path, {A: 3})
    watched.next()
    real = limits_file.read
    met: list[ConfigError] = []

    def read(path):
        try:
            return real(path)
        except ConfigError as error:
            if not met:
                path.write_text(json.dumps({A: 9}))
            met.append(error)
            raise

    monkeypatch.setattr(limits_file, "read", read)
    path.write_text("")

    assert watched.next() == {A: 9}
    assert watched.nothing_more()
    assert len(met) == 1


def test_what_cannot_be_read_is_warned_of(path, watched):
    limits_file.write(path, {A: 3})
    watched.next()
    path.unlink()
    path.mkdir()

    assert "Is a directory" in watched.warnings.get(timeout=5)


def test_a_watcher_may_be_closed_twice_and_looks_no_more(path, watched):
    watched.watcher.close()
    watched.watcher.close()
    limits_file.write(path, {A: 3})

    assert watched.nothing_more()
