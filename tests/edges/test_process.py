"""Open files: raised as far as is needed, or refused with both numbers."""

import subprocess
import sys

import pytest

from genpipe.edges.process import SPARE_FILES

TRY = """
import resource, sys
from genpipe.core.errors import ConfigError
from genpipe.edges.process import raise_file_limit
soft, hard, connections = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    raise_file_limit(connections)
except ConfigError as error:
    print(error)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def tried(soft, hard, connections):
    """What is said, and the limits afterwards."""
    command = [sys.executable, "-c", TRY, str(soft), str(hard), str(connections)]
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
