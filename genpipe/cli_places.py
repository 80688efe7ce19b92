"""What commands that look at a whole run have in common: where it is, and the lines that they tell."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from genpipe.core.errors import ConfigError

if TYPE_CHECKING:
    from genpipe.edges.s3.place import Place

RUN_AT = "A run folder, or s3://bucket/prefix."
HOW = "How S3 is spoken to, as for run (s3.endpoint_url, s3.region …); repeatable."


def tell(text: str) -> None:
    """Show a line on stderr, where there is one."""
    if sys.stderr is not None:
        try:
            sys.stderr.write(text + "\n")
        except (OSError, ValueError):
            return


def target_of(run_at: str, overrides: list[str] | None) -> "Path | Place":
    """A run folder, or a place in S3.

    Raises:
        ConfigError: what is said of S3 is wrong, or is said of a folder.
    """
    from genpipe.offsite import is_offsite, reading_place

    if is_offsite(run_at):
        return reading_place(run_at, overrides or [])
    if overrides:
        raise ConfigError(f"--set is for s3:// places: {run_at} is a folder, and knows where it is sent to")
    return Path(run_at)
