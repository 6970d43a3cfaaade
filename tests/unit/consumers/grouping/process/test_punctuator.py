"""A grouping process knows the broker's time, whatever the host's clock does."""

from rollstream.consumers.grouping.process.punctuator import BrokerClock


class Host:
    def __init__(self) -> None:
        self.wall_s, self.monotonic_s = 1000.0, 5.0

    def clock(self) -> BrokerClock:
        return BrokerClock(lambda: self.wall_s, lambda: self.monotonic_s)

    def wait(self, seconds: float) -> None:
        self.wall_s += seconds
        self.monotonic_s += seconds


def test_time_continues_if_the_host_clock_is_set_back_or_forth() -> None:
    host = Host()
    clock = host.clock()
    assert clock.now_ms == 1_000_000
    for step_s in (-86_400.0, 200_000.0):
        host.wall_s += step_s
        before = clock.now_ms
        host.wait(2.0)
        assert clock.now_ms == before + 2000


def test_a_host_clock_that_is_behind_is_corrected_by_the_records_read() -> None:
    host = Host()
    clock = host.clock()
    clock.passed(1_500_000)
    clock.passed(900_000)
    host.wait(1.0)
    assert clock.now_ms == 1_501_000


def test_a_host_clock_that_is_ahead_is_corrected_by_the_answer_of_the_broker() -> None:
    host = Host()
    clock = host.clock()
    clock.told(400_000)
    host.wait(1.0)
    assert clock.now_ms == 401_000
