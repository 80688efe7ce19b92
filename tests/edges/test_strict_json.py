"""JSON in and out."""

import json
import math

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genpipe.edges.strict_json import dumps, exact_member, loads, no_numbers, raw_member

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
odd_text = st.text(st.characters() | st.characters(categories=["Cs"]), max_size=8)


def strict(data):
    """Parse as the strictest reader would: UTF-8, no NaN, no lone surrogate."""

    def refuse(word):
        raise AssertionError(word)

    value = json.loads(data.decode(), parse_constant=refuse)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def test_valid_pairs_and_a_genuine_replacement_character_stay():
    assert loads(rb'"\ud83d\ude00"') == "\U0001f600"
    assert loads('"\ufffd \U0001f600", '.strip(", ").encode()) == "\ufffd \U0001f600"
    assert loads(rb'["\ud83d\ude00 \ufffd", "\ud83d"]') == ["\U0001f600 \ufffd", "\ufffd"]


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (rb'"cut \ud83d"', "cut \ufffd"),
        (rb'"low \udcff end"', "low \ufffd end"),
        (rb'"\ude00\ud83d"', "\ufffd\ufffd"),
        (rb'{"k\udfff": ["\ud800"]}', {"k\ufffd": ["\ufffd"]}),
        (b"[NaN, Infinity, -Infinity, 1e400, -1e400]", [None] * 5),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        (rb'[123456789012345678901234567890, "\ud800"]', [123456789012345678901234567890, "\ufffd"]),
    ],
)
def test_what_other_writers_produce_is_taken_in(data, value):
    assert loads(data) == value


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'"caf\xe9"', "not UTF-8: byte 0xe9 at offset 4"),
        (b'"\xed\xa0\x80"', "not UTF-8"),
        (b'{"a": 1}{"b": 2}', "not JSON: Extra data at character 8"),
        (b'{"a": ', "not JSON"),
        (b"", "not JSON"),
        (b"\x00\x00", "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b'"raw \x01"', "not JSON"),
        (b"[NaN,]", "not JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b"9" * 5_000, "too many digits"),
        (b"[NaN, " + b"9" * 5_000 + b"]", "too many digits"),
    ],
)
def test_what_is_no_json_is_refused_in_one_line(data, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        loads(data)

    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 100


@given(plain)
def test_what_was_written_reads_back(value):
    """The same value, but for numbers that JSON does not have and whole numbers that are held as floats."""

    def expected(item):
        if isinstance(item, list):
            return [expected(inner) for inner in item]
        if isinstance(item, dict):
            return {key: expected(inner) for key, inner in item.items()}
        if isinstance(item, float) and not math.isfinite(item):
            return None
        return item

    data = dumps(value)

    assert strict(data) == expected(value)
    assert b"\n" not in data


@given(st.lists(odd_text) | st.dictionaries(odd_text, odd_text))
def test_lone_surrogates_never_get_out(value):
    strict(dumps(value))


def test_any_whole_number_beside_what_json_does_not_have_is_written():
    assert (
        dumps([2**70, float("nan"), float("-inf"), "\ud800é", (1,)])
        == '[1180591620717411303424,null,null,"\ufffdé",[1]]'.encode()
    )


def test_a_value_nested_too_deeply_to_be_written_is_a_value_error():
    value: list[object] = []
    for _ in range(50_000):
        value = [value]

    with pytest.raises(ValueError, match="nested too deeply"):
        dumps(value)
    while value:  # taken apart by hand, since freeing it at once recurses as deeply
        value = value.pop()  # type: ignore[assignment]


@pytest.mark.parametrize(
    "digits",
    [
        *(
            "7.0",
            "7",
            "1e3",
            "1E+3",
            "0",
            "-0",
            "-0.0",
            "0.10",
            "18446744073709551615",
            "18446744073709551616",
        ),
        *("123456789012345678901", "-9223372036854775808", "-9223372036854775809", "3.14159265358979323846"),
    ],
)
@pytest.mark.parametrize("shape", ["%s", "[%s,1]", '{"a":{"b":[%s]}}'])
def test_numbers_are_copied_digit_for_digit(digits, shape):
    text = shape % digits
    line = b'{"prompt": "p", "id": %s}\n' % text.encode()

    assert raw_member(line, loads(line), "id") == text.encode()


@pytest.mark.parametrize(
    ("source", "copied"),
    [
        (b'"7"', b'"7"'),
        (b"true", b"true"),
        (b"null", b"null"),
        (b'""', b'""'),
        (b'{"a": 1.50, "b": "\xc3\xa9"}', b'{"a":1.50,"b":"\xc3\xa9"}'),
        (rb'"\ud800"', b'"\xef\xbf\xbd"'),
        (rb'[1.0, "\ud800", NaN, 1e400]', b'[1.0,"\xef\xbf\xbd",null,null]'),
        (b"NaN", b"null"),
    ],
)
def test_other_values_are_copied_as_strict_json(source, copied):
    line = b'{"id": %s, "x": 1}' % source

    assert raw_member(line, loads(line), "id") == copied


@pytest.mark.parametrize("field", ["id", "k\ufffd", "last"])
def test_the_member_that_is_copied_is_the_one_that_counts(field):
    """Of keys given twice the last; not one that stands deeper; with escapes, white space and all."""
    line = (
        b' { "\\u0069d" : 1.0 , "x":{"id":5.0,"last":[{}]},"k\\udfff":"s}", "id"\r:\t2.0, "y":"\\"id\\":7.0",'
        b'"k\\ud800" : 3.0 , "last": [4.0, "}", {"a":"]"}] }\n'
    )

    wanted = {"id": b"2.0", "k\ufffd": b"3.0", "last": b'[4.0,"}",{"a":"]"}]'}
    assert raw_member(line, loads(line), field) == wanted[field]


def test_words_that_are_no_numbers_are_found_in_one_member_and_not_in_another():
    line = b'{"a": [NaN, {"b": -Infinity}, "NaN", 1e400], "c": [1e300, "Infinity"], "d": NaN}'

    assert no_numbers(line, "a") == ["NaN", "-Infinity", "1e400"]
    assert no_numbers(line, "c") == []


# ---- depth ----

deep = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | odd_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=10,
)


