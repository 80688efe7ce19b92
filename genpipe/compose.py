"""Builds a run out of its parts, carries it through, and says how it ended."""

import asyncio
import copy
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path

from genpipe import __version__
from genpipe.config import Settings
from genpipe.core import wording
from genpipe.core.errors import ConfigError, Fenced, GenpipeError, ResumeMismatch, ServerFault
from genpipe.core.progress import Restored
from genpipe.core.values import Chunk
from genpipe.driving import Drive, Parts
from genpipe.edges.connections import Names
from genpipe.edges.console import Display
from genpipe.edges.discovery import Served, one_model, survey
from genpipe.edges.files import OsFiles
from genpipe.edges.health import RunModel
from genpipe.edges.limits_file import LIMITS, clear, described
from genpipe.edges.process import check_local_ports, raise_file_limit
from genpipe.edges.prompts.checking import check_files, has_records
from genpipe.edges.prompts.dialects import Dialect
from genpipe.edges.prompts.source import FileSource
from genpipe.edges.record import Wall
from genpipe.edges.run_folder import RunFolder, RunIdentity, recorded_run
from genpipe.edges.s3.place import Place
from genpipe.edges.sglang import Monotonic, SglangTransport
from genpipe.edges.store import Store
from genpipe.edges.store_thread import StoreThread
from genpipe.ending import Ending
from genpipe.inputs import Inputs
from genpipe.offsite import Offsite
from genpipe.opening import opened, tell
from genpipe.signals import Signals
from genpipe.wiring import asks_versions, dialect_of, endpoints_of, transport_of

BAD_LINES_SHOWN_MAX = 1000


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
    signals = Signals(display, grace_s=settings.request.grace_s, upload_s=settings.s3.stop_s)
    stack = AsyncExitStack()
    this = _Run(settings, display, signals, stack)
    signals.install()
    try:
        async with stack:
            return await this.carry_out(retry_failed=retry_failed, allow_changed=allow_changed)
    except asyncio.CancelledError:
        if this.trouble is not None and this.drive is None:
            raise this.trouble from None
        if signals.first is None:
            raise
        when = "while the input was verified" if this.begun else "before anything was sent"
        message = f"stopped by {signals.first.name} {when}"
        return Ending(exit_code=128 + signals.first, message=message, progress=None)
    finally:
        signals.remove()


class _Peeked:
    """A source whose first chunk was looked at."""

    def __init__(self, source: FileSource, first: Chunk) -> None:
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


