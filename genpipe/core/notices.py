"""What people should be told of the servers and the answers, a line each, once when it begins."""

from genpipe.core.flow import Core


class Notices:
    """Remembers what was said."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._is_out = False
        self._warned: set[str] = set()

    def once(self, text: str) -> list[str]:
        """This, if it was never said before."""
        if text in self._said:
            return []
        self._said.add(text)
        return [f"warning: {text}"]

    def due(self, core: Core, now_s: float) -> list[str]:
        """What is to be said now; to be asked about once a second."""
        lines = []
        is_out = core.outage.since_s is not None
        if is_out and not self._is_out and (text := core.outage.text(now_s)) is not None:
            self._is_out = True
            lines.append(text)
        elif self._is_out and not is_out:
            self._is_out = False
            lines.append("a server can be used again: going on")
        # A share moves a little with each answer: what is said once is that its bound was passed, or which
        # server is meant.
        warned = {text.partition(": ")[0]: text for text in core.quality.warnings}
        lines += [f"warning: {warned[bound]}" for bound in sorted(warned.keys() - self._warned)]
        self._warned = set(warned)
        return lines
