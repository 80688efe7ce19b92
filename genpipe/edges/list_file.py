"""The lists beside the shards: files that only grow, and that are begun anew, once, where the disk errs."""

from contextlib import suppress
from threading import Lock

from genpipe.core.errors import DiskFull, Fenced, StoreError
from genpipe.edges.appender import Appender
from genpipe.edges.files import Files, blaming, replace_atomically


class ListFile:
    """One list of a run folder. Added to by one thread, and synced by one, which may be another.

    A sync or a write that failed is never tried again on the same file: what is not known to be durable is
    kept in memory, and is written, after all that is, to a new file that takes the old one's name. That is
    done once; a second failure is an error. A sync that met a full disk is not counted.
    """

    def __init__(self, files: Files, appender: Appender, *, may_lag: bool) -> None:
        """Go on with a list.

        Args:
            files: the disk.
            appender: the file, opened; all that it holds is durable.
            may_lag: it can be made again from the shards, so that a full disk is no error: what finds no
                room is kept, and written with what comes next.
        """
        self._files = files
        self._appender = appender
        self._may_lag = may_lag
        # What is not written yet, and what was written and is not known to be durable.
        self._waiting = self._unsynced = b""
        # The file must not be written to or synced any more.
        self._is_spoiled = False
        # For another reason than want of room, and whether that has been met before.
        self._has_erred = self._was_replaced = False
        self._lock = Lock()

    def add(self, data: bytes) -> None:
        """Put ``data`` at the end; it is durable only after :meth:`sync`.

        Raises:
            DiskFull: there is no room for it, and the list may not lag; it is as it was.
            StoreError: what was written is not what the file holds.
        """
        with self._lock:
            self._waiting += data
            self._write()

    def sync(self) -> None:
        """Make all that was added durable, but for what a list that may lag found no room for.

        Raises:
            DiskFull: there is no room, and the list may not lag; what was not durable is forgotten.
            StoreError: it may not be durable, and a new file was no help.
        """
        with self._lock:
            self._write()
        if not self._is_spoiled:
            try:
                self._appender.sync()
            except StoreError as error:
                self._spoil(error)
            else:
                with self._lock:
                    unsynced_bytes = self._appender.size_bytes - self._appender.durable_bytes
                    self._unsynced = self._unsynced[len(self._unsynced) - unsynced_bytes :]
                return
        with self._lock:
            self._replace()

    def close(self) -> None:
        """Give the file back; nothing is written. May be called twice."""
        self._appender.close()

    def _write(self) -> None:
        if not self._waiting or self._is_spoiled:
            return
        try:
            self._appender.append(self._waiting)
        except DiskFull:
            if not self._may_lag:
                self._waiting = b""
                raise
        except Fenced:
            raise
        except StoreError:
            self._is_spoiled = self._has_erred = True
        else:
            self._unsynced, self._waiting = self._unsynced + self._waiting, b""

    def _spoil(self, error: StoreError) -> None:
        """Write no more to the file, and cut off what a sync by the next process could not vouch for."""
        with self._lock:
            self._is_spoiled = True
            self._has_erred |= not isinstance(error, DiskFull)
            with suppress(StoreError):
                self._appender.forget()

    def _replace(self) -> None:
        path = self._appender.path
        if self._has_erred and self._was_replaced:
            raise StoreError(
                f"{path} could not be made durable, and a new file in its place could not either; see to the "
                "disk and start the same command again: what was durable before is kept"
            )
        try:
            with blaming(path, "write anew"):
                durable = self._files.read(path)[: self._appender.durable_bytes]
                replace_atomically(self._files, path, durable + self._unsynced + self._waiting)
            appender = Appender(self._files, path, new=False)
        except DiskFull:
            if self._may_lag:
                return
            self._waiting = self._unsynced = b""
            raise
        self._appender.close()
        self._appender = appender
        self._waiting = self._unsynced = b""
        self._was_replaced |= self._has_erred
        self._is_spoiled = self._has_erred = False
