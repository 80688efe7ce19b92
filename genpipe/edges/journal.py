"""The shard that grows: groups of lines are appended to it, and it is sealed and followed by the next."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from genpipe.core.errors import DiskFull, Fenced, StoreError
from genpipe.edges.appender import Appender
from genpipe.edges.background import Background
from genpipe.edges.files import Files, blaming
from genpipe.edges.shards import Entry, Tally, shard_name

WORTH_A_THREAD_BYTES = 128 << 10
"""Fewer bytes are hashed sooner than another thread is woken up."""


class Journal:
    """The open shard, and how it is left for the next one.

    A sync that failed is never tried again on the same file. What was not durable is cut off, the file is
    sealed as short as it is, and the next one begins.

    Attributes:
        tally: what the open shard holds; all of it is durable.
        is_spoiled: its sync failed, so that it can only be sealed.
        is_sealed: the next one is to be begun before anything is written.
    """

    def __init__(
        self,
        files: Files,
        shards: Path,
        appender: Appender,
        tally: Tally,
        *,
        seq: int,
        epoch: int,
        guard: Callable[[], None],
        background: Background,
    ) -> None:
        """Go on with an open shard.

        Args:
            files: the disk.
            shards: the folder of the shards.
            appender: the open shard; all that it holds is durable, and its name too.
            tally: what it holds.
            seq: its number.
            epoch: the number of this claim of the run folder.
            guard: raises ``Fenced`` where the folder is no longer ours.
            background: where the digest is made while the disk is at work.
        """
        self.tally = tally
        self._files = files
        self._shards = shards
        self._appender = appender
        self._seq = seq
        self._epoch = epoch
        self._guard = guard
        self._background = background
        self.is_spoiled = False
        self.is_sealed = False

    def write(self, lines: Sequence[bytes]) -> None:
        """Make whole lines durable at the end of the open shard, all of them or none.

        Raises:
            DiskFull: there is no room; none of them counts, and they may come again.
            Fenced: the folder is somebody else's, or somebody else writes to the shard.
            StoreError: the disk erred; the shard is to be sealed before anything more is written.
        """
        assert not self.is_spoiled
        assert not self.is_sealed
        data = b"".join(lines)
        self._guard()
        background = self._background if len(data) >= WORTH_A_THREAD_BYTES else Background(None)
        digest = background.submit(self.tally.digest_over, data)
        try:
            self._put(data)
        finally:
            digest.wait()
        self.tally.take_hashed(len(data), len(lines), digest.result())

    def _put(self, data: bytes) -> None:
        try:
            self._appender.append(data)
        except (DiskFull, Fenced):
            raise
        except StoreError:
            self.is_spoiled = True
            raise
        try:
            self._appender.sync()
        except StoreError:
            self.is_spoiled = True
            # At once: what another sync says of these bytes could not be believed, nor what one says that the
            # next process makes. Where they cannot be cut now, sealing meets that again.
            with contextlib.suppress(StoreError):
                self._appender.forget()
            raise

    def seal(self) -> Entry | None:
        """Cut off what is not durable, and give the open shard its last name.

        The new name is durable only after :meth:`begin_next` or :meth:`sync_names`.

        Returns:
            What it holds, or None where it held nothing and was removed.

        Raises:
            DiskFull: there is no room for the name; this may be called again.
            Fenced: the folder is somebody else's.
            StoreError: the file keeps its name.
        """
        self._guard()
        path = self._appender.path
        self._appender.forget()
        entry = None
        with blaming(path, "seal"):
            if self.tally.lines:
                entry = self.tally.entry(self._seq, self._epoch)
                self._files.rename(path, self._shards / shard_name(self._seq, is_open=False))
            else:
                self._files.unlink(path)
        self._appender.close()
        self.is_sealed, self.is_spoiled = True, False
        self._seq += 1
        self.tally = Tally()
        return entry

    def begin_next(self) -> None:
        """Open the shard after the one that was sealed; both names are durable on return.

        Raises:
            DiskFull: there is no room for it; this may be called again.
            StoreError: the disk refuses.
        """
        assert self.is_sealed
        path = self._shards / shard_name(self._seq, is_open=True)
        self._appender = Appender(self._files, path, new=True)
        self.is_sealed = False
        # Nothing is acknowledged in a shard that a power loss could take away whole.
        self.sync_names()

    def sync_names(self) -> None:
        """Make the names of the shards durable.

        Raises:
            StoreError: they may not be; for want of room too, because a sync is not to be tried again.
        """
        try:
            with blaming(self._shards, "sync"):
                self._files.sync_folder(self._shards)
        except DiskFull as error:
            raise StoreError(str(error)) from error

    def close(self) -> None:
        """Give the file back; nothing is written. May be called twice."""
        self._appender.close()
