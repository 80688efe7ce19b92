"""The parts of putting a run together that no whole run shows."""

import asyncio
import threading

import pytest

from genpipe.compose import _opened


@pytest.mark.parametrize("cancels", [1, 3])
def test_what_a_thread_opens_is_closed_before_a_cancel_goes_through(cancels):
    opened = threading.Event()
    closed: list[str] = []
    told: list[int] = []

    def opening():
        assert opened.wait(10.0)
        return "a folder"

    async def main():
        task = asyncio.ensure_future(
            _opened(asyncio.to_thread(opening), closed.append, on_cancel=lambda: told.append(1))
        )
        for _ in range(cancels):
            await asyncio.sleep(0.01)
            task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
        opened.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())

    assert closed == ["a folder"]
    assert told == [1]


def test_what_is_opened_undisturbed_stays_open():
    closed: list[str] = []

    async def main():
        return await _opened(asyncio.to_thread(lambda: "a folder"), closed.append)

    assert asyncio.run(main()) == "a folder"
    assert closed == []
