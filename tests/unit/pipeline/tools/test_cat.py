"""`rollstream cat` ends where it was told to, whatever takes up the last offsets."""

from collections.abc import Iterable

import pytest

from rollstream.pipeline.tools import cat
from rollstream.pipeline.tools.cat import ReadSpan
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.reader import Polled
from rollstream.topics.kafka.records import KafkaRecord, Place


class Followed:
    """A stand-in for the reader of a topic of one partition; each poll returns the next answer."""

    def __init__(self, *answers: Polled) -> None:
        self.answers = list(answers)
        self.now = 0.0

    def __enter__(self) -> "Followed":
        return self

    def __exit__(self, *_: object) -> None: ...

    def partitions_of(self, _topic: str) -> int:
        return 1

    def bounds(self, _topic: str, _partitions: list[int]) -> dict[int, tuple[int, int]]:
        return {0: (0, 0)}

    def assign(self, _positions: dict[tuple[str, int], int]) -> None: ...

    def monotonic(self) -> float:
        return self.now

    def poll(self, _most: int, wait_s: float) -> Polled:
        self.now += wait_s
        assert self.answers, "it follows the topic past the place at which it was to stop"
        return self.answers.pop(0)

    def passed_ends(
        self, places: set[Place], _ends: dict[Place, int], records: Iterable[KafkaRecord]
    ) -> Iterable[Place]:
        """The topic had three records when it was first read."""
        return places if any(record.offset >= 2 for record in records) else ()


def read(reader: Followed, monkeypatch: pytest.MonkeyPatch, span: ReadSpan) -> list[KafkaRecord]:
    """Read main.steps with a stand-in, whose polls are all that takes time."""
    monkeypatch.setattr(cat, "Reader", lambda *_, **__: reader)
    monkeypatch.setattr(cat, "time", reader)
    monkeypatch.setattr(clients, "check_broker", lambda _kafka: None)
    return list(cat.messages(KafkaConfig(), "main.steps", span))


def test_following_stops_at_an_offset_although_no_record_is_right_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    place, records = ("main.steps", 0), [KafkaRecord("main.steps", 0, offset) for offset in range(3)]
    # The marker of a transaction takes up offset 3; further records may never come.
    reader = Followed(Polled(records[:2], {place: 2}), Polled(records[2:], {}), Polled([], {place: 4}))
    assert read(reader, monkeypatch, ReadSpan(stop=4, follow=True)) == records
    assert reader.answers == []


def test_a_topic_that_is_written_to_all_the_time_is_printed_to_the_end_that_it_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # No poll ever reports an end, because each fetch returns another record.
    records = [KafkaRecord("main.steps", 0, offset) for offset in range(10)]
    reader = Followed(*(Polled([record], {}) for record in records))
    assert read(reader, monkeypatch, ReadSpan()) == records[:3]


def test_a_partition_that_returns_nothing_is_an_error_unless_it_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, silent = Polled([KafkaRecord("main.steps", 0, 0)], {}), [Polled([], {})] * 1000
    with pytest.raises(BrokerUnavailable, match=r"main\.steps partitions \[0\] returned nothing for 60 s; check that"):
        read(Followed(first, *silent), monkeypatch, ReadSpan())
    follower = Followed(first, *silent, Polled([], {("main.steps", 0): 4}))
    assert read(follower, monkeypatch, ReadSpan(stop=4, follow=True)) == first.records
