"""What the values of settings may be, whatever section they stand in."""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

PREFIX_BYTES_MAX = 900
"""A key may have 1,024 bytes, and the longest that is put below a prefix needs some hundred."""


def _sayable(text: str) -> str:
    if not text.isprintable() or not text.strip():
        raise ValueError("must be text that can be printed, and not blank")
    return text


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be UTF-8") from None
    return text


def _path(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ValueError("must be a path, and not blank")
    return text


def _s3_uri(text: str) -> str:
    if not (text.isprintable() and re.fullmatch(r"s3://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]/[^/].*", text)):
        raise ValueError("must name a folder in a bucket, such as s3://bucket/run1")
    if any(part in ("", ".", "..") for part in text.rstrip("/").removeprefix("s3://").split("/")):
        raise ValueError("must not have empty parts, nor . or .., such as s3://bucket/run1")
    if len(text.partition("s3://")[2].partition("/")[2].encode()) > PREFIX_BYTES_MAX:
        raise ValueError(f"must not be longer than {PREFIX_BYTES_MAX} bytes behind the bucket")
    return text.rstrip("/")


def _http_url(text: str) -> str:
    if "@" in text:
        # It may hold a password, so it is not shown.
        raise PydanticCustomError("secret", "must hold no user and no password: keys are AWS's own matter")
    if not (text.isprintable() and re.fullmatch(r"https?://[^\s/?#]+/?", text)):
        raise ValueError("must be an address such as https://store.example:9000")
    return text.rstrip("/")


Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
SomeSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Share = Annotated[float, Field(ge=0, le=1, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
OnBound = Literal["stop", "warn"]
Name = Annotated[str, AfterValidator(_sayable)]
Text = Annotated[str, AfterValidator(_unicode)]
PathText = Annotated[str, AfterValidator(_path)]
S3Uri = Annotated[str, AfterValidator(_s3_uri)]
HttpUrl = Annotated[str, AfterValidator(_http_url)]


class Section(BaseModel):
    """A section of the settings: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def misplaced(place: str, wanted: str) -> PydanticCustomError:
    """What is wrong with one of the members that are passed through."""
    return PydanticCustomError("misplaced", "{wanted}", {"place": place, "wanted": wanted})


def demand_json(value: Any, where: str) -> None:
    """TOML has dates, not-a-number and whole numbers of any size; JSON as servers read it has not."""
    if isinstance(value, dict):
        for key, part in value.items():
            demand_json(part, f"{where}.{key}")
    elif isinstance(value, list):
        for part in value:
            demand_json(part, where)
    elif not _is_json(value):
        raise misplaced(where, f"cannot be sent as JSON, got {value}")


def _is_json(value: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return True
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)
