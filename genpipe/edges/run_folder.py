"""The claim on a run folder: whose it is, what run it belongs to, and the segments of that run."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from genpipe.core.errors import ConfigError, ResumeMismatch
from genpipe.edges import lines
from genpipe.edges.appender import Appender
from genpipe.edges.files import TEMPORARY, Files, blaming, make_folder, replace_atomically
from genpipe.edges.heartbeat import HEARTBEAT, Pause
from genpipe.edges.lock import LOCK, FolderLock
from genpipe.edges.mending import Mender
from genpipe.edges.prompts.patterns import is_pattern
from genpipe.edges.settings_compare import canonical, differences, digest_of, shortened

RUN = "run.json"
SEGMENTS = "segments.jsonl"
FORMAT = 1

_DIFFERENCES_MAX = 10
_ANOTHER = "another output folder (with --s3, another prefix too)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What a run is, as the present command has it.

    Attributes:
        inputs: paths of the input files, in order.
        settings: JSON-ready; what shapes an answer, and nothing else.
        shard_records: lines of a full shard (count, >= 1).
        version: genpipe's own.
    """

    inputs: tuple[str, ...]
    settings: Mapping[str, Any]
    shard_records: int
    version: str

    @property
    def digest(self) -> str:
        """The settings as 16 hex digits: the same for the same settings, whatever their order.

        Raises:
            ConfigError: a setting has no place in JSON.
        """
        return digest_of(self.settings)


class Elsewhere(Protocol):
    """Where a run is kept beside its folder. Blocking; called under the folder's lock."""

    @property
    def name(self) -> str:
        """How it is called in messages, such as ``s3://bucket/run1``."""
        ...

    def agree(self, run: dict[str, Any], *, is_new: bool) -> dict[str, Any]:
        """The ``run.json`` that counts: ``run``, which is kept there from now on, or what is there already.

        Args:
            run: what the folder has, or would begin with.
            is_new: the folder has none yet, so that it adopts what is there.

        Raises:
            ConfigError: what is there is not to be understood.
            ResumeMismatch: the folder has another run than is there.
            ObjectStoreError: it cannot be read or written.
        """
        ...

    def take_over(self, path: Path, lock: FolderLock) -> None:
        """Claim the place, and bring to the folder what it lacks; ``run.json`` stands in it by now.

        Raises:
            Fenced: another driver has the place.
            ResumeMismatch: records of another run are there.
            StoreError: it cannot be read or written, or a file in the folder refuses.
        """
        ...


