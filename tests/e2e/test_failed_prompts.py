"""``failed.jsonl``: what is asked again by itself, what only on demand, and what counts in the end."""

import json
import signal
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.e2e.harness import (
    asked_after,
    asked_by_process,
    audit,
    failures,
    genpipe,
    listed,
    progress,
    row_of,
    run_command,
    running,
    saved,
    servers,
    wait_for,
    without_probes,
    write_prompts,
)
from tests.edges.audit import whole_lines

ROWS, LIMIT = 30, 8
QUICK = ("--set", "retry.backoff_s=0.01", "--set", "retry.bench_pause_s=0.05")


class Folder:
    """One run, taken up again and again with the same command."""

    def __init__(self, tmp_path, odd):
        self.texts = [odd.get(place, f"Row {place}. <<tokens=5>>") for place in range(ROWS)]
        self.source = write_prompts(tmp_path / "in.jsonl", self.texts)
        self.out = tmp_path / "out"

    def run(self, fleet, *options, attempts=1):
        few = ["--set", f"retry.prompt_attempts={attempts}", *QUICK]
        return genpipe(*run_command(fleet, self.source, self.out, LIMIT, *few, *options))

    @property
    def counts(self):
        state = progress(self.out)
        assert state is not None
        assert state["state"] == "done"
        return state["completed"], state["failed"], state["total"]

    def lines_about(self, index):
        path = self.out / "failed.jsonl"
        data = path.read_bytes() if path.exists() else b""
        return [line for line in whole_lines(data) if line["index"] == index]

    def wait_for_lines_about(self, index, count):
        wait_for(lambda: len(self.lines_about(index)) == count, "the failure's line")

    def audit(self, *failed):
        assert sorted(failures(self.out).keys() - saved(self.out).keys()) == sorted(failed)
        return audit(self.out, self.texts, but=failed)


def asked_of(fleet):
    """The requests for prompts, by process; the servers have ended."""
    fleet.stop()
    return asked_by_process(without_probes(fleet.visits()))


def times_asked(asked, text):
    """By process, how often a row was asked."""
    return [sum(visit["row"] == row_of(text) for visit in visits) for visits in asked]


def test_what_failed_for_now_has_fresh_attempts_at_each_resume_until_it_is_answered(tmp_path):
    folder = Folder(tmp_path, {5: "Row 5. <<status=500>>"})
    ended, counts = [], []
    with servers(tmp_path) as fleet:
        for _ in range(2):
            ended.append(folder.run(fleet, attempts=2))
            counts.append(folder.counts)
        asked = asked_of(fleet)
    (tmp_path / "mended").mkdir()
    with servers(tmp_path / "mended", orders=False) as fleet:
        for _ in range(2):
            ended.append(folder.run(fleet, attempts=2))
            counts.append(folder.counts)
        asked += asked_of(fleet)
    lines = folder.lines_about(5)

    assert [each.code for each in ended] == [1, 1, 0, 0], ended[-1].err
    assert counts == [(29, 1, 30), (29, 1, 30), (30, 0, 30), (30, 0, 30)]
    # The resumes ask nothing but what had failed, and the last one finds nothing to ask.
    assert [len({visit["row"] for visit in visits}) for visits in asked] == [30, 1, 1]
    times = times_asked(asked, folder.texts[5])
    assert [line["attempts"] for line in lines] == times[:2]
    assert min(times[:2]) >= 2
    assert times[2] == 1
    assert [(line["for_good"], line["last_status"]) for line in lines] == [(False, 500), (False, 500)]
    assert folder.audit()[5]["attempts"] == 1
    assert "failed, listed in" not in ended[2].err + ended[3].err


def test_what_failed_for_good_is_left_alone_by_every_resume_and_asked_on_demand(tmp_path):
    refused = {4: "Row 4. <<status=400 why=too_long times=2 tokens=5>>", 9: "Row 9. <<status=422>>"}
    folder = Folder(tmp_path, refused)
    with servers(tmp_path) as fleet:
        first, same = folder.run(fleet), folder.run(fleet)
        counts = [folder.counts]
        # The second refusal, the third request, and then nothing that could be answered is left.
        retried = [folder.run(fleet, "--retry-failed")]
        counts.append(folder.counts)
        retried.append(folder.run(fleet, "--retry-failed"))
        counts.append(folder.counts)
        after = folder.run(fleet)
        asked = asked_of(fleet)

    assert [each.code for each in (first, same, *retried, after)] == [1, 1, 1, 1, 1]
    assert counts == [(28, 2, 30), (28, 2, 30), (29, 1, 30)]
    assert folder.counts == (29, 1, 30)
    assert times_asked(asked, folder.texts[4]) == [1, 1, 1]
    assert times_asked(asked, folder.texts[9]) == [1, 1, 1]
    assert [len(visits) for visits in asked] == [30, 2, 2]
    assert len(folder.lines_about(9)) == 3
    folder.audit(9)
    assert 4 in listed(folder.out)
    assert 9 not in listed(folder.out)


def test_the_end_tells_how_to_ask_again_what_failed_for_good(tmp_path):
    folder = Folder(tmp_path, {4: "Row 4. <<status=400 why=too_long>>", 9: "Row 9. <<status=500>>"})
    with servers(tmp_path) as fleet:
        both = folder.run(fleet)
    last = both.err.splitlines()[-1]

    assert both.code == 1
    assert "2 failed" in last
    assert str(folder.out / "failed.jsonl") in last
    assert "--retry-failed" in last


