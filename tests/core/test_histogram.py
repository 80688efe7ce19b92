"""Log-bucket histograms."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genpipe.core.histogram import Histogram

VALUES = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=200)


def filled(values, per_octave=16):
    histogram = Histogram(per_octave=per_octave, least=1e-3)
    for value in values:
        histogram.add(value)
    return histogram


@given(VALUES, st.floats(0.0, 1.0))
def test_a_quantile_is_good_to_a_bucket(values, share):
    ordered = sorted(values)
    exact = ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    assert filled(values).quantile(share) == pytest.approx(exact, rel=2 ** (1 / 16) - 1 + 1e-9)


@given(VALUES, VALUES)
def test_merging_is_adding_all(left, right):
    merged = filled(left)
    merged.merge(filled(right))
    both = filled(left + right)

    assert (merged.buckets, merged.count, merged.largest) == (both.buckets, both.count, both.largest)


@given(VALUES)
def test_counts_survive_json(values):
    histogram = filled(values)
    again = Histogram(per_octave=16, least=1e-3)
    again.add_counts(histogram.as_counts())

    assert (again.buckets, again.count) == (histogram.buckets, histogram.count)
    assert again.largest >= histogram.largest * (1 - 1e-9)


@given(st.floats(1e-3, 1e6))
def test_a_value_lies_in_its_bucket(value):
    histogram = Histogram(per_octave=8, least=1e-3)
    bucket = histogram.bucket(value)

    assert histogram.low(bucket) <= value * (1 + 1e-12)
    assert value <= histogram.low(bucket + 1) * (1 + 1e-12)


def test_small_values_fall_into_the_least_bucket():
    histogram = Histogram(per_octave=4, least=1.0)
    for value in (0.0, -3.0, 0.5, 1.0):
        histogram.add(value)

    assert histogram.buckets == {0: 4}


def test_an_empty_one_has_no_quantile():
    assert Histogram(per_octave=4, least=1.0).quantile(0.5) is None


def test_no_quantile_is_above_the_largest_value():
    assert filled([3.0]).quantile(0.99) == 3.0


def test_unlike_histograms_do_not_merge():
    with pytest.raises(AssertionError):
        filled([1.0], per_octave=16).merge(filled([1.0], per_octave=8))


def test_counts_with_a_key_that_is_no_number_are_refused():
    with pytest.raises(ValueError, match="invalid literal"):
        Histogram(per_octave=4, least=1.0).add_counts({"x": 1})
