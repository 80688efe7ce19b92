"""A set of whole numbers at a bit each behaves like a set."""

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genpipe.core.bitmap import Bitmap

NUMBERS = st.integers(0, 300)


@given(st.lists(st.tuples(st.booleans(), NUMBERS), max_size=80))
def test_it_agrees_with_a_set(steps):
    bitmap, model = Bitmap(), set()
    for put_in, number in steps:
        if put_in:
            assert bitmap.add(number) == (number not in model)
            model.add(number)
        else:
            assert bitmap.discard(number) == (number in model)
            model.discard(number)

    assert list(bitmap) == sorted(model)
    assert (len(bitmap), bitmap.count) == (len(model), len(model))
    assert all((number in bitmap) == (number in model) for number in range(-3, 400))
    assert bitmap == Bitmap(model)


@given(st.sets(NUMBERS), NUMBERS, NUMBERS)
def test_counting_between_two_bounds(numbers, start, stop):
    expected = sum(start <= number < stop for number in numbers)

    assert Bitmap(numbers).count_between(start, stop) == expected


@given(st.sets(NUMBERS))
def test_ranges_put_together_are_the_set_and_touch_nowhere(numbers):
    found = list(Bitmap(numbers).ranges())

    assert {number for first, last in found for number in range(first, last + 1)} == numbers
    assert all(later[0] > earlier[1] + 1 for earlier, later in itertools.pairwise(found))


def test_two_are_equal_whatever_their_room():
    large = Bitmap([3, 5000])
    large.discard(5000)

    assert large == Bitmap([3])
    assert large != Bitmap([4])
    assert large != {3}


def test_a_million_indices_take_little_memory():
    bitmap = Bitmap(range(1_000_000))

    assert sys.getsizeof(bitmap._bits) < 200_000
    assert bitmap.count_between(0, 1_000_000) == 1_000_000


def test_a_negative_index_is_a_bug():
    with pytest.raises(AssertionError):
        Bitmap([-1])


def test_it_cannot_be_a_key():
    with pytest.raises(TypeError, match="unhashable"):
        hash(Bitmap())
