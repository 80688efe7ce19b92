"""Small runs with records of every kind, and exports of them."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet

from genpipe.edges import lines, strict_json
from genpipe.edges.export.export import CardPlace, export_to_file
from genpipe.edges.export.wish import Wish
from genpipe.edges.files import OsFiles
from genpipe.edges.folder_shelf import FolderShelf
from genpipe.edges.settings_compare import digest_of

NOW = "2026-01-02T03:04:05.678Z"


def record(index, content="Four.", *, user="2 + 2?", id_json=None, kept="", **changes):
    """A record as it stands in a shard, without its checksum and its last brace."""
    response = {"content": content, "reasoning_content": None, "tool_calls": None}
    facts = {
        "messages": [{"role": "user", "content": user}],
        "response": response,
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 9, "completion_tokens": 3},
        "flags": [],
        "model": "m",
        "server": "http://gpu0:30000",
        "attempts": 1,
        "started_at": "2026-01-02T03:04:05.678Z",
        "latency_s": 2.5,
        "rid": f"gp-{index}",
    }
    if "responses" in changes:
        facts = {("responses" if key == "response" else key): value for key, value in facts.items()}
    latest = {key: facts.pop(key) for key in ("latency_s", "rid")}
    facts = {**facts, **changes, **latest}
    head = b'{"index":%d' % index + (b',"id":' + id_json.encode() if id_json is not None else b"")
    return head + b"," + strict_json.dumps(facts)[1:-1] + (b"," + kept.encode() if kept else b"")


def asked(member, payload, index=0, content="Four.", **changes):
    """A record whose payload is called so."""
    made = record(index, content, messages="HERE", **changes)
    return made.replace(b'"messages":"HERE"', strict_json.dumps({member: payload})[1:-1])


def response(content="Four.", thought=None, calls=None):
    return {"content": content, "reasoning_content": thought, "tool_calls": calls}


def make_run(folder: Path, *records: bytes, shard_records=4, **request) -> Path:
    """A finished run of those records, in that order."""
    (folder / "shards").mkdir(parents=True)
    settings = {
        "request": {
            "api": "chat",
            "model": "m",
            "sampling": {},
            "extra_body": {},
            "token_ids": True,
            **request,
        }
    }
    run = {
        "format": 1,
        "run_id": "r",
        "created_at": "2026-01-01T00:00:00.000Z",
        "genpipe": "0.1.0",
        "inputs": [{"path": "/data/secret place/in.jsonl"}],
        "settings": settings,
        "digest": digest_of(settings),
        "shard_records": shard_records,
    }
    (folder / "run.json").write_text(json.dumps(run))
    for seq, start in enumerate(range(0, len(records), shard_records)):
        data = b"".join(map(lines.encode, records[start : start + shard_records]))
        (folder / "shards" / f"part-{seq:06d}.jsonl").write_bytes(data)
    return folder


def export(folder: Path, name="out.jsonl", *, card=None, force=False, warnings=None, **wish):
    """Export to a file beside the folder: what the command would say, and the file."""
    out = folder.parent / name
    told: list[str] = []
    exported = export_to_file(
        FolderShelf(folder, OsFiles()),
        OsFiles(),
        out,
        force=force,
        warn=told.append,
        progress=lambda *_: None,
        wish=Wish(**wish) if wish else None,
        card=None if card is None else CardPlace(path=card, now_text=NOW),
    )
    assert told == [] if warnings is None else warnings.extend(told) is None
    return exported, out


def rows_of(tmp_path: Path, *records: bytes, request=None, **wish) -> list[dict[str, Any]]:
    """The rows that records become."""
    number = len(list(tmp_path.iterdir()))
    folder = make_run(tmp_path / f"run{number}", *records, **(request or {}))
    return json_rows(export(folder, f"rows{number}.jsonl", **wish)[1])


def json_rows(path: Path) -> list[dict[str, Any]]:
    # What is copied byte for byte may hold half a pair, as an escape.
    data = path.read_bytes().replace(rb"\ud800", rb"\ufffd")
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


# What Parquet makes of rows: the columns say what is a text of JSON, and what is not there is null.


def is_json(field) -> bool:
    return (field.metadata or {}).get(b"format") == b"json"


def read_back(value, field):
    """A value of a column as the JSON value that it stands for."""
    kind = field.type
    if value is None:
        return None
    if is_json(field):
        return json.loads(value)
    if pyarrow.types.is_struct(kind):
        return {
            kind.field(place).name: read_back(value[kind.field(place).name], kind.field(place))
            for place in range(kind.num_fields)
            if value[kind.field(place).name] is not None
        }
    if pyarrow.types.is_list(kind):
        return [read_back(item, kind.value_field) for item in value]
    return value


def without_nulls(value, field):
    """A JSON value as it comes back from such a column."""
    if value is None or is_json(field):
        return value
    if pyarrow.types.is_struct(field.type):
        return {
            key: without_nulls(item, field.type.field(key)) for key, item in value.items() if item is not None
        }
    if pyarrow.types.is_list(field.type):
        return [without_nulls(item, field.type.value_field) for item in value]
    return value


def parquet_rows(path: Path) -> list[dict[str, Any]]:
    table = pyarrow.parquet.read_table(path)
    return [
        {name: read_back(value, table.schema.field(name)) for name, value in row.items() if value is not None}
        for row in table.to_pylist()
    ]


def assert_same_rows(folder: Path, **wish) -> pyarrow.Schema:
    """As Parquet a run has the rows that it has as JSON Lines; the schema of the columns."""
    lines_path = export(folder, "same.jsonl", force=True, **wish)[1]
    parquet_path = export(folder, "same.parquet", force=True, **wish)[1]
    schema = pyarrow.parquet.read_schema(parquet_path)
    wanted = [
        {key: without_nulls(value, schema.field(key)) for key, value in row.items() if value is not None}
        for row in json_rows(lines_path)
    ]
    found = parquet_rows(parquet_path)
    assert found == wanted
    return schema
