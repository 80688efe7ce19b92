"""Everything on disk held against everything else: ``genpipe verify``. The checks stand in ``FORMAT.md``."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from genpipe.core.errors import ConfigError, ObjectStoreError
from genpipe.core.wording import number
from genpipe.edges import done_indices
from genpipe.edges.files import TEMPORARY, Files, blaming
from genpipe.edges.findings import Finding, Report, of_bytes
from genpipe.edges.folder_shelf import Prefix, elsewhere
from genpipe.edges.lock import FolderLock
from genpipe.edges.looking import Doubles, Seen, look_at
from genpipe.edges.reading import (
    Contents,
    Held,
    contents_of,
    driver_at_work,
    in_turn,
    last_report,
    read_shard,
    run_of,
    shard_records_of,
)
from genpipe.edges.recovery import Recovery
from genpipe.edges.run_folder import SEGMENTS
from genpipe.edges.s3 import auditing
from genpipe.edges.s3.commits import UPLOADS, Commit, decode_all
from genpipe.edges.shards import (
    DONE_INDICES,
    FAILED,
    MANIFEST,
    PENDING_MAX,
    QUARANTINE,
    SHARDS,
    Entry,
    Manifest,
    ShardFile,
    scan,
    shard_name,
)

Progress = Callable[[int, int], None]
"""Called with the bytes of shards that were read, and all that there are."""

_THREADS_MAX = 4


def verify(
    folder: Path,
    files: Files,
    *,
    progress: Progress,
    threads: int | None = None,
    remote: Prefix | None = None,
) -> Report:
    """Look at everything, change nothing.

    A few shards are in memory at a time, and a bit per prompt. Of what is in the object store, only the names
    and lengths are looked at.

    Args:
        folder: the run folder.
        files: the disk.
        progress: told how far it is.
        threads: how many shards are looked at at once; as many as there are cores, up to four, if None.
        remote: where the folder is sent to, or None.

    Raises:
        ConfigError: there is no run in the folder, or its ``run.json`` is not to be understood.
        StoreError: the folder cannot be looked into.
    """
    run_id = str(run_of(files, folder)["run_id"])
    look = _Look(folder, files, run_id, remote)
    return look.report(progress, threads or min(os.cpu_count() or 1, _THREADS_MAX))


def repair(folder: Path, files: Files, *, now_text: str, warn: Callable[[str], None]) -> None:
    """Claim the folder, and mend whatever :func:`verify` finds.

    Of what is in S3 it knows what ``uploads.jsonl`` says, which every start with S3 makes anew: shards that
    fell behind that get new numbers, and records that S3 has go to quarantine. The store is not asked.

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


