"""Builds a run out of its parts, carries it through, and says how it ended."""

import asyncio
import contextlib
import copy
import random
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from genpipe import __version__
from genpipe.config import Settings
from genpipe.core import wording
from genpipe.core.errors import ConfigError, Fenced, GenpipeError, ResumeMismatch, StoreError
from genpipe.core.flow import Core
from genpipe.core.progress import Progress, Restored
from genpipe.core.values import Chunk
from genpipe.driver import Driver, finish
from genpipe.edges import prompts
from genpipe.edges.console import Display
from genpipe.edges.dialects import Dialect
from genpipe.edges.discovery import find_model
from genpipe.edges.files import OsFiles
from genpipe.edges.process import raise_file_limit
from genpipe.edges.record import Wall
from genpipe.edges.report import Report
from genpipe.edges.run_folder import RunFolder, RunIdentity, recorded_run
from genpipe.edges.sglang import Monotonic, SglangTransport
from genpipe.edges.store import Store
from genpipe.edges.store_thread import StoreThread
from genpipe.signals import Signals
from genpipe.wiring import dialect_of, endpoints_of, flow_settings_of, specs_of

T = TypeVar("T")

EXIT_DONE, EXIT_SOME_FAILED, EXIT_GUARD = 0, 1, 3

BAD_LINES_SHOWN_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended.

    Attributes:
        exit_code: 0 done, 1 done with failures, 3 stopped by a guard, 130 or 143 stopped by a signal.
        message: one line for people.
        progress: the last snapshot, or None where nothing was begun.
    """

    exit_code: int
    message: str
    progress: dict[str, Any] | None


async def run(
    settings: Settings, *, display: Display, retry_failed: bool = False, allow_changed: bool = False
) -> Ending:
    """Start or resume a run, and carry it to its end.

    Args:
        settings: what to do.
        display: shows how it goes.
        retry_failed: ask prompts again that failed for good.
        allow_changed: go on though settings that shape an answer are not those the run began with.

    Raises:
        GenpipeError: the run could not begin or go on; all answers that had come are on disk.
        asyncio.CancelledError: it was cancelled from outside; likewise.
    """
    signals = Signals(settings.request.grace_s, display)
    stack = AsyncExitStack()
    this = _Run(settings, display, signals, stack)
    signals.install()
    try:
        async with stack:
            return await this.carry_out(retry_failed=retry_failed, allow_changed=allow_changed)
    except asyncio.CancelledError:
        if signals.first is None:
            raise
        when = "while the input was verified" if this.begun else "before anything was sent"
        message = f"stopped by {signals.first.name} {when}"
        return Ending(exit_code=128 + signals.first, message=message, progress=None)
    finally:
        signals.remove()


class _Peeked:
    """A source whose first chunk was looked at."""

    def __init__(self, source: prompts.JsonlSource, first: Chunk) -> None:
        self._source = source
        self._first: Chunk | None = first

    @property
    def total(self) -> int | None:
        return self._source.total

    async def read(self, count: int) -> Chunk:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return await self._source.read(count)

    async def verify_rest(self) -> None:
        await self._source.verify_rest()


class _Run:
    """One call of :func:`run`, step by step; what it opens, its stack closes."""

    def __init__(self, settings: Settings, display: Display, signals: Signals, stack: AsyncExitStack) -> None:
        self.settings = settings
        self.display = display
        self.signals = signals
        self.stack = stack
        self.clock = Monotonic()
        # The one look at the wall clock: from here on the run's own clock counts.
        self.wall = Wall(wall_s=time.time(), run_s=self.clock.now_s())
        self.files = [Path(path) for path in settings.input.paths]
        self.out = Path(settings.output.dir or "")
        self.endpoints = endpoints_of(settings)
        self.rng = random.Random()
        # What the scan of the input found, perhaps before there was a driver to tell.
        self.mismatch: ConfigError | None = None
        self.store: Store | None = None
        self.begun = False

    async def carry_out(self, *, retry_failed: bool, allow_changed: bool) -> Ending:
        """All of it."""
        dialect = await asyncio.to_thread(self._check)
        began_with = recorded_run(OsFiles(), self.out)
        model = self.settings.request.model
        served: str | None = None
        if model is None and began_with is not None and not allow_changed:
            model = began_with["settings"]["request"]["model"]
        if model is None:
            model = served = await self._find_model()
        folder = await self._claim(model, allow_changed=allow_changed)
        store, store_thread = await self._open_store(folder, retry_failed=retry_failed)
        source = self._open_source(folder, dialect, store)
        first = await source.read(sum(server.concurrency for server in self.settings.servers))
        if served is None and (first.prompts or not first.exhausted):
            # Only now is it known that servers are needed at all.
            self._compare_models(model, await self._find_model())
        restored = Restored(
            done=store.done.count,
            failed=0 if retry_failed else store.failed_for_good_count,
            sums=copy.deepcopy(store.sums),
        )
        if restored.done or restored.failed:
            self.display.note(
                f"resuming run {folder.run_id[:8]} in {self.out}: {wording.number(restored.done)} done, "
                f"{wording.number(restored.failed)} failed for good"
            )
        transport = await self._open_transport(model)
        return await self._drive(folder, store_thread, _Peeked(source, first), transport, restored)

    def _check(self) -> Dialect:
        """Everything that can be wrong before anything is touched."""
        settings = self.settings
        if not self.files:
            raise ConfigError("no input: name files with --prompts, or input.paths in the config")
        if not settings.servers:
            raise ConfigError("no servers: name them with --servers, or [[servers]] in the config")
        if settings.output.dir is None:
            raise ConfigError("no run folder: name it with --out, or output.dir in the config")
        dialect = dialect_of(settings)
        if not prompts.has_records(self.files):
            names = ", ".join(map(str, self.files))
            raise ConfigError(f"no prompts in {names}: the input is empty")
        if settings.input.on_bad_line == "fail":
            report = prompts.check_files(self.files, dialect, bad_lines_max=BAD_LINES_SHOWN_MAX)
            for bad in report.bad_lines:
                self.display.note(f"{bad.file}:{bad.line}: {bad.reason}")
            if report.bad_count:
                raise ConfigError(
                    f"{report.bad_count} of {report.records} records cannot be sent, the first in "
                    f"{report.bad_lines[0].file} line {report.bad_lines[0].line}: mend them, or set "
                    "input.on_bad_line=skip"
                )
        raise_file_limit(sum(server.concurrency for server in settings.servers))
        return dialect

    async def _find_model(self) -> str:
        return await find_model(
            self.endpoints, configured=self.settings.request.model, note=self.display.note
        )

    def _compare_models(self, before: str, now: str) -> None:
        if self.settings.request.model is None and before != now:
            raise ResumeMismatch(
                f"the run in {self.out} began with other settings: request.model was {before!r}, and the "
                f"servers now serve {now!r}. Serve that model again, or give another output folder"
            )

    async def _claim(self, model: str, *, allow_changed: bool) -> RunFolder:
        """Claim the run folder, in a thread: where the file system has no locks, that may take a while."""
        ended = threading.Event()

        def pause(seconds: float) -> None:
            if ended.wait(seconds):
                raise Fenced(f"stopped while waiting for {self.out}")

        claim = asyncio.to_thread(
            RunFolder.open,
            self.out,
            RunIdentity(
                inputs=self.settings.input.paths,
                settings=self.settings.shape(model),
                shard_records=self.settings.output.shard_records,
                version=__version__,
            ),
            OsFiles(),
            allow_changed=allow_changed,
            now_text=self._now_text(),
            warn=self._warn,
            pause=pause,
        )
        folder = await _opened(claim, RunFolder.close, on_cancel=ended.set)
        self.stack.callback(folder.close)
        return folder

    async def _open_store(self, folder: RunFolder, *, retry_failed: bool) -> tuple[Store, StoreThread]:
        pool = StoreThread.make_pool()
        self.stack.callback(pool.shutdown)
        opening = asyncio.to_thread(
            Store.open,
            folder.path,
            OsFiles(),
            shard_records=folder.shard_records,
            wall=self.wall,
            warn=self._warn,
            settings=folder.settings_mark,
            retry_failed=retry_failed,
            epoch=folder.epoch,
            guard=folder.check_still_mine,
            pool=pool,
        )
        # While a recovery is at work the folder must stay ours, whoever wants to stop.
        self.store = store = await _opened(opening, Store.close)
        thread = StoreThread(store)
        self.stack.push_async_callback(thread.close)
        return store, thread

    def _open_source(self, folder: RunFolder, dialect: Dialect, store: Store) -> prompts.JsonlSource:
        loop = asyncio.get_running_loop()
        source = prompts.JsonlSource(
            files=self.files,
            dialect=dialect,
            index_path=folder.path / "input.idx",
            done=store.skip,
            warn=self._warn,
            on_mismatch=lambda error: _tell(loop, self._on_mismatch, error),
        )
        self.stack.callback(source.close)
        return source

    def _on_mismatch(self, error: ConfigError) -> None:
        self.mismatch = error
        if self.signals.driver is not None:
            self.signals.driver.fail(error)

    async def _open_transport(self, model: str) -> SglangTransport:
        request = self.settings.request
        transport = SglangTransport(
            self.endpoints,
            model=model,
            members={**request.sampling, **request.extra_body},
            timeout_s=request.timeout_s,
        )
        return await self.stack.enter_async_context(transport)

    async def _drive(
        self,
        folder: RunFolder,
        store: StoreThread,
        source: _Peeked,
        transport: SglangTransport,
        restored: Restored,
    ) -> Ending:
        """The run itself."""
        if self.mismatch is not None:
            raise self.mismatch
        self.begun = True
        began_s = self.clock.now_s()
        started_at = self._now_text()
        folder.start_segment(started_at, {"version": __version__, "servers": len(self.endpoints)})
        core = Core(flow_settings_of(self.settings), specs_of(self.settings), self.rng, began_s)
        facts = {"run_id": folder.run_id, "segment": folder.segment, "started_at": started_at}
        progress = Progress(restored, began_s=began_s)
        report = Report(
            folder.path,
            progress,
            total=lambda: source.total,
            facts=facts,
            wall=self.wall,
            display=self.display,
        )
        driver = Driver(
            core, source=source, transport=transport, store=store, clock=self.clock, reporter=report
        )
        state, trouble, is_ours = "failed", None, True
        self.signals.driver = driver
        try:
            await driver.run()
            if self.mismatch is not None:
                raise self.mismatch
            if core.complete:
                # Only now is it known that the answers belong to the input that the run began with. All of
                # them are on disk, so that a signal may end the wait.
                self.signals.driver = None
                await source.verify_rest()
                self.signals.driver = driver
            if not self.signals.hurried:
                await store.seal_last()
            state = "done" if core.complete else "stopped" if core.refusal else "interrupted"
        except asyncio.CancelledError:
            state = "interrupted"
            raise
        except GenpipeError as error:
            trouble, is_ours = str(error), not isinstance(error, Fenced)
            raise
        finally:
            now_s = self.clock.now_s()
            # This takes a file's sync and no more; nothing else is left for the loop to do.
            last = report.close(core, now_s, state=state, last_error=trouble, is_ours=is_ours)
            # Where the disk is what failed, this fails too, and the first error is the one to be told.
            with contextlib.suppress(StoreError):
                folder.check_still_mine()
                folder.end_segment(
                    self._now_text(),
                    why=state,
                    sums=core.sums.as_json(),
                    wall_s=now_s - began_s,
                    slot_seconds=core.books.owned_by_all_s(),
                )
        return self._ending(core, last)

    def _ending(self, core: Core, last: dict[str, Any]) -> Ending:
        done, failed = wording.number(last["completed"]), last["failed"]
        total = wording.number(last["total"])
        took = wording.duration(last["elapsed_s"])
        if core.complete:
            message = f"done: {done} of {total} prompts answered, in {took}"
            if failed:
                message += f"; {wording.number(failed)} failed, listed in {self.out / 'failed.jsonl'}"
                for_good = self.store.failed_for_good_count if self.store is not None else 0
                if for_good:
                    message += f" ({wording.number(for_good)} for good: only --retry-failed asks them again)"
            code = EXIT_SOME_FAILED if failed else EXIT_DONE
        elif core.refusal:
            code = EXIT_GUARD
            message = f"stopped by guards.refused_share: {core.refusal}; {done} prompts answered"
        else:
            assert self.signals.first is not None
            code = 128 + self.signals.first
            message = (
                f"stopped by {self.signals.first.name}: {done} of {total} prompts done and on disk; the same "
                "command goes on from there"
            )
        return Ending(exit_code=code, message=message, progress=last)

    def _now_text(self) -> str:
        return self.wall.text(self.clock.now_s())

    def _warn(self, text: str) -> None:
        self.display.note(f"warning: {text}")


async def _opened(
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


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[ConfigError], None], error: ConfigError) -> None:
    """Call on the loop's thread, if the loop is still there."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, error)
