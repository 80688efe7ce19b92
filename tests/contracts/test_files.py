"""What every disk must do, the machine's own and the model in memory."""

import errno
import os
import threading
from pathlib import Path

import pytest

from genpipe.core.errors import DiskFull, StoreError
from genpipe.edges.appender import Appender
from genpipe.edges.files import Files, OsFiles, blaming, make_folder, replace_atomically, write_all
from tests.edges.memory_files import MemoryFiles, PowerLoss


@pytest.fixture(params=["os", "memory"])
def disk(request, tmp_path) -> tuple[Files, Path]:
    if request.param == "os":
        return OsFiles(), tmp_path
    return MemoryFiles([Path("/disk")]), Path("/disk")


def test_writes_go_to_the_end_and_are_read_back(disk):
    files, folder = disk
    handle = files.open_append(folder / "a", new=True)
    write_all(files, handle, b"one\n")
    files.close(handle)
    handle = files.open_append(folder / "a", new=False)
    taken = files.write(handle, memoryview(b"two\n"))
    files.sync(handle)

    assert taken == 4
    assert files.length(handle) == 8
    assert files.read(folder / "a") == b"one\ntwo\n"
    files.close(handle)


def test_a_new_file_must_not_exist_and_an_old_one_must(disk):
    files, folder = disk
    files.close(files.open_append(folder / "a", new=True))

    with pytest.raises(FileExistsError):
        files.open_append(folder / "a", new=True)
    with pytest.raises(FileNotFoundError):
        files.open_append(folder / "b", new=False)
    with pytest.raises(FileNotFoundError):
        files.open_append(folder / "nowhere" / "b", new=True)


def test_a_cut_file_goes_on_at_its_new_end(disk):
    files, folder = disk
    handle = files.open_append(folder / "a", new=True)
    write_all(files, handle, b"0123456789")
    files.truncate(handle, 4)
    write_all(files, handle, b"x")
    files.close(handle)

    assert files.read(folder / "a") == b"0123x"


def test_a_file_cannot_be_cut_to_more_than_it_has(disk):
    files, folder = disk
    handle = files.open_append(folder / "a", new=True)

    with pytest.raises(AssertionError):
        files.truncate(handle, 1)
    files.close(handle)


def test_rename_replaces_and_an_open_handle_stays_with_its_file(disk):
    files, folder = disk
    for name in "ab":
        handle = files.open_append(folder / name, new=True)
        write_all(files, handle, name.encode())
        files.close(handle)
    handle = files.open_append(folder / "a", new=False)
    files.rename(folder / "a", folder / "b")
    write_all(files, handle, b"!")
    files.close(handle)
    files.sync_folder(folder)

    assert files.sizes(folder) == {"b": 2}
    assert files.read(folder / "b") == b"a!"
    assert not files.exists(folder / "a")


def test_folders_are_made_one_by_one_and_hold_files(disk):
    files, folder = disk
    files.mkdir(folder / "sub")
    files.close(files.open_append(folder / "sub" / "a", new=True))
    files.close(files.open_append(folder / "b", new=True))

    assert files.exists(folder / "sub")
    assert files.sizes(folder) == {"b": 0}
    assert files.sizes(folder / "sub") == {"a": 0}
    with pytest.raises(FileExistsError):
        files.mkdir(folder / "sub")
    with pytest.raises(FileNotFoundError):
        files.mkdir(folder / "x" / "y")


def test_what_is_removed_is_gone_and_what_is_not_there_is_an_error(disk):
    files, folder = disk
    files.close(files.open_append(folder / "a", new=True))
    files.unlink(folder / "a")

    assert not files.exists(folder / "a")
    for step in (files.unlink, files.read, files.sizes, files.sync_folder):
        with pytest.raises(FileNotFoundError):
            step(folder / "nothing")
    with pytest.raises(FileNotFoundError):
        files.rename(folder / "nothing", folder / "b")


