"""The records that are passed around."""

import json

import pytest

from genpipe.core.sums import Sums
from genpipe.core.values import ServerSpec
from tests.core.build import an_answer


def test_sums_count_tokens_only_where_they_are_known():
    sums = Sums()
    sums.add(10, ())
    sums.add(None, ("cut",))
    sums.add(0, ("empty", "cut"))

    assert (sums.records, sums.output_tokens, sums.usage_unknown) == (3, 10, 1)
    assert sums.flags == {"cut": 2, "empty": 1}
    assert sums.lengths.count == 2


def test_sums_survive_json():
    sums = Sums()
    sums.add(10, ("cut",))
    sums.add(None, ())
    again = Sums.from_json(json.loads(json.dumps(sums.as_json())))

    assert again.as_json() == sums.as_json()


def test_merged_sums_are_sums_of_all():
    left, right, both = Sums(), Sums(), Sums()
    for sums, tokens in ((left, 3), (right, None), (right, 500)):
        sums.add(tokens, ("cut",))
        both.add(tokens, ("cut",))
    left.merge(right)

    assert left.as_json() == both.as_json()


@pytest.mark.parametrize("data", [{}, {"records": "x"}, {"records": 1, "output_tokens": None}])
def test_sums_of_something_else_are_refused(data):
    with pytest.raises((KeyError, TypeError, ValueError)):
        Sums.from_json(data)


def test_values_do_not_change():
    with pytest.raises(AttributeError):
        an_answer().model = "other"


def test_a_server_has_a_slot_at_least():
    with pytest.raises(AssertionError):
        ServerSpec(url="http://a", limit=0)