class RunFolder:
    """A run folder that this process has claimed. One owner; :meth:`close` gives it back.

    Attributes:
        path: the folder.
        run_id: the run's own name (32 hex digits), the same over all its segments.
        created_at: when the run first began, as text.
        shard_records: lines of a full shard, as the run began with.
        settings_mark: digest of the present settings where they are not those the run began with, else None;
            goes into every record.
        is_new: the run began with this claim.
        epoch: number of this claim, from 1.
        nonce: this claim's own name.
        previous_nonce: the name of the claim before; None where there was none.
        segment: number of this process's segment, from 1.
        segments: what earlier processes wrote in ``segments.jsonl``, in order.
    """

    def __init__(
        self,
        path: Path,
        lock: FolderLock,
        run: Mapping[str, Any],
        *,
        settings_mark: str | None,
        is_new: bool,
        segments: Appender,
        past: tuple[dict[str, Any], ...],
    ) -> None:
        self.path = path
        self.run_id: str = run["run_id"]
        self.created_at: str = run["created_at"]
        self.shard_records: int = run["shard_records"]
        self.settings_mark = settings_mark
        self.is_new = is_new
        self.epoch = lock.epoch
        self.nonce = lock.nonce
        self.previous_nonce = lock.previous_nonce
        self.segment = 1 + max((entry["segment"] for entry in past), default=0)
        self.segments = past
        self._lock = lock
        self._segments = segments

    @classmethod
    def open(
        cls,
        path: Path,
        identity: RunIdentity,
        files: Files,
        *,
        allow_changed: bool,
        now_text: str,
        warn: Callable[[str], None],
        pause: Pause = time.sleep,
        elsewhere: Elsewhere | None = None,
    ) -> "RunFolder":
        """Claim a folder for a run: a new run in a new or empty folder, else the one that it holds.

        Args:
            path: the folder; created where it is missing.
            identity: the run as the present command has it.
            files: the disk.
            allow_changed: go on with settings other than those that the run began with.
            now_text: the present moment (ISO 8601, UTC).
            warn: told, in one line each, what was odd, and what is waited for.
            pause: waits for some seconds; called only where the file system has no locks. What it raises
                ends the claim.
            elsewhere: where the run is kept beside the folder; a new folder adopts the run that is there.

        Raises:
            ConfigError: the folder is not a run's, or its ``run.json`` is not to be understood. Nothing in it
                was changed.
            ResumeMismatch: it holds another run.
            Fenced: another driver has it, or what is elsewhere.
            StoreError: it cannot be written or locked, or what is elsewhere cannot.
        """
        assert identity.shard_records >= 1
        _refuse_foreign(path)
        with blaming(path, "create"):
            make_folder(files, path)
        lock = FolderLock.take(path, started_at=now_text, warn=warn, pause=pause)
        try:
            # Another process may have begun here between the first look and the lock.
            _refuse_foreign(path)
            here = _read_run(files, path)
            run = _new_run(identity, now_text) if here is None else here
            run_id = run["run_id"]
            if elsewhere is not None:
                run = elsewhere.agree(run, is_new=here is None)
            is_new = here is None and run["run_id"] == run_id
            mark = None
            if not is_new:
                where = elsewhere.name if elsewhere is not None and here is None else str(path)
                mark = _compare(where, run, identity, allow_changed=allow_changed, warn=warn)
            if here is None:
                with blaming(path / RUN, "write"):
                    replace_atomically(files, path / RUN, encode_run(run))
            if elsewhere is not None:
                elsewhere.take_over(path, lock)
            segments, past = _open_segments(files, path, warn)
            return cls(path, lock, run, settings_mark=mark, is_new=is_new, segments=segments, past=past)
        except BaseException:
            lock.release()
            raise

    def check_still_mine(self) -> None:
        """Make sure that nobody took the folder over; cheap enough for every group.

        Raises:
            Fenced: the lock file is not the one that was locked, or the heartbeat is another driver's.
            StoreError: the lock file cannot be looked at, or the heartbeat not be kept up.
        """
        self._lock.check_still_mine()

    def start_segment(self, started_at: str, facts: Mapping[str, Any]) -> None:
        """Note, durably, that this process began.

        Args:
            started_at: the moment (ISO 8601, UTC).
            facts: what else is worth keeping of it, JSON-ready.

        Raises:
            StoreError: it was not noted.
        """
        self._note({"segment": self.segment, "started_at": started_at, "epoch": self.epoch, **facts})

    def end_segment(
        self,
        ended_at: str,
        *,
        why: str,
        sums: Mapping[str, Any],
        wall_s: float,
        slot_seconds: Mapping[str, float],
    ) -> None:
        """Note, durably, that this process ends.

        Args:
            ended_at: the moment (ISO 8601, UTC).
            why: in a word or a line.
            sums: totals over this segment's records, as :meth:`genpipe.core.values.Sums.as_json` gives them.
            wall_s: how long the segment lasted.
            slot_seconds: the books, by owner.

        Raises:
            StoreError: it was not noted.
        """
        facts = {"segment": self.segment, "ended_at": ended_at, "why": why, "sums": dict(sums)}
        self._note({**facts, "wall_s": round(wall_s, 3), "slot_seconds": dict(slot_seconds)})

    def close(self) -> None:
        """Give the folder back. May be called twice."""
        try:
            self._segments.close()
        finally:
            self._lock.release()

    def _note(self, entry: Mapping[str, Any]) -> None:
        self._segments.append(lines.encode(canonical(entry, sort=False)[:-1]))
        self._segments.sync()


def recorded_run(files: Files, path: Path) -> dict[str, Any] | None:
    """The ``run.json`` of the run in a folder, or None where there is no run; claims nothing.

    Raises:
        ConfigError: the folder is not a run's, or its ``run.json`` is not to be understood.
        StoreError: it cannot be read.
    """
    _refuse_foreign(path)
    return _read_run(files, path)


def _refuse_foreign(path: Path) -> None:
    """Refuse a place where something else is than a run, or nothing."""
    try:
        names = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise ConfigError(f"{path} is a file, not a folder: give another output folder") from None
    except OSError as error:
        raise ConfigError(
            f"cannot look into {path}: {error.strerror}; see to its permissions, or give another folder"
        ) from None
    ours = {LOCK, RUN + TEMPORARY}
    foreign = sorted(name for name in names - ours if not name.startswith(HEARTBEAT))
    if foreign and RUN not in names:
        raise ConfigError(
            f"{path} holds {shortened(', '.join(foreign[:5]))} but no {RUN}: it is no run folder (or {RUN} "
            "was lost: put it back). Give an empty or a new folder; nothing was changed here"
        )