class _Look:
    """One look at one run folder."""

    def __init__(self, folder: Path, files: Files, run_id: str, remote: Prefix | None) -> None:
        self._folder = folder
        self._files = files
        self._run_id = run_id
        self._remote = remote
        self._doubles = Doubles()
        self._unsent: list[auditing.Unsent] = []
        self._findings: list[Finding] = []

    def report(self, progress: Progress, threads: int) -> Report:
        at_work = driver_at_work(self._folder)
        # Read before the shards: whatever it lists is in a shard by now, and a driver may go on meanwhile.
        listed = self._read(DONE_INDICES)
        uploads_data = self._read(UPLOADS)
        uploads = decode_all(uploads_data or b"")
        contents = contents_of(self._files, self._folder)
        away = elsewhere(contents, uploads)
        was_used = bool(listed) or bool(contents.manifest_data)
        self._check_manifest(contents, away)
        self._check_names(contents, was_used=was_used and not away)
        if uploads_data is not None:
            self._findings += auditing.of_uploads(uploads_data, contents, run_id=self._run_id)
        self._take_elsewhere(away)
        size_bytes = self._look_at_all(contents, uploads, progress, threads)
        if self._read(FAILED) is None and was_used:
            then = "a start begins it anew, and asks prompts again that had failed for good"
            self._find(FAILED, "is missing", then)
        self._check_list(FAILED, indexed=True)
        self._check_list(SEGMENTS, indexed=False)
        self._check_done_indices(listed)
        self._note_leftovers()
        if self._remote is not None or uploads_data is not None:
            self._check_sent(uploads)
        at_work = at_work or driver_at_work(self._folder)
        return Report(
            name=str(self._folder),
            driver_at_work=at_work,
            shards=len(contents.shards or ()) + len(away),
            records=len(self._doubles.done),
            size_bytes=size_bytes,
            findings=tuple(finding for finding in self._findings if not (at_work and finding.in_flight)),
        )

    def _take_elsewhere(self, away: dict[int, Commit]) -> None:
        """Count the records of the shards that only the object store has."""
        for seq in sorted(away):
            entry = away[seq].entry
            if doubled := self._doubles.take(entry.ranges, []):
                what = f"holds {doubled} records of prompts that earlier shards in S3 hold too"
                self._find(_file_of(seq), what, "the first of each counts")
        if away:
            records = sum(commit.entry.count for commit in away.values())
            self._find(
                SHARDS,
                f"lacks {number(len(away))} shards of {number(records)} records that are in S3 only",
                "nothing needs them here; `genpipe export` fetches them",
                is_problem=False,
            )

    def _look_at_all(
        self, contents: Contents, uploads: dict[int, Commit], progress: Progress, threads: int
    ) -> int:
        """Look at every shard, a few at once: how many bytes they have."""
        size_bytes = 0
        total_bytes = sum(shard.size_bytes for shard in contents.shards or ())
        sent = {commit.entry.seq: commit.entry for commit in uploads.values()}
        held = (self._held(shard, entry) for shard, entry in contents.pairs())
        looks = in_turn(look_at, held, threads)
        for (shard, entry), seen in zip(contents.pairs(), looks, strict=True):
            self._findings += seen.findings
            self._take(seen)
            if not (entry is not None and shard.seq in sent and sent[shard.seq].says_the_same(entry)):
                self._unsent.append(auditing.Unsent.of(shard, entry, seen))
            size_bytes += seen.size_bytes
            progress(size_bytes, total_bytes)
        return size_bytes

    def _held(self, shard: ShardFile, entry: Entry | None) -> Held:
        return Held(
            file=f"{SHARDS}/{shard.name}",
            size_bytes=shard.size_bytes,
            entry=entry,
            is_open=shard.is_open,
            read=partial(read_shard, self._files, self._folder, shard),
        )

    def _check_sent(self, uploads: dict[int, Commit]) -> None:
        """What is in the object store, and what is not yet."""
        found = auditing.of_numbers(self._unsent, uploads.values())
        self._findings += found.values()
        stale = set(found)
        committed: set[int] = set()
        if self._remote is not None:
            try:
                audit = auditing.against_store(
                    self._remote.open(),
                    run_id=self._run_id,
                    uploads=uploads,
                    manifest=lambda: Manifest.decode(self._read(MANIFEST) or b"").listed,
                    unsent=self._unsent,
                )
            except (ConfigError, ObjectStoreError) as error:
                then = "see to the store, and verify again"
                self._find(self._remote.uri, f"S3 was not looked at: {error}", then)
            else:
                self._findings += audit.findings
                committed = audit.committed
                stale |= audit.stale
        pending = [
            one.file
            for one in self._unsent
            if not one.shard.is_open and one.shard.seq not in committed and one.file not in stale
        ]
        if pending:
            is_over = last_report(self._files, self._folder).get("state") == "done"
            self._find(
                pending[0],
                "is not known to be in S3"
                + (f", nor are {len(pending) - 1} more sealed shards" if len(pending) > 1 else ""),
                "start the same command again, which uploads what is there",
                is_problem=is_over,
                in_flight=True,
            )

    def _find(self, file: str, what: str, then: str, **kind: bool) -> None:
        self._findings.append(Finding(file=file, what=what, then=then, **kind))

    def _read(self, name: str) -> bytes | None:
        path = self._folder / name
        with blaming(path, "read"):
            return self._files.read(path) if self._files.exists(path) else None

    def _check_manifest(self, contents: Contents, away: dict[int, Commit]) -> None:
        """Its own lines, and whether it lists the shards that there are."""
        data = contents.manifest_data
        listed, bad_count = contents.manifest.listed, contents.manifest.bad_count
        sealed = contents.sealed
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
        for seq in sorted(listed.keys() - sealed - away.keys()):
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
        sealed = contents.sealed
        is_open = [shard for shard in contents.shards if shard.is_open]
        for shard in is_open:
            if shard.seq in sealed:
                file = f"{SHARDS}/{shard.name}"
                self._find(file, "has a sealed twin of its number", "a start gives it another number")
        for shard in is_open[:-1]:
            self._find(f"{SHARDS}/{shard.name}", "is open and not the newest shard", "a start seals it")

    def _take(self, seen: Seen) -> None:
        if doubled := self._doubles.take(seen.ranges, seen.indices):
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
            if len(self._doubles.done):
                self._find(DONE_INDICES, "is missing", "a start makes it again from the shards")
            return
        difference = done_indices.difference(data, self._doubles.done)
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