def _last_fact(folder: RunFolder, name: str) -> str | None:
    """What the servers said of their model when the run went on last."""
    said = (entry.get(name) for entry in reversed(folder.segments))
    return next((fact for fact in said if isinstance(fact, str)), None)


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
        self.out = Path(settings.output.dir or "")
        self.endpoints = endpoints_of(settings)
        self.names = Names()
        stack.push_async_callback(self.names.close)
        # What each server said that it serves, or why it said nothing; and the one model of them all.
        self.answers: dict[str, Served | ServerFault] | None = None
        self.served: Served | None = None
        self.recorded_path: str | None = None
        self.offsite: Offsite | None = None
        # Set when whoever waits in a thread is to give up.
        self.ended = threading.Event()
        self.inputs = Inputs(settings, self.out, self.ended)
        # What is found wrong beside the run itself, perhaps before there is a drive to tell.
        self.trouble: GenpipeError | None = None
        self.drive: Drive | None = None
        task = asyncio.current_task()
        assert task is not None
        self.task = task

    @property
    def begun(self) -> bool:
        """Whether something may have been sent."""
        return self.drive is not None

    async def carry_out(self, *, retry_failed: bool, allow_changed: bool) -> Ending:
        """All of it."""
        checking = asyncio.to_thread(self._check)
        dialect = await opened(checking, lambda _: None, on_cancel=self.ended.set)
        began_with = recorded_run(OsFiles(), self.out)
        await self._open_offsite()
        if began_with is None and self.offsite is not None:
            began_with = await asyncio.to_thread(self.offsite.recorded_run)
        model = self.settings.request.model
        if model is None and began_with is not None and not allow_changed:
            model = began_with["settings"]["request"]["model"]
        if model is None:
            await self._survey(wait=True)
            assert self.served is not None
            model = self.served.name
        folder = await self._claim(model, allow_changed=allow_changed)
        store, store_thread = await self._open_store(folder, retry_failed=retry_failed)
        if self.offsite is not None:
            # Before inputs are copied and servers waited for: the lease is to be kept, and what is left over
            # may go up meanwhile.
            await self.offsite.begin(folder, store.unsent)
            self.signals.on_first = self.offsite.snapshot
        files = await self._fetch_inputs(dialect)
        source = self._source_of(folder, files, dialect, store)
        first = await source.read(sum(server.concurrency for server in self.settings.servers))
        self.recorded_path = _last_fact(folder, "model_path")
        if self.answers is None and (first.prompts or not first.exhausted):
            # Only now is it known that servers are needed at all. Those that cannot be asked are left to the
            # scheduler, if it can tell later whether they serve the run's model.
            can_tell = self.recorded_path is not None or self.settings.request.model is not None
            await self._survey(wait=not can_tell)
        if not allow_changed:
            named = model if self.settings.request.model is None else None
            self._compare_models(_last_fact(folder, "served_model") or named)
        restored = self._restored(folder, store, retry_failed=retry_failed)
        transport = await self._open_transport(model)
        parts = Parts(
            settings=self.settings,
            display=self.display,
            signals=self.signals,
            clock=self.clock,
            wall=self.wall,
            folder=folder,
            store=store_thread,
            source=_Peeked(source, first),
            transport=transport,
            served=self.served,
            starting=self._starting(),
            restored=restored,
            offsite=self.offsite,
        )
        self.drive = Drive(parts, self.trouble)
        return await self.drive.carry_out()

    def _restored(self, folder: RunFolder, store: Store, *, retry_failed: bool) -> Restored:
        """What earlier segments left behind, which is told."""
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
        return restored

    def _check(self) -> Dialect:
        """Everything that can be wrong before anything is touched."""
        settings = self.settings
        if not settings.input.paths:
            raise ConfigError("no input: name files with --prompts, or input.paths in the config")
        if not settings.servers:
            raise ConfigError("no servers: name them with --servers, or [[servers]] in the config")
        if settings.output.dir is None:
            raise ConfigError("no run folder: name it with --out, or output.dir in the config")
        dialect = dialect_of(settings)
        self.inputs.look()
        if not self.inputs.are_copied:
            self._scan(self.inputs.local(), dialect)
        limits = {server.url: server.concurrency for server in settings.servers}
        check_local_ports(limits)
        raise_file_limit(sum(limits.values()))
        return dialect

    def _scan(self, files: list[Path], dialect: Dialect) -> None:
        """Refuse an input without records; where it is wanted, also one with bad lines."""
        if not has_records(files):
            names = ", ".join(self.settings.input.paths)
            raise ConfigError(f"no prompts in {names}: the input is empty")
        if self.settings.input.on_bad_line == "fail":
            report = check_files(files, dialect, bad_lines_max=BAD_LINES_SHOWN_MAX)
            for bad in report.bad_lines:
                self.display.note(f"{bad.file}:{bad.line}: {bad.reason}")
            if report.bad_count:
                raise ConfigError(
                    f"{report.bad_count} of {report.records} records cannot be sent, the first in "
                    f"{report.bad_lines[0].file}:{report.bad_lines[0].line}: mend them, or set "
                    "input.on_bad_line=skip"
                )

    async def _open_offsite(self) -> None:
        """Connect to S3, if that is wanted; a wrong setting is found before anything is asked or sent."""
        s3 = self.settings.s3
        if s3.uri is None:
            if (place := Place.read(self.out, OsFiles())) is not None:
                self._warn(f"this run also goes to {place.uri}: without --s3 nothing is uploaded")
            return
        opening = asyncio.to_thread(Offsite, s3, s3.uri, self.display, self.ended, on_fenced=self._on_fenced)
        self.offsite = await opened(opening, Offsite.give_up, on_cancel=self.ended.set)
        self.stack.push_async_callback(self.offsite.close, self.signals)

    async def _survey(self, *, wait: bool) -> None:
        """Ask the servers what they serve; with ``wait``, until one of them says it."""
        note, versions = self.display.note, asks_versions(self.settings)
        self.answers = await survey(self.endpoints, wait=wait, note=note, names=self.names, versions=versions)
        self.served = one_model(
            self.answers,
            configured=self.settings.request.model,
            any_model=self.settings.start.any_model,
            note=note,
        )

    def _starting(self) -> frozenset[int]:
        """Servers that could not be asked."""
        return frozenset(
            position
            for position, endpoint in enumerate(self.endpoints)
            if isinstance((self.answers or {}).get(endpoint.url), ServerFault)
        )

    def _run_model(self) -> RunModel:
        """What a server that joins must serve: as those that are there, or as an earlier segment had it."""
        path = self.served.path if self.served is not None else self.recorded_path
        return RunModel(path=path, is_compared=not self.settings.start.any_model)

    def _compare_models(self, before: str | None) -> None:
        """Hold what is served now against what was served before, where that is known."""
        if self.served is None:
            return
        is_other = before is not None and before != self.served.name
        if is_other and not self.settings.start.any_model:
            raise ResumeMismatch(
                f"the run in {self.out} began with other settings: request.model was {before!r}, and the "
                f"servers now serve {self.served.name!r}. Serve that model again, give another output "
                "folder, or add --allow-changed"
            )
        if None not in (self.recorded_path, self.served.path) and self.recorded_path != self.served.path:
            self._warn(
                f"the servers served {self.recorded_path} when this run went on before, and now they serve "
                f"{self.served.path}: stop it if that is another model"
            )

    async def _claim(self, model: str, *, allow_changed: bool) -> RunFolder:
        """Claim the run folder, in a thread: where another may have it, that may take a while."""
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
            pause=self._pause,
            elsewhere=self.offsite.remote if self.offsite is not None else None,
        )
        folder = await opened(claim, RunFolder.close, on_cancel=self.ended.set)
        self.stack.callback(folder.close)
        if old := await asyncio.to_thread(clear, folder.path / LIMITS):
            self.display.note(
                f"the limits that an earlier segment was told hold no more ({described(old)}): this one "
                "begins with the servers as configured"
            )
        if self.offsite is not None:
            # The prefix is given back before the folder is: whoever is next finds both free.
            self.stack.push_async_callback(self.offsite.close, self.signals)
        return folder

    async def _fetch_inputs(self, dialect: Dialect) -> list[Path]:
        """The input as local files; those in S3 are copied into the run folder first."""
        if not self.inputs.are_copied:
            return self.inputs.local()
        fetching = asyncio.to_thread(self.inputs.fetch, self.display.note)
        files = await opened(fetching, lambda _: None, on_cancel=self.ended.set)
        await asyncio.to_thread(self._scan, files, dialect)
        return files

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
            on_sealed=self.offsite.sealed if self.offsite is not None else None,
            pool=pool,
        )
        # While a recovery is at work the folder must stay ours, whoever wants to stop.
        store = await opened(opening, Store.close)
        thread = StoreThread(store)
        self.stack.push_async_callback(thread.close)
        return store, thread

    def _source_of(self, folder: RunFolder, files: list[Path], dialect: Dialect, store: Store) -> FileSource:
        loop = asyncio.get_running_loop()
        source = FileSource(
            files=files,
            dialect=dialect,
            index_path=folder.path / "input.idx",
            done=store.skip,
            warn=self._warn,
            on_mismatch=lambda error: tell(loop, self._fail, error),
        )
        self.stack.callback(source.close)
        return source

    def _fail(self, error: GenpipeError) -> None:
        self.trouble = self.trouble or error
        if self.drive is not None:
            self.drive.fail(error)

    def _on_fenced(self, error: Fenced) -> None:
        self._fail(error)
        if self.drive is None:
            # A server may be waited for, for hours.
            self.task.cancel()

    async def _open_transport(self, model: str) -> SglangTransport:
        transport = transport_of(
            self.settings,
            self.endpoints,
            model=model,
            run_model=self._run_model(),
            served=self.answers or {},
            names=self.names,
            warn=self._warn,
        )
        return await self.stack.enter_async_context(transport)

    def _pause(self, seconds: float) -> None:
        if self.ended.wait(seconds):
            raise Fenced(f"stopped while waiting for {self.out}")

    def _now_text(self) -> str:
        return self.wall.text(self.clock.now_s())

    def _warn(self, text: str) -> None:
        self.display.note(f"warning: {text}")
