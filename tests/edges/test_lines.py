"""The checksummed line."""

from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genpipe.edges.lines import ENDS_BYTES, TRAILER_BYTES, body_of, decode, encode, index_of, looks_whole

MEMBERS = b'{"index":12,"a":"\xc3\xa9\xe2\x80\xa8,\\"_c\\":\\"12345678\\"}"'


def test_a_line_is_json_whose_last_member_is_the_checksum_of_what_stands_before_it():
    line = encode(MEMBERS)

    assert line == MEMBERS + b',"_c":"%08x"}\n' % crc32(MEMBERS)
    assert len(line) == len(MEMBERS) + TRAILER_BYTES
    assert decode(line) == MEMBERS + b"}" == body_of(line)


def test_the_checksum_keeps_its_leading_zeros():
    members = next(text for n in range(1000) if crc32(text := b'{"index":%d' % n) < 1 << 24)

    assert encode(members)[-11:-9] == b"00"
    assert decode(encode(members)) == members + b"}"


@given(st.data())
def test_no_part_of_a_line_and_no_changed_line_counts(data):
    line = encode(MEMBERS)
    cut = data.draw(st.integers(0, len(line) - 1))
    place = data.draw(st.integers(0, len(line) - 1))
    changed = bytearray(line)
    changed[place] ^= data.draw(st.integers(1, 255))

    assert decode(line[:cut]) is None
    assert decode(line[cut:]) is None or cut == 0
    assert decode(bytes(changed)) is None


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"{}\n", b'{"index":1}\n', b"\0" * 4096, b'"}\n', b',"_c":"00000000"}\n']
)
def test_what_is_no_line_does_not_count(line):
    assert decode(line) is None


@pytest.mark.parametrize(
    ("line", "index"),
    [
        (b'{"index":0,"a":1}', 0),
        (b'{"index":9999999,"_c":"00000000"}\n', 9_999_999),
        (b'{"index":5}', 5),
        (b'{"index":-1,"a":1}', None),
        (b'{"index":1.5}', None),
        (b'{"index":,"a":1}', None),
        (b'{"index":12', None),
        (b'{"index":' + b"9" * 20 + b"}", None),
        (b'{"id":1,"index":2}', None),
        (b"", None),
    ],
)
def test_the_index_is_read_off_the_first_key(line, index):
    assert index_of(line) == index


def test_an_index_is_read_where_its_record_begins():
    data = encode(b'{"index":7') + encode(b'{"index":89')

    assert index_of(data, len(data) // 2) == 89
    assert index_of(data, 1) is None


@pytest.mark.parametrize("index", [0, 10**19 - 1])
@pytest.mark.parametrize("members", [b"", b',"a":"' + b"x" * 99 + b'"'])
def test_a_whole_file_looks_whole_by_its_ends_and_one_that_lost_either_does_not(index, members):
    data = encode(b'{"index":%d%b' % (index, members))
    size = len(data)
    first, last = data[:ENDS_BYTES], data[-ENDS_BYTES:]

    assert looks_whole(first, last)
    assert not looks_whole(bytes(len(first)), last)
    assert not looks_whole(first, bytes(len(last)))
    assert not looks_whole(first, data[-ENDS_BYTES - 1 : size - 1])
    assert not looks_whole(data[1 : ENDS_BYTES + 1], last)
    assert not looks_whole(b"", b"")
