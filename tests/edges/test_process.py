"""Open files: raised as far as is needed, or refused with both numbers."""

import subprocess
import sys

import pytest

from genpipe.core.errors import ConfigError
from genpipe.edges.process import LOCAL_PORTS, SPARE_FILES, check_local_ports, port_room

TRY = """
import resource, sys
from genpipe.core.errors import ConfigError
from genpipe.edges.process import file_room, raise_file_limit
soft, hard, connections = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    print(file_room(connections)) if LIVE else raise_file_limit(connections)
except ConfigError as error:
    print(error)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def tried(soft, hard, connections, *, live=False):
    """What is said, and the limits afterwards."""
    command = [sys.executable, "-c", TRY.replace("LIVE", str(live)), str(soft), str(hard), str(connections)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *said, limits = done.stdout.splitlines()
    return said, tuple(map(int, limits.split()))


def test_the_soft_limit_is_raised_as_far_as_the_connections_need():
    assert tried(128, 1024, 200) == ([], (2 * 200 + SPARE_FILES, 1024))


def test_a_limit_that_is_high_enough_is_left_alone():
    assert tried(900, 1024, 200) == ([], (900, 1024))


def test_the_hard_limit_itself_will_do():
    assert tried(128, 600, 200) == ([], (600, 600))


def test_a_hard_limit_that_is_too_low_is_refused_with_both_numbers():
    said, limits = tried(128, 599, 200)

    assert len(said) == 1
    assert said[0].startswith("200 requests at once need 600 open files and this process may have 599: ")
    assert "--concurrency" in said[0]
    assert limits == (128, 599)


def test_what_the_system_itself_does_not_allow_is_refused_in_one_line():
    try:
        said, limits = tried(128, -1, 2**40)
    except AssertionError:
        pytest.skip("this process may not have an endless hard limit")

    assert len(said) == 1
    assert "1099511627776 requests at once need" in said[0]
    assert limits[0] == 128


def test_a_live_run_has_the_limit_raised_too_and_is_told_in_one_line_where_that_is_not_allowed():
    assert tried(128, 1024, 200, live=True) == (["None"], (2 * 200 + SPARE_FILES, 1024))

    said, limits = tried(128, 599, 200, live=True)

    assert said == [
        "200 requests at once need 600 open files and this process may have 599: raise the limit (ulimit -Hn)"
    ]
    assert limits == (128, 599)


# ---- local ports ----


def test_as_many_requests_as_there_are_local_ports_are_allowed_to_each_address(tmp_path):
    ports = tmp_path / "range"
    ports.write_text("40000\t40099\n")

    check_local_ports({"http://a:1": 100, "http://b:1": 100}, ports)


def test_one_more_is_refused_with_both_numbers(tmp_path):
    ports = tmp_path / "range"
    ports.write_text("40000\t40099\n")

    with pytest.raises(ConfigError) as caught:
        check_local_ports({"http://a:1": 100, "http://b:1": 101}, ports)

    said = "101 requests at once to http://b:1 need as many local ports and this machine has 100: "
    assert str(caught.value).startswith(said)
    assert "--concurrency" in str(caught.value)
    assert port_room("http://a:1", 100, ports) is None
    assert (port_room("http://b:1", 101, ports) or "").startswith(said)


@pytest.mark.parametrize("content", [None, b"", b"40000", b"a b", b"1 2 3", b"\xff\xfe"])
def test_where_the_range_cannot_be_read_nothing_is_refused(content, tmp_path):
    ports = tmp_path / "range"
    if content is not None:
        ports.write_bytes(content)

    check_local_ports({"http://a:1": 10**9}, ports)


@pytest.mark.skipif(not LOCAL_PORTS.exists(), reason="only Linux says which local ports there are")
def test_this_machine_has_ports_for_some_connections_and_not_for_more_than_there_are():
    check_local_ports({"http://a:1": 1})
    with pytest.raises(ConfigError):
        check_local_ports({"http://a:1": 70_000})
