"""JSON of model calls: our functions read and write the same values as the standard library."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.producers.json_text import decode, encode, readable

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters())
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=20,
)


@given(VALUES)
def test_what_is_written_is_read_by_everyone_and_the_other_way_round(value: object) -> None:
    assert decode(encode(value)) == value
    assert json.loads(encode(value)) == value
    assert decode(json.dumps(value)) == value
    assert decode(json.dumps(value).encode()) == value


def test_lone_surrogates_and_large_integers_are_left_to_the_standard_library() -> None:
    assert decode(r'["\ud800"]') == ["\ud800"]
    assert json.loads(encode(["\ud800", 2**70])) == ["\ud800", 2**70]


@given(VALUES)
def test_a_readable_text_fits_into_utf_8_and_has_the_same_value(value: object) -> None:
    assert json.loads(readable(value).encode()) == json.loads(json.dumps(value))


def test_only_lone_surrogates_are_escaped_in_a_readable_text() -> None:
    assert readable({"a": "é \ud83d", "b": "\U0001f600"}, (",", ":")) == r'{"a":"é \ud83d","b":"' + '\U0001f600"}'


def test_a_number_that_is_none_is_read_and_written_as_null() -> None:
    assert math.isnan(decode("[NaN]")[0])
    assert encode([math.nan, math.inf]) == b"[null,null]"


@pytest.mark.parametrize("text", [b"", b"{", b'{"a": 1,}', b"\xff", "nul"])
def test_what_is_no_json_is_a_value_error(text: bytes | str) -> None:
    with pytest.raises(ValueError):
        decode(text)


def test_what_has_no_json_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        encode({"a": object()})
