"""A scheduler with as little around it as a test needs."""

from genpipe.core.errors import FaultKind, PromptFault, ServerFault
from genpipe.core.flow import Core, FlowSettings
from genpipe.core.values import (
    Answer,
    BadLine,
    Cancel,
    Checkup,
    Chunk,
    Commit,
    Inquire,
    Probe,
    Prompt,
    Read,
    ServerSpec,
    Start,
    Vitals,
)

REFUSED = Checkup(trouble="connection refused", refused=True)


class Steady:
    """Jitter that is always the longest pause."""

    def uniform(self, a: float, b: float, /) -> float:
        return b


def prompts(*indices):
    return tuple(Prompt(index=index, payload=b"[]") for index in indices)


def bad(*indices):
    return tuple(BadLine(index=index, file="in.jsonl", line=index + 1, reason="no JSON") for index in indices)


def make_core(count=2, slots=(1,), *, exhausted=True, core_class=Core, now_s=0.0, **settings):
    """A core that has read ``count`` prompts: all slots open, commits wait for nobody, no second attempts."""
    specs = [ServerSpec(url=f"http://s{number}", limit=limit) for number, limit in enumerate(slots)]
    fields = {"ramp_s": 0.0, "group_interval_s": 0.0, "hedge": False, **settings}
    core = core_class(FlowSettings(**fields), specs, Steady(), now_s)
    assert [type(action) for action in core.due(now_s)] == [Read]
    core.offered(Chunk(prompts=prompts(*range(count)), exhausted=exhausted), now_s)
    return core


def due(core, now_s, kind):
    """What is due of one kind, and the core's own check."""
    found = [action for action in core.due(now_s) if isinstance(action, kind)]
    core.check()
    return found


def starts(core, now_s):
    return due(core, now_s, Start)


def probes(core, now_s):
    return due(core, now_s, Probe)


def commits(core, now_s):
    return due(core, now_s, Commit)


def cancels(core, now_s):
    return due(core, now_s, Cancel)


def reads(core, now_s):
    return due(core, now_s, Read)


def inquiries(core, now_s):
    return [inquire.server for inquire in due(core, now_s, Inquire)]


def started(core, server=None):
    """What is in flight, at one server or at all, oldest first."""
    return [each.start for each in core.flights() if server in (None, each.start.server)]


def inquired(core, now_s, server=0, **vitals):
    """A server was asked; the attempts that are to be cancelled now."""
    core.inquired(server, Vitals(**vitals), now_s)
    core.check()
    return [cancel.attempt for cancel in cancels(core, now_s)]


def cancel(core, start, now_s):
    core.cancelled(start, now_s)
    core.check()


def well(core, now_s, server=0, **found):
    probed(core, server, Checkup(**found), now_s)


def probed(core, server, checkup, now_s):
    core.probed(server, checkup, now_s)
    core.check()


def an_answer(*, size_bytes=100, output_tokens=10, finish_reason="stop", content="x"):
    return Answer(
        response={"content": content, "reasoning_content": None, "tool_calls": None},
        finish_reason=finish_reason,
        usage=None,
        output_tokens=output_tokens,
        model=None,
        size_bytes=size_bytes,
    )


def answer(core, start, now_s, *, last_s=None, wire_s=None, **fields):
    """The reply's last byte came at ``last_s``, and is handled now."""
    last_s = now_s if last_s is None else last_s
    core.landed(start, start.started_s if wire_s is None else wire_s, last_s, now_s)
    core.answered(start, an_answer(**fields), now_s)
    core.check()


def fault(kind=FaultKind.BROKEN, *, wire_s=None, retry_after_s=None):
    return ServerFault(f"it is {kind}", kind=kind, wire_s=wire_s, retry_after_s=retry_after_s)


def fail(core, start, now_s, kind=FaultKind.BROKEN, **fields):
    core.failed(start, fault(kind, **{"wire_s": start.started_s, **fields}), now_s)
    core.check()


def refuse(core, start, now_s, *, status=400, message="too long"):
    core.failed(start, PromptFault(message, status=status, wire_s=start.started_s), now_s)
    core.check()


def commit(core, now_s):
    """Carry out every commit that is due now; the groups."""
    groups = []
    while found := commits(core, now_s):
        for action in found:
            groups.append(action.group)
            core.committed(action.group.number, now_s)
    return groups


def bench(core, server, now_s, kind=FaultKind.UNREACHABLE):
    """Three faults in a row at ``server``, all at once."""
    found = [start for start in starts(core, now_s) if start.server == server]
    assert len(found) >= 3
    for start in found[:3]:
        fail(core, start, now_s, kind)
    return found[3:]
