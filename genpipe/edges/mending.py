"""How bytes that are no record, or one too many, leave a file of a run: by way of quarantine."""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from genpipe.core.bitmap import Bitmap
from genpipe.edges import lines
from genpipe.edges.appender import Appender
from genpipe.edges.files import Files, blaming, make_folder, replace_atomically
from genpipe.edges.shards import QUARANTINE, Entry, scan

BEFORE = "of prompts that stand before them, in it or in an earlier shard"


class Mender:
    """Mends files of one run folder, for the process that holds its lock.

    Whatever is taken out of a file is durable in ``quarantine/`` before. A sealed shard is read-only, so it
    is replaced and never opened for writing; the other files are cut where that is enough.
    """

    def __init__(self, folder: Path, files: Files, warn: Callable[[str], None]) -> None:
        self._quarantine = folder / QUARANTINE
        self._files = files
        self._warn = warn

    def mend(self, path: Path, *, is_sealed: bool = False, indexed: bool = True) -> list[bytes]:
        """The good lines of a file, which are durable, and all that it holds, on return.

        Args:
            path: the file.
            is_sealed: it is a sealed shard.
            indexed: a line must begin with an index to be good.

        Raises:
            StoreError: the file refuses; no good line was removed.
        """
        with blaming(path, "read"):
            found = scan(self._files.read(path), indexed=indexed)
        for offset, bad in found.bad:
            self.keep_aside(path, offset, bad)
        good = found.good
        if found.is_torn:
            self._warn(
                f"{path} ended in {len(found.bad[0][1])} bytes of an unfinished write: they were moved to "
                f"{self._quarantine}"
            )
        elif found.bad:
            self._warn(
                f"{path} IS DAMAGED: {len(found.bad)} bad places before good lines (first at byte "
                f"{found.bad[0][0]}) were moved to {self._quarantine}; the {len(good)} good lines are kept, "
                "what was lost runs again. Have the disk checked"
            )
        if not found.bad:
            with blaming(path, "sync"):
                # After a kill the page cache may be newer than the disk.
                self._files.sync_path(path)
        elif found.is_torn and not is_sealed:
            self._cut(path, found.good_bytes)
        else:
            self._replace(path, good)
        return good

    def cut_back(self, path: Path, entry: Entry) -> bool:
        """Cut a sealed shard that is longer than its entry says back to the bytes that were sealed.

        The process that sealed it cut off what a refused sync had left in doubt, wrote those records into the
        next shard, and lost power before that cut was durable: kept, they would be doubled.

        Returns:
            False where its first bytes are not those that were sealed, and nothing was done.

        Raises:
            StoreError: the file refuses.
        """
        with blaming(path, "read"):
            data = self._files.read(path)
        sealed, rest = data[: entry.size_bytes], data[entry.size_bytes :]
        if not entry.covers(sealed):
            return False
        self.keep_aside(path, entry.size_bytes, rest)
        self._warn(
            f"{path} had {len(rest)} bytes behind the {entry.size_bytes} that were sealed (a power loss "
            f"undid a cut): they were moved to {self._quarantine}"
        )
        self._replace(path, [sealed])
        return True

    def drop_doubled(self, path: Path, good: list[bytes], done: Bitmap, *, what: str = BEFORE) -> list[bytes]:
        """Take the records out of a shard that it, or a shard before it, has already.

        Args:
            path: the shard.
            good: its lines, which are all good and all that it holds.
            done: what the shards before it have.
            what: how those records are called.

        Returns:
            The lines that stay.

        Raises:
            StoreError: the file refuses.
        """
        seen: set[int] = set()
        is_again = []
        for line in good:
            index = lines.index_of(line)
            assert index is not None
            is_again.append(index in seen or index in done)
            seen.add(index)
        if not any(is_again):
            return good
        kept: list[bytes] = []
        offset = 0
        for again, run in groupby(zip(is_again, good, strict=True), key=lambda pair: pair[0]):
            part = [line for _, line in run]
            data = b"".join(part)
            if again:
                self.keep_aside(path, offset, data)
            else:
                kept += part
            offset += len(data)
        self._warn(f"{path} held {sum(is_again)} records {what}: they were moved to {self._quarantine}")
        self._replace(path, kept)
        return kept

    def keep_aside(self, path: Path, offset: int, data: bytes) -> None:
        """Copy bytes of a file to quarantine, durably; what lies there is never replaced or removed.

        Raises:
            StoreError: they were not copied.
        """
        with blaming(self._quarantine, "write to"):
            make_folder(self._files, self._quarantine)
            name = f"{path.name}@{offset}"
            taken = 0
            while self._files.exists(self._quarantine / name):
                if self._files.read(self._quarantine / name) == data:
                    return
                taken += 1
                name = f"{path.name}@{offset}.{taken}"
            replace_atomically(self._files, self._quarantine / name, data)

    def _replace(self, path: Path, good: list[bytes]) -> None:
        with blaming(path, "rewrite"):
            replace_atomically(self._files, path, b"".join(good))

    def _cut(self, path: Path, size_bytes: int) -> None:
        appender = Appender(self._files, path, new=False)
        try:
            appender.cut(size_bytes)
        finally:
            appender.close()
