"""Everything on disk held against everything else: ``genpipe verify``. The checks stand in ``FORMAT.md``."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from genpipe.core.bitmap import Bitmap
from genpipe.core.wording import number
from genpipe.edges import done_indices, lines
from genpipe.edges.files import TEMPORARY, Files, blaming
from genpipe.edges.findings import Finding, Report, of_bytes, of_entry
from genpipe.edges.lock import FolderLock
from genpipe.edges.reading import Contents, contents_of, driver_at_work, read_shard, shard_records_of
from genpipe.edges.recovery import Recovery
from genpipe.edges.run_folder import SEGMENTS
from genpipe.edges.shards import (
    DONE_INDICES,
    FAILED,
    MANIFEST,
    PENDING_MAX,
    QUARANTINE,
    SHARDS,
    Entry,
    ShardFile,
    scan,
    shard_name,
)

Progress = Callable[[int, int], None]
"""Called with the bytes of shards that were read, and all that there are."""

_THREADS_MAX = 4


def verify(folder: Path, files: Files, *, progress: Progress, threads: int | None = None) -> Report:
    """Look at everything, change nothing.

    A few shards are in memory at a time, and a bit per prompt.

    Args:
        folder: the run folder.
        files: the disk.
        progress: told how far it is.
        threads: how many shards are looked at at once; as many as there are cores, up to four, if None.

    Raises:
        ConfigError: there is no run in the folder, or its ``run.json`` is not to be understood.
        StoreError: the folder cannot be looked into.
    """
    shard_records_of(files, folder)
    return _Look(folder, files).report(progress, threads or min(os.cpu_count() or 1, _THREADS_MAX))


def repair(folder: Path, files: Files, *, now_text: str, warn: Callable[[str], None]) -> None:
    """Claim the folder, and mend whatever :func:`verify` finds.

    Args:
        folder: the run folder.
        files: the disk.
        now_text: the present moment (ISO 8601, UTC).
        warn: told, in one line each, what was done.

    Raises:
        ConfigError: there is no run in the folder, or its ``run.json`` is not to be understood.
        Fenced: a driver owns it.
        StoreError: a file refuses, or the shards are gone.
    """
    shard_records = shard_records_of(files, folder)
    lock = FolderLock.take(folder, started_at=now_text, warn=warn)
    try:
        state = Recovery(
            folder,
            files,
            shard_records=shard_records,
            epoch=lock.epoch,
            warn=warn,
            guard=lock.check_still_mine,
            deep=True,
        ).run()
        for appender in (state.journal, state.manifest, state.failures, state.done_indices):
            appender.close()
        if state.tally.lines == 0:
            # A start begins a shard to write to, and nothing is to be written here.
            with blaming(state.journal.path, "remove"):
                files.unlink(state.journal.path)
                files.sync_folder(folder / SHARDS)
    finally:
        lock.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What one shard holds.

    Attributes:
        file: its name in the run folder.
        size_bytes: bytes that were read.
        ranges: its indices as runs, where they are just those that the manifest lists.
        indices: the index of each good line, where they are others.
        findings: what is wrong with it alone.
    """

    file: str
    size_bytes: int
    ranges: list[tuple[int, int]]
    indices: list[int]
    findings: list[Finding]


