"""A small program that commits a fixed plan of groups to a store, to be killed and lied to from outside.

One line goes to its standard output for each group, once that is acknowledged, and for each shard that is
handed on, in one write. With
``--serve`` it makes itself ready once and then forks a driver for each request, which stops itself before
its first step: a tracer that attaches then sees the store's calls and no others.
"""

import argparse
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from genpipe.core.errors import DiskFull, StoreError
from genpipe.core.values import Group
from genpipe.edges.files import Files, OsFiles
from genpipe.edges.shards import shard_name
from genpipe.edges.store import Store
from tests.edges.samples import WALL, given_up, group
from tests.faults.mutants import MUTANTS, ShortWrites

FULL_PAUSE_S = 0.02
READY = "ready"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be committed.

    Attributes:
        records: how many prompts get an answer.
        shard_records: lines of a full shard.
        group_records: answers in a group.
        full_tries: how often a group is committed again where the disk is full.
    """

    records: int = 30
    shard_records: int = 7
    group_records: int = 3
    full_tries: int = 0

    @property
    def indices(self) -> range:
        """The prompts that get an answer, sooner or later."""
        return range(self.records)

    def groups(self) -> Iterator[Group]:
        """All groups, in order: answers out of order, failures for good, and failures that pass."""
        order = [index ^ 1 if index ^ 1 < self.records else index for index in self.indices]
        for number, start in enumerate(range(0, self.records, self.group_records), 1):
            failures = []
            if number % 3 == 2:
                failures = [
                    given_up(self.records + number),
                    given_up(self.records - number, for_good=False),
                ]
            part = order[start : start + self.group_records]
            yield group(*part, failures=failures, number=number)


def run(folder: Path, files: Files, plan: Plan, ack: Callable[[bytes], None]) -> list[str]:
    """Commit what is not done yet, and seal the last shard; the warnings of the start.

    Raises:
        StoreError: the disk refused, for good.
    """
    warnings: list[str] = []
    store = Store.open(
        folder,
        files,
        shard_records=plan.shard_records,
        wall=WALL,
        warn=warnings.append,
        on_sealed=lambda entry: ack(b"sealed %b\n" % shard_name(entry.seq, is_open=False).encode()),
    )
    try:
        for planned in plan.groups():
            finished = tuple(f for f in planned.finished if f.prompt.index not in store.done)
            indices = {f.prompt.index for f in finished}
            failures = tuple(
                g
                for g in planned.given_up
                if g.index not in store.done and g.index not in store.skip and g.index not in indices
            )
            if not finished and not failures:
                continue
            _commit(store, Group(number=planned.number, finished=finished, given_up=failures), plan, ack)
            words = [b"%d" % f.prompt.index for f in finished] + [b"f%d" % g.index for g in failures]
            ack(b"ack %b\n" % b" ".join(words))
        store.seal_last()
    finally:
        store.close()
    return warnings


def _commit(store: Store, planned: Group, plan: Plan, ack: Callable[[bytes], None]) -> None:
    for tries_left in range(plan.full_tries, -1, -1):
        try:
            store.commit(planned)
        except DiskFull:
            if tries_left == 0:
                raise
            ack(b"full\n")
            time.sleep(FULL_PAUSE_S)
        else:
            return


def main(arguments: Sequence[str], pause: Callable[[], None] = lambda: None) -> int:
    """Carry out one plan, after a pause; the exit code is genpipe's own for what went wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name, default in (("records", 30), ("shard-records", 7), ("group-records", 3), ("full-tries", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--write-max", type=int, help="bytes that one write takes at most")
    parser.add_argument("--file-bytes-max", type=int, help="the system's limit on a file's length")
    parser.add_argument("--mutant", choices=MUTANTS)
    given = parser.parse_args(arguments)
    plan = Plan(
        records=given.records,
        shard_records=given.shard_records,
        group_records=given.group_records,
        full_tries=given.full_tries,
    )
    files: Files = OsFiles()
    if given.write_max is not None:
        files = cast("Files", ShortWrites(files, given.write_max))
    if given.mutant is not None:
        files = MUTANTS[given.mutant](files, setattr)
    if given.file_bytes_max is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (given.file_bytes_max, given.file_bytes_max))
    pause()
    try:
        run(given.folder, files, plan, lambda line: _say(1, line))
    except StoreError as error:
        _say(2, f"{error}\n".encode())
        return error.exit_code
    return 0


def _say(handle: int, line: bytes) -> None:
    """One write, so that a line is there whole or not at all."""
    assert os.write(handle, line) == len(line)


def serve() -> None:
    """Fork a driver for each line of standard input, until that ends.

    A request is ``{"arguments": [...], "out": path, "err": path}``. The answers are the driver's process
    id, once it has stopped itself, and its exit code, once it has ended.
    """
    with tempfile.TemporaryDirectory() as scratch:
        # So that no driver imports anything while it is traced.
        run(Path(scratch), OsFiles(), Plan(), lambda line: None)
    _say(1, f"{READY}\n".encode())
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _drive(request)
        os.waitpid(pid, os.WUNTRACED)
        _say(1, b"%d\n" % pid)
        _say(1, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _drive(request: dict[str, object]) -> None:
    """The forked driver: it must never return into the loop that forked it."""
    code = 70
    try:
        for handle, path in ((1, request["out"]), (2, request["err"])):
            os.dup2(os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), handle)
        code = main(cast("list[str]", request["arguments"]), lambda: os.kill(os.getpid(), signal.SIGSTOP))
    finally:
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        sys.exit(main(sys.argv[1:]))
