"""Carries a run that was put together through to its end."""

import asyncio
import contextlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from genpipe import __version__
from genpipe.config import Settings
from genpipe.core.errors import Fenced, GenpipeError, StoreError
from genpipe.core.flow import Core
from genpipe.core.ports import Source
from genpipe.core.progress import Progress, Restored
from genpipe.driver import Driver
from genpipe.edges.console import Display
from genpipe.edges.discovery import Served
from genpipe.edges.limits_file import LIMITS, Limits, Watcher
from genpipe.edges.record import Wall
from genpipe.edges.report import Report
from genpipe.edges.run_folder import RunFolder
from genpipe.edges.sglang import Monotonic, SglangTransport
from genpipe.edges.store_thread import StoreThread
from genpipe.ending import Ending, Leftover, ending
from genpipe.live_limits import LiveLimits
from genpipe.offsite import Offsite
from genpipe.opening import tell
from genpipe.signals import Signals
from genpipe.wiring import endpoints_of, flow_settings_of, specs_of


class VerifiedSource(Source, Protocol):
    """A source that can also say whether the whole input is what the run began with."""

    async def verify_rest(self) -> None:
        """Wait for that; see :meth:`genpipe.edges.prompts.source.FileSource.verify_rest`."""
        ...


@dataclass(slots=True, kw_only=True)
class Parts:
    """What a run is carried through with. Whoever opened them closes them.

    Attributes:
        settings: what to do.
        display: shows how it goes.
        signals: what was asked from outside.
        clock: the run's clock.
        wall: the process's anchor of the wall clock.
        folder: the run folder, claimed.
        store: where records become durable.
        source: where prompts come from.
        transport: how they reach servers.
        served: the model of the servers that could be asked, or None.
        starting: positions of servers that could not be asked yet.
        restored: what earlier segments left behind.
        offsite: S3's part, or None.
    """

    settings: Settings
    display: Display
    signals: Signals
    clock: Monotonic
    wall: Wall
    folder: RunFolder
    store: StoreThread
    source: VerifiedSource
    transport: SglangTransport
    served: Served | None
    starting: frozenset[int]
    restored: Restored
    offsite: Offsite | None


