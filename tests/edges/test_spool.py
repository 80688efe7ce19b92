"""Standard input, kept as a file."""

import os
import threading
import time
from pathlib import Path

import pytest

from genpipe.core.errors import ConfigError, DiskFull, StoreError
from genpipe.edges.prompts import spool as module
from genpipe.edges.prompts.spool import demand_piped, spool


@pytest.fixture
def pipe():
    ends = list(os.pipe())
    yield ends
    for end in ends:
        if end is not None:
            os.close(end)


def shut(pipe):
    os.close(pipe[1])
    pipe[1] = None


@pytest.fixture(autouse=True)
def no_lingering(monkeypatch):
    monkeypatch.setattr(module, "_LINGER_S", 0.01)


def test_all_bytes_are_kept_whoever_writes_slowly(tmp_path, pipe):
    data = os.urandom(3 << 20)

    def write():
        for place in range(0, len(data), 100_000):
            view = memoryview(data)[place : place + 100_000]
            while view:
                view = view[os.write(pipe[1], view) :]
            time.sleep(0.001)
        shut(pipe)

    writer = threading.Thread(target=write)
    writer.start()
    size_bytes = spool(tmp_path / "stdin", stop=threading.Event(), descriptor=pipe[0])
    writer.join()

    assert size_bytes == len(data)
    assert (tmp_path / "stdin").read_bytes() == data
    assert list(tmp_path.iterdir()) == [tmp_path / "stdin"]


@pytest.mark.parametrize("moment", ["before the end", "at the end"])
def test_a_stop_leaves_nothing(tmp_path, pipe, monkeypatch, moment):
    """At the end too: the signal that stops us may have ended whoever writes, a moment earlier."""
    monkeypatch.setattr(module, "_LINGER_S", 10.0)
    stop = threading.Event()
    os.write(pipe[1], b'{"prompt": "half of a li')
    if moment == "at the end":
        shut(pipe)
    threading.Timer(0.3, stop.set).start()
    began_s = time.monotonic()

    with pytest.raises(StoreError, match="stopped"):
        spool(tmp_path / "stdin", stop=stop, descriptor=pipe[0])
    assert time.monotonic() - began_s < 5
    assert list(tmp_path.iterdir()) == []


def test_while_it_grows_the_file_has_another_name(tmp_path, pipe):
    stop, path = threading.Event(), tmp_path / "stdin"
    thread = threading.Thread(target=lambda: spool(path, stop=stop, descriptor=pipe[0]))
    thread.start()
    os.write(pipe[1], b"x" * 1_000)
    deadline_s = time.monotonic() + 10
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline_s:
        time.sleep(0.01)

    assert list(tmp_path.iterdir()) == [tmp_path / "stdin.part"]
    shut(pipe)
    thread.join()
    assert path.read_bytes() == b"x" * 1_000


@pytest.mark.parametrize("data", [b"", b"\n \r\n"])
def test_nothing_on_standard_input_is_no_input(tmp_path, pipe, data):
    os.write(pipe[1], data)
    shut(pipe)

    with pytest.raises(ConfigError, match="no prompts on standard input: it is empty"):
        spool(tmp_path / "stdin", stop=threading.Event(), descriptor=pipe[0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_told_as_such(tmp_path, pipe):
    (tmp_path / "stdin.part").symlink_to("/dev/full")
    os.write(pipe[1], b"x" * 60_000)
    shut(pipe)

    with pytest.raises(DiskFull, match=r"stdin\.part"):
        spool(tmp_path / "stdin", stop=threading.Event(), descriptor=pipe[0])


def test_a_terminal_is_refused_and_a_pipe_is_not(pipe):
    ours, theirs = os.openpty()
    try:
        with pytest.raises(ConfigError, match="is a terminal here") as caught:
            demand_piped(theirs)
        assert "\n" not in str(caught.value)
        demand_piped(pipe[0])
    finally:
        os.close(ours)
        os.close(theirs)
