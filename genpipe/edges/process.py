"""What this process may use of its machine."""

from genpipe.core.errors import ConfigError

SPARE_FILES = 200
"""Open files beside the connections: shards, input, standard streams, libraries (count)."""


def raise_file_limit(connections: int) -> None:
    """Raise the soft limit of open files as far as is needed and allowed.

    Args:
        connections: connections that may be open at once.

    Raises:
        ConfigError: the hard limit is too low; names both numbers.
    """
    try:
        import resource
    except ImportError:
        return
    needed = 2 * connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{connections} requests at once need {needed} open files and this process may have {hard}: "
            "raise the limit (ulimit -Hn), or lower --concurrency"
        )
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except (ValueError, OSError) as error:
        # Without a hard limit there is still the system's own.
        raise ConfigError(
            f"{connections} requests at once need {needed} open files, this process may have {soft}, and the "
            f"system does not raise that ({error}): lower --concurrency"
        ) from None
