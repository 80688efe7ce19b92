"""Cuts the power of a file system while a driver works on it."""

from pathlib import Path
from random import Random

from genpipe.edges.files import OsFiles
from tests.faults.audits import Count, assert_complete, verdict_on
from tests.faults.drivers import Launcher, parse_acks, wait_for_word
from tests.faults.mounts import Mounted
from tests.faults.store_driver import Plan

PLAN = Plan(records=600, shard_records=20, group_records=5)
ACKS_MAX = 20
"""Most groups between two losses: five losses come before the plan's end."""


def losses(
    launcher: Launcher, mounted: Mounted, scratch: Path, count: Count, rng: Random, *, times: int, mutant=()
) -> None:
    """One run folder through so many losses and to its end, with an audit after each.

    Only what was read from the driver before the power went counts as promised: a sync that races with the
    loss may report success and be lost.
    """
    folder = mounted.folder / "run"
    folder.mkdir()
    arguments = [
        *(folder, "--records", PLAN.records, "--shard-records", PLAN.shard_records),
        *("--group-records", PLAN.group_records, *mutant),
    ]
    records: set[int] = set()
    failures: set[int] = set()
    for time_number in range(times):
        attempt = scratch / f"attempt-{time_number}"
        attempt.mkdir()
        wanted = rng.randint(1, ACKS_MAX)

        def cut_after_acks(out: Path, wanted=wanted) -> None:
            acked, acked_failures = parse_acks(wait_for_word(out, b"ack ", wanted))
            mounted.cut_power()
            records.update(acked)
            failures.update(acked_failures)

        ended = launcher.run(attempt, arguments, meanwhile=cut_after_acks)
        assert ended.code != 0, "it had ended before the power went"
        mounted.start_again()
        count.tried()
        count.audited(verdict_on(OsFiles(), folder, records, failures))
    (scratch / "last").mkdir()
    ended = launcher.run(scratch / "last", arguments)
    assert ended.code == 0, ended.err
    mounted.start_again()
    count.audited(verdict_on(OsFiles(), folder, PLAN.indices, failures | ended.acked_failures))
    assert_complete(OsFiles(), folder, PLAN)
