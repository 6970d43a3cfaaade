"""Heartbeats: a loop that turns is alive however often it turns, and one that does not is named with its age."""

import pytest

from rollstream.topics.heartbeats import START, Heartbeats
from tests.support.waiting import eventually


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_loop_is_stuck_once_its_newest_beat_is_older_than_the_stall() -> None:
    clock = Clock()
    heartbeats = Heartbeats(clock)
    heartbeats.beat("grouping")
    clock.now_s += 10
    assert heartbeats.stuck(10) == ""
    clock.now_s += 1
    assert heartbeats.stuck(10) == "grouping: no progress for 11 s"
    heartbeats.beat("grouping")
    assert heartbeats.stuck(10) == ""


def test_one_loop_that_turns_does_not_hide_another_that_is_stuck() -> None:
    clock = Clock()
    heartbeats = Heartbeats(clock)
    heartbeats.beat("decoding")
    clock.now_s += 60
    heartbeats.beat("event loop")
    assert heartbeats.stuck(30) == "decoding: no progress for 60 s"


def test_a_start_without_progress_is_stuck_too_and_ends_with_the_first_turn_of_a_loop() -> None:
    clock = Clock()
    heartbeats = Heartbeats(clock)
    clock.now_s += 60
    assert heartbeats.stuck(30) == f"{START}: no progress for 60 s"
    heartbeats.beat()
    assert heartbeats.stuck(30) == ""
    heartbeats.beat("training")
    clock.now_s += 20
    heartbeats.beat()
    assert heartbeats.ages == {"training": 20.0}, "progress of the start does not count after it"


@pytest.mark.parametrize("loop", [START, "training"])
def test_a_call_that_blocks_for_long_is_no_stuck_loop_and_begins_none(loop: str) -> None:
    clock = Clock()
    heartbeats = Heartbeats(clock)
    heartbeats.beat(loop)
    with heartbeats.during("training"):
        clock.now_s += 400
        eventually(lambda: heartbeats.stuck(300) == "", 60, "a beat")
    assert list(heartbeats.ages) == [loop]
    clock.now_s += 400
    assert heartbeats.stuck(300) == f"{loop}: no progress for 400 s", "nothing beats afterwards"
