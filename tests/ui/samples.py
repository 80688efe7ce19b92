"""Snapshots as ``progress.json`` holds them."""

from typing import Any


def server(place=0, **changes) -> dict[str, Any]:
    fields = {
        "url": f"http://10.0.0.{place + 1}:30000",
        "state": "up",
        "limit": 64,
        "allowed": 64,
        "in_flight": 60,
        "answers": 1_234_567,
        "output_tokens": 1_234_567_890,
        "faults": {},
        "last_error": None,
        "slot_time": {"wire": 0.97, "dispatch": 0.03},
    }
    return {**fields, **changes}


def progress(**changes) -> dict[str, Any]:
    fields = {
        "state": "running",
        "total": 10_000,
        "completed": 2_500,
        "failed": 0,
        "in_flight": 60,
        "percent": 25.0,
        "rate_per_sec": 12.34,
        "rate_per_sec_segment": 11.0,
        "eta_hours": 0.5,
        "eta_hours_low": 0.4,
        "eta_hours_high": 0.75,
        "eta_at": "2026-03-01T12:00:00.000Z",
        "total_output_tokens": 1_000_000,
        "avg_output_tokens": 400.0,
        "usage_unknown": 0,
        "output_tokens_per_sec": 5_000.0,
        "output_tokens_per_sec_whole": 4_900.0,
        "elapsed_s": 228.0,
        "slot_time": {
            "whole": {"wire": 0.97, "dispatch": 0.03, "input": 0.0},
            "recent": {"wire": 1.0, "dispatch": 0.0, "input": 0.0},
        },
        "dispatch_gap_ms": {"p50": 0.7, "p99": 1.5, "max": 9.0},
        "loop_lag_ms": None,
        "verdict": None,
        "quality": {
            **dict.fromkeys(["empty", "cut", "looping", "unclosed_think", "short"], 0),
            "shares": {"whole": None, "recent": None},
        },
        "servers": [server()],
        "s3": None,
        "last_error": None,
        "run_id": "0123456789abcdef",
        "segment": 1,
        "started_at": "2026-03-01T11:30:00.000Z",
        "updated_at": "2026-03-01T11:33:48.000Z",
    }
    return {**fields, **changes}


UNKNOWN: dict[str, Any] = {
    "total": None,
    "percent": None,
    "rate_per_sec": None,
    "rate_per_sec_segment": None,
    "eta_hours": None,
    "eta_hours_low": None,
    "eta_hours_high": None,
    "eta_at": None,
    "avg_output_tokens": None,
    "output_tokens_per_sec": None,
    "output_tokens_per_sec_whole": None,
    "dispatch_gap_ms": None,
    "slot_time": {"whole": None, "recent": None},
}
"""What nobody knows just after the start."""
