"""Sets of offsets survive their form in the journal, and ranges are parsed, or refused with the expected form."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records.journal import OffsetRange, from_ranges, to_ranges


@given(offsets=st.sets(st.one_of(st.integers(0, 40), st.integers(0, 2**62))))
def test_ranges_hold_the_offsets_they_were_made_of(offsets: set[int]) -> None:
    ranges = to_ranges(offsets)
    assert list(from_ranges(ranges)) == sorted(offsets)
    assert ranges.dtype.str == "<i8"
    pairs = ranges.reshape(-1, 2).tolist()
    assert all(first + count < after for (first, count), (after, _) in itertools.pairwise(pairs))


@pytest.mark.parametrize(("text", "expected"), [("0:1200-1450", (0, 1200, 1450)), ("3:7", (3, 7, 7))])
def test_a_range_is_parsed_from_partition_first_and_last(text: str, expected: tuple[int, int, int]) -> None:
    assert OffsetRange.parse(text) == expected


@pytest.mark.parametrize("text", ["", "7", "0:", "0:9-3", "0:1-", "-1:2", "0:1-2-3", f"0:{'9' * 19}"])
def test_anything_else_is_refused_as_no_range(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a range of offsets"):
        OffsetRange.parse(text)
