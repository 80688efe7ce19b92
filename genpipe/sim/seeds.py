"""The command that runs worlds in virtual time: many seeds with a summary, or one with its story."""

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

from genpipe.core import wording
from genpipe.core.books import shares
from genpipe.core.settings import FlowSettings
from genpipe.sim.engine import Engine, Outcome
from genpipe.sim.laws import ServerLaw
from genpipe.sim.world import World, from_seed

SEEDS = 500
"""Worlds that are run where no seed is named (count)."""

STORY_LINES_MAX = 200
"""Of a longer story, its end is told (lines)."""

SUMMARY = (
    "events", "prompts", "answered", "given up", "returned", "turns that others follow", "requests", "hedges",
    "late answers dropped",
    "deaths", "given up as poison", "innocents given up as poison", "swallowed", "inquiries",
    "called off: stalled", "called off: overdue",
)  # fmt: skip
"""What the summary tells, in this order."""


MOST = "servers harmed by one prompt, at most"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What one world has to say for the summary.

    Attributes:
        seed: the world's.
        broken: the promise that was broken, or None.
        counts: what happened how often.
    """

    seed: int
    broken: str | None
    counts: dict[str, int]


def main(argv: Sequence[str] | None = None, *, engine: type[Engine] = Engine) -> int:
    """Run one seed, or many; 1 if any promise was broken."""
    parser = argparse.ArgumentParser(
        prog="python -m genpipe.sim.seeds",
        description="Run worlds that seeds make, in virtual time, and hold the scheduler to its promises.",
    )
    parser.add_argument("seed", type=int, nargs="?", help="run this one, and tell its story")
    parser.add_argument("--count", type=int, default=SEEDS, help=f"how many to run (default {SEEDS})")
    options = parser.parse_args(argv)
    if options.seed is not None:
        return _run_one(options.seed, engine)
    return _run_many(options.count, engine)


def _run_one(seed: int, engine: type[Engine]) -> int:
    world, story = from_seed(seed), list[str]()
    _say(_world_table(world))
    try:
        outcome = engine(world, story=story).run()
    except Exception as error:  # a bug breaks a promise too
        _say(_story(story))
        _say(f"seed {seed}: a promise was broken: {_words(error)}")
        _say(f"again with: {_command(seed)}")
        return 1
    _say(_story(story))
    _say(_outcome_table(world, outcome))
    return 0


def _run_many(count: int, engine: type[Engine]) -> int:
    began_s = time.monotonic()
    total: Counter[str] = Counter()
    failed = harmed = 0
    for told in _each(count, engine):
        if told.broken is not None:
            failed += 1
            _say(f"seed {told.seed}: a promise was broken: {told.broken}; again with: {_command(told.seed)}")
        most = told.counts.pop(MOST, 0)
        harmed = max(harmed, most)
        total.update(told.counts)
    _say(f"{wording.number(count)} worlds in {wording.duration(time.monotonic() - began_s)}")
    for what in SUMMARY:
        _say(f"  {wording.number(total[what]):>10} {what}")
    _say(f"  {harmed:>10} {MOST}")
    _say("every promise was kept" if not failed else f"{failed} of {count} seeds broke a promise")
    return 1 if failed else 0


def _each(count: int, engine: type[Engine]) -> Iterator[Told]:
    workers = os.cpu_count() or 1
    if workers == 1 or count < 8:
        yield from (_tell(seed, engine) for seed in range(count))
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(_tell, range(count), [engine] * count, chunksize=4)


def _tell(seed: int, engine: type[Engine]) -> Told:
    world = from_seed(seed)
    try:
        outcome = engine(world).run()
    except Exception as error:  # a bug breaks a promise too
        return Told(seed=seed, broken=_words(error), counts={"prompts": world.prompts})
    return Told(
        seed=seed,
        broken=None,
        counts={
            "events": outcome.events,
            "prompts": world.prompts,
            "answered": len(outcome.done),
            "given up": len(outcome.gave_up),
            "returned": outcome.core.returned,
            "requests": outcome.attempts,
            **outcome.counts,
        },
    )


def _words(error: Exception) -> str:
    if str(error):
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return kind + " ".join(str(error).split())
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    assert trace is not None
    return f"line {trace.tb_lineno} of {Path(trace.tb_frame.f_code.co_filename).name}"


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - this command's result


def _command(seed: int) -> str:
    return f"make sim SEED={seed}"


def _story(lines: Sequence[str]) -> str:
    left = len(lines) - STORY_LINES_MAX
    head = [f"({left} lines before)"] if left > 0 else []
    return "\n".join(["what happened", *head, *lines[-STORY_LINES_MAX:]])


def _world_table(world: World) -> str:
    lines = [f"the world of seed {world.seed}"]
    lines += [
        f"  {each.name:<15} {getattr(world, each.name)}"
        for each in fields(world)
        if each.name not in ("seed", "servers", "changes", "settings")
    ]
    usual = FlowSettings()
    unusual = [
        f"{each.name} = {getattr(world.settings, each.name)}"
        for each in fields(usual)
        if getattr(world.settings, each.name) != getattr(usual, each.name)
    ]
    lines.append(f"  settings        {', '.join(unusual) or 'the usual ones'}")
    for number, law in enumerate(world.servers):
        lines += _server_lines(number, law)
    return "\n".join(lines)


def _server_lines(number: int, law: ServerLaw) -> Iterator[str]:
    yield f"  server {number}: {law.limit} slots, {law.median_s:.2f} s (sigma {law.sigma})"
    spans = [("away", start_s, end_s) for start_s, end_s in law.outages]
    spans += [(str(spell.ill), spell.start_s, spell.end_s) for spell in law.spells]
    if spans:
        yield "    " + ", ".join(f"{what} {start_s:.1f} to {end_s:.1f} s" for what, start_s, end_s in spans)
    odd = [f"{kind} {wording.percent(chance)}" for kind, chance in law.faults.items() if chance]
    odd += [f"{name} {wording.percent(chance)}" for name, chance in _chances(law) if chance]
    odd += ["crashes"] if law.crashes and law.outages else []
    odd += [f"busy over {law.busy_over}"] if law.busy_over is not None else []
    odd += ["starting"] if law.starting else []
    odd += [f"joins at {law.joins_s:.1f} s"] if law.joins_s is not None else []
    yield f"    {', '.join([*odd, f'loads {law.loads}'])}"


def _chances(law: ServerLaw) -> tuple[tuple[str, float], ...]:
    return ("swallows", law.swallows), ("lies", law.lies)


def _outcome_table(world: World, outcome: Outcome) -> str:
    done, gave_up, core = len(outcome.done), len(outcome.gave_up), outcome.core
    lines = [
        f"ended after {outcome.makespan_s:.1f} s of virtual time",
        f"  {done} of {world.prompts} done, {gave_up} given up, {core.returned} returned",
        f"  {outcome.attempts} requests sent",
        *(f"  {count} {what}" for what, count in sorted(outcome.counts.items()) if count),
        "slot time",
    ]
    by_owner = shares(core.books.owned_by_all_s()) or {}
    lines += [f"  {owner:<10} {wording.percent(share):>7}" for owner, share in by_owner.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
