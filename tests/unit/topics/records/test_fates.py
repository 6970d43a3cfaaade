"""Fates and drop reasons are spelled in one place, and the names of counts hold both."""

import pytest

from rollstream.topics.records.fates import (
    BATCHED,
    CONTROL,
    DEAD_LETTERED,
    DETAIL_LIMIT,
    DROP_REASONS,
    DROPPED,
    FATES,
    clip,
    dropped_for,
    fate_and_reason,
)


def test_every_fate_is_listed_once() -> None:
    assert FATES == (BATCHED, DROPPED, DEAD_LETTERED, CONTROL)


@pytest.mark.parametrize("reason", [*DROP_REASONS, "a maker's: own", ""])
def test_the_name_of_a_count_of_drops_gives_its_reason_back(reason: str) -> None:
    assert fate_and_reason(dropped_for(reason)) == (DROPPED, reason)


@pytest.mark.parametrize("fate", FATES)
def test_a_fate_by_itself_has_no_reason(fate: str) -> None:
    assert fate_and_reason(fate) == (fate, "")


def test_a_text_is_cut_to_its_limit_and_left_alone_within_it() -> None:
    assert clip("x" * DETAIL_LIMIT, DETAIL_LIMIT) == "x" * DETAIL_LIMIT
    assert clip("x" * (DETAIL_LIMIT + 1), DETAIL_LIMIT) == "x" * (DETAIL_LIMIT - 1) + "…"