class _Look:
    """One look at one run folder."""

    def __init__(self, folder: Path, files: Files) -> None:
        self._folder = folder
        self._files = files
        self._done = Bitmap()
        self._findings: list[Finding] = []

    def report(self, progress: Progress, threads: int) -> Report:
        at_work = driver_at_work(self._folder)
        # Read before the shards: whatever it lists is in a shard by now, and a driver may go on meanwhile.
        listed = self._read(DONE_INDICES)
        contents = contents_of(self._files, self._folder)
        self._check_manifest(contents)
        self._check_names(contents, was_used=bool(listed) or bool(contents.manifest_data))
        size_bytes = 0
        total_bytes = sum(shard.size_bytes for shard in contents.shards or ())
        for seen in self._looks(contents, threads):
            self._findings += seen.findings
            self._take(seen)
            size_bytes += seen.size_bytes
            progress(size_bytes, total_bytes)
        if self._read(FAILED) is None and (listed or contents.manifest_data):
            then = "a start begins it anew, and asks prompts again that had failed for good"
            self._find(FAILED, "is missing", then)
        self._check_list(FAILED, indexed=True)
        self._check_list(SEGMENTS, indexed=False)
        self._check_done_indices(listed)
        self._note_leftovers()
        at_work = at_work or driver_at_work(self._folder)
        return Report(
            folder=self._folder,
            driver_at_work=at_work,
            shards=len(contents.shards or ()),
            records=len(self._done),
            size_bytes=size_bytes,
            findings=tuple(finding for finding in self._findings if not (at_work and finding.in_flight)),
        )

    def _find(self, file: str, what: str, then: str, **kind: bool) -> None:
        self._findings.append(Finding(file=file, what=what, then=then, **kind))

    def _read(self, name: str) -> bytes | None:
        path = self._folder / name
        with blaming(path, "read"):
            return self._files.read(path) if self._files.exists(path) else None

    def _check_manifest(self, contents: Contents) -> None:
        """Its own lines, and whether it lists the shards that there are."""
        data = contents.manifest_data
        listed, bad_count = contents.manifest.listed, contents.manifest.bad_count
        sealed = {shard.seq for shard in contents.shards or () if not shard.is_open}
        if data is None and sealed:
            self._find(MANIFEST, "is missing", "a start makes it again from the shards")
            return
        if bad_count:
            is_torn = bad_count == 1 and not (data or b"").endswith(b"\n")
            self._find(
                MANIFEST,
                f"holds {bad_count} lines that do not count, or do not agree with themselves",
                "a start drops them, and lists those shards again",
                is_problem=not is_torn,
                in_flight=is_torn,
            )
        if contents.shards is None:
            return
        for seq in sorted(listed.keys() - sealed):
            self._find(
                _file_of(seq),
                f"is gone, with {listed[seq].count} records",
                "put it back, or a start asks those prompts again; --repair takes it off the manifest",
            )
        newest = max(listed, default=-1)
        # Shards are listed a moment after they are sealed.
        pending = [seq for seq in sealed if seq > newest]
        for seq in sorted(sealed - listed.keys()):
            self._find(
                _file_of(seq),
                "is not listed in the manifest",
                "a start reads it and lists it",
                is_problem=seq < newest or len(pending) > PENDING_MAX,
                in_flight=seq > newest,
            )

    def _check_names(self, contents: Contents, *, was_used: bool) -> None:
        if not contents.shards:
            if was_used:
                self._find(
                    SHARDS,
                    "is gone" if contents.shards is None else "is empty",
                    "put the shards back (is a disk not mounted?): there is nothing to repair from",
                )
            return
        sealed = {shard.seq for shard in contents.shards if not shard.is_open}
        is_open = [shard for shard in contents.shards if shard.is_open]
        for shard in is_open:
            if shard.seq in sealed:
                file = f"{SHARDS}/{shard.name}"
                self._find(file, "has a sealed twin of its number", "a start gives it another number")
        for shard in is_open[:-1]:
            self._find(f"{SHARDS}/{shard.name}", "is open and not the newest shard", "a start seals it")

    def _looks(self, contents: Contents, threads: int) -> Iterator[_Seen]:
        """What each shard holds, in order; a few are looked at at once, and no more are kept."""
        with ThreadPoolExecutor(threads, thread_name_prefix="genpipe-verify") as pool:
            ahead: deque[Future[_Seen]] = deque()
            for shard, entry in contents.pairs():
                if len(ahead) > threads:
                    yield ahead.popleft().result()
                ahead.append(pool.submit(_look_at, self._files, self._folder, shard, entry))
            while ahead:
                yield ahead.popleft().result()

    def _take(self, seen: _Seen) -> None:
        """Count a shard's records; those that a shard before it has are doubled."""
        done = self._done
        doubled = len(seen.indices) - sum(map(done.add, seen.indices))
        for first, last in seen.ranges:
            doubled += done.count_between(first, last + 1)
            done.add_range(first, last)
        if doubled:
            self._find(
                seen.file,
                f"holds {doubled} records of prompts that stand before them, in it or in an earlier shard",
                f"the first of each counts; --repair moves the others to {QUARANTINE}/",
            )

    def _check_list(self, name: str, *, indexed: bool) -> None:
        data = self._read(name)
        if data:
            by = "a start" if indexed else "--repair"
            self._findings += of_bytes(name, scan(data, indexed=indexed), by=by, in_flight=True)

    def _check_done_indices(self, data: bytes | None) -> None:
        if data is None:
            if len(self._done):
                self._find(DONE_INDICES, "is missing", "a start makes it again from the shards")
            return
        difference = done_indices.difference(data, self._done)
        if difference is None:
            return
        # Half a line at its end is what a kill leaves.
        is_torn = difference.garbage == 1 and difference.is_torn
        is_wrong = bool(difference.foreign or difference.repeated or (difference.garbage and not is_torn))
        self._find(
            DONE_INDICES,
            f"has {difference}",
            "a start makes it again from the shards",
            is_problem=is_wrong,
            in_flight=not is_wrong,
        )

    def _note_leftovers(self) -> None:
        for folder in ("", SHARDS, QUARANTINE):
            path = self._folder / folder
            with blaming(path, "look into"):
                sizes = self._files.sizes(path) if self._files.exists(path) else {}
            if folder == QUARANTINE and sizes:
                self._find(
                    QUARANTINE,
                    f"holds {len(sizes)} files of {number(sum(sizes.values()))} bytes that were no records",
                    "nothing removes them but you",
                    is_problem=False,
                )
            for name in sorted(sizes):
                if name.endswith(TEMPORARY) and folder != QUARANTINE:
                    file = str(Path(folder) / name)
                    what = "was left behind half-written"
                    self._find(file, what, "a start removes it", is_problem=False, in_flight=True)


