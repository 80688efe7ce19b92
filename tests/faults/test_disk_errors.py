"""Disks that refuse: full ones, used-up quotas, errors once and for ever, short writes, in every place."""

from pathlib import Path

import pytest

from genpipe.edges.files import OsFiles
from tests.faults.audits import Count, assert_complete, verdict_on
from tests.faults.drivers import Ended, Launchers, wait_for_word
from tests.faults.lint import traced
from tests.faults.mounts import CannotMountError, Mounted, image, in_memory
from tests.faults.refusals import FULL, REFUSALS
from tests.faults.store_driver import Plan
from tests.faults.sweep import Sweep, empty
from tests.faults.weakest import Weakest


def go_on(launchers: Launchers, scratch: Path, folder: Path, plan: Plan, count: Count, *ended: Ended) -> None:
    """Audit what the refused drivers left, resume on a disk that is well again, and audit the whole."""
    acked = frozenset().union(*(one.acked for one in ended))
    failures = frozenset().union(*(one.acked_failures for one in ended))
    count.audited(verdict_on(OsFiles(), folder, acked, failures))
    last = scratch / "last"
    last.mkdir()
    resumed = launchers.run(last, arguments_of(folder, plan))
    assert resumed.code == 0, resumed.err
    count.audited(verdict_on(OsFiles(), folder, plan.indices, failures | resumed.acked_failures))
    assert_complete(OsFiles(), folder, plan)


def arguments_of(folder: Path, plan: Plan) -> list[object]:
    return [
        *(folder, "--records", plan.records, "--shard-records", plan.shard_records),
        *("--group-records", plan.group_records, "--full-tries", plan.full_tries),
    ]


@pytest.mark.parametrize("refused", REFUSALS, ids=str)
def test_a_refusal_costs_nothing_that_was_acknowledged_and_is_survived_where_that_can_be(
    launchers, tmp_path, count, refused
):
    plan = Plan(full_tries=5)
    folder = tmp_path / "run"
    folder.mkdir()
    ended = launchers.run(tmp_path, arguments_of(folder, plan), strace=refused.strace(folder))
    counted = count("refusals by table")
    counted.tried()

    assert ended.code == refused.code, ended.err
    assert ended.full == refused.full
    go_on(launchers, tmp_path, folder, plan, counted, ended)


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("how_long", ["", "+"], ids=["once", "for ever"])
def test_an_error_in_any_place_costs_nothing_and_is_not_believed_away(
    launchers, tmp_path, count, error, how_long
):
    """Each call in its turn; then both processes are replayed: no second sync may be believed."""
    plan = Plan(records=15, shard_records=4, full_tries=1)
    counted = count(f"{error} {'for ever' if how_long else 'once'}, at each call")
    options = tuple(arguments_of(tmp_path, plan)[1:])
    sweep = Sweep(launchers=launchers, scratch=tmp_path, prepare=empty, plan=plan, options=options)

    def refused_at(point: tuple[str, int]) -> None:
        name, at = point
        scratch = tmp_path / f"{name}-{at}"
        folder = scratch / "run"
        folder.mkdir(parents=True)
        disk = Weakest(folder)
        inject = ["-e", f"inject={name}:error={error}:when={at}{how_long}"]
        first = traced(launchers, scratch / "first", folder, disk, *options, strace=inject)
        counted.tried()
        counted.audited(verdict_on(OsFiles(), folder, first.acked, first.acked_failures))
        second = traced(launchers, scratch / "second", folder, disk, *options)
        assert second.code == 0, f"{point}: {second.err}"
        # What the first process could not sync of a list may be lost: lists are made again from the shards.
        assert [complaint for complaint in disk.complaints if not complaint.startswith("h")] == [], point
        failures = first.acked_failures | second.acked_failures
        counted.audited(verdict_on(OsFiles(), folder, plan.indices, failures))
        assert_complete(OsFiles(), folder, plan)

    launchers.each(refused_at, sweep.points())


def test_a_limit_on_file_lengths_ends_in_more_shards(launchers, tmp_path, count):
    """A write that takes some of its bytes, and then an error of the system's own."""
    plan = Plan(shard_records=25)
    folder = tmp_path / "run"
    folder.mkdir()
    ended = launchers.run(tmp_path, [*arguments_of(folder, plan), "--file-bytes-max", 5000])
    counted = count("limits on a file's length")
    counted.tried()

    assert ended.code == 0, ended.err
    assert len(list((folder / "shards").iterdir())) > 2
    go_on(launchers, tmp_path, folder, plan, counted, ended)


# ---- disks that are really full ----

BIG = Plan(records=600, shard_records=50, group_records=5, full_tries=400)
FEW_TRIES = Plan(records=600, shard_records=50, group_records=5, full_tries=2)


class SmallMemory:
    """Room for about half of the plan, in memory."""

    kind = "a full tmpfs"

    def __init__(self, scratch: Path) -> None:
        self.mounting = in_memory(scratch, "128k")

    def fill(self, mounted: Mounted) -> None:
        """It is small by itself."""

    def free(self, mounted: Mounted) -> None:
        mounted.resize("4m")


class SmallImage:
    """Room for about half of the plan, on ext4."""

    kind = "a full ext4"

    def __init__(self, scratch: Path) -> None:
        self.mounting = image(scratch, "ext4")

    def fill(self, mounted: Mounted) -> None:
        ballast = mounted.folder / "ballast"
        with pytest.raises(OSError, match="No space left"), open(ballast, "wb", buffering=0) as file:
            file.writelines(bytes(1 << 16) for _ in range(1 << 20))
        with open(ballast, "r+b") as file:
            file.truncate(ballast.stat().st_size - (96 << 10))

    def free(self, mounted: Mounted) -> None:
        (mounted.folder / "ballast").unlink()


@pytest.fixture(params=[SmallMemory, SmallImage])
def small(request, tmp_path, count):
    """A kind of small disk, and one of it."""
    disk = request.param(tmp_path)
    try:
        with disk.mounting as mounted:
            disk.fill(mounted)
            (mounted.folder / "run").mkdir()
            yield disk, mounted
    except CannotMountError as refused:
        count(disk.kind).skip(str(refused))
        pytest.skip(str(refused))


def test_a_full_disk_is_waited_for_and_gone_on_from(launchers, tmp_path, count, small):
    disk, mounted = small
    folder = mounted.folder / "run"

    def free(out: Path) -> None:
        wait_for_word(out, b"full\n", 3)
        disk.free(mounted)

    with launchers.one() as launcher:
        ended = launcher.run(tmp_path, arguments_of(folder, BIG), meanwhile=free)
    counted = count(disk.kind)
    counted.tried()

    assert ended.code == 0, ended.err
    assert ended.full >= 3
    assert ended.acked == set(BIG.indices)
    go_on(launchers, tmp_path, folder, BIG, counted, ended)


def test_a_start_on_a_disk_that_is_still_full_damages_nothing(launchers, tmp_path, count, small):
    disk, mounted = small
    folder = mounted.folder / "run"
    ended = []
    for number in range(3):
        scratch = tmp_path / f"try-{number}"
        scratch.mkdir()
        ended.append(launchers.run(scratch, arguments_of(folder, FEW_TRIES)))
        counted = count(disk.kind)
        counted.tried()
        assert ended[-1].code == FULL, ended[-1].err
        acked = frozenset().union(*(one.acked for one in ended))
        counted.audited(verdict_on(OsFiles(), folder, acked))

    assert 100 < len(ended[0].acked) < BIG.records
    disk.free(mounted)
    go_on(launchers, tmp_path, folder, BIG, count(disk.kind), *ended)
