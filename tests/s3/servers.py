"""Real S3 servers as processes of their own, on free ports of the loopback.

::

    with Weed(tmp_path / "weed") as server:            # or Rclone, or Moto
        place = server.place("run1")                   # s3://runs/run1 there, for BotoObjects
        place = server.place("run1", endpoint_url=proxy.url)
        place = server.place("run1", tls=True)         # Weed and Rclone have a port with TLS too
        subprocess.run(..., env={**os.environ, **server.env})
        server.keys("run1/")                           # what is there, by a client of its own
        server.read("run1/run.json"), server.metadata(...), server.write(key, data), server.delete(key)
        server.kill(); server.start()                  # SIGKILL; again on the same ports and data
        server.stop(); server.cont()                   # SIGSTOP and SIGCONT

``Weed`` keeps every promise. ``Rclone`` ignores conditions, knows no checksums and capitalises the names of
metadata. ``Moto`` is in memory: a kill loses all, and it checks neither keys nor checksums. The bucket
``runs`` is there once a server has started, and no other. ``env`` also keeps a user's own AWS settings out.
"""

import contextlib
import datetime as dt
import ipaddress
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from genpipe.edges.s3.place import Place

BUCKET = "runs"
REGION = "us-east-1"
KEY_ID = "AKIAGENPIPETESTS0001"
SECRET = "a-secret-of-the-tests-that-is-forty-long"
START_TIMEOUT_S = 25.0
START_TRIES = 4

_PORTS = range(12_000, 22_000)
"""SeaweedFS adds 10,000 to each of its ports for its own use; what is higher still is for the clients."""


def missing(program: str) -> str | None:
    """Why a server cannot be started, or None."""
    return None if _path_of(program).exists() else f"{program} is not installed beside {sys.executable}"


