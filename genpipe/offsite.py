"""S3's part in a run: the probe, the claim of the prefix, and the uploads."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from genpipe.config import S3, load
from genpipe.config_types import HttpUrl
from genpipe.core.errors import ConfigError, Fenced, StoreError
from genpipe.edges.console import Display
from genpipe.edges.files import OsFiles
from genpipe.edges.run_folder import RunFolder
from genpipe.edges.s3.objects import Objects
from genpipe.edges.s3.place import Place
from genpipe.edges.s3.remote import Remote
from genpipe.edges.s3.troubles import Troubles
from genpipe.edges.s3.uploader import Uploader, UploadSettings
from genpipe.edges.shards import Entry
from genpipe.opening import tell
from genpipe.signals import Signals

SCHEME = "s3://"

LOOK_S = 10.0
"""Limit of one wait for the store where a run is only looked at (seconds)."""

LOOK_EVERY_S = 0.5
"""How often the end of a run looks whether all is uploaded, beside being told so (seconds)."""

CLOSE_S, STOPPED_CLOSE_S, HURRIED_CLOSE_S = 10.0, 3.0, 1.0
"""Longest that the last snapshots and the lease's release may take: by itself, after a signal, after a
second one (seconds)."""


def is_offsite(text: str) -> bool:
    """Whether this names a place in S3."""
    return text.startswith(SCHEME)


def reading_place(uri: str, overrides: Sequence[str]) -> Place:
    """A run in S3 that is only looked at.

    Args:
        uri: ``s3://bucket/prefix``.
        overrides: ``s3.key=value``, as for a run.

    Raises:
        ConfigError: one of them is no such.
    """
    s3 = load(overrides=overrides, s3=uri).s3
    assert s3.uri is not None
    return place_of(s3, s3.uri)


def open_objects(place: Place) -> Objects:
    """What is at a place; nothing is asked of the store yet."""
    from genpipe.edges.s3.boto import BotoObjects

    # Somebody waits for it.
    return BotoObjects(replace(place, timeout_s=min(place.timeout_s, LOOK_S)), Troubles())


def place_of(s3: S3, uri: str) -> Place:
    """Where something is, and how its store is spoken to."""
    endpoint_url = s3.endpoint_url
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        # The library heeds these as well; here they are known by whoever looks at the folder later.
        if endpoint_url is None and (given := os.environ.get(name)):
            endpoint_url = _address(name, given)
    return Place(
        uri=uri,
        endpoint_url=endpoint_url,
        region=s3.region,
        path_style=s3.path_style,
        checksums=s3.checksums,
        timeout_s=s3.timeout_s,
    )


def _address(name: str, text: str) -> str:
    try:
        return TypeAdapter(HttpUrl).validate_python(text)
    except ValidationError:
        # It may hold a password, so it is not shown.
        raise ConfigError(
            f"{name} must be an address such as https://store.example:9000, with no user and no password"
        ) from None


class Offsite:
    """S3's part in one run.

    Attributes:
        uri: where the run goes.
        remote: what a claim of the run folder asks.
    """

    def __init__(
        self,
        s3: S3,
        uri: str,
        display: Display,
        ended: threading.Event,
        *,
        on_fenced: Callable[[Fenced], None],
    ) -> None:
        """Connect, and probe the store. Blocking.

        Args:
            s3: the settings.
            uri: where the run goes.
            display: told what is odd and what is waited for.
            ended: set by whoever wants all waiting to end; set by :meth:`close`.
            on_fenced: told, on the loop's thread, that another driver has the prefix.

        Raises:
            ConfigError: the store is not as the settings say; the message names what.
        """
        from genpipe.edges.s3.boto import BotoObjects
        from genpipe.edges.s3.probe import probe

        self.uri = uri
        self._s3 = s3
        self._on_fenced = on_fenced
        self._ended = ended
        self._troubles = Troubles()
        self._place = place_of(s3, uri)
        self._objects = BotoObjects(self._place, self._troubles, stop=self._ended)
        probe(self._objects)
        self.remote = Remote(
            self._objects,
            owner={"host": socket.gethostname(), "pid": os.getpid()},
            ttl_s=s3.lease_s,
            warn=lambda text: display.note(f"warning: {text}"),
            note=display.note,
            pause=self._pause,
            place=self._place,
        )
        self._uploader: Uploader | None = None
        self._is_drained = self._is_closed = False

    def recorded_run(self) -> dict[str, Any] | None:
        """The ``run.json`` of the run in S3, or None where there is none yet. Blocking."""
        return self.remote.recorded_run()

    async def begin(self, folder: RunFolder, unsent: list[Entry]) -> None:
        """Upload what is sealed and not in S3, and from now on whatever is sealed.

        Args:
            folder: the run folder, claimed.
            unsent: sealed shards that are not in S3, by number.

        Raises:
            StoreError: a file of the folder refuses.
        """
        loop = asyncio.get_running_loop()
        assert self.remote.lease is not None
        uploader = Uploader(
            folder.path,
            OsFiles(),
            self._objects,
            self.remote.lease,
            run_id=folder.run_id,
            commits=self.remote.commits,
            next_number=self.remote.next_number,
            backlog=unsent,
            orphans=self.remote.orphans,
            troubles=self._troubles,
            settings=UploadSettings(
                uploads=self._s3.uploads,
                tail_s=self._s3.tail_s,
                progress_s=self._s3.progress_s,
                lease_s=self._s3.lease_s,
            ),
            on_fenced=lambda error: tell(loop, self._on_fenced, error),
        )
        # Before it starts: who is cancelled meanwhile is to close it.
        self._uploader = uploader
        try:
            await asyncio.to_thread(uploader.start)
        except StoreError:
            self._is_drained = True
            raise

    def sealed(self, entry: Entry) -> None:
        """A shard is sealed and durable; any thread may tell."""
        if self._uploader is not None:
            self._uploader.sealed(entry)

    def snapshot(self) -> None:
        """Upload at once what is not sealed yet; returns before that is done."""
        if self._uploader is not None:
            self._uploader.snapshot()

    def state(self) -> dict[str, Any]:
        """For ``progress.json``."""
        assert self._uploader is not None
        return self._uploader.state()

    def missing(self) -> list[int]:
        """Sealed shards that are not in S3, by number."""
        return self._uploader.missing() if self._uploader is not None else []

    async def drain(
        self, signals: Signals, publish: Callable[[], None] | None = None, *, is_stopping: bool = False
    ) -> None:
        """Wait for the uploads: ``drain_s``, or ``stop_s`` from the first signal on, or until the second.

        Args:
            signals: what was asked from outside.
            publish: shows how it goes; called about once a second.
            is_stopping: the run ends before its time: ``stop_s`` from now on.
        """
        assert self._uploader is not None
        self._is_drained = True
        began_s = time.monotonic()
        until_s = began_s + (self._s3.stop_s if is_stopping else self._s3.drain_s)
        publish_s = began_s
        while not signals.hurried:
            now_s = time.monotonic()
            if signals.first is not None and not is_stopping:
                is_stopping, until_s = True, min(until_s, now_s + self._s3.stop_s)
            if publish is not None and now_s >= publish_s:
                publish_s = now_s + 1.0
                publish()
            left_s = min(LOOK_EVERY_S, max(0.0, until_s - now_s))
            if await asyncio.to_thread(self._uploader.drain, left_s) or self._uploader.is_stuck:
                return
            if now_s >= until_s:
                return

    async def close(self, signals: Signals) -> None:
        """Last snapshots and progress, and the lease is given back; bounded. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._uploader is not None:
                if not self._is_drained:
                    # A signal, or an error, has ended the run before its time.
                    await self.drain(signals, is_stopping=True)
                limit_s = CLOSE_S if signals.first is None else STOPPED_CLOSE_S
                limit_s = HURRIED_CLOSE_S if signals.hurried else limit_s
                await asyncio.to_thread(self._uploader.close, limit_s)
            else:
                await asyncio.to_thread(self.give_up)
        finally:
            self._ended.set()

    def give_up(self) -> None:
        """Give back what was claimed, where nothing has begun."""
        self.remote.close()

    def _pause(self, seconds: float) -> None:
        if self._ended.wait(seconds):
            raise Fenced(f"stopped while waiting for {self.uri}")
