"""A look at a run from outside: its last snapshot, and whether somebody still writes it."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from genpipe.core import wording
from genpipe.core.errors import ConfigError
from genpipe.core.progress import OVER
from genpipe.edges.files import OsFiles
from genpipe.edges.lock import LOCK
from genpipe.edges.owner import Standing, standing
from genpipe.edges.report import PROGRESS
from genpipe.edges.run_folder import RUN, recorded_run
from genpipe.edges.s3 import layout
from genpipe.edges.s3.objects import Fetched, Objects
from genpipe.ui import terminal

STALE_S = 10.0
"""A snapshot of a live run is never much older than a second; from this age on it is said (seconds)."""

LEASE_STALE_S = 90.0
"""A driver that has not renewed its lease for so long, or for as long as that says, is held to be dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was seen.

    Attributes:
        progress: the last snapshot.
        alive: a driver is at work.
        note: what is to be said about it, or None.
    """

    progress: dict[str, Any]
    alive: bool
    note: str | None

    def as_json(self) -> str:
        """The snapshot, and whether it is alive."""
        data = {**self.progress, "alive": self.alive}
        return orjson.dumps(data, option=orjson.OPT_INDENT_2).decode()

    def as_text(self) -> str:
        """For people."""
        return terminal.status(self.progress, note=self.note, alive=self.alive)


def look(folder: Path) -> Look:
    """Look at the run in ``folder``; touches nothing.

    Raises:
        ConfigError: there is no run in it, or it has not said anything yet.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder")
    if not (folder / RUN).exists():
        raise ConfigError(f"{folder} is no run folder: there is no {RUN} in it")
    recorded_run(OsFiles(), folder)
    path = folder / PROGRESS
    try:
        with open(path, "rb") as file:
            data = file.read()
            # Not by its own words: they are one reading of the driver's clock, which may have been set since.
            age_s = max(0.0, time.time() - os.fstat(file.fileno()).st_mtime)
    except FileNotFoundError:
        raise ConfigError(f"the run in {folder} has not reported yet: try again in a second") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    progress = _read(data, str(path))
    alive = _owner_lives(folder, age_s)
    note = None
    if alive and progress["state"] not in OVER and age_s >= STALE_S:
        note = f"the last report is {wording.duration(age_s)} old: the driver is stuck, or is starting again"
    elif not alive and progress["state"] not in OVER:
        note = (
            f"not running: its driver ended without a word, {wording.duration(age_s)} ago. "
            "The same command as before goes on from here"
        )
    elif not alive and progress["state"] == "interrupted":
        note = "not running: the same command as before goes on from here"
    return Look(progress=progress, alive=alive, note=note)


def look_offsite(objects: Objects) -> Look:
    """Look at a run in S3, which may be on any machine; touches nothing.

    Ages are by this machine's clock against the store's.

    Raises:
        ConfigError: there is no run, or it has not said anything yet.
        ObjectStoreError: the store does not answer.
    """
    fetched = objects.get(layout.PROGRESS)
    if fetched is None:
        if objects.get(layout.RUN) is None:
            raise ConfigError(f"{objects.name} holds no run: there is no {layout.RUN} in it")
        raise ConfigError(f"the run at {objects.name} has not reported yet: try again in a minute")
    progress = _read(fetched.data, f"{objects.name}/{layout.PROGRESS}")
    age_s = _age_s(fetched)
    lease = objects.get(layout.LEASE)
    alive = lease is not None and _is_held(lease)
    where = f"as of {wording.duration(age_s)} ago"
    if alive or progress["state"] in OVER:
        note = where if alive or progress["state"] == "done" else f"{where}; not running"
    else:
        since = "" if lease is None else f" for {wording.duration(_age_s(lease))}"
        note = (
            f"{where}; its driver has not been heard of{since}: it has ended, or cannot reach the store. The "
            "same command, there or on another machine, goes on from here"
        )
    return Look(progress=progress, alive=alive, note=note)


def _age_s(fetched: Fetched) -> float:
    return max(0.0, time.time() - fetched.modified_at.timestamp())


def _is_held(lease: Fetched) -> bool:
    """Whether the driver that holds it has renewed it lately: three times in the time that it tells."""
    try:
        fields = json.loads(lease.data)
        return not fields["released"] and _age_s(lease) < max(LEASE_STALE_S, float(fields["ttl_s"]))
    except (ValueError, KeyError, TypeError):
        return False


def _read(data: bytes, name: str) -> dict[str, Any]:
    """A snapshot that can be shown; what cannot is refused by its name."""
    try:
        progress: dict[str, Any] = json.loads(data)
        terminal.status(progress)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{name} is not as this version writes it ({type(error).__name__}: {error}): it is written anew "
            "while a run goes on"
        ) from None
    return progress


def _owner_lives(folder: Path, age_s: float) -> bool:
    """Whether the process that signed the lock is there; where that cannot be seen, its reports must do."""
    try:
        owner = json.loads((folder / LOCK).read_bytes())
    except (OSError, ValueError):
        owner = None
    found = standing(owner) if isinstance(owner, dict) else Standing.UNKNOWN
    return age_s < STALE_S if found is Standing.UNKNOWN else found is Standing.ALIVE