def test_the_end_does_not_ask_for_retry_failed_where_the_same_command_is_enough(tmp_path):
    folder = Folder(tmp_path, {9: "Row 9. <<status=500>>"})
    with servers(tmp_path) as fleet:
        ended = folder.run(fleet)
    last = ended.err.splitlines()[-1]

    assert ended.code == 1
    assert "1 failed" in last
    assert "--retry-failed" not in last


def test_a_bad_line_fails_once_and_is_looked_at_again_only_on_demand(tmp_path):
    folder = Folder(tmp_path, {})
    lines = folder.source.read_bytes().splitlines(keepends=True)
    lines[7] = b'{"id": "p-7", "prompt": 7}\n'
    folder.source.write_bytes(b"".join(lines))
    with servers(tmp_path) as fleet:
        codes = [folder.run(fleet).code, folder.run(fleet).code]
        lines_at_first = len(folder.lines_about(7))
        codes.append(folder.run(fleet, "--retry-failed").code)
        fleet.stop()
        visits = fleet.visits()

    assert codes == [1, 1, 1]
    assert lines_at_first == 1
    assert len(folder.lines_about(7)) == 2
    assert {line["for_good"] for line in folder.lines_about(7)} == {True}
    assert folder.counts == (29, 1, 30)
    assert len(visits) == 29
    folder.audit(7)


@contextmanager
def statuses_by_text(statuses):
    """One server that answers these texts with these statuses and all others well: its base address.

    A simulated server reads its orders from the prompt, and cannot say something else to the same one.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.reply(200, {"object": "list", "data": [{"id": "tiny-model", "object": "model"}]})

        def do_POST(self):
            given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = given["messages"][-1]["content"]
            if text in statuses:
                error = {"object": "error", "message": "as it was told", "code": statuses[text]}
                return self.reply(statuses[text], error)
            message = {"role": "assistant", "content": f"echo {row_of(text)} "}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            answer = {"id": given.get("rid", "x"), "object": "chat.completion", "model": given["model"]}
            return self.reply(200, {**answer, "choices": [choice], "usage": usage})

        def reply(self, status, body):
            data = json.dumps(body).encode()
            self.send_response(status)
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
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def test_a_later_failure_takes_the_place_of_the_earlier_one_in_either_direction(tmp_path):
    folder = Folder(tmp_path, {})
    five, six = folder.texts[5], folder.texts[6]
    seen = []

    def run(statuses, *options):
        few = ["--set", "retry.prompt_attempts=1", *QUICK]
        with statuses_by_text(statuses) as address:
            where = ["--prompts", folder.source, "--servers", address, "--out", folder.out]
            ended = genpipe("run", *where, *few, *options)
        last = failures(folder.out)
        seen.append((ended.code, last[5]["for_good"], last[6]["for_good"], *folder.counts))

    run({five: 500, six: 400})
    run({five: 400, six: 500})
    run({five: 400, six: 500}, "--retry-failed")
    run({})
    run({five: 500}, "--retry-failed")
    run({})

    assert seen == [
        (1, False, True, 28, 2, 30),
        # The one that had failed for now was asked, and now fails for good; the other was not.
        (1, True, True, 28, 2, 30),
        (1, True, False, 28, 2, 30),
        # What failed for now is answered: its old line stands, and no longer counts.
        (1, True, False, 29, 1, 30),
        (1, False, False, 29, 1, 30),
        (0, False, False, 30, 0, 30),
    ]
    assert [line["for_good"] for line in folder.lines_about(5)] == [False, True, True, False]
    assert [line["for_good"] for line in folder.lines_about(6)] == [True, False]
    folder.audit()


def test_a_kill_between_a_failure_and_its_retry_counts_it_once(tmp_path):
    folder = Folder(tmp_path, {5: "Row 5. <<status=500>>", 6: "Row 6. <<status=400 why=too_long>>"})
    folder.texts[20:] = [f"Row {place}. <<tokens=5 delay=1>>" for place in range(20, ROWS)]
    write_prompts(folder.source, folder.texts)
    few = ["--set", "retry.prompt_attempts=1", *QUICK]
    with servers(tmp_path) as fleet:
        command = run_command(fleet, folder.source, folder.out, LIMIT, *few)
        for round_number in (1, 2):
            with running(*command, err=tmp_path / "run.err") as run:
                folder.wait_for_lines_about(5, round_number)
                run.send(signal.SIGKILL)
                run.wait()
        killed_s, done = fleet.visits_until_now()[-1]["arrival_s"], set(saved(folder.out))
        ended = genpipe(*command)
        again = asked_after(without_probes(fleet.visits_until_now()), killed_s)

    assert ended.code == 1
    assert folder.counts == (28, 2, 30)
    assert len(folder.lines_about(5)) == 3
    assert len(folder.lines_about(6)) == 1
    assert again == {row_of(text) for place, text in enumerate(folder.texts) if place not in {6, *done}}
    folder.audit(5, 6)


def test_failures_take_no_part_in_the_rate_or_in_what_is_done(tmp_path):
    odd = {place: f"Row {place}. <<status=400 why=too_long>>" for place in range(0, ROWS, 3)}
    folder = Folder(tmp_path, odd)
    with servers(tmp_path) as fleet:
        ended = folder.run(fleet)
        status = genpipe("status", folder.out)
    records = folder.audit(*odd)
    state = progress(folder.out)

    assert ended.code == 1
    assert len(records) == 20
    assert folder.counts == (20, 10, 30)
    assert state is not None
    assert state["percent"] == pytest.approx(100 * 20 / 30, abs=0.1)
    assert "10 failed" in status.out
