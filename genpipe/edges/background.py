"""Work in other threads: where there is no pool for it, it is done at once."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from threading import Thread
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Job(Generic[T]):
    """One piece of work that was handed over."""

    def __init__(self, future: "Future[T]") -> None:
        self._future = future

    @property
    def is_over(self) -> bool:
        """Whether :meth:`result` would return, or raise, at once."""
        return self._future.done()

    def wait(self) -> None:
        """Return once it is over, however it ended."""
        wait([self._future])

    def result(self) -> T:
        """What it returned, once it is over; raises what it raised."""
        return self._future.result()


class Background:
    """Hands work to a pool of threads; without one, does it in the caller's thread, in order."""

    def __init__(self, pool: Executor | None) -> None:
        self._pool = pool

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Job[T]:
        """Have ``work`` done."""
        if self._pool is not None:
            return Job(self._pool.submit(work, *args, **kwargs))
        future: Future[T] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:  # the caller meets it where it asks for the result
            future.set_exception(error)
        return Job(future)


def join_until(threads: Sequence[Thread], deadline_s: float) -> None:
    """Wait for these, as far as they were started, until then by the monotonic clock."""
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, deadline_s - time.monotonic()))
