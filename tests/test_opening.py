"""What a thread opens is never left open."""

import asyncio
import threading

import pytest

from genpipe.opening import opened


@pytest.mark.parametrize("cancels", [1, 3])
def test_what_a_thread_opens_is_closed_before_a_cancel_goes_through(cancels):
    may_open = threading.Event()
    closed: list[str] = []
    told: list[int] = []

    def opening():
        assert may_open.wait(10.0)
        return "a folder"

    async def main():
        task = asyncio.ensure_future(
            opened(asyncio.to_thread(opening), closed.append, on_cancel=lambda: told.append(1))
        )
        for _ in range(cancels):
            await asyncio.sleep(0.01)
            task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
        may_open.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())

    assert closed == ["a folder"]
    assert told == [1]


def test_what_is_opened_undisturbed_stays_open():
    closed: list[str] = []

    async def main():
        return await opened(asyncio.to_thread(lambda: "a folder"), closed.append)

    assert asyncio.run(main()) == "a folder"
    assert closed == []
