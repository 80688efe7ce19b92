"""genpipe: fan prompts out over SGLang servers, lose nothing, and say why it is not faster."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genpipe.config import Settings
    from genpipe.ending import Ending

__version__ = "0.1.0"


async def run(settings: "Settings", *, quiet: bool = True) -> "Ending":
    """Start or resume a run from Python, on the event loop that is running (as in a notebook).

    Args:
        settings: from :func:`genpipe.config.load`.
        quiet: no progress on stderr, only messages.

    Raises:
        GenpipeError: the run could not begin or go on; all answers that had come are on disk.
    """
    from genpipe import compose
    from genpipe.edges.console import display

    return await compose.run(settings, display=display(quiet=quiet))