def _read_run(files: Files, path: Path) -> dict[str, Any] | None:
    """What ``run.json`` says; None where there is none."""
    file = path / RUN
    with blaming(file, "read"):
        if not files.exists(file):
            return None
        data = files.read(file)
    return parse_run(data, str(file))


def parse_run(data: bytes, name: str) -> dict[str, Any]:
    """What a ``run.json`` says.

    Args:
        data: its bytes.
        name: how it is called in messages.

    Raises:
        ConfigError: it is not to be understood.
    """
    try:
        run = json.loads(data)
    except ValueError:
        run = None
    if not isinstance(run, dict):
        raise ConfigError(
            f"{name} is damaged ({len(data)} bytes, no JSON object): put back a copy of it. Nothing was "
            "changed; the records in the folder are safe"
        )
    if run.get("format") != FORMAT:
        raise ConfigError(
            f"{name} is of format {run.get('format')!r}, and this genpipe knows format {FORMAT}: use the "
            f"version that began the run (genpipe {run.get('genpipe', 'unknown')})"
        )
    kinds = {"run_id": str, "created_at": str, "inputs": list, "settings": dict, "shard_records": int}
    for key, kind in kinds.items():
        if not isinstance(run.get(key), kind):
            raise ConfigError(f"{name} is damaged: {key!r} is missing or no {kind.__name__}; put back a copy")
    if run["shard_records"] < 1:
        raise ConfigError(f"{name} is damaged: 'shard_records' is {run['shard_records']}; put back a copy")
    if digest_of(run["settings"]) != run.get("digest"):
        raise ConfigError(f"{name} is damaged: its settings and their digest do not agree; put back a copy")
    return run


def encode_run(run: Mapping[str, Any]) -> bytes:
    """The bytes of a ``run.json``."""
    return json.dumps(run, indent=2).encode() + b"\n"


def _new_run(identity: RunIdentity, now_text: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "run_id": uuid4().hex,
        "created_at": now_text,
        "genpipe": identity.version,
        "inputs": [{"path": given} for given in identity.inputs],
        "settings": dict(identity.settings),
        "digest": identity.digest,
        "shard_records": identity.shard_records,
    }


def _compare(
    where: str,
    run: Mapping[str, Any],
    identity: RunIdentity,
    *,
    allow_changed: bool,
    warn: Callable[[str], None],
) -> str | None:
    """Hold the present command against the run; the digest of settings that may differ and do, else None."""
    inputs = [str(given.get("path")) for given in run["inputs"]]
    # A pattern stands for any number of files: there, only the index of the input can tell.
    if len(inputs) != len(identity.inputs) and not any(map(is_pattern, (*inputs, *identity.inputs))):
        raise ResumeMismatch(
            f"the run in {where} began with {len(inputs)} input files, and now there are "
            f"{len(identity.inputs)}: give the same files in the same order, or {_ANOTHER}"
        )
    if run["shard_records"] != identity.shard_records:
        warn(
            f"the run in {where} has shards of {run['shard_records']} records and keeps them: "
            f"{identity.shard_records} is not used"
        )
    changed = differences(run["settings"], identity.settings)
    if not changed:
        return None
    more = len(changed) - _DIFFERENCES_MAX
    told = "; ".join(changed[:_DIFFERENCES_MAX]) + (f"; and {more} more" if more > 0 else "")
    if not allow_changed:
        raise ResumeMismatch(
            f"the run in {where} began with other settings: {told}. Set them as they were, give "
            f"{_ANOTHER}, or mix the answers on purpose with --allow-changed"
        )
    warn(f"settings are not those that the run in {where} began with: {told}")
    return identity.digest


def _open_segments(
    files: Files, path: Path, warn: Callable[[str], None]
) -> tuple[Appender, tuple[dict[str, Any], ...]]:
    """``segments.jsonl``, ready to be appended to, and what it says so far."""
    file = path / SEGMENTS
    with blaming(file, "read"):
        is_new = not files.exists(file)
    # Half a line at the end is cut: or else the next would be glued to it, and lost with it.
    good = [] if is_new else Mender(path, files, warn).mend(file, indexed=False)
    appender = Appender(files, file, new=is_new)
    try:
        if is_new:
            with blaming(path, "sync"):
                files.sync_folder(path)
    except BaseException:
        appender.close()
        raise
    entries = [json.loads(lines.body_of(line)) for line in good]
    return appender, tuple(entry for entry in entries if isinstance(entry.get("segment"), int))