class Drive:
    """One run from its first request to its last upload. :meth:`carry_out` may be called once."""

    def __init__(self, parts: Parts, trouble: GenpipeError | None) -> None:
        """Prepare.

        Args:
            parts: what it is made of.
            trouble: what was found wrong already, or None.
        """
        self._parts = parts
        self._trouble = trouble
        self._driver: Driver | None = None
        self._worked_until_s: float | None = None

    def fail(self, error: GenpipeError) -> None:
        """End the run with this error, met outside of it: perhaps before it begins, or at its very end."""
        self._trouble = self._trouble or error
        if self._driver is not None:
            self._driver.fail(error)

    async def carry_out(self) -> Ending:
        """The run itself.

        Raises:
            GenpipeError: it could not go on; all answers that had come are on disk.
            asyncio.CancelledError: it was cancelled from outside; likewise.
        """
        parts = self._parts
        self._raise_trouble()
        began_s = parts.clock.now_s()
        started_at = parts.wall.text(began_s)
        parts.folder.start_segment(started_at, self._facts())
        core = Core(
            flow_settings_of(parts.settings),
            specs_of(parts.settings),
            random.Random(),
            began_s,
            starting=parts.starting,
        )
        core.quality.lengths.remember(parts.restored.sums.lengths)
        report = self._report(began_s, started_at)
        self._driver = Driver(
            core,
            source=parts.source,
            transport=parts.transport,
            store=parts.store,
            clock=parts.clock,
            reporter=report,
        )
        state, trouble, is_ours = "failed", None, True
        parts.signals.driver = self._driver
        try:
            await self._run(self._driver, core, report)
            state = "done" if core.complete else "stopped" if core.refusal else "interrupted"
        except asyncio.CancelledError:
            state = "interrupted"
            raise
        except GenpipeError as error:
            error = await self._with_uploads(error)  # the same, and more words
            trouble = str(error)
            # A folder that another driver has is not written to; one that lost its place in S3 alone is.
            is_ours = not isinstance(error, Fenced) or error is self._trouble
            raise error from None
        finally:
            now_s = parts.clock.now_s()
            # This takes a file's sync and no more; nothing else is left for the loop to do.
            last = report.close(
                core, now_s, state=state, worked_until_s=self._worked_until_s, last_error=trouble,
                is_ours=is_ours,
            )  # fmt: skip
            # Where the disk is what failed, this fails too, and the first error is the one to be told.
            with contextlib.suppress(StoreError):
                parts.folder.check_still_mine()
                parts.folder.end_segment(
                    parts.wall.text(now_s),
                    why=state,
                    sums=core.sums.as_json(),
                    wall_s=now_s - began_s,
                    slot_seconds=core.books.owned_by_all_s(),
                )
        return ending(
            core, last, Path(parts.settings.output.dir or ""), stopped_by=parts.signals.first,
            leftover=self._leftover(),
        )  # fmt: skip

    def _facts(self) -> dict[str, Any]:
        """What is worth keeping of this segment, beside its figures."""
        facts: dict[str, Any] = {"version": __version__, "servers": len(self._parts.settings.servers)}
        if (served := self._parts.served) is not None:
            facts |= {"served_model": served.name, "model_path": served.path}
        return facts

    def _report(self, began_s: float, started_at: str) -> Report:
        parts = self._parts
        folder = parts.folder
        return Report(
            folder.path,
            Progress(parts.restored, began_s=began_s, reconnects=parts.transport.reconnects),
            total=lambda: parts.source.total,
            facts={"run_id": folder.run_id, "segment": folder.segment, "started_at": started_at},
            wall=parts.wall,
            display=parts.display,
            s3=parts.offsite.state if parts.offsite is not None else None,
        )

    def _watch_limits(self, driver: Driver) -> Watcher:
        """Carry out what is written into ``limits.json``, since the folder was claimed."""
        parts = self._parts
        path = parts.folder.path / LIMITS
        live = LiveLimits(
            specs_of(parts.settings),
            endpoints_of(parts.settings),
            parts.transport,
            driver,
            parts.display.note,
        )
        loop = asyncio.get_running_loop()

        def on_change(wished: Limits) -> None:
            tell(loop, live.apply, wished)

        return Watcher(path, on_change, lambda text: parts.display.note(f"warning: {text}"))

    async def _run(self, driver: Driver, core: Core, report: Report) -> None:
        parts, signals = self._parts, self._parts.signals
        watcher = self._watch_limits(driver)
        try:
            await driver.run()
        finally:
            watcher.close()
        self._raise_trouble()
        if core.complete:
            # Only now is it known that the answers belong to the input that the run began with. All of them
            # are on disk, so that a signal may end the wait.
            signals.driver = None
            await parts.source.verify_rest()
            signals.driver = driver
        if not signals.hurried:
            await parts.store.seal_last()
        if parts.offsite is not None:
            signals.is_uploading = True
            # What is waited for from here on is no server's time, and must not thin out the rates.
            self._worked_until_s = worked_until_s = parts.clock.now_s()
            await parts.offsite.drain(
                signals,
                lambda: report.publish(
                    core, parts.clock.now_s(), state="draining", worked_until_s=worked_until_s
                ),
            )
            self._raise_trouble()

    async def _with_uploads(self, error: GenpipeError) -> GenpipeError:
        """The same error; of one of the disk, with what is not in S3 after a last short wait."""
        offsite = self._parts.offsite
        if offsite is None or isinstance(error, Fenced) or not isinstance(error, StoreError):
            return error
        await offsite.drain(self._parts.signals, is_stopping=True)
        left = self._leftover().uploads_text()
        return type(error)(f"{error}{left}") if left else error

    def _raise_trouble(self) -> None:
        if self._trouble is not None:
            raise self._trouble

    def _leftover(self) -> Leftover:
        offsite = self._parts.offsite
        for_good = self._parts.store.failed_for_good_count
        if offsite is None:
            return Leftover(failed_for_good=for_good)
        return Leftover(
            failed_for_good=for_good,
            not_uploaded=tuple(offsite.missing()),
            uri=offsite.uri,
            trouble=offsite.state()["last_error"],
        )
