"""What a view has read of a topic, and whether it can go on there."""

import pytest

from rollstream.consumers.log_view import LogView, ViewOutdated


def test_a_view_goes_on_at_its_positions_and_begins_with_what_is_left() -> None:
    view = LogView(position={0: 5})
    assert view.starts("run.rollouts", {0: (5, 9), 1: (3, 4)}, "") == {0: 5, 1: 3}
    assert view.starts("run.rollouts", {0: (0, 5)}, "") == {0: 5}
    assert (view.has(0, 4), view.has(0, 5), view.has(1, 0)) == (True, False, False)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({0: (6, 9)}, r"rollouts\[0\] begins at offset 6, and was read up to 5: .* were deleted; start again"),
        ({0: (0, 4)}, r"rollouts\[0\] ends at offset 4, and was read up to 5, so .* created again; start again"),
        ({}, r"rollouts\[0\] ends at offset -1"),
    ],
)
def test_a_view_never_goes_on_over_a_gap(bounds: dict[int, tuple[int, int]], message: str) -> None:
    with pytest.raises(ViewOutdated, match=message):
        LogView(position={0: 5}).starts("run.rollouts", bounds, "start again")


@pytest.mark.parametrize("other", [("run.rollouts", "b"), ("other.rollouts", "a")])
def test_a_view_never_goes_on_with_another_topic(other: tuple[str, str]) -> None:
    LogView().check_topic(*other, "")
    view = LogView("run.rollouts", "a")
    view.check_topic("run.rollouts", "a", "")
    with pytest.raises(ViewOutdated, match=r"run\.rollouts with id a was read before, not .*; start again"):
        view.check_topic(*other, "start again")
