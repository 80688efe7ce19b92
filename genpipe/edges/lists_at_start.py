"""What a start makes of the lists beside the shards: ``.done_indices`` and ``failed.jsonl``."""

from collections.abc import Callable
from pathlib import Path

from genpipe.core.bitmap import Bitmap
from genpipe.edges import done_indices
from genpipe.edges.files import Files, blaming, replace_atomically
from genpipe.edges.mending import Mender
from genpipe.edges.shards import DONE_INDICES, FAILED, failure_of


def put_right_done_indices(
    folder: Path, files: Files, done: Bitmap, *, brought: int, warn: Callable[[str], None]
) -> None:
    """Let ``.done_indices`` hold just what is done.

    Args:
        folder: the run folder.
        files: the disk.
        done: indices with a durable record.
        brought: how many of them were brought from elsewhere by this start, so that they are not listed yet.
        warn: told, in one line, what was wrong with it.

    Raises:
        StoreError: it cannot be read or written.
    """
    path = folder / DONE_INDICES
    with blaming(path, "read"):
        there = files.exists(path)
        data = files.read(path) if there else b""
    what = done_indices.difference(data, done)
    if what is None:
        return
    if what.foreign or what.repeated or what.garbage or what.missing > brought:
        again = "; what they stood for is lost, and those prompts run again" if what.foreign else ""
        warn(f"{path} {'had' if there else 'was missing:'} {what}: rewritten from the shards{again}")
    with blaming(path, "rewrite"):
        replace_atomically(files, path, done_indices.encode(done))


def read_failures(
    folder: Path, files: Files, mender: Mender, done: Bitmap, *, was_used: bool, warn: Callable[[str], None]
) -> Bitmap:
    """The indices whose last word is a failure for good, and that are not done.

    Args:
        folder: the run folder.
        files: the disk.
        mender: mends ``failed.jsonl``.
        done: indices with a durable record.
        was_used: the folder has held records, so that the file is missed where it is not there.
        warn: told, in one line, that it is missed.

    Raises:
        StoreError: it cannot be read or mended.
    """
    path = folder / FAILED
    for_good = Bitmap()
    with blaming(path, "read"):
        there = files.exists(path)
    if was_used and not there:
        warn(f"{path} is missing: prompts that had failed for good are asked again")
    for line in mender.mend(path) if there else ():
        failure = failure_of(line)
        if failure is None or failure[0] in done:
            continue
        index, is_for_good = failure
        if is_for_good:
            for_good.add(index)
        else:
            for_good.discard(index)
    return for_good
