"""Moments at which something is due, of which there may be none."""


def earlier(one_s: float | None, other_s: float | None) -> float | None:
    """The earlier of two moments (seconds), either of which may not be there."""
    if one_s is None:
        return other_s
    return one_s if other_s is None or one_s < other_s else other_s
