"""``genpipe limit``: a run folder whose driver is this very process, and what the command makes of it."""

import json
import subprocess
import sys
import threading
import time

import pytest

from genpipe import limiting
from genpipe.core.errors import ConfigError
from genpipe.edges import limits_file
from genpipe.edges.files import OsFiles
from genpipe.edges.limits_file import LIMITS, Watcher
from genpipe.edges.run_folder import RunFolder, RunIdentity
from tests.ui.samples import progress, server

FLEET = (
    "http://gpu1:30000",
    "http://gpu1:30001",
    "http://my-gpu1:30002",
    "http://10.0.0.7:30000",
    "https://api.example/x",
)


class Run:
    """A live run, so far as the command can see one."""

    def __init__(self, place):
        identity = RunIdentity(
            inputs=("a.jsonl",), settings={"request": {}}, shard_records=500, version="0.1.0"
        )
        now = "2026-03-01T12:00:00.000Z"
        self.folder = place
        self.claim = RunFolder.open(
            place, identity, OsFiles(), allow_changed=False, now_text=now, warn=pytest.fail
        )
        self.configured = dict.fromkeys(FLEET, 8)
        self.state = "running"
        self.gone = set()
        self.report({})

    def report(self, changed):
        """Put a snapshot as the driver would, once it has taken some limits."""
        fleet = {**self.configured, **changed}
        rows = []
        for url, limit in fleet.items():
            is_gone = limit == 0 or url in self.gone
            rows.append(server(url=url, limit=limit or 8, state="gone" if is_gone else "up", in_flight=0))
        snapshot = json.dumps(progress(servers=rows, state=self.state))
        temporary = self.folder / "progress.json.tmp"
        temporary.write_text(snapshot)
        temporary.replace(self.folder / "progress.json")

    def limit(self, *changes, wait_s=0.0):
        """The exit code, what stands on stdout and what on stderr."""
        out: list[str] = []
        err: list[str] = []
        code = limiting.limit(self.folder, changes, say=out.append, tell=err.append, wait_s=wait_s)
        return code, "\n".join(out), "\n".join(err)

    @property
    def limits(self):
        return limits_file.read(self.folder / LIMITS)


@pytest.fixture
def run(tmp_path):
    live = Run(tmp_path / "run")
    yield live
    live.claim.close()


@pytest.fixture
def driven(run):
    """The same, with somebody who takes what the file says."""
    watcher = Watcher(run.folder / LIMITS, run.report, pytest.fail, every_s=0.02)
    yield run
    watcher.close()


def refusal(run, *changes):
    """The one line that is said; nothing is handed over."""
    before = (run.folder / LIMITS).read_bytes() if (run.folder / LIMITS).exists() else None
    with pytest.raises(ConfigError) as caught:
        run.limit(*changes)
    after = (run.folder / LIMITS).read_bytes() if (run.folder / LIMITS).exists() else None
    assert after == before
    assert str(caught.value).isprintable()
    return str(caught.value)


# ---- what it does ----


def test_a_change_that_is_taken_shows_the_rows_that_it_changed_and_no_other(driven):
    code, out, err = driven.limit("http://gpu1:30001=16", wait_s=5)
    lines = out.splitlines()

    assert (code, err) == (0, "")
    assert len(lines) == 2
    assert lines[0].startswith("server ")
    assert lines[1].startswith("http://gpu1:30001 ")
    assert " 0/16 " in lines[1]
    assert driven.limits == {"http://gpu1:30001": 16}


def test_servers_are_added_and_removed_in_one_command(driven):
    code, out, _ = driven.limit("http://new:30000=32", "gpu1:30000=0", wait_s=5)

    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [
        ["http://new:30000", "up"],
        ["http://gpu1:30000", "gone"],
    ]


def test_a_change_is_merged_with_what_was_changed_before(driven):
    driven.limit("gpu1:30000=4", "gpu1:30001=0", wait_s=5)
    driven.limit("gpu1:30000=5", "http://new:1=2", wait_s=5)

    assert driven.limits == {"http://gpu1:30000": 5, "http://gpu1:30001": 0, "http://new:1": 2}


def test_what_the_driver_has_not_taken_in_time_is_handed_over_and_exits_with_1(run):
    began_s = time.monotonic()
    code, out, err = run.limit("gpu1:30000=4", "http://new:1=2", wait_s=0.3)

    assert time.monotonic() - began_s >= 0.3
    assert (code, out) == (1, "")
    assert err == (
        "genpipe: handed over (http://gpu1:30000=4, http://new:1=2), but not taken within 0.3 s; it will be, "
        f"and `genpipe status {run.folder}` shows it then"
    )
    assert run.limits == {"http://gpu1:30000": 4, "http://new:1": 2}


