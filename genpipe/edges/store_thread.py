"""The store behind the core's port: its blocking work is done in threads of its own."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from genpipe.core.errors import StoreError
from genpipe.core.values import Group, Space
from genpipe.edges.store import EncodedGroup, Store

T = TypeVar("T")


class StoreThread:
    """A :class:`Store` behind the core's ``Store`` port: nothing of it is done on the event loop's thread.

    Groups are written in one thread, in the order in which they came. A group that comes while another is
    written is encoded in a second one meanwhile. A caller that is cancelled stops waiting; the step that it
    began is carried out to its end.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._under_way = 0
        self._encoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="genpipe-encode")
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="genpipe-store")

    @staticmethod
    def make_pool() -> ThreadPoolExecutor:
        """Threads for what a store does beside a commit; the caller shuts them down after the store."""
        return ThreadPoolExecutor(max_workers=2, thread_name_prefix="genpipe-seal")

    @property
    def failed_for_good_count(self) -> int:
        """See :attr:`Store.failed_for_good_count`."""
        return self._store.failed_for_good_count

    async def commit(self, group: Group) -> Space | None:
        """See :meth:`genpipe.core.ports.Store.commit`."""
        self._under_way += 1
        if self._under_way == 1:
            write = self._carry_out(lambda: self._write(self._store.encode(group)))
        else:
            encoded = self._encoder.submit(self._store.encode, group)
            write = self._carry_out(lambda: self._write(encoded.result()))
        try:
            return await write
        finally:
            self._under_way -= 1

    async def space(self) -> Space:
        """See :meth:`genpipe.core.ports.Store.space`."""
        return await self._carry_out(self._store.space)

    async def seal_last(self) -> None:
        """See :meth:`Store.seal_last`."""
        await self._carry_out(self._store.seal_last)

    async def close(self) -> None:
        """Wait for the step in progress, close the store and end the threads."""
        try:
            await self._carry_out(self._store.close)
        finally:
            # The last step has been done: this waits for the threads to end, and for no work.
            for executor in (self._encoder, self._writer):
                executor.shutdown(wait=True)

    def _write(self, encoded: EncodedGroup) -> Space | None:
        self._store.write(encoded)
        # The group is durable, whatever this says.
        with contextlib.suppress(StoreError):
            return self._store.space()
        return None

    async def _carry_out(self, step: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, step)
