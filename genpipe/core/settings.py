"""How the scheduler behaves, as numbers."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """When a server is taken out of use and how it comes back.

    Attributes:
        faults: faults in a row that bench a server (count, >= 1).
        pause_s: wait before the first probe (seconds); doubles with each failure.
        pause_max_s: longest wait between probes (seconds).
        trial_s: age at which the one trial prompt no longer keeps the other slots shut (seconds).
    """

    faults: int = 3
    pause_s: float = 0.5
    pause_max_s: float = 8.0
    trial_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
    """When a run is not what was meant: shares among what ended last.

    Attributes:
        refused_after: prompts after which a fleet that refuses most of them stops the run.
        refused_share_max: share of those that may end as prompt faults.
        after: prompts, or answers, that there must be before the other bounds count.
        window: how many of the last ones are looked at.
        failed_share_max: share of the prompts that may end without an answer.
        empty_share_max: share of the answers that may hold no text.
        cut_share_max: share of the answers that may end at the length limit.
        looping_share_max: share of the answers that may end in a repeated phrase.
        unclosed_think_share_max: share of the answers that may end within their reasoning.
        short_share_max: share of the answers that may be short.
        short_tokens: answers of fewer output tokens are short, whatever the others are like (count).
        on_failed: what happens when the bound is passed; likewise the others.
    """

    refused_after: int = 200
    refused_share_max: float = 0.5
    after: int = 200
    window: int = 1000
    failed_share_max: float = 0.5
    empty_share_max: float = 0.2
    cut_share_max: float = 0.5
    looping_share_max: float = 0.1
    unclosed_think_share_max: float = 0.2
    short_share_max: float = 0.5
    short_tokens: int = 8
    on_failed: Literal["stop", "warn"] = "stop"
    on_empty: Literal["stop", "warn"] = "warn"
    on_cut: Literal["stop", "warn"] = "warn"
    on_looping: Literal["stop", "warn"] = "warn"
    on_unclosed_think: Literal["stop", "warn"] = "warn"
    on_short: Literal["stop", "warn"] = "warn"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    """How the scheduler behaves.

    Attributes:
        prompt_attempts: faults charged to one prompt before it is given up for now (count, >= 1).
        backoff_s: first pause of a prompt after a fault (seconds); doubles with each.
        backoff_max_s: longest pause (seconds).
        bench: when a server is taken out of use.
        ramp_s: slots open over this time at the start (seconds).
        group_records_max: records in one commit.
        group_bytes_max: answer bytes in one commit, give or take one answer.
        group_interval_s: least time between the starts of two commits (seconds).
        backlog_records_max: ended prompts that may wait for the writer before nothing more is sent or read.
        backlog_bytes_max: likewise in answer bytes.
        disk_look_s: how often to look whether a full disk has room again (seconds).
        disk_wait_s: how long to wait for that before the run ends (seconds).
        grace_s: what a stop for odd answers leaves to requests in flight; one for want of room too, if there
            is some left (seconds).
        disk_reserve_bytes: room that is kept free on the disk; a twentieth of a small one.
        ready_spare: prompts kept ready beyond one for each slot.
        longest_first: of the prompts in memory the longest goes first, as a guess at the longest answer.
        stall_s: age at which a request is given up (seconds); None: learnt from this run.
        silent_s: a server that neither answers nor shows any work for so long has stalled (seconds).
        abort_s: how long the slot of a given-up request stays shut, for its server to notice (seconds).
        hedge: near the end, late requests are sent to a second server as well.
        alone: a prompt with which two servers died is tried once more at the end, alone on one of them.
        give_up_s: how long to wait while no server can be used before the run ends (seconds); None: for ever.
        guards: when a run stops itself, or warns.
    """

    prompt_attempts: int = 4
    backoff_s: float = 0.5
    backoff_max_s: float = 8.0
    bench: BenchSettings = field(default_factory=BenchSettings)
    ramp_s: float = 1.0
    group_records_max: int = 256
    group_bytes_max: int = 4 << 20
    group_interval_s: float = 0.025
    backlog_records_max: int = 4096
    backlog_bytes_max: int = 64 << 20
    disk_look_s: float = 1.0
    disk_wait_s: float = 600.0
    grace_s: float = 20.0
    disk_reserve_bytes: int = 64 << 20
    ready_spare: int = 256
    longest_first: bool = False
    stall_s: float | None = None
    silent_s: float = 60.0
    abort_s: float = 4.0
    hedge: bool = True
    alone: bool = False
    give_up_s: float | None = None
    guards: GuardSettings = field(default_factory=GuardSettings)
