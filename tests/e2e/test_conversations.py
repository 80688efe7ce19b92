"""Conversations over real sockets: on several servers, through kills and stops, with tools and thoughts."""

import json
import signal
import threading
from collections import defaultdict
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.e2e.harness import (
    asked_after,
    failures,
    genpipe,
    listed,
    report,
    row_of,
    run_command,
    running,
    saved,
    servers,
    wait_for,
    wait_for_records,
)

pytestmark = pytest.mark.slow

MULTI_TURN = ("--set", "request.multi_turn=true")


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def write_conversations(path, conversations):
    """An input file with these texts of users, and an old answer behind each of them."""
    records = [
        {"id": place, "messages": [each for text in texts for each in (user(text), assistant("OLD ANSWER"))]}
        for place, texts in enumerate(conversations)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def three_turns(count, order):
    return [[f"{place}: turn {turn}. <<{order}>>" for turn in range(3)] for place in range(count)]


def assert_whole(record, texts):
    """The record of a conversation: each answer is the one to its turn, and the others stand before it."""
    said = [each["response"]["content"] for each in record["steps"]]
    history = [
        each for text, answer in zip(texts, said, strict=True) for each in (user(text), assistant(answer))
    ]

    assert [answer.split()[:2] for answer in said] == [["echo", row_of(text)] for text in texts]
    assert record["messages"] == history[:-1]
    assert record["response"] == record["steps"][-1]["response"]
    assert record["finish_reason"] == record["steps"][-1]["finish_reason"]
    tokens = [each["usage"]["completion_tokens"] for each in record["steps"]]
    assert record["usage"]["completion_tokens"] == sum(tokens)


def audit(out, conversations, *, but=()):
    records = saved(out)
    assert sorted(records) == sorted(listed(out)) == sorted(set(range(len(conversations))) - set(but))
    for index, record in records.items():
        assert_whole(record, conversations[index])
    return records


def test_each_turn_is_asked_once_with_the_new_answers_and_on_any_server(tmp_path):
    conversations = three_turns(40, "tokens=6 delay=0.02")
    source, out = write_conversations(tmp_path / "in.jsonl", conversations), tmp_path / "out"
    with servers(tmp_path, 3) as fleet:
        ended = genpipe(*run_command(fleet, source, out, 3, *MULTI_TURN))
        fleet.stop()
        visits = fleet.visits()
    records = audit(out, conversations)
    order = [visit["row"] for visit in visits]
    port_of = {visit["row"]: visit["port"] for visit in visits}
    state = report(out)

    assert ended.code == 0, ended.err
    assert sorted(order) == sorted(row_of(text) for texts in conversations for text in texts)
    assert len(set(order)) == len(order)
    places = [[order.index(row_of(text)) for text in texts] for texts in conversations]
    assert places == [sorted(each) for each in places]
    used = [[port_of[row_of(text)] for text in texts] for texts in conversations]
    assert any(len(set(ports)) > 1 for ports in used)
    for index, record in records.items():
        assert [each["server"].rsplit(":", 1)[1] for each in record["steps"]] == list(map(str, used[index]))
        assert record["attempts"] == 3
        assert record["latency_s"] >= sum(each["latency_s"] for each in record["steps"]) - 0.01
    assert (state["completed"], state["total"], state["failed"]) == (40, 40, 0)
    assert state["total_output_tokens"] == sum(
        each["usage"]["completion_tokens"] for each in records.values()
    )
    assert sum(each["output_tokens"] for each in state["servers"]) == state["total_output_tokens"]
    assert sum(each["answers"] for each in state["servers"]) == 120


def test_a_kill_loses_unfinished_conversations_only_and_they_are_asked_anew(tmp_path):
    conversations = three_turns(40, "tokens=6 delay=0.15")
    source, out = write_conversations(tmp_path / "in.jsonl", conversations), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        command = run_command(fleet, source, out, 4, *MULTI_TURN)
        with running(*command, err=tmp_path / "run.err") as run:
            wait_for_records(run, out, 8)
            run.kill()
        done = set(saved(out))
        killed_s = fleet.visits_until_now()[-1]["arrival_s"]
        ended = genpipe(*command)
        again = asked_after(fleet.visits_until_now(), killed_s)
        verified = genpipe("verify", out)
    audit(out, conversations)

    assert ended.code == 0, ended.err
    assert 8 <= len(done) < 40
    assert again == {
        row_of(text) for place, texts in enumerate(conversations) if place not in done for text in texts
    }
    assert verified.code == 0, verified.out


def test_a_stop_lets_the_turns_in_flight_land_and_begins_no_others(tmp_path):
    conversations = three_turns(8, "tokens=6 delay=0.8")
    source, out = write_conversations(tmp_path / "in.jsonl", conversations), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        command = run_command(fleet, source, out, 2, *MULTI_TURN, "--set", "start.ramp_s=0")
        with running(*command, err=tmp_path / "run.err") as run:
            wait_for(lambda: len(fleet.visits()) >= 4 or run.over, "the first turns")
            run.send(signal.SIGTERM)
            code = run.wait()
        stopped = fleet.visits_until_now()
        ended = genpipe(*command)
    audit(out, conversations)

    assert code == 143
    # Four answered their first turn, four more at most had begun the second when the signal came.
    assert len(stopped) <= 8
    assert all(visit["end_s"] - visit["arrival_s"] > 0.7 for visit in stopped), "a turn was cut off"
    assert ended.code == 0, ended.err


def test_a_turn_that_is_refused_fails_its_conversation_and_keeps_what_was_made(tmp_path):
    conversations = three_turns(6, "tokens=6")
    conversations[2][2] = "Too long. <<status=400 why=too_long>>"
    conversations[4][0] = "At once. <<status=400 why=too_long>>"
    source, out = write_conversations(tmp_path / "in.jsonl", conversations), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        ended = genpipe(*run_command(fleet, source, out, 2, *MULTI_TURN))
    audit(out, conversations, but=[2, 4])
    late, early = failures(out)[2], failures(out)[4]
    said = [each["response"]["content"] for each in late["steps"]]

    assert ended.code == 1, ended.err
    assert (late["last_status"], late["for_good"], late["attempts"]) == (400, True, 3)
    assert [answer.split()[1] for answer in said] == [row_of(text) for text in conversations[2][:2]]
    assert late["messages"] == [
        user(conversations[2][0]), assistant(said[0]),
        user(conversations[2][1]), assistant(said[1]),
        user(conversations[2][2]),
    ]  # fmt: skip
    assert "messages" not in early
    assert "steps" not in early


# ---- tools and thoughts ----


@contextmanager
def answering(answer_to):
    """A server that answers a list of messages with what ``answer_to`` makes of it; and what it was sent."""
    sent = defaultdict(list)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.reply({"object": "list", "data": [{"id": "tiny-model", "object": "model"}]})

        def do_POST(self):
            given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            messages = given["messages"]
            message = {"role": "assistant", "content": None, "reasoning_content": None, "tool_calls": None}
            message |= answer_to(messages)
            sent[messages[0]["content"]].append(messages)
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            answer = {"id": given.get("rid", "x"), "object": "chat.completion", "model": given["model"]}
            self.reply({**answer, "choices": [choice], "usage": usage})

        def reply(self, body):
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", sent
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def a_call(number, name, arguments="{}"):
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def a_result(number, text):
    return {"role": "tool", "tool_call_id": number, "content": text}


def test_results_of_tools_are_spliced_in_and_calls_without_any_fail_with_what_was_made(tmp_path):
    old = [
        assistant(None, tool_calls=[a_call("old", "rain", '{"in": "Oslo"}')]), a_result("old", "yes"),
        assistant("OLD ANSWER"), user("Thanks."), assistant("OLD ANSWER"),
    ]  # fmt: skip
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    records = [{"messages": [user(name), *old]} for name in ("same", "none", "other")]
    source.write_text("".join(json.dumps(record) + "\n" for record in records))

    def answer_to(messages):
        first, last = messages[0]["content"], messages[-1]
        if last["role"] == "tool":
            return {"content": f"It says {last['content']}."}
        if last["content"] == "Thanks." or first == "none":
            return {"content": "Well."}
        return {"tool_calls": [{**a_call("new", "rain" if first == "same" else "snow"), "index": 0}]}

    with answering(answer_to) as (address, sent):
        ended = genpipe("run", "--prompts", source, "--servers", address, "--out", out, *MULTI_TURN)
    call, failure = a_call("new", "rain"), failures(out)[2]

    assert ended.code == 1, ended.err
    assert sorted(saved(out)) == [0, 1]
    assert saved(out)[0]["messages"] == sent["same"][-1] == [
        user("same"), assistant(None, tool_calls=[call]), a_result("new", "yes"),
        assistant("It says yes."), user("Thanks."),
    ]  # fmt: skip
    assert len(saved(out)[0]["steps"]) == 3
    assert saved(out)[1]["messages"] == [user("none"), assistant("Well."), user("Thanks.")]
    assert failure["message"].endswith("turn 1 calls tools whose results the original does not have")
    assert (failure["error_class"], failure["last_status"]) == ("PromptFault", None)
    assert failure["steps"][0]["response"]["tool_calls"][0]["function"]["name"] == "snow"
    (server,) = report(out)["servers"]
    assert (server["answers"], server["faults"]) == (6, {})


@pytest.mark.parametrize("kept", [False, True], ids=["left out", "put in"])
def test_thoughts_are_kept_in_the_record_and_stand_in_the_history_only_by_option(tmp_path, kept):
    source = write_conversations(tmp_path / "in.jsonl", [["a", "b"]])
    out, option = tmp_path / "out", f"request.reasoning_in_history={str(kept).lower()}"

    def answer_to(messages):
        return {"content": f"said {len(messages)}", "reasoning_content": f"thought {len(messages)}"}

    with answering(answer_to) as (address, sent):
        where = ["run", "--prompts", source, "--servers", address, "--out", out]
        ended = genpipe(*where, *MULTI_TURN, "--set", option)
    thought = {"reasoning_content": "thought 1"} if kept else {}

    assert ended.code == 0, ended.err
    assert sent["a"] == [[user("a")], [user("a"), assistant("said 1", **thought), user("b")]]
    steps = saved(out)[0]["steps"]
    assert [each["response"]["reasoning_content"] for each in steps] == ["thought 1", "thought 3"]