def test_one_change_of_two_is_not_both(run):
    """The driver's next report shows the first one alone."""
    timer = threading.Timer(0.1, run.report, [{"http://gpu1:30000": 4}])
    timer.start()
    code, _, _ = run.limit("gpu1:30000=4", "gpu1:30001=4", wait_s=0.5)
    timer.join()

    assert code == 1


def test_a_removed_server_that_is_not_shown_any_more_is_taken(run):
    def forget():
        del run.configured["http://gpu1:30001"]
        run.report({})

    timer = threading.Timer(0.1, forget)
    timer.start()
    code, out, _ = run.limit("gpu1:30001=0", wait_s=5)
    timer.join()

    assert code == 0
    assert out.startswith("server")


def test_a_run_that_ends_meanwhile_is_not_waited_for(run):
    def end():
        run.state = "done"
        run.report({})

    timer = threading.Timer(0.2, end)
    timer.start()
    began_s = time.monotonic()
    code, _, err = run.limit("gpu1:30001=3", wait_s=30)
    timer.join()

    assert time.monotonic() - began_s < 10
    assert code == 1
    assert err.endswith("but the run has ended meanwhile, and begins again with the servers as configured")


# ---- which server is meant ----


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("http://gpu1:30000", "http://gpu1:30000"),
        ("http://GPU1:30000/v1/", "http://gpu1:30000"),
        ("gpu1:30000", "http://gpu1:30000"),
        ("Gpu1:30001", "http://gpu1:30001"),
        (":30001", "http://gpu1:30001"),
        ("30001", "http://gpu1:30001"),
        ("7:30000", "http://10.0.0.7:30000"),
        (".7:30000", "http://10.0.0.7:30000"),
        ("api.example/x", "https://api.example/x"),
        ("api.example:443/x", "https://api.example/x"),
        ("example/x", "https://api.example/x"),
        ("/x", "https://api.example/x"),
        (" gpu1:30000 ", "http://gpu1:30000"),
    ],
)
def test_a_server_is_named_by_its_address_or_by_the_end_of_it(run, name, url):
    run.limit(f"{name}=3")

    assert run.limits == {url: 3}


def test_a_host_that_is_given_whole_is_meant_though_others_end_like_it(run):
    run.configured = {"http://eu.gpu1:30000": 8, "http://gpu1:30000": 8}
    run.report({})
    run.limit("gpu1:30000=3")

    assert run.limits == {"http://gpu1:30000": 3}


def test_a_range_of_ports_means_each_of_them(run):
    run.limit("http://gpu9:30000-30002=4")

    assert run.limits == {f"http://gpu9:{port}": 4 for port in (30000, 30001, 30002)}


def test_a_star_means_all_servers_in_use_and_what_is_said_of_one_counts_more(run):
    run.gone = {"http://gpu1:30001"}
    run.report({})
    run.limit("my-gpu1:30002=2", "*=5", "http://new:1=3")

    assert run.limits == {
        **{url: 5 for url in FLEET if url != "http://gpu1:30001"},
        "http://my-gpu1:30002": 2,
        "http://new:1": 3,
    }


def test_a_server_that_was_handed_over_and_is_not_shown_yet_is_known(run):
    run.limit("http://new:1=3")
    run.limit("new:1=4")

    assert run.limits == {"http://new:1": 4}


