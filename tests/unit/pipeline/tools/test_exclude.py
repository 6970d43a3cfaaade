"""Drops that an exclusion is found to have caused."""

import pytest

from rollstream.pipeline.tools.exclusion_marks import Exclusion
from rollstream.pipeline.tools.exclusion_report import journal_details
from tests.support.pairs import driver, pair

LONG = "n" * 290


@pytest.mark.parametrize("name", ["addition", "a is excluded", "two\nlines", LONG])
def test_a_group_dropped_for_its_environment_is_known_by_whatever_name(name: str) -> None:
    d = driver(exclude_environments=(name,))
    pair(d, environment=name)
    assert [drop.reason for drop in d.drops] == ["excluded"] * 2
    for drop in d.drops:
        assert drop.detail in journal_details(Exclusion(environments=(name,)), ())
        assert drop.detail not in journal_details(Exclusion(environments=("another",), workers=(name,)), ())


def test_a_group_dropped_for_an_offset_is_known_by_it() -> None:
    d = driver(exclude_offsets=("0:0",))
    pair(d)
    for drop in d.drops:
        assert drop.detail in journal_details(Exclusion(offsets=("0:0",)), {0})
        assert drop.detail not in journal_details(Exclusion(offsets=("0:7",)), {7})
