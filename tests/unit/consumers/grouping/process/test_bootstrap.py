"""A restored run whose batches or dead letters are newer than its journal is refused, whatever else its topics hold."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from rollstream.consumers.grouping.process import bootstrap
from rollstream.consumers.grouping.process.bootstrap import check_nothing_beyond
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import StateRefused
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.wire.keys import encode_key
from tests.support.pairs import driver, pair


def check(monkeypatch: pytest.MonkeyPatch, *keys: bytes | None) -> None:
    """Check a run whose `batches` hold records with these keys; its journal knows batches 0 to 4 of partition 0."""

    def records(_kafka: KafkaConfig, topic: str) -> Iterator[KafkaRecord]:
        if topic == "r.batches":
            yield from (KafkaRecord(topic, 0, offset, key=key) for offset, key in enumerate(keys))

    monkeypatch.setattr(bootstrap, "read_to_end", records)
    grouping = driver()
    pair(grouping, "q")
    grouping.commit()
    check_nothing_beyond(KafkaConfig(), "r", {0: replace(grouping.journal[-1], batch_number=5)})


def test_records_without_the_key_of_a_batch_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [b"[]", b"[7]", b'["x"]', b"{}", b"", None, encode_key("1-9"), encode_key("0-4")]
    check(monkeypatch, *keys)
    with pytest.raises(StateRefused, match="run r holds batch 0-5, which its journal does not contain"):
        check(monkeypatch, *keys, encode_key("0-5"))
