"""Where a run is in an object store, and how it is spoken to; kept in the run folder as ``s3.json``."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from genpipe.core.errors import ConfigError
from genpipe.edges.files import Files, blaming, replace_atomically

PLACE = "s3.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A prefix in a store. It holds no secrets.

    Attributes:
        uri: ``s3://bucket/prefix``, without a slash at its end.
        endpoint_url: address of a store other than AWS's own.
        region: the bucket's, or None for what AWS's own chain says.
        path_style: the bucket stands in the path; as the library decides if None.
        checksums: ``when_supported`` or ``when_required``, as the library has it.
        timeout_s: limit of one wait for the store within a request (seconds).
    """

    uri: str
    endpoint_url: str | None = None
    region: str | None = None
    path_style: bool | None = None
    checksums: str = "when_supported"
    timeout_s: float = 30.0

    @property
    def bucket(self) -> str:
        """The bucket's name."""
        return self.uri.removeprefix("s3://").partition("/")[0]

    @property
    def prefix(self) -> str:
        """What all keys begin with, with a slash at its end; nothing, for a whole bucket."""
        below = self.uri.removeprefix("s3://").partition("/")[2]
        return below + "/" if below else ""

    def write(self, folder: Path, files: Files) -> None:
        """Note it in a run folder, whose lock the caller holds, unless just that is noted there.

        Raises:
            StoreError: a file refuses.
        """
        path, data = folder / PLACE, json.dumps(asdict(self), indent=2).encode() + b"\n"
        with blaming(path, "write"):
            if not (files.exists(path) and files.read(path) == data):
                replace_atomically(files, path, data)

    @classmethod
    def read(cls, folder: Path, files: Files) -> "Place | None":
        """What is noted in a run folder; None where nothing is.

        Raises:
            ConfigError: it is not to be understood.
            StoreError: it cannot be read.
        """
        path = folder / PLACE
        with blaming(path, "read"):
            if not files.exists(path):
                return None
            data = files.read(path)
        try:
            place = TypeAdapter(cls).validate_json(data, strict=True, extra="forbid")
        except ValueError:
            place = None
        if place is None or re.fullmatch(r"s3://[^/]+/.+", place.uri) is None or place.timeout_s <= 0:
            raise ConfigError(f"{path} is damaged: remove it, and name the place with --s3 at the next start")
        return place
