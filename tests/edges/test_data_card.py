"""The data card: what an export holds, in Markdown."""

import json
from collections import Counter

import pytest

from genpipe import __version__
from genpipe.edges.export.data_card import About, Facts, card, output_tokens
from genpipe.edges.export.wish import Wish
from tests.edges.export_runs import NOW, export, make_run, record, response

RUN = {
    "run_id": "r1",
    "created_at": "then",
    "genpipe": "0.0.9",
    "inputs": [{"path": "/home/somebody/a.jsonl"}, {"path": "s3://bucket/b.parquet"}],
    "settings": {"request": {"api": "chat", "sampling": {"temperature": 0.7}}},
}


def about(**changes):
    given = {"name": "x.jsonl", "now_text": NOW, "run": RUN, "wish": Wish(format="openai"), "total": None}
    return About(**{**given, "doubled": 0, "warnings": 0, **changes})


def facts_of(*tokens, **changes):
    facts = Facts()
    for count in tokens:
        facts.take({"usage": {"completion_tokens": count}, "finish_reason": "stop", "model": "m"}, 1)
    for name, value in changes.items():
        setattr(facts, name, value)
    return facts


def tables_of(text):
    """All rows of tables, by what stands first in them."""
    cells = [line.strip("| ").split(" | ") for line in text.split("\n") if line.startswith("| ")]
    return {row[0].strip(): row[1] for row in cells if len(row) > 1}


def test_a_card_of_an_export(tmp_path):
    given = [
        record(0, usage={"completion_tokens": 10}, model="a"),
        record(1, usage={"completion_tokens": 20}, flags=["cut"], finish_reason="length"),
        record(2, usage={"completion_tokens": 30}, flags=["cut", "looping"], finish_reason="length"),
        record(3, usage=None, settings="abcd"),
        record(4, flags=["empty"]),
        record(5, usage={"completion_tokens": 1}, output_tokens=700, kept='"settings":"abcd"'),
        record(0, "twice"),
    ]
    folder = make_run(tmp_path / "run", *given, sampling={"temperature": 0.5})
    (folder / "progress.json").write_text(json.dumps({"total": 10}))
    export(folder, "out.jsonl", card=tmp_path / "card.md", format="openai", without=frozenset({"empty"}))
    text = (tmp_path / "card.md").read_text()
    found = tables_of(text)

    assert text.startswith("# `out.jsonl`\n\n5 rows of the format `openai`, of 5 prompts, in the order")
    assert "Reasoning stands in `reasoning_content`." in text
    assert found["made"] == f"{NOW} by genpipe {__version__}"
    assert found["input"] == "in.jsonl"
    assert found["exported"] == "5"
    assert found["left out: flagged empty"] == "1"
    assert found["doubled, left out"] == "1"
    assert (found["prompts without a record"], found["prompts of the run"]) == ("4", "10")
    assert [found[key] for key in ("min", "median", "mean", "p90", "max", "all together", "not known")] == [
        "10", "20", "190", "700", "700", "760", "1 records",
    ]  # fmt: skip
    assert found["`cut`"] == "2 (40 %)"
    assert found["`looping`"] == "1 (20 %)"
    assert "`empty`" not in found
    assert (found["`stop`"], found["`length`"]) == ("3 (60 %)", "2 (40 %)")
    assert (found["`a`"], found["`m`"]) == ("1 (20 %)", "4 (80 %)")
    assert '"temperature": 0.5' in text
    assert "2 records were made with other settings" in text
    assert "secret" not in text
    assert "gpu0" not in text


def test_each_record_is_counted_by_what_was_counted_when_it_was_written():
    assert output_tokens({"usage": {"completion_tokens": 5}}) == 5
    assert output_tokens({"usage": {"completion_tokens": 5}, "output_tokens": 7}) == 7
    assert output_tokens({"usage": {"completion_tokens": 5}, "output_tokens": None}) is None
    for odd in (None, True, -1, "5", 5.0):
        assert output_tokens({"usage": {"completion_tokens": odd}}) is None
    assert output_tokens({"usage": None}) is None
    assert output_tokens({"usage": {}}) is None


@pytest.mark.parametrize(
    ("tokens", "median", "p90", "mean"),
    [
        ([5], "5", "5", "5.0"),
        ([1, 2], "1", "2", "1.5"),
        (range(1, 11), "5", "9", "5.5"),
        ([0, 0, 9], "0", "9", "3.0"),
    ],
)
def test_quantiles_are_exact(tokens, median, p90, mean):
    found = tables_of(card(about(), facts_of(*tokens)))

    assert (found["median"], found["p90"], found["mean"]) == (median, p90, mean)


def test_lengths_are_drawn_by_octaves():
    text = card(about(), facts_of(*[0] * 3, 1, 2, 3, 16, *range(1024, 1084)))
    drawn = text.split("```text\n")[1].split("\n```")[0].split("\n")

    assert [line.split("#")[0].split("  ")[-2 if "#" in line else 0].strip() for line in drawn[:3]] == [
        "0",
        "1",
        "2 to 3",
    ]
    assert drawn[0].endswith(" 3")
    assert drawn[3].strip().startswith("4 to 7")
    assert drawn[3].endswith(" 0")
    assert "#" not in drawn[3]
    assert drawn[-1].strip() == f"1,024 to 2,047  {'#' * 30}  60"
    assert len(drawn) == 12


def test_names_of_others_are_no_markdown():
    facts = facts_of(1, models=Counter({"a|b\n# `x`": 1}), flags=Counter({"``": 1}))
    text = card(about(name="`evil`|\n# x"), facts)

    assert "\n# x" not in text
    assert "| `` a\\|b # `x` `` |" in text
    assert "| ``` `` ``` |" in text
    assert text.startswith("# `` `evil`| # x ``\n")


def test_settings_cannot_leave_their_block():
    run = {**RUN, "settings": {"input": {"system": "```\n# x\n````"}}}
    text = card(about(run=run), facts_of(1))

    assert "`````json\n" in text
    assert text.count("`````") == 2


def test_what_is_not_known_is_said():
    assert "Not known of any record." in card(about(), Facts())
    assert "No record has a flag." in card(about(), Facts())
    assert "**Some records may be missing**" in card(about(warnings=1), Facts())
    assert "may be missing" not in card(about(), Facts())
    assert "prompts without" not in card(about(total=0), facts_of(1))


def test_the_form_of_the_rows_is_said():
    assert "Reasoning" not in card(about(wish=Wish()), Facts())
    assert "between `<think>`" in card(about(wish=Wish(format="prompt", reasoning="think")), Facts())
    assert "Reasoning was left out." in card(about(wish=Wish(format="prompt", reasoning="drop")), Facts())
    assert "`loss_mask` is 1 over" in card(about(wish=Wish(format="prompt", token_ids=True)), Facts())


def test_names_without_end_are_counted_together():
    facts = Facts()
    for place in range(1500):
        facts.take({"model": f"m{place}", "finish_reason": None}, 1)

    assert len(facts.models) == 1001
    assert facts.models["others"] == 500
    assert facts.finish_reasons == {"none": 1500}


def test_rows_of_several_samples_are_told_from_records(tmp_path):
    folder = make_run(tmp_path / "run", record(0, responses=[response("a"), response("b")]))
    export(folder, card=tmp_path / "card.md", format="prompt")

    assert "2 rows of the format `prompt`, of 1 prompts" in (tmp_path / "card.md").read_text()