def wrapped(data, levels, around):
    opener, closer = around
    return opener * levels + data + closer * levels


AROUND = [(b"[", b"]"), (b'{"a":', b"}"), (b'[0,{"a" : ', b"} , 1 ]")]


@pytest.mark.parametrize("around", AROUND)
@given(value=deep)
@settings(max_examples=10, deadline=None)
def test_what_is_nested_too_deeply_for_libraries_is_read_and_written_like_the_rest(around, value):
    levels = 1_100
    data = json.dumps(value).encode()

    read = loads(wrapped(data, levels, around))
    written = dumps(read)

    compact = [part.replace(b" ", b"") for part in around]
    assert written == wrapped(dumps(value), levels, compact)


@pytest.mark.parametrize(
    "inner",
    [
        *(b"", b"1,", b",", b"1 2", b'{"a"}', b'{"a":}', b'{"a":1,}', b"{1:2}", b'{"a" 1}', b"'a'", b"tru"),
        *(
            b"01",
            b"+1",
            b"1.",
            b".5",
            b"1e",
            b'"\x01"',
            b'"\\x"',
            b'"a',
            b"-",
            b"]",
            b"{]",
            b'{"a":1]',
            b"[1}",
        ),
    ],
)
def test_what_is_no_json_is_none_at_any_depth(inner):
    with pytest.raises(ValueError, match="not JSON") as caught:
        loads(b"[" * 1_500 + b"[1," + inner + b"]" + b"]" * 1_500)

    assert len(str(caught.value)) < 100


def test_what_follows_a_deep_value_is_no_part_of_it():
    data = wrapped(b"1", 1_500, AROUND[0])

    assert dumps(loads(data + b" \n\t")) == data
    with pytest.raises(ValueError, match="not JSON"):
        loads(data + b" x")
    with pytest.raises(ValueError, match="not JSON"):
        loads(data[:-1])


def test_deep_strings_are_read_without_halves_of_pairs():
    value = loads(wrapped(rb'"\ud800 \ud83d\ude00"', 1_500, AROUND[0]))

    for _ in range(1_500):
        (value,) = value
    assert value == "\ufffd \U0001f600"


def test_a_deep_value_is_copied_digit_for_digit():
    source = wrapped(b'1.0,1e3,-0,123456789012345678901,NaN,1e400,"\\ud800"', 3_000, AROUND[0])
    wanted = wrapped(b'1.0,1e3,-0,123456789012345678901,null,null,"\xef\xbf\xbd"', 3_000, AROUND[0])
    line = b'{"id": %s, "b": {"id": 1.0}}' % source

    assert raw_member(line, loads(line), "id") == wanted
    assert no_numbers(line, "id") == ["NaN", "1e400"]
    assert no_numbers(line, "b") == []
    assert dumps(exact_member(line, loads(line), "b")) == b'{"id":1.0}'


def test_a_value_deeper_than_orjson_writes_is_copied_all_the_same():
    source = b"[" * 300 + b"1.0" + b"]" * 300
    line = b'{"id": %s}' % source

    with pytest.raises(TypeError):
        orjson.dumps(orjson.loads(source))
    assert raw_member(line, loads(line), "id") == source
