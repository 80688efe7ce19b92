"""Any order of groups, starts, crashes, refusals and damage, on a disk in memory that forgets what it may."""

import errno
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from genpipe.core.errors import DiskFull, StoreError
from genpipe.core.values import Group
from genpipe.edges.store import Store
from tests.edges import audit
from tests.edges.audit import FOLDER
from tests.edges.memory_files import Inode, MemoryFiles, PowerLoss
from tests.edges.samples import WALL, given_up, group
from tests.faults.audits import PROPERTY, Count, verdict_on
from tests.faults.soak import SOAK

PROMPTS = 40
SHARD_RECORDS = 4
EXAMPLES = 80
STEPS = 25
NEEDS_ROOM = frozenset({"create", "write", "mkdir"})
DERIVED = (FOLDER / ".done_indices", FOLDER / "manifest.jsonl")

counted = Count("steps of a state machine")


class FullFiles(MemoryFiles):
    """A disk in memory that can be full from a step on, until it is freed.

    Bytes of a file whose sync failed stay unsafe, whoever syncs it later, until they are cut off; or else
    they are on the disk after all, and a cut of them can be undone by a power loss.
    """

    full_from: int | None = None
    carries_out_refused: bool = False

    def __init__(self, base: Iterable[Path] = ()) -> None:
        super().__init__(base)
        self._dropped_to: dict[Inode, int] = {}

    @classmethod
    def of(cls, files: MemoryFiles) -> "FullFiles":
        """The same disk."""
        full = cls()
        full.__dict__.update(files.__dict__)
        return full

    def kill(self) -> "FullFiles":
        after = self.of(super().kill())
        for path, inode in self._names.items():
            if inode is not None and inode in self._dropped_to:
                after._dropped_to[after._inode(path)] = self._dropped_to[inode]
        return after

    def truncate(self, handle: int, size: int) -> None:
        super().truncate(handle, size)
        inode = self._open[handle][1]
        self._dropped_to[inode] = min(self._dropped_to.get(inode, 0), size)

    def _sync(self, path: Path, inode: Inode) -> None:
        try:
            self._step("sync", path)
        except OSError:
            if self.carries_out_refused:
                inode.synced = bytes(inode.data)
            else:
                self._dropped_to[inode] = max(self._dropped_to.get(inode, 0), len(inode.data))
            raise
        if len(inode.synced) >= self._dropped_to.get(inode, 0):
            inode.synced = bytes(inode.data)

    def _step(self, method: str, path: Path) -> None:
        if self.full_from is not None and len(self.log) >= self.full_from and method in NEEDS_ROOM:
            self.log.append((method, path.name))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        super()._step(method, path)


@dataclass(frozen=True)
class Fault:
    """Something that happens to the disk so many steps from now, unless somebody heals it before.

    Attributes:
        what: an error's name, ``full``, ``power`` or ``none``.
        steps: how many steps go well before.
        carried_out: a sync that is refused has done its work all the same.
    """

    what: str
    steps: int
    carried_out: bool = False

    def come(self, files: FullFiles) -> None:
        """Let it be due."""
        step = len(files.log) + self.steps
        files.carries_out_refused = self.carried_out
        if self.what == "full":
            files.full_from = step
        elif self.what == "power":
            files.stop_before = step
        elif self.what != "none":
            files.refuse_step = (step, getattr(errno, self.what))


WANTED = st.lists(st.integers(0, PROMPTS - 1), min_size=1, max_size=9, unique=True)
FAULT = st.builds(
    Fault,
    st.sampled_from(["none", "EIO", "ENOSPC", "EDQUOT", "full", "power"]),
    st.integers(0, 12),
    st.booleans(),
)


