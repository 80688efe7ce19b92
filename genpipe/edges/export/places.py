"""Where an export is written: finished files appear in their places whole, together, or not at all."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from genpipe.core.errors import ConfigError
from genpipe.edges.files import Files, blaming

_FOLDER = ".genpipe-export-"


def check_place(folder: Path | None, out: Path, *, force: bool) -> None:
    """Refuse a file that must not be replaced, or that would lie where a driver may be at work.

    Args:
        folder: the run folder, or None.
        out: the file.
        force: an existing file is replaced.

    Raises:
        ConfigError: it cannot have that place.
    """
    if folder is not None and folder.resolve() in (out, *out.parents):
        raise ConfigError(
            f"{out} is in the run folder {folder}, which is not to be changed: name another place"
        )
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is no folder: make it first, or name another place than {out}")
    if out.exists():
        if not out.is_file():
            raise ConfigError(f"{out} is no file, and is not replaced: name another, or - for stdout")
        if not force:
            raise ConfigError(f"{out} exists: name another file, or replace it with --force")


def put_in_place(finished: list[tuple[Path, Path]], files: Files, *, force: bool) -> None:
    """Give finished files their names, in order; where one cannot have it, those before it are as they were.

    Args:
        finished: each as it is called now, in a folder for temporary files, and as it is to be called.
        files: the disk.
        force: existing files are replaced.

    Raises:
        ConfigError: a file has come to be there meanwhile.
        StoreError: the disk refuses.
    """
    with ExitStack() as way_back:
        for place, (temporary, out) in enumerate(finished, 1):
            with blaming(out, "write"):
                is_last = place == len(finished)
                # The last one is replaced in one step; before it, what is replaced may have to come back.
                if force and not is_last and out.exists():
                    old = out.rename(temporary.with_name(f"{temporary.name}.old"))
                    way_back.callback(old.rename, out)
                _put_one(temporary, out, force=force)
                way_back.callback(out.unlink, missing_ok=True)
        way_back.pop_all()
    for folder in {out.parent for _, out in finished}:
        with blaming(folder, "write to"):
            files.sync_folder(folder)


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A folder for files that are not finished, removed with all that is in it at the end.

    Raises:
        StoreError: there can be none.
    """
    with blaming(parent, "write to"):
        place = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=parent))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _put_one(temporary: Path, out: Path, *, force: bool) -> None:
    if not force:
        try:
            out.hardlink_to(temporary)
        except OSError:
            # It exists, or the file system has no hard links.
            check_place(None, out, force=False)
        else:
            return
    temporary.rename(out)
