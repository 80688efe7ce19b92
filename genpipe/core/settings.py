"""How the scheduler behaves, as numbers."""

from dataclasses import dataclass, field


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
        grace_s: what a stop for want of room leaves to requests in flight, if there is some left (seconds).
        disk_reserve_bytes: room that is kept free on the disk; a twentieth of a small one.
        ready_spare: prompts kept ready beyond one for each slot.
        refused_after: prompts after which a fleet that refuses most of them stops the run.
        refused_share_max: share of those that may end as prompt faults.
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
    refused_after: int = 200
    refused_share_max: float = 0.5
