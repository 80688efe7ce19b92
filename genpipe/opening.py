"""What is opened, or told, across threads."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from genpipe.core.errors import GenpipeError
from genpipe.driver import finish

T = TypeVar("T")


async def opened(
    opening: Coroutine[Any, Any, T],
    close: Callable[[T], None],
    *,
    on_cancel: Callable[[], None] | None = None,
) -> T:
    """What is opened in a thread, which cannot be cancelled: if this is, it is closed once it is open."""
    task = asyncio.ensure_future(opening)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()

        async def give_back() -> None:
            with contextlib.suppress(GenpipeError):
                close(await task)

        await finish(give_back())
        raise


def tell(loop: asyncio.AbstractEventLoop, call: Callable[[T], None], what: T) -> None:
    """Call on the loop's thread, if the loop is still there."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, what)