# ---- what it refuses ----


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["gpu1:30000"], "'gpu1:30000': write SERVER=N, e.g. gpu1:30000=16, or gpu1:30000=0 to use"),
        (["=3"], "'=3': write SERVER=N"),
        ([""], "'': write SERVER=N"),
        (["gpu1:30000\n=3"], r"'gpu1:30000\n=3': write SERVER=N"),
        (["gpu1:30000="], "gpu1:30000: its limit must be a whole number from 0 to 65,535, got ''; write"),
        (["gpu1:30000=x"], "gpu1:30000: its limit must be a whole number from 0 to 65,535, got 'x'; write"),
        (["gpu1:30000=-1"], "gpu1:30000: its limit must be a whole number from 0 to 65,535, got '-1'; write"),
        (["gpu1:30000=1.5"], "gpu1:30000: its limit must be a whole number from 0 to 65,535, got '1.5'"),
        (["gpu1:30000=99999"], "must be a whole number from 0 to 65,535, got '99999'"),
        (["gpu1:30000=²"], "must be a whole number from 0 to 65,535, got '²'"),
        (["gpu2:30000=3"], "gpu2:30000 is no server of this run; its servers are http://gpu1:30000, "),
        (["u1:30000=3"], "u1:30000 is no server of this run; its servers are"),
        (["gpu1:3000=3"], "To add one, give its whole address, as in http://gpu1:30000=16"),
        ([":30000=3"], ":30000 may mean http://gpu1:30000, http://10.0.0.7:30000: give more of the address"),
        (["http://new:1=0"], "http://new:1 is no server of this run, so that it cannot be removed; its"),
        (["http://new:0=1"], "http://new:0=1: must be an address such as http://gpu1:30000"),
        (["ftp://new:1=1"], "ftp://new:1=1: must be an address such as http://gpu1:30000"),
        (["http://new:9-2=1"], "http://new:9-2=1: 9-2 is no range of ports"),
        (["gpu1:30000=1", "http://gpu1:30000=2"], "http://gpu1:30000=2: http://gpu1:30000 is given twice"),
        (["*=1", "*=2"], "*=2: * is given twice; give it once"),
        (["*=0"], "that would leave no server to the run in "),
        ([f"{url}=0" for url in FLEET], "that would leave no server to the run in "),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_line_and_changes_nothing(run, changes, said):
    assert said in refusal(run, *changes)


def test_a_password_is_not_shown(run):
    for name in ("http://me:hunter2@gpu1:30000", "me:hunter2@gpu1:30000"):
        assert refusal(run, f"{name}=3") == "a server's address holds no user and no password"


def test_the_last_server_cannot_be_removed_though_others_are_known_that_are_gone(run):
    run.configured = {"http://a:1": 8, "http://b:1": 8}
    run.gone = {"http://b:1"}
    run.report({})

    assert refusal(run, "a:1=0").startswith("that would leave no server to the run in ")


def test_the_servers_that_were_removed_before_count_too(run):
    run.configured = {"http://a:1": 8, "http://b:1": 8}
    run.report({})
    run.limit("a:1=0")

    assert refusal(run, "b:1=0").startswith("that would leave no server to the run in ")
    assert run.limit("b:1=0", "http://c:1=4")[0] == 1
    assert run.limits == {"http://a:1": 0, "http://b:1": 0, "http://c:1": 4}


def test_a_file_that_is_damaged_is_named_and_left_as_it_is(run):
    (run.folder / LIMITS).write_text("{")

    assert refusal(run, "gpu1:30000=3").startswith(
        f"{run.folder / LIMITS} is damaged (1 bytes, no JSON object)"
    )


def test_a_run_that_is_over_is_refused(run):
    run.state = "done"
    run.report({})

    assert refusal(run, "gpu1:30000=3").startswith(
        f"the run in {run.folder} is not under way (its last report says done): give limits to `genpipe run`"
    )


def test_a_run_whose_driver_was_killed_is_refused(run):
    owner = json.loads((run.folder / ".lock").read_bytes())
    (run.folder / ".lock").write_text(json.dumps({**owner, "pid_start": owner["pid_start"] - 1}))

    assert "is not under way (its driver has ended)" in refusal(run, "gpu1:30000=3")


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no folder"):
        limiting.limit(tmp_path / "none", ["a:1=3"], say=print, tell=print)


# ---- the command ----


def command(*args):
    return subprocess.run(
        [sys.executable, "-m", "genpipe", "limit", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.mark.slow
def test_the_command_exits_with_0_once_it_is_taken_and_with_2_for_what_cannot_be(driven):
    taken, refused = command(driven.folder, ":30001=9", "*=7"), command(driven.folder, "gpu1:30000=x")

    assert (taken.returncode, taken.stderr) == (0, "")
    assert len(taken.stdout.splitlines()) == 1 + len(FLEET)
    assert driven.limits == {**dict.fromkeys(FLEET, 7), "http://gpu1:30001": 9}
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.startswith("genpipe: error: gpu1:30000: its limit must be")
    assert len(refused.stderr.splitlines()) == 1


def test_a_run_in_s3_is_not_where_its_driver_is():
    done = command("s3://bucket/run", "a:1=3")

    assert done.returncode == 2
    assert done.stderr == "genpipe: error: limits are changed where the driver is: name its run folder\n"