def credentials(folder: Path, *, key_id: str = KEY_ID, secret: str = SECRET) -> dict[str, str]:
    """Environment with these keys and no other AWS settings."""
    folder.mkdir(parents=True, exist_ok=True)
    config, keys = folder / "aws-config", folder / "aws-credentials"
    config.touch()
    keys.touch()
    return {
        "AWS_ACCESS_KEY_ID": key_id,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_CONFIG_FILE": str(config),
        "AWS_SHARED_CREDENTIALS_FILE": str(keys),
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on just now, nor on those 10,000 above."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        while len(found) < count:
            port = secrets.choice(_PORTS)
            with contextlib.suppress(OSError):
                for number in (port, port + 10_000):
                    held.enter_context(socket.create_server(("127.0.0.1", number)))
                found.append(port)
    return found


class Server:
    """One server; see the top of this file. Use as a context manager, or ``start`` and ``kill`` it."""

    program = ""
    has_tls = False

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = folder / "server.log"
        self.env = credentials(folder)
        self.data = folder / "data"
        self.data.mkdir(exist_ok=True)
        self.process: subprocess.Popen[bytes] | None = None
        self._ports: list[int] = []
        self._client: Any = None
        if self.has_tls:
            self.cert, self.key = self_signed(folder)
            self.env["AWS_CA_BUNDLE"] = str(self.cert)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        if self._client is not None:
            self._client.close()
            self._client = None

    @property
    def url(self) -> str:
        """Its address over plain HTTP."""
        return f"http://127.0.0.1:{self._ports[0]}"

    @property
    def tls_url(self) -> str:
        """Its address with TLS; ``env`` has the certificate."""
        assert self.has_tls
        return f"https://127.0.0.1:{self._ports[1]}"

    def place(self, prefix: str, *, tls: bool = False, bucket: str = BUCKET, **changes: Any) -> Place:
        """A prefix in the bucket, as a run is told of it."""
        settings = {
            "endpoint_url": self.tls_url if tls else self.url,
            "region": REGION,
            "timeout_s": 10.0,
            **changes,
        }
        return Place(uri=f"s3://{bucket}/{prefix}", **settings)

    # ---- the process ----

    def start(self) -> None:
        """Start it, or start it again on the same ports and data; returns once a put has succeeded."""
        again = bool(self._ports)
        for left in reversed(range(START_TRIES)):
            if not again:
                self._ports = free_ports(self._port_count())
            try:
                self._launch()
            except AssertionError:
                self.kill()
                if left == 0:
                    raise
            else:
                return

    def kill(self) -> None:
        """SIGKILL; nothing of it runs any more on return."""
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait(20)
            self.process = None

    def stop(self) -> None:
        """SIGSTOP: connections are accepted by the kernel, and nothing is answered."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT: what came meanwhile is carried out now."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    # ---- its objects, seen by a client of its own ----

    def client(self, **config: Any) -> Any:
        """A client with the right keys; retries a little."""
        import boto3
        from botocore.config import Config

        session = boto3.session.Session(
            aws_access_key_id=KEY_ID, aws_secret_access_key=SECRET, region_name=REGION
        )
        settings = {
            "s3": {"addressing_style": "path"},
            "connect_timeout": 2,
            "read_timeout": 10,
            "retries": {"total_max_attempts": 3},
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "proxies": {},
            **config,
        }
        return session.client("s3", endpoint_url=self.url, config=Config(**settings))

    def keys(self, prefix: str = "") -> list[str]:
        """All keys of the bucket that begin so."""
        pages = self._own().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [found["Key"] for page in pages for found in page.get("Contents", [])]

    def read(self, key: str) -> bytes:
        """The bytes of an object."""
        reply = self._own().get_object(Bucket=BUCKET, Key=key)
        with contextlib.closing(reply["Body"]) as body:
            return bytes(body.read())

    def metadata(self, key: str) -> dict[str, str]:
        """The metadata of an object, names in lower case."""
        found = self._own().head_object(Bucket=BUCKET, Key=key)["Metadata"]
        return {name.lower(): value for name, value in found.items()}

    def write(self, key: str, data: bytes) -> None:
        """Put an object."""
        self._own().put_object(Bucket=BUCKET, Key=key, Body=data)

    def delete(self, key: str) -> None:
        """Remove an object."""
        self._own().delete_object(Bucket=BUCKET, Key=key)

    # ---- inside ----

    def _own(self) -> Any:
        if self._client is None:
            self._client = self.client()
        return self._client

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _port_count(self) -> int:
        return 1

    def _launch(self) -> None:
        assert self.process is None
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                _dying_with_us(self._command()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, **self.env, "HOME": str(self.folder)},
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        with contextlib.closing(self.client(retries={"total_max_attempts": 1})) as client:
            while not self._is_ready(client):
                assert self.process.poll() is None, f"{self.program} ended: {self._said()}"
                assert time.monotonic() < deadline_s, f"{self.program} takes no puts: {self._said()}"
                time.sleep(0.05)

    def _said(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def _is_ready(self, client: Any) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            with contextlib.suppress(
                client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists
            ):
                client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key=".ready", Body=b"ready")
            client.delete_object(Bucket=BUCKET, Key=".ready")
        except (BotoCoreError, ClientError):
            return False
        return True


class Weed(Server):
    """SeaweedFS."""

    program = "weed"
    has_tls = True

    def _port_count(self) -> int:
        return 6

    def _command(self) -> list[str]:
        config = self.folder / "s3.json"
        identity = {
            "name": "genpipe",
            "credentials": [{"accessKey": KEY_ID, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config.write_text(json.dumps({"identities": [identity]}))
        s3, tls, master, volume, filer, admin = self._ports
        options = {
            "dir": self.data,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.telemetry": "false",
            "admin.ui": "false",
            "admin.port": admin,
            "webdav": "false",
            "master.port": master,
            "volume.port": volume,
            "filer.port": filer,
            "s3.port": s3,
            "s3.port.https": tls,
            "s3.cert.file": self.cert,
            "s3.key.file": self.key,
            "s3.config": config,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.autoCreateBucket": "false",
        }
        return [str(_path_of("weed")), "mini", *(f"-{name}={value}" for name, value in options.items())]


class Rclone(Server):
    """``rclone serve s3``: a store that takes conditions and heeds none.

    A process of its own serves TLS: what one has put, the other shows some minutes later.
    """

    program = "rclone"
    has_tls = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._tls_process: subprocess.Popen[bytes] | None = None

    def _port_count(self) -> int:
        return 2

    def _command(self) -> list[str]:
        return self._serve(self._ports[0])

    def start(self) -> None:
        """Start it, and a second process on the same folder with TLS."""
        super().start()
        assert self._tls_process is None
        with open(self.log, "ab") as log:
            self._tls_process = subprocess.Popen(
                _dying_with_us(
                    [*self._serve(self._ports[1]), "--cert", str(self.cert), "--key", str(self.key)]
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._ports[1]), 1):
                return
            assert time.monotonic() < deadline_s, self._said()
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL to both."""
        super().kill()
        if self._tls_process is not None:
            self._tls_process.kill()
            self._tls_process.wait(20)
            self._tls_process = None

    def place(self, prefix: str, **changes: Any) -> Place:
        """A prefix in the bucket; it does not know the SDK's checksums."""
        return super().place(prefix, **{"checksums": "when_required", **changes})

    def _serve(self, port: int) -> list[str]:
        where = ["--config", os.devnull, "--addr", f"127.0.0.1:{port}"]
        return [
            str(_path_of("rclone")), "serve", "s3", *where, "--auth-key", f"{KEY_ID},{SECRET}", str(self.data)
        ]  # fmt: skip


class Moto(Server):
    """moto: in memory."""

    program = "moto_server"

    def _command(self) -> list[str]:
        return [sys.executable, str(_path_of("moto_server")), "-H", "127.0.0.1", "-p", str(self._ports[0])]


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate for the loopback and its key, in files."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = dt.datetime.now(dt.UTC)
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = folder / "cert.pem", folder / "key.pem"
    cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    return cert_path, key_path


def _dying_with_us(command: list[str]) -> list[str]:
    """The command so that the kernel kills it where the tests themselves are killed, if that can be had."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", *command] if setpriv else command


def _path_of(program: str) -> Path:
    return Path(sys.executable).parent / program
