"""An event loop whose time jumps: a sleep of a week costs nothing, and a wait for nothing is an error."""

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """The stdlib's loop; where it would wait for a timer, the clock is put forward instead."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._virtual_s

    def jump(self, seconds: float) -> None:
        self._virtual_s += seconds

    def timers(self) -> list[asyncio.TimerHandle]:
        """Timers that are armed."""
        return [handle for handle in self._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]  # no other way to see them


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if found or timeout == 0:
            return found
        assert timeout is not None, "every task waits, and nothing will ever happen"
        self._loop.jump(max(0.0, timeout))
        return []


class VirtualClock:
    """The run's clock over a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now_s(self) -> float:
        return self._loop.time()


def run_virtual(main: Callable[[VirtualLoop], Awaitable[Any]]) -> Any:
    """Run ``main(loop)``; afterwards no task and no timer is left."""

    async def outer() -> Any:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        result = await main(loop)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks that survived: {left}"
        assert not loop.timers(), f"timers that survived: {loop.timers()}"
        return result

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(outer())
