"""Small prompts, answers and groups for tests of the store."""

from genpipe.core.values import Answer, Finished, GivenUp, Group, Prompt
from genpipe.edges.record import Wall

WALL = Wall(wall_s=1_700_000_000.0, run_s=100.0)


def answer(content="hi", *, output_tokens=7, **changes):
    fields = {
        "response": {"content": content, "reasoning_content": None, "tool_calls": None},
        "finish_reason": "stop",
        "usage": None if output_tokens is None else {"prompt_tokens": 3, "completion_tokens": output_tokens},
        "output_tokens": output_tokens,
        "model": "m",
        "size_bytes": 200,
    }
    return Answer(**{**fields, **changes})


def finished(index, given=None, **prompt):
    payload = b'[{"role":"user","content":"prompt %d"}]' % index
    return Finished(
        prompt=Prompt(index=index, payload=payload, **prompt),
        answer=given or answer(f"answer to {index}", output_tokens=10 + index),
        server="http://gpu0:30000",
        tries=1,
        started_s=101.5,
        latency_s=2.0006,
    )


def given_up(index, *, for_good=True, message="no"):
    return GivenUp(
        index=index, tries=2, error_class="PromptFault", message=message, last_status=400, for_good=for_good
    )


def group(*indices, failures=(), number=1):
    return Group(number=number, finished=tuple(map(finished, indices)), given_up=tuple(failures))