def test_a_read_only_file_is_read_synced_renamed_and_not_opened_for_writing(disk):
    files, folder = disk
    handle = files.open_append(folder / "a", new=True)
    write_all(files, handle, b"one")
    files.make_read_only(folder / "a")
    write_all(files, handle, b"two")
    files.close(handle)
    files.sync_path(folder / "a")
    files.rename(folder / "a", folder / "b")

    assert files.read(folder / "b") == b"onetwo"
    if isinstance(files, OsFiles):
        assert (folder / "b").stat().st_mode & 0o222 == 0
    if not isinstance(files, OsFiles) or os.geteuid() != 0:
        with pytest.raises(PermissionError):
            files.open_append(folder / "b", new=False)


@pytest.mark.parametrize(("size", "ends"), [(2, (b"01", b"89")), (99, (b"0123456789", b"0123456789"))])
def test_the_ends_of_a_file_are_read_alone(disk, size, ends):
    files, folder = disk
    handle = files.open_append(folder / "a", new=True)
    write_all(files, handle, b"0123456789")
    files.close(handle)

    assert files.read_ends(folder / "a", size) == ends


def test_the_files_of_a_folder_are_told_while_they_change_their_names(tmp_path):
    files = OsFiles()
    over = threading.Event()

    def rename():
        while not over.is_set():
            for name in "abcdefgh":
                (tmp_path / name).write_bytes(b"x")
                (tmp_path / name).rename(tmp_path / name.upper())

    renamer = threading.Thread(target=rename)
    renamer.start()
    try:
        seen = [files.sizes(tmp_path) for _ in range(2000)]
    finally:
        over.set()
        renamer.join()

    assert any(seen)


def test_a_disk_has_no_more_room_than_its_size(disk):
    files, folder = disk
    space = files.space(folder)

    assert 0 < space.free_bytes <= space.total_bytes
    with pytest.raises(FileNotFoundError):
        files.space(folder / "nowhere")


def test_replacing_leaves_the_new_bytes_and_no_temporary_file(disk):
    files, folder = disk
    files.close(files.open_append(folder / "a.tmp", new=True))
    replace_atomically(files, folder / "a", b"old")
    replace_atomically(files, folder / "a", b"new")

    assert files.read(folder / "a") == b"new"
    assert files.sizes(folder) == {"a": 3}


def test_missing_folders_are_made_with_those_above_them(disk):
    files, folder = disk
    make_folder(files, folder / "a" / "b" / "c")
    make_folder(files, folder / "a" / "b" / "c")

    assert files.exists(folder / "a" / "b" / "c")


def test_an_appender_knows_what_is_durable(disk):
    files, folder = disk
    appender = Appender(files, folder / "a", new=True)
    appender.append(b"12345")
    before = (appender.size_bytes, appender.durable_bytes)
    appender.sync()
    after = (appender.size_bytes, appender.durable_bytes)
    appender.cut(2)
    appender.close()
    appender.close()

    assert (before, after) == ((5, 0), (5, 5))
    assert files.read(folder / "a") == b"12"


def test_an_appender_notices_that_somebody_else_writes(disk):
    files, folder = disk
    appender = Appender(files, folder / "a", new=True)
    other = files.open_append(folder / "a", new=False)
    write_all(files, other, b"theirs")
    files.close(other)

    with pytest.raises(StoreError, match="another program writes to it"):
        appender.append(b"ours")
    appender.close()


@pytest.mark.parametrize("taken", [0, 3])
def test_an_append_that_fails_leaves_nothing_of_itself(disk, taken):
    files, folder = disk
    appender = Appender(files, folder / "a", new=True)
    appender.append(b"12345")
    real, asked = files.write, []

    def write(handle, data):
        asked.append(len(data))
        if len(asked) == 2 or not taken:
            raise OSError(errno.ENOSPC, "full")
        return real(handle, data[:taken])

    files.write = write
    with pytest.raises(DiskFull, match="full"):
        appender.append(b"abcdef")
    files.write = real
    appender.append(b"67")
    appender.close()

    assert files.read(folder / "a") == b"1234567"


