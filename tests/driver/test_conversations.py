"""The driver over virtual time, with conversations: each is asked turn by turn, and saved once."""

import asyncio
import random
from dataclasses import replace

import pytest

from genpipe.core.errors import PromptFault
from tests.driver.fakes import FakeTransport
from tests.driver.rig import Rig
from tests.driver.virtual import run_virtual

TURNS = 3


class Talking(FakeTransport):
    """Prompts with an even index are conversations; that with index 4 cannot go on from its second turn."""

    def examine(self, start, reply):
        answer = super().examine(start, reply)
        made = (*(start.prompt.conversation or ()), start.attempt)
        if start.prompt.index % 2 or len(made) == TURNS:
            return replace(answer, steps=[{"attempt": each} for each in made])
        if start.prompt.index == 4 and len(made) == 2:
            fault = PromptFault("it cannot go on", wire_s=reply.wire_s)
            fault.made_json = b'"steps":2'
            raise fault
        return replace(answer, more=replace(start.prompt, payload=b"[1]", conversation=made))


def test_a_conversation_is_asked_turn_by_turn_and_saved_once():
    async def main(loop):
        rig = Rig(loop, count=6, kind=Talking)
        await rig.driver.run()
        return rig

    rig = run_virtual(main)
    sent = [index for what, index in rig.transport.log if what == "sent"]
    steps = {index: len(answer.steps) for index, answer in rig.store.done.items()}

    assert [sent.count(index) for index in range(6)] == [3, 1, 3, 1, 2, 1]
    assert steps == {0: 3, 1: 1, 2: 3, 3: 1, 5: 1}
    assert rig.store.failed == {4}
    (given_up,) = (each for group in rig.store.groups for each in group.given_up)
    assert (given_up.made_json, given_up.last_status) == (b'"steps":2', None)
    assert rig.core.complete
    rig.core.check()


@pytest.mark.parametrize("how", ["stop", "cancel"])
@pytest.mark.parametrize("seed", range(15))
def test_however_a_run_ends_no_conversation_is_saved_in_part(seed, how):
    rng = random.Random(seed)

    async def main(loop):
        rig = Rig(loop, kind=Talking, limits=(2, 1), latency_s=lambda start: rng.expovariate(1.0))
        task = asyncio.ensure_future(rig.driver.run())
        await asyncio.sleep(rng.uniform(0, 20))
        if how == "stop":
            rig.driver.stop(grace_s=rng.choice([0.0, 5.0]))
            sent = len(rig.transport.log)
            await task
            later = [each for each in rig.transport.log[sent:] if each[0] == "sent"]
            assert later == []
        else:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return rig

    rig = run_virtual(main)

    for index, answer in rig.store.done.items():
        assert len(answer.steps) == (1 if index % 2 else TURNS)
    assert rig.store.failed <= {4}
    assert rig.core.unsaved == 0
    rig.core.check()
