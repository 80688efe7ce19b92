"""A process that claims a folder, and then does what it is told, one word a line.

``claimer.py FOLDER OPTIONS``, with options as JSON: ``error`` (the name of what ``flock`` fails with),
``host`` (what this machine is called), ``module`` (other values for constants of the heartbeat), ``at`` (when
to begin).
"""

import errno
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from genpipe.core.errors import StoreError
from genpipe.edges import heartbeat
from genpipe.edges.lock import FolderLock

SECONDS_MAX = 100


def tell(word, **facts):
    print(json.dumps({"word": word, **facts}), flush=True)


def obey(lock, order):
    """What is told about an order."""
    if order == "fork":
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, b"!")
            time.sleep(SECONDS_MAX)
            os._exit(0)
        os.read(reader, 1)
        return {"child": child}
    if order == "fork and release":
        child = os.fork()
        if child == 0:
            lock.release()
            os._exit(0)
        return {"code": os.waitpid(child, 0)[1]}
    if order == "check":
        try:
            lock.check_still_mine()
        except StoreError as error:
            return {"error": type(error).__name__, "text": str(error)}
        return {"error": None}
    assert order == "release"
    lock.release()
    return {}


def main(folder, options):
    for name, value in options.get("module", {}).items():
        assert hasattr(heartbeat, name)
        setattr(heartbeat, name, value)
    if "host" in options:
        socket.gethostname = lambda: options["host"]
    more: dict[str, Any] = {}
    if "error" in options:
        code = getattr(errno, options["error"])

        def flock(handle, operation):
            raise OSError(code, os.strerror(code))

        more["flock"] = flock
    tell("ready")
    if "at" in options:
        time.sleep(max(0.0, options["at"] - 0.02 - time.time()))
        while time.time() < options["at"]:
            pass
    warnings: list[str] = []
    try:
        lock = FolderLock.take(folder, started_at="2026-01-02T03:04:05.678Z", warn=warnings.append, **more)
    except StoreError as error:
        tell("refused", error=type(error).__name__, text=str(error), warnings=warnings)
        return
    tell("claimed", epoch=lock.epoch, warnings=warnings)
    for line in sys.stdin:
        tell("done", **obey(lock, line.strip()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
