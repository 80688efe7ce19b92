"""Which files a run reads, and what is wrong with how they are named."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from genpipe import config, inputs
from genpipe.core.errors import ConfigError
from genpipe.inputs import Inputs


def settings_of(*prompts, **overrides):
    return config.load(
        None, overrides=[f"{key}={value}" for key, value in overrides.items()], prompts=prompts
    )


def found(tmp_path, *prompts, **overrides):
    some = Inputs(settings_of(*prompts, **overrides), tmp_path / "out", threading.Event())
    some.look()
    return [str(path) for path in some.local()]


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        Path(name).write_text('{"prompt": "x"}\n')
    return tmp_path


def test_paths_keep_their_order_and_patterns_are_sorted_among_them(files):
    assert found(files, "c.txt", "*.jsonl") == ["c.txt", "a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (["a.jsonl", "a.jsonl"], ["a.jsonl is in the input twice: name"]),
        (["b.jsonl", "*.jsonl"], ["b.jsonl is in the input twice", "'b.jsonl'", "'*.jsonl'"]),
        (["a*", "*a.jsonl"], ["a.jsonl is in the input twice", "'a*'", "'*a.jsonl'"]),
        (["a.jsonl", "./a.jsonl"], ["is in the input twice"]),
        (["a.jsonl", "link"], ["link is in the input twice", "'a.jsonl'"]),
        (["-", "a.jsonl", "-"], ["standard input is in the input twice"]),
        (["none-*.jsonl"], ["no file matches 'none-*.jsonl'"]),
        (["."], [". is a directory", "./*.jsonl"]),
        (["pipe"], ["pipe is a pipe", "--prompts -"]),
        (["/dev/null"], ["/dev/null is not a plain file"]),
        (["s3://bucket"], ["names no object"]),
        (["data.bz2"], ["data.bz2 is bzip2"]),
    ],
)
def test_what_cannot_be_meant_is_one_line(files, monkeypatch, paths, words):
    os.mkfifo("pipe")
    Path("link").symlink_to("a.jsonl")
    Path("data.bz2").write_bytes(b"BZh91AY&SY")
    with pytest.raises(ConfigError) as caught:
        found(files, *paths)

    text = str(caught.value)
    assert "\n" not in text
    assert [word for word in words if word not in text] == []


def test_a_form_that_is_demanded_is_demanded(files):
    from pyarrow import parquet, table

    parquet.write_table(table({"prompt": ["x"]}), "a.parquet")

    assert found(files, "a.parquet", "a.jsonl") == ["a.parquet", "a.jsonl"]
    assert found(files, "a.parquet", **{"input.format": "'parquet'"}) == ["a.parquet"]
    with pytest.raises(ConfigError, match=r"a\.parquet is Parquet, and input\.format is 'jsonl'"):
        found(files, "a.parquet", **{"input.format": "'jsonl'"})
    with pytest.raises(ConfigError, match=r"a\.jsonl is no Parquet file, and input\.format is 'parquet'"):
        found(files, "a.jsonl", **{"input.format": "'parquet'"})


def test_a_check_reads_forms_and_patterns_side_by_side(files):
    import gzip

    Path("d.jsonl").write_bytes(gzip.compress(b'bad\n{"prompt": "y"}\n'))

    report = inputs.check(settings_of("*.jsonl"), note=pytest.fail)

    assert (report.records, report.bad_count, report.bad_lines[0].file) == (4, 1, "d.jsonl")


def test_a_file_that_is_one_array_is_told_how_to_become_lines(files):
    hint = "one JSON array; jq -c '.[]' FILE makes lines of it"
    row = '{"prompt": "x"}'
    for text, hinted in (
        (f"[{row}, {row}]", [True]),
        (f"\n  [{row}, {row}]\n{row}\n", [True]),
        (f"[\n  {row},\n  {row}\n]\n", [True, False, False]),
        (f"{row}\n[{row}]\n", [False]),
        (f"{row}\n[\n{row}\n", [True]),
    ):
        Path("a.jsonl").write_text(text)
        bad = inputs.check(settings_of("a.jsonl"), note=pytest.fail).bad_lines
        assert [hint in line.reason for line in bad] == hinted, text


def test_a_file_of_one_spread_object_is_told_how_to_become_lines(files):
    hint = "; this looks like JSON that is spread over lines; jq -c . FILE makes one line of each value"
    row = '{"prompt": "x"}'
    for text, hinted in (
        ('{\n"prompt": "x"\n}\n', [True, False, False]),
        ('\n {\r\n"prompt": "x"}\n', [True, False]),
        (f"{row}\n{{\n", [False]),
        (f"[\n{{\n{row}\n", [False, False]),
    ):
        Path("a.jsonl").write_text(text)
        bad = inputs.check(settings_of("a.jsonl"), note=pytest.fail).bad_lines
        assert [line.reason.endswith(hint) for line in bad] == hinted, text


@pytest.mark.parametrize("name", ["UTF-16", "UTF-16-LE", "UTF-16-BE", "UTF-32"])
def test_wide_text_is_refused_at_the_start_with_the_way_to_utf_8(files, name):
    text = ("" if name in ("UTF-16", "UTF-32") else "\ufeff") + '{"prompt": "x"}\n'
    Path("wide.jsonl").write_bytes(text.encode(name))

    with pytest.raises(
        ConfigError, match=f"^wide.jsonl is {name[:6]}, which is not read: .*iconv -f {name[:6]}"
    ):
        found(files, "a.jsonl", "wide.jsonl")


def check_stdin(data):
    return subprocess.run(
        [sys.executable, "-m", "genpipe", "check", "-"], input=data, capture_output=True, timeout=60
    )


@pytest.mark.slow
def test_a_check_reads_standard_input_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = check_stdin(b'{"prompt": "x"}\nbad\n')
    blank = check_stdin(b"\n \n")

    assert (done.returncode, done.stdout.splitlines()[0]) == (1, b"2 records in 20 bytes")
    assert b"\n  -:2: not JSON" in done.stdout
    assert blank.returncode == 2
    assert blank.stderr.splitlines()[-1].startswith(b"genpipe: error: no prompts ")
    assert list(tmp_path.iterdir()) == []