def test_what_is_not_durable_is_forgotten(disk):
    files, folder = disk
    appender = Appender(files, folder / "a", new=True)
    appender.append(b"12345")
    appender.sync()
    appender.append(b"67")
    appender.forget()

    assert (appender.size_bytes, appender.durable_bytes) == (5, 5)
    assert files.read(folder / "a") == b"12345"
    appender.close()


@pytest.mark.parametrize(
    ("code", "kind"), [("ENOSPC", DiskFull), ("EDQUOT", DiskFull), ("EIO", StoreError), ("EFBIG", StoreError)]
)
def test_errors_name_the_file_and_the_next_step(code, kind):
    with (
        pytest.raises(StoreError, match=r"cannot sync /x/y: .*; (see to the disk|free some space)") as caught,
        blaming(Path("/x/y"), "sync"),
    ):
        raise OSError(getattr(errno, code), "reason")

    assert type(caught.value) is kind


class TestPowerLoss:
    """What the model forgets: it must forget enough, or the tests upon it prove nothing."""

    folder = Path("/disk")

    def test_a_sync_after_one_that_failed_claims_to_have_worked_and_keeps_nothing(self):
        files = MemoryFiles([self.folder])
        handle = files.open_append(self.folder / "a", new=True)
        files.sync_folder(self.folder)
        files.write(handle, b"kept")
        files.sync(handle)
        files.write(handle, b"lost")
        files.refuse_once["sync", "a"] = errno.EIO
        with pytest.raises(OSError, match="error"):
            files.sync(handle)
        files.sync(handle)

        assert files.crash().read(self.folder / "a") == b"kept"

    def test_a_file_needs_both_its_bytes_and_its_name_synced(self):
        files = MemoryFiles([self.folder])
        for name, syncs in {"both": ("file", "folder"), "bytes": ("file",), "neither": ()}.items():
            handle = files.open_append(self.folder / name, new=True)
            write_all(files, handle, b"data")
            if "file" in syncs:
                files.sync(handle)
            if "folder" in syncs:
                files.sync_folder(self.folder)
            write_all(files, handle, b"more")
            files.close(handle)

        after = files.crash()
        assert after.sizes(self.folder) == {"both": 4}
        assert files.kill().sizes(self.folder) == {"both": 8, "bytes": 8, "neither": 4 + 4}
        assert files.kill().crash().sizes(self.folder) == {"both": 4}

    def test_a_rename_is_undone_and_a_synced_name_of_unsynced_bytes_is_empty(self):
        files = MemoryFiles([self.folder])
        handle = files.open_append(self.folder / "a", new=True)
        files.sync_folder(self.folder)
        write_all(files, handle, b"data")
        files.rename(self.folder / "a", self.folder / "b")
        files.close(handle)

        assert files.crash().sizes(self.folder) == {"a": 0}

    def test_what_lies_in_a_lost_folder_is_lost(self):
        files = MemoryFiles([self.folder])
        files.mkdir(self.folder / "sub")
        handle = files.open_append(self.folder / "sub" / "a", new=True)
        files.sync(handle)
        files.sync_folder(self.folder / "sub")
        files.close(handle)

        assert not files.crash().exists(self.folder / "sub" / "a")

    def test_a_replaced_file_is_whole_at_every_instant(self):
        steps = 0
        while True:
            files = MemoryFiles([self.folder])
            files.put(self.folder / "a", b"old")
            files.stop_before = steps
            try:
                replace_atomically(files, self.folder / "a", b"new bytes")
            except PowerLoss:
                assert files.crash().read(self.folder / "a") in {b"old", b"new bytes"}
                steps += 1
                continue
            break

        assert files.crash().read(self.folder / "a") == b"new bytes"
        assert steps == 5
