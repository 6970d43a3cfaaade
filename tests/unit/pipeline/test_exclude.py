"""Which drops an exclusion is found to have caused."""

import pytest

from pipeline.tools.exclude import Exclusion, _is_of
from tests.unit.consumers.grouping.pairs import driver, pair

LONG = "n" * 290


@pytest.mark.parametrize("name", ["addition", "a is excluded", "two\nlines", LONG])
def test_a_group_dropped_for_its_environment_is_known_by_whatever_name(name: str) -> None:
    d = driver(exclude_environments=(name,))
    pair(d, environment=name)
    assert [drop.reason for drop in d.drops] == ["excluded"] * 2
    for drop in d.drops:
        assert _is_of(drop, Exclusion(environments=(name,)), ())
        assert not _is_of(drop, Exclusion(environments=("another",), workers=(name,)), ())


def test_a_group_dropped_for_an_offset_is_known_by_it() -> None:
    d = driver(exclude_offsets=("0:0",))
    pair(d)
    for drop in d.drops:
        assert _is_of(drop, Exclusion(offsets=("0:0",)), {0})
        assert not _is_of(drop, Exclusion(offsets=("0:7",)), {7})
