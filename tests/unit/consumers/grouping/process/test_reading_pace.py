"""A process that is told to read slowly reads as fast as it may, and no faster."""

import pytest

from rollstream.consumers.grouping.process.reading_pace import ReadingPace


class Time:
    """A clock that advances only when `sleep` is called."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.mark.parametrize("rate", [0.5, 7.0, 150.0, 5000.0])
def test_a_process_behind_reads_at_its_rate(rate: float) -> None:
    time = Time()
    pace = ReadingPace(rate, 0.1, lambda: time.now, time.sleep)
    read = 0
    while time.now < 60:
        most = pace.most(500)
        assert 1 <= most <= 500
        pace.passed(most)
        read += most
    assert read == pytest.approx(60 * rate, rel=0.02, abs=2)


def test_no_burst_follows_idle_time() -> None:
    time = Time()
    pace = ReadingPace(100.0, 0.1, lambda: time.now, time.sleep)
    time.now += 3600
    assert pace.most(500) == 10


def test_without_a_rate_nothing_is_held_back() -> None:
    time = Time()
    pace = ReadingPace(0.0, 0.1, lambda: time.now, time.sleep)
    for _ in range(100):
        assert pace.most(500) == 500
        pace.passed(500)
    assert time.now == 0