def _file_of(seq: int) -> str:
    return f"{SHARDS}/{shard_name(seq, is_open=False)}"


def _look_at(files: Files, folder: Path, shard: ShardFile, entry: Entry | None) -> _Seen:
    """Read one shard and hold it against its entry. Runs in a thread, and shares nothing."""
    file = f"{SHARDS}/{shard.name}"
    try:
        data = read_shard(files, folder, shard)
    except OSError as error:
        problem = Finding(
            file=file,
            what=f"cannot be read: {error.strerror or error}",
            then="see to the disk (or its permissions)",
        )
        return _Seen(file=file, size_bytes=0, ranges=[], indices=[], findings=[problem])
    is_as_sealed = entry is not None and entry.covers(data)
    if entry is not None and is_as_sealed:
        # The bytes that were sealed, whose checksums were right then.
        indices = lines.indices_of(data)
        if indices is not None and sorted(indices) == list(entry.indices()):
            return _Seen(file=file, size_bytes=len(data), ranges=entry.ranges, indices=[], findings=[])
    found = scan(data)
    by = "a start" if shard.is_open else "--repair"
    is_as_listed = entry is not None and sorted(found.indices) == list(entry.indices())
    findings = []
    if entry is not None and not (is_as_sealed and is_as_listed):
        findings += of_entry(file, found, entry, is_as_sealed=is_as_sealed)
    findings += of_bytes(file, found, by=by, in_flight=shard.is_open)
    return _Seen(
        file=file,
        size_bytes=len(data),
        ranges=entry.ranges if entry is not None and is_as_listed else [],
        indices=[] if is_as_listed else found.indices,
        findings=findings,
    )
