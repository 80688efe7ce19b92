"""Run folders as a crash may have left them, for drivers to start from."""

import shutil
from pathlib import Path

from genpipe.edges.files import OsFiles
from genpipe.edges.store import Store
from tests.edges.samples import WALL
from tests.faults.store_driver import Plan

GROUPS_BEFORE = 7


def half_done(folder: Path, plan: Plan) -> frozenset[int]:
    """A run that was ended in order after some groups; the indices of its records."""
    folder.mkdir()
    store = Store.open(folder, OsFiles(), shard_records=plan.shard_records, wall=WALL, warn=_no_warning)
    acked: set[int] = set()
    for planned in list(plan.groups())[:GROUPS_BEFORE]:
        store.commit(planned)
        acked |= {finished.prompt.index for finished in planned.finished}
    store.close()
    return frozenset(acked)


def left_by_crashes(folder: Path, plan: Plan) -> frozenset[int]:
    """Several crashes' leftovers at once, no record of them lost; the indices of the records.

    The newest open shard, and every other file that grows, ends in half a line; the shard before it is full
    and was not sealed; the one before that has garbage between two records, and is not in the manifest; a
    temporary file was not renamed.
    """
    acked = half_done(folder, plan)
    *_, older, newer, growing = sorted((folder / "shards").iterdir())
    newer.chmod(0o644)
    newer.rename(newer.with_name(f"{newer.name}.open"))
    first, rest = older.read_bytes().split(b"\n", 1)
    older.chmod(0o644)
    older.write_bytes(first + b"\n" + b'{"index":1,garbage}\n' + rest)
    manifest = folder / "manifest.jsonl"
    lines = manifest.read_bytes().splitlines(keepends=True)
    manifest.write_bytes(b"".join(lines[:-2]) + lines[-1][:40])
    for torn, tail in (
        (growing, b'{"index":29,"messages":[{"role":"us'),
        (folder / "failed.jsonl", b'{"index":99,"attem'),
        (folder / ".done_indices", b"2"),
    ):
        with open(torn, "ab") as file:
            file.write(tail)
    (folder / "manifest.jsonl.tmp").write_bytes(lines[0])
    return acked


def copy_of(folder: Path, where: Path) -> Path:
    """A folder's copy; the copy's modes and bytes are those of the original."""
    shutil.copytree(folder, where, copy_function=shutil.copy)
    return where


def _no_warning(line: str) -> None:
    raise AssertionError(f"unexpected warning: {line}")