class StoreMachine(RuleBasedStateMachine):
    """A driver, the disk that it writes to, and what it was told to be durable."""

    @initialize()
    def begin(self) -> None:
        self.files = FullFiles([FOLDER])
        self.store: Store | None = None
        self.acked: set[int] = set()
        self.acked_failures: set[int] = set()
        self.tried: set[int] = set()
        self.groups = 0
        self.damaged = False
        self._start()

    # What the driver does, and what happens to it meanwhile.

    @rule(parts=st.lists(st.tuples(WANTED, FAULT, st.booleans()), min_size=1, max_size=4))
    def commit(self, parts: list[tuple[list[int], Fault, bool]]) -> None:
        """Some prompts are answered, some of the others fail; a full disk is freed, or is not."""
        for wanted, fault, is_freed in parts:
            assert self.store is not None
            fresh = [index for index in wanted if index not in self.store.done]
            failures = [given_up(index, for_good=index % 4 == 1) for index in fresh[5:]]
            self.groups += 1
            fault.come(self.files)
            self._commit(group(*fresh[:5], failures=failures, number=self.groups), is_freed=is_freed)
            self._heal()

    @rule(fault=FAULT)
    def seal_and_start_again(self, fault: Fault) -> None:
        """A run that ends in order."""
        assert self.store is not None
        fault.come(self.files)
        self._survive(self.store.seal_last)
        self._start()

    @rule(retry_failed=st.booleans(), fault=FAULT)
    def start_again(self, retry_failed: bool, fault: Fault) -> None:
        """A driver that was interrupted, and another after it."""
        fault.come(self.files)
        self._start(retry_failed=retry_failed)

    # What happens between its steps.

    @rule(write_max=st.sampled_from([1, 50, 400, 1 << 30]))
    def writes_take_so_many_bytes(self, write_max: int) -> None:
        self.files.write_max = write_max

    @rule(seed=st.none() | st.integers(0, 1 << 16), fault=FAULT)
    def the_power_goes(self, seed: int | None, fault: Fault) -> None:
        self._lose_power(seed)
        fault.come(self.files)
        self._start()

    @rule(fault=FAULT)
    def the_process_is_killed(self, fault: Fault) -> None:
        self.store = None
        self._on(self.files.kill())
        fault.come(self.files)
        self._start()

    @rule(
        path=st.sampled_from(DERIVED),
        keep=st.floats(0, 1),
        how=st.sampled_from(["cut", "zeros", "garbage"]),
        fault=FAULT,
    )
    def a_derived_file_is_damaged(self, path: Path, keep: float, how: str, fault: Fault) -> None:
        self._close()
        if self.files.exists(path):
            data = self.files.read(path)
            size = int(len(data) * keep)
            rest = {"cut": b"", "zeros": bytes(len(data) - size), "garbage": b"7\nxx\n{}\n"}[how]
            self.files.put(path, data[:size] + rest)
            self.damaged = True
        fault.come(self.files)
        self._start()

    # What must hold.

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        """Now, and if the power went at this moment."""
        counted.tried()
        audit.check(self.files, self.acked, maybe=self.tried)
        for files in (self.files.crash(), self.files.crash(Random(len(self.files.log)))):
            self._on_disk(files)
        assert self.store is not None
        assert self.store.sums.records == len(self.store.done)
        assert set(self.store.done) >= self.acked

    def teardown(self) -> None:
        """Everything can still be brought to its end."""
        if not hasattr(self, "files"):
            return
        self._heal()
        self._start()
        assert self.store is not None
        left = [index for index in range(PROMPTS) if index not in self.store.done]
        self.store.commit(group(*left, number=self.groups + 1))
        self.store.seal_last()
        self._close()
        audit.check(self.files, range(PROMPTS))
        audit.check_at_rest(self.files)
        # A cut that a power loss undoes leaves a shard longer than the manifest says, until the next start.
        self._on(FullFiles.of(self.files.crash()))
        self._start()
        self._close()
        counted.audited(verdict_on(self.files, FOLDER, range(PROMPTS)))

    # How.

    def _commit(self, planned: Group, *, is_freed: bool) -> None:
        assert self.store is not None
        store = self.store
        self.tried |= {finished.prompt.index for finished in planned.finished}

        def step() -> None:
            try:
                store.commit(planned)
            except DiskFull:
                if not is_freed:
                    raise
                self._heal()
                store.commit(planned)
            self.acked.update(finished.prompt.index for finished in planned.finished)
            self.acked_failures.update(failure.index for failure in planned.given_up)

        if not self._survive(step):
            self._start()

    def _survive(self, step: Callable[[], None]) -> bool:
        """Whether it went well; after a power loss the disk is what is left of it."""
        try:
            step()
        except PowerLoss:
            self._lose_power(len(self.files.log))
            return False
        except StoreError:
            return False
        return True

    def _start(self, *, retry_failed: bool = False) -> None:
        """Close, and open again: what is due may also hit the start, but not more than two in a row."""
        for last in (False, False, True):
            self._close()
            if last:
                self._heal()
            if self._survive(lambda: self._open(retry_failed=retry_failed)):
                break
        self.damaged = False
        assert self.store is not None
        assert set(self.store.done) == set(audit.counts(self.files))
        audit.check_at_rest(self.files)

    def _open(self, *, retry_failed: bool) -> None:
        self.store = Store.open(
            FOLDER,
            self.files,
            shard_records=SHARD_RECORDS,
            wall=WALL,
            warn=lambda line: None,
            retry_failed=retry_failed,
        )
        failed = {line["index"] for line in audit.whole_lines(self.files.read(FOLDER / "failed.jsonl"))}
        assert self.acked_failures <= failed | set(self.store.done)

    def _close(self) -> None:
        store, self.store = self.store, None
        if store is not None:
            store.close()
            assert self.files.open_count == 0

    def _heal(self) -> None:
        self.files.full_from = self.files.refuse_step = self.files.stop_before = None

    def _lose_power(self, seed: int | None) -> None:
        self.store = None
        self._on(FullFiles.of(self.files.crash(None if seed is None else Random(seed))))

    def _on(self, files: FullFiles) -> None:
        """Go on with what is left of the disk; it keeps no orders."""
        self.files = files
        self._on_disk(self.files)

    def _on_disk(self, files: MemoryFiles) -> None:
        """Before a start has mended anything; a list that somebody damaged may say anything."""
        if self.damaged:
            assert self.acked <= set(audit.counts(files))
            return
        verdict = verdict_on(files, FOLDER, self.acked, self.acked_failures)
        assert not verdict.lost
        assert not verdict.leading


@pytest.mark.slow
@pytest.mark.timeout(600 * SOAK)
def test_no_order_of_events_loses_or_doubles_what_was_acknowledged(record_property):
    try:
        run_state_machine_as_test(
            StoreMachine,
            settings=settings(
                max_examples=EXAMPLES * SOAK,
                stateful_step_count=STEPS,
                derandomize=SOAK == 1,
                database=None,
                deadline=None,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
                # To make a long example short takes minutes: a soak has them.
                phases=[Phase.generate] if SOAK == 1 else list(Phase),
            ),
        )
    finally:
        record_property(PROPERTY, counted.row())
