"""A name server of a test's own, and commands that ask it for names, through the C library as always.

The command gets a mount namespace in which ``/etc/resolv.conf`` names our server and no other.
"""

import os
import random
import shutil
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

ADDRESS = socket.inet_aton("127.0.0.1")
SERVFAIL = 2
TYPE_A = 1

_MOUNTED = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'


def why_not() -> str | None:
    """Why this machine does not let us, or None."""
    if shutil.which("unshare") is None or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "a name server of one's own needs root and unshare"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", _MOUNTED, "/etc/resolv.conf", "true"], capture_output=True
    )
    return None if done.returncode == 0 else f"unshare says: {done.stderr.decode().strip()}"


class NameServer:
    """Says 127.0.0.1 for every name, once it has failed so often; can be slow. A context manager.

    Attributes:
        address: where it listens, on port 53.
        looked_up: moments of the look-ups that came (seconds, monotonic).
    """

    def __init__(self, *, failures: int = 0, delay_s: float = 0.0) -> None:
        self._failures, self._delay_s = failures, delay_s
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._thread = threading.Thread(target=self._serve, name="names", daemon=True)
        self._timers: list[threading.Timer] = []
        self.looked_up: list[float] = []
        self.address = ""

    def __enter__(self) -> Self:
        for _ in range(20):
            self.address = f"127.53.{random.SystemRandom().randrange(1, 255)}.1"
            try:
                self._socket.bind((self.address, 53))
                break
            except OSError:
                continue
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The reader ends with a datagram of ours: closing alone would not wake it.
        self._socket.sendto(b"", self._socket.getsockname())
        self._thread.join(10)
        for timer in self._timers:
            timer.cancel()
        self._socket.close()

    def command(self, folder: Path, *program: str) -> tuple[str, ...]:
        """A program that asks nobody but us for names."""
        config = folder / "resolv.conf"
        config.write_text(f"nameserver {self.address}\noptions timeout:30 attempts:1\n")
        return ("unshare", "--mount", "sh", "-c", _MOUNTED, str(config), *program)

    def _serve(self) -> None:
        while True:
            data, sender = self._socket.recvfrom(4096)
            if not data:
                return
            if self._type(data) == TYPE_A:
                self.looked_up.append(time.monotonic())
            if self._delay_s:
                timer = threading.Timer(self._delay_s, self._answer, (data, sender))
                self._timers.append(timer)
                timer.start()
            else:
                self._answer(data, sender)

    def _answer(self, data: bytes, sender: tuple[str, int]) -> None:
        question_end = data.index(b"\0", 12) + 5
        question, asked = data[12:question_end], self._type(data)
        # A look-up asks for addresses of both families, IPv4 first: both fail.
        fails = len(self.looked_up) <= self._failures
        answers = 0 if fails or asked != TYPE_A else 1
        head = data[:2] + struct.pack(">HHHHH", 0x8180 | (SERVFAIL if fails else 0), 1, answers, 0, 0)
        record = b"\xc0\x0c" + struct.pack(">HHIH", TYPE_A, 1, 0, len(ADDRESS)) + ADDRESS
        self._socket.sendto(head + question + record * answers, sender)

    @staticmethod
    def _type(data: bytes) -> int:
        question_end = data.index(b"\0", 12) + 5
        return int(struct.unpack(">H", data[question_end - 4 : question_end - 2])[0])
