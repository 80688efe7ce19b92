"""What a record brings along for its own request: sampling parameters and further members of the body."""

from typing import Any

from genpipe.core.values import OWN_BODY_KEYS, ApiName
from genpipe.edges.known_options import refused_sampling
from genpipe.edges.prompts.record_errors import RecordError, kind_of
from genpipe.edges.strict_json import dumps, exact_member, no_numbers


def sampling_of(
    line: bytes, record: dict[str, Any], field: str, *, api: ApiName, odd: bool, single: bool
) -> bytes:
    """The sampling parameters in a record's field, as JSON members without braces, digit for digit.

    A member that is null is left out: tables have all columns in all rows.

    Args:
        line: what ``record`` was parsed from.
        record: one input record.
        field: where they stand; nowhere, or null, is none.
        api: how servers are asked; ``generate`` refuses a request with one that it does not know, with a
            status that would be the server's fault.
        odd: ``line`` holds something that is no strict JSON.
        single: one answer a prompt is all that can be asked for.

    Raises:
        RecordError: they are no object, or one cannot be sent.
    """
    plain = record.get(field)
    if odd:
        _demand_numbers(line, record, field)
    if plain is None:
        return b""
    if type(plain) is not dict:
        raise RecordError(f"{field!r} is {kind_of(plain)}, not an object of sampling parameters")
    for name in plain:
        if name in OWN_BODY_KEYS:
            raise RecordError(f"{field}.{name} is set by genpipe itself")
        if api == "generate" and plain[name] is not None and (why := refused_sampling(name)):
            raise RecordError(f"{field}.{name}: {why}")
    if single:
        _demand_one(f"{field}.n", plain.get("n"))
    exact = exact_member(line, record, field)
    return dumps({name: value for name, value in exact.items() if plain[name] is not None})[1:-1]


def body_of(
    line: bytes,
    record: dict[str, Any],
    fields: tuple[str, ...],
    *,
    odd: bool,
    single: bool,
    sampling: dict[str, Any] | None,
) -> bytes:
    """Those fields of a record that are there and not null, as JSON members without braces, digit for digit.

    Args:
        line: what ``record`` was parsed from.
        record: one input record.
        fields: their names.
        odd: ``line`` holds something that is no strict JSON.
        single: one answer a prompt is all that can be asked for.
        sampling: the record's own sampling parameters, which may not have the same names.

    Raises:
        RecordError: one cannot be sent.
    """
    members = []
    for name in fields:
        if odd:
            _demand_numbers(line, record, name)
        if record.get(name) is None:
            continue
        if sampling and sampling.get(name) is not None:
            raise RecordError(f"{name!r} stands in the record's sampling parameters as well")
        if single and name == "n":
            _demand_one(name, record[name])
        members.append(dumps(name) + b":" + dumps(exact_member(line, record, name)))
    return b",".join(members)


def _demand_numbers(line: bytes, record: dict[str, Any], field: str) -> None:
    """Refuse what was read as null, but is a number that nobody can be sent."""
    if field in record and (words := no_numbers(line, field)):
        raise RecordError(f"{field!r} holds {words[0][:40]}, which cannot be sent to a server")


def _demand_one(name: str, count: object) -> None:
    if count is not None and (count != 1 or isinstance(count, bool)):
        raise RecordError(f"{name!r} is not 1, and request.multi_turn asks for one answer at a time")
