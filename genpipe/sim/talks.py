"""What becomes of the prompts of a world; conversations, of which each answer says what comes next."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from genpipe.core.errors import PromptFault
from genpipe.core.values import Answer, Prompt, Start
from genpipe.sim.world import Fate, World

TOKENS = 10
"""Tokens in each answer (count)."""

ANSWER = Answer(
    response={"content": "x"},
    finish_reason="stop",
    usage=None,
    output_tokens=TOKENS,
    model=None,
    size_bytes=100,
)

LENGTHS = (2, 2, 3, 4, 6)
"""How many turns conversations have; each is as frequent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """How far a conversation has come.

    Attributes:
        turns: how many it has.
        made: the attempts whose answers are in the history, by number.
    """

    turns: int
    made: tuple[int, ...] = ()


def turn_of(prompt: Prompt) -> int:
    """Which turn is asked, from 0."""
    return len(prompt.conversation.made) if prompt.conversation is not None else 0


def made_json(made: Sequence[int]) -> bytes:
    """What a failed conversation leaves behind."""
    return b'"made":[%s]' % b",".join(b"%d" % attempt for attempt in made) if made else b""


class Script:
    """What a world has in store for each of its prompts.

    Attributes:
        fates: what becomes of each on whatever server; of a conversation, of one of its turns.
        turns: how many each has; 1 where it is no conversation.
    """

    def __init__(self, world: World) -> None:
        rng = random.Random(world.seed + 2)
        self.fates = [world.fate(rng.random()) for _ in range(world.prompts)]
        self._long = [rng.random() < world.long_share for _ in range(world.prompts)]
        self._sizes = [rng.randint(1, 50) for _ in range(world.prompts)]
        rng = random.Random(world.seed + 3)
        self.turns = [
            rng.choice(LENGTHS) if rng.random() < world.talks_share else 1 for _ in range(world.prompts)
        ]
        self._fatal = [rng.randrange(turns) for turns in self.turns]

    def prompt(self, index: int) -> Prompt:
        """A prompt as it stands in the input."""
        turns = self.turns[index]
        talk = Talk(turns=turns) if turns > 1 else None
        return Prompt(index=index, payload=b"x" * self._sizes[index], conversation=talk)

    def fate(self, prompt: Prompt) -> Fate:
        """What becomes of what is asked now."""
        return self.fate_of(prompt.index, turn_of(prompt))

    def fate_of(self, index: int, turn: int) -> Fate:
        """What becomes of one turn of a prompt."""
        fate = self.fates[index]
        return fate if turn == self._fatal[index] or fate is Fate.BAD else Fate.ANSWERED

    def is_long(self, prompt: Prompt) -> bool:
        """Whether its answer takes longer; of a conversation, that to its last turn."""
        return self._long[prompt.index] and turn_of(prompt) == self.turns[prompt.index] - 1

    def answer(self, start: Start) -> Answer:
        """What is made of a good reply.

        Raises:
            PromptFault: there is no way to go on from it.
        """
        prompt, talk = start.prompt, start.prompt.conversation
        made = (*talk.made, start.attempt) if talk is not None else (start.attempt,)
        if self.fate(prompt) is Fate.STUCK:
            fault = PromptFault("nothing can be asked after this")
            fault.made_json = made_json(made)
            raise fault
        if talk is None:
            return ANSWER
        if len(made) < talk.turns:
            more = replace(
                prompt,
                payload=prompt.payload + b"y" * 10,
                conversation=replace(talk, made=made),
                made=partial(made_json, made),
            )
            return replace(ANSWER, more=more)
        return replace(ANSWER, output_tokens=TOKENS * len(made), steps=[{"attempt": each} for each in made])
