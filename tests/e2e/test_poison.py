"""A prompt that kills servers, and a server of another model, over real sockets."""

import pytest

from tests.e2e.harness import audit, failures, genpipe, report, row_of, run_command, servers, write_prompts

pytestmark = pytest.mark.slow


def test_a_prompt_that_kills_its_server_is_given_up_after_two_and_all_others_are_answered(tmp_path):
    texts = [f"Row {place}. <<delay=0.2>>" for place in range(120)]
    texts[30] = "Poison. <<die=0.3>>"
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 4) as fleet:
        ended = genpipe(*run_command(fleet, source, out, 4, "--set", "retry.pause_max_s=1"))
        fleet.stop()
        visits = fleet.visits()
    audit(out, texts, but=[30])
    asked = [visit["port"] for visit in visits if visit["row"] == row_of(texts[30])]

    assert ended.code == 1, ended.err
    assert set(failures(out)) == {30}
    failure = failures(out)[30]
    assert failure["error_class"] == "Poison"
    assert not failure["for_good"]
    assert "servers died 2 times" in failure["message"]
    assert len(asked) == len(set(asked)) == 2
    away = [row["url"] for row in report(out)["servers"] if row["state"] == "benched"]
    assert len(away) == 2
    assert all(url in failure["message"] for url in away)


def test_a_poison_prompt_is_tried_alone_at_the_end_where_that_is_wished_for(tmp_path):
    texts = [f"Row {place}. <<delay=0.2>>" for place in range(60)]
    texts[10] = "Harmless on the third try. <<die=0.3 times=2>>"
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 3) as fleet:
        for place in range(3):
            fleet.mode(place, "revive_s", value=2)
        options = ("--set", "retry.pause_max_s=1", "--set", "retry.poison=alone")
        ended = genpipe(*run_command(fleet, source, out, 4, *options))
        fleet.stop()
        visits = fleet.visits()
    audit(out, texts)
    asked = [visit for visit in visits if visit["row"] == row_of(texts[10])]

    assert ended.code == 0, ended.err
    assert len(asked) == 3
    # The third try was at one of the two that it had killed, with nothing beside it.
    assert asked[2]["port"] in {visit["port"] for visit in asked[:2]}
    assert asked[2]["in_flight"] == 1
