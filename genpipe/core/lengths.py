"""How long the answers are: which are short, and which servers give far shorter ones than the others do."""

from collections.abc import Iterator, Sequence

from genpipe.core import wording
from genpipe.core.histogram import Histogram
from genpipe.core.server import Server, ServerState
from genpipe.core.values import Answer

MEDIAN_PART = 20
"""An answer of fewer tokens than this part of the run's median is short (factor)."""

KNOWN_MIN = 300
"""So many lengths must be known before there is a median to go by (count)."""

LOOK_EVERY = 256
"""The median is taken anew after so many answers (count)."""

BLOCK_ANSWERS = 64
"""A server is judged by so many of its last answers (count)."""

SERVER_PART = 10
"""Where something is wrong with a server, three quarters of its answers are shorter than this part of the
fleet's median (factor). Its own median alone jumps to and fro where half of the answers are a word."""

SERVERS_NAMED_MAX = 4


class Lengths:
    """Tokens of the answers of this run; remembers of each server no more than a block of them.

    Answers whose tokens are not known, and those that call a tool, are left out.
    """

    def __init__(self, *, short_tokens: int, known: Histogram, servers: Sequence[Server]) -> None:
        """Begin.

        Args:
            short_tokens: an answer of fewer tokens is short, whatever the others are like (count).
            known: the lengths of this process's answers; it grows as they are saved.
            servers: the fleet, by position.
        """
        self._short_tokens = short_tokens
        self._known = [known]
        self._servers = servers
        self._median_tokens = 0.0
        self._look_in = 0
        self._blocks: dict[int, list[int]] = {}
        self._quartiles: dict[int, tuple[int, int]] = {}

    def remember(self, lengths: Histogram) -> None:
        """Earlier segments had answers of these lengths."""
        self._known.append(lengths)

    def add(self, answer: Answer, server: int) -> bool:
        """An answer came from the server at this position; whether it is short.

        Of several samples, or the turns of a conversation, each is counted on.
        """
        tokens = answer.output_tokens
        if tokens is None:
            return False
        response = answer.response
        samples = response if isinstance(response, list) else (response,)
        if any(part.get("tool_calls") for part in samples):
            return False
        asked = len(answer.steps) if answer.steps else len(samples)
        block = self._blocks.setdefault(server, [])
        block.append(tokens // asked)
        if len(block) >= BLOCK_ANSWERS:
            block.sort()
            self._quartiles[server] = (block[BLOCK_ANSWERS // 2], block[BLOCK_ANSWERS * 3 // 4])
            block.clear()
        if self._look_in <= 0:
            self._look_in = LOOK_EVERY
            self._median_tokens = self._median()
        self._look_in -= 1
        return tokens < self._short_tokens * asked or tokens * MEDIAN_PART < self._median_tokens

    @property
    def short_texts(self) -> tuple[str, str]:
        """What a short answer is now, and what to set where such answers are right."""
        if self._short_tokens * MEDIAN_PART >= self._median_tokens:
            what = f"answers hold fewer than {wording.number(self._short_tokens)} tokens"
            return what, "set guards.short_tokens = 0 where such answers are right"
        median = wording.number(round(self._median_tokens))
        what = f"answers hold less than a twentieth of the run's median, which is {median} tokens"
        return what, "set guards.short_share = 1 where such answers are right"

    def warnings(self) -> Iterator[str]:
        """A line for each server whose answers are far shorter than the others'."""
        found = {
            position: quartiles
            for position, quartiles in self._quartiles.items()
            if self._servers[position].state is not ServerState.GONE
        }
        if len(found) < 2:
            return
        medians = sorted(median for median, _ in found.values())
        fleet = medians[len(medians) // 2]
        low = [position for position, (_, upper) in found.items() if upper * SERVER_PART < fleet]
        more = len(low) - SERVERS_NAMED_MAX
        for place, position in enumerate(low[:SERVERS_NAMED_MAX], 1):
            server, (median, _) = self._servers[position], found[position]
            text = (
                f"{server.spec.url}: answers hold {wording.number(median)} tokens at the median, the fleet's "
                f"hold {wording.number(fleet)}: look at its log, and at how it was started"
            )
            if place == SERVERS_NAMED_MAX and more > 0:
                text += f"; likewise {wording.number(more)} more servers"
            yield text

    def _median(self) -> float:
        """The run's median, 0 while too little is known."""
        both = Histogram(per_octave=self._known[0].per_octave, least=self._known[0].least)
        for lengths in self._known:
            both.merge(lengths)
        median = both.quantile(0.5) if both.count >= KNOWN_MIN else None
        return median or 0.0
