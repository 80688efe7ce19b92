"""Reads a progress.json in a tight loop, as the worst of dashboards would, until the run is over.

``poller.py PATH SECONDS_MAX``: prints one JSON object, with what was seen and the first thing that was wrong.
"""

import json
import sys
import time
from pathlib import Path

OVER = {"done", "stopped", "failed", "interrupted"}
NEVER_LESS = ("updated_at", "completed", "failed", "elapsed_s", "total_output_tokens")


def wrong_with(now, before):
    """What is wrong with a snapshot, or None."""
    if now["total"] is not None and now["completed"] + now["failed"] > now["total"]:
        return "more have ended than there are"
    if now["eta_hours"] == 0 and now["total"] != now["completed"] + now["failed"]:
        return "an ETA of 0 with work left"
    if before is not None:
        for key in NEVER_LESS:
            if now[key] < before[key]:
                return f"{key} went back from {before[key]} to {now[key]}"
    return None


def main(path, seconds_max):
    reads, wrong, before = 0, None, None
    states: list[str] = []
    snapshots: set[str] = set()
    deadline_s = time.monotonic() + seconds_max
    while time.monotonic() < deadline_s and wrong is None:
        try:
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            if before is not None:
                wrong = "the file was gone"
            continue
        try:
            now = json.loads(data)
        except ValueError:
            wrong = f"no JSON: {data[:100]!r} ({len(data)} bytes)"
            continue
        reads += 1
        snapshots.add(now["updated_at"])
        wrong = wrong_with(now, before)
        before = now
        if not states or states[-1] != now["state"]:
            states.append(now["state"])
        if now["state"] in OVER:
            break
    print(json.dumps({"reads": reads, "snapshots": len(snapshots), "states": states, "wrong": wrong}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
