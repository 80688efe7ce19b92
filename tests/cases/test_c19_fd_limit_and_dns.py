"""Too few open files are found out at the start, and names that cannot be looked up cost time and no row."""

from collections import Counter

import pytest

from tests.e2e import names
from tests.e2e.harness import (
    GENPIPE,
    assert_within_limit,
    audit,
    progress,
    report,
    row_of,
    run_command,
    running,
    saved,
    servers,
    wait_for,
    without_probes,
    write_prompts,
)
from tests.e2e.names import NameServer
from tests.e2e.offsite import environment, options
from tests.faults.soak import SOAK
from tests.s3.proxy import FaultProxy

ROWS, LIMIT = 500, 100
TEXTS = [f"Row {place}. <<delay=0.5>>" for place in range(ROWS)]

FAILURES = 20
LOOK_UP_S = 5.0 if SOAK > 1 else 2.5

needs_names = pytest.mark.skipif(names.why_not() is not None, reason=str(names.why_not()))


def limited(how):
    """Genpipe under a limit of open files, as a shell sets it."""
    return ("sh", "-c", f'ulimit {how} && exec "$@"', "sh", *GENPIPE)


def test_a_soft_limit_of_128_files_is_raised_for_two_hundred_connections(tmp_path):
    source, out = write_prompts(tmp_path / "in.jsonl", TEXTS), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        command = run_command(fleet, source, out, LIMIT, "--set=start.ramp_s=0")
        with running(*command, err=tmp_path / "run.err", command=limited("-Sn 128")) as run:
            code = run.wait()
        fleet.stop()
        visits = fleet.visits()

    assert code == 0, run.err
    assert {record["attempts"] for record in audit(out, TEXTS).values()} == {1}
    assert {port: max(v["in_flight"] for v in visits if v["port"] == port) for port in fleet.ports} == (
        dict.fromkeys(fleet.ports, LIMIT)
    )
    assert_within_limit(fleet, LIMIT)
    assert [server["faults"] for server in report(out)["servers"]] == [{}, {}]


def test_a_hard_limit_of_128_files_is_refused_with_both_numbers_and_nothing_is_asked(tmp_path):
    source, out = write_prompts(tmp_path / "in.jsonl", TEXTS), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        command = run_command(fleet, source, out, LIMIT)
        with running(*command, err=tmp_path / "run.err", command=limited("-n 128")) as run:
            code = run.wait()
        fleet.stop()
        visits = fleet.visits()
    (line,) = run.err.splitlines()

    assert code == 2
    assert line.startswith("genpipe: error: ")
    assert " 128" in line
    assert f"{2 * 2 * LIMIT + 200} open files" in line
    assert visits == []
    assert saved(out) == {}


def test_a_hard_limit_that_is_just_enough_loses_no_checkpoint(tmp_path):
    """Shards, their folder and the list are opened again and again while all connections are open."""
    source, out = write_prompts(tmp_path / "in.jsonl", TEXTS), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        command = run_command(
            fleet, source, out, LIMIT, "--set=start.ramp_s=0", "--set=output.shard_records=20"
        )
        enough = limited(f"-n {2 * 2 * LIMIT + 200}")
        with running(*command, err=tmp_path / "run.err", command=enough) as run:
            code = run.wait()

    assert code == 0, run.err
    audit(out, TEXTS)


def named(fleet, count):
    """Addresses of servers by names that nobody but our name server knows."""
    return [f"--servers=http://gpu{place}.test:{fleet.ports[place]}" for place in range(count)]


def impatient(*more):
    return ["--set=retry.pause_max_s=0.4", "--set=retry.bench_pause_s=0.1", *more]


@needs_names
def test_look_ups_that_fail_twenty_times_are_waited_out_and_no_row_pays(tmp_path):
    """One server has an address, so that the run goes on meanwhile; the other's name comes to life late."""
    texts = [f"Row {place}. <<delay=0.2>>" for place in range(ROWS)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 2) as fleet, NameServer(failures=FAILURES) as name_server:
        command = ["run", "--prompts", source, "--out", out, "--concurrency", 8, *named(fleet, 1)]
        command += [f"--servers={fleet.urls[1]}", *impatient()]
        program = name_server.command(tmp_path, *GENPIPE)
        with running(*command, err=tmp_path / "run.err", command=program) as run:
            trouble = wait_for(
                lambda: (now := progress(out)) and now["servers"][0]["last_error"], "the trouble to be shown"
            )
            code = run.wait()
        fleet.stop()
        visits = without_probes(fleet.visits())
    by_port = Counter(visit["port"] for visit in visits)
    records = audit(out, texts)

    assert code == 0, run.err
    assert "gpu0.test" in trouble or "name" in trouble
    assert len(name_server.looked_up) > FAILURES
    assert (out / "failed.jsonl").read_bytes() == b""
    # From the first good look-up on it does its part, and is not looked up for each connection.
    assert by_port[fleet.ports[0]] > 40
    assert len(name_server.looked_up) < FAILURES + 10
    assert Counter(visit["row"] for visit in visits) == Counter(row_of(text) for text in texts)
    assert sum(record["attempts"] for record in records.values()) < ROWS + FAILURES


@needs_names
def test_a_run_of_which_no_name_can_be_looked_up_yet_begins_when_they_can(tmp_path):
    texts = [f"Row {place}." for place in range(40)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 2) as fleet, NameServer(failures=FAILURES if SOAK > 1 else 6) as name_server:
        command = ["run", "--prompts", source, "--out", out, "--concurrency", 8, *named(fleet, 2)]
        program = name_server.command(tmp_path, *GENPIPE)
        with running(*command, *impatient(), err=tmp_path / "run.err", command=program) as run:
            code = run.wait()

    assert code == 0, run.err
    audit(out, texts)
    assert (out / "failed.jsonl").read_bytes() == b""


@needs_names
def test_slow_look_ups_of_many_names_wait_neither_for_one_another_nor_for_uploads(tmp_path, moto):
    """Eight names of which each takes seconds, while eight uploads at once wait for a slow store."""
    count = 8
    texts = [f"Row {place}. <<delay={0.03 * LOOK_UP_S:g}>>" for place in range(40 * count)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with (
        servers(tmp_path, count) as fleet,
        NameServer(delay_s=LOOK_UP_S) as name_server,
        FaultProxy(moto.url) as store,
    ):
        place = moto.place("names", endpoint_url=store.url)
        store.delay(2 * LOOK_UP_S, method="PUT", key="/shards/", times=8)
        command = ["run", "--prompts", source, "--out", out, "--concurrency", 2, "--no-hedge"]
        command += named(fleet, count)
        command += [*options(place, uploads=8, timeout_s=30), "--set=output.shard_records=5"]
        program = name_server.command(tmp_path, *GENPIPE)
        with running(*command, err=tmp_path / "run.err", command=program, env=environment(moto)) as run:
            code = run.wait()
        fleet.stop()
        visits = without_probes(fleet.visits())
    first_s = {visit["port"]: visit["arrival_s"] for visit in reversed(visits)}

    assert code == 0, run.err
    assert {record["attempts"] for record in audit(out, texts).values()} == {1}
    assert [server["faults"] for server in report(out)["servers"]] == [{}] * count
    # Once, or twice, to find out what is served, and once for the requests: not one name after the other.
    assert min(first_s.values()) - run.began_s < 3 * LOOK_UP_S + 9
    if LOOK_UP_S < 5:
        # A look-up as long as the limit of a health check makes that fail now and then.
        assert sorted(first_s) == fleet.ports
        assert max(first_s.values()) - min(first_s.values()) < LOOK_UP_S + 2
