"""Compares the clock of this machine with the brokers' clocks, by the times with which brokers stamp records.

A stamp that first appears between two requests was made between them, so it bounds the difference of the clocks in both
directions. If no record arrives, only a clock that is behind can be detected, because no stamp is later than the
present. The check only needs permission to see a topic, and writes nothing.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.doctor.findings import Finding
from rollstream.topics.kafka import access_control, topic_admin
from rollstream.topics.kafka.records import Place
from rollstream.topics.wire.catalogue import CATALOGUE, topic_name

SKEW_S = 5.0
"""Difference of clocks above which the stream time of grouping and the times in logs mislead."""
_WATCHED_S = 5.0
"""Time to wait for a record. While a run goes on, marks and rollouts arrive at shorter intervals."""
_PAUSE_S = 0.1
_CHECK = "clock"
_REMEDY = "let NTP set the clocks of this machine and of the brokers"


@dataclass(frozen=True)
class Skew:
    """Bounds of the seconds by which a clock is ahead of the clock that stamped a record."""

    least_s: float
    most_s: float

    @property
    def is_large(self) -> bool:
        """Whether the clocks certainly differ by more than `SKEW_S`."""
        return self.least_s > SKEW_S or self.most_s < -SKEW_S

    @property
    def text(self) -> str:
        """The direction, and the least difference that the bounds allow."""
        if self.least_s > 0:
            return f"this machine's clock is at least {self.least_s:.0f} s ahead of the brokers'"
        return f"this machine's clock is at least {-self.most_s:.0f} s behind the brokers'"


def check_clock(config: RunConfig) -> Iterator[Finding]:
    """Yield a finding on the difference between the clocks of this machine and of the brokers."""
    places = _stamped_partitions(config)
    if not places:
        yield Finding(check=_CHECK, level="note", text="this user sees no topic whose records the brokers stamp")
        return

    def newest_stamps() -> dict[Place, int]:
        answers = topic_admin.offsets(config.kafka, places, "max_timestamp")
        return {place: stamp for place, (_offset, stamp) in answers.items() if stamp > 0}

    yield from compared(newest_stamps)


def compared(newest_stamps: Callable[[], dict[Place, int]], watched_s: float = _WATCHED_S) -> Iterator[Finding]:
    """Yield a finding on this machine's clock from the newest stamps of partitions, requested repeatedly."""
    asked_s = time.time()
    before = newest_stamps()
    skews = [Skew(-float("inf"), time.time() - stamp / 1000) for stamp in before.values()]
    deadline = time.monotonic() + watched_s
    exact = False
    while not exact and not any(skew.is_large for skew in skews) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
        asking_s = time.time()
        now = newest_stamps()
        arrived = [stamp / 1000 for place, stamp in now.items() if stamp > before.get(place, 0)]
        skews += [Skew(asked_s - stamp_s, time.time() - stamp_s) for stamp_s in arrived]
        exact, before, asked_s = bool(arrived), now, asking_s
    large = [skew for skew in skews if skew.is_large]
    if large:
        yield Finding(check=_CHECK, level="fault", text=large[-1].text, remedy=_REMEDY)
    elif exact:
        text = f"this clock and the brokers' differ by less than {SKEW_S:g} s"
        yield Finding(check=_CHECK, level="ok", text=text)
    elif skews:
        yield Finding(
            check=_CHECK,
            level="note",
            text="this clock is not behind the brokers'; whether it is ahead is unknown: no record arrived within "
            f"{watched_s:g} s (the newest is {min(skew.most_s for skew in skews):.0f} s old)",
            remedy="run the check again while the run goes on",
        )
    else:
        yield Finding(check=_CHECK, level="note", text="there is no record yet whose time could be compared")


def _stamped_partitions(config: RunConfig) -> list[Place]:
    """Partitions of the topics whose records brokers stamp and that this user may see."""
    topics = [topic_name(config.run, spec.name) for spec in CATALOGUE if spec.append_time]
    seen = [name for name, may in access_control.topic_operations(config.kafka, topics).items() if may]
    return [(name, number) for name in seen for number in range(topic_admin.partitions_of(config.kafka, name))]
