"""`rollstream cat` ends where it was told to, whatever takes up the last offsets."""

import pytest

from rollstream.pipeline.tools import cat
from rollstream.pipeline.tools.cat import ReadSpan
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.reader import Polled
from rollstream.topics.kafka.records import KafkaRecord


class Followed:
    """A stand-in for the reader of a topic of one partition; each poll returns the next answer."""

    def __init__(self, *answers: Polled) -> None:
        self.answers = list(answers)

    def __enter__(self) -> "Followed":
        return self

    def __exit__(self, *_: object) -> None: ...

    def partitions_of(self, _topic: str) -> int:
        return 1

    def bounds(self, _topic: str, _partitions: list[int]) -> dict[int, tuple[int, int]]:
        return {0: (0, 0)}

    def assign(self, _positions: dict[tuple[str, int], int]) -> None: ...

    def poll(self, _most: int, _wait_s: float) -> Polled:
        assert self.answers, "it follows the topic past the place at which it was to stop"
        return self.answers.pop(0)


def test_following_stops_at_an_offset_although_no_record_is_right_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    place, records = ("main.steps", 0), [KafkaRecord("main.steps", 0, offset) for offset in range(3)]
    # The marker of a transaction takes up offset 3; further records may never come.
    reader = Followed(Polled(records[:2], {place: 2}), Polled(records[2:], {}), Polled([], {place: 4}))
    monkeypatch.setattr(cat, "Reader", lambda *_, **__: reader)
    monkeypatch.setattr(clients, "check_broker", lambda _kafka: None)
    read = list(cat.messages(KafkaConfig(), "main.steps", ReadSpan(stop=4, follow=True)))
    assert (read, reader.answers) == (records, [])
