"""The page's list of dead letters has previews, and keeps no values."""

import tracemalloc
from collections.abc import Iterator

import pytest

from rollstream.pipeline.tools import dlq
from rollstream.pipeline.ui.server import dead_letters
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.wire.codec import encode
from tests.support.runs import rollout
from tests.unit.pipeline.tools.test_dlq import LETTERS, MIB, large_letters, letter, redriven


def test_rows_are_newest_first_with_the_beginning_of_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [encode(rollout()), "é".encode() * 1000, None]
    messages: list[KafkaRecord] = [*(letter(n, value) for n, value in enumerate(values)), redriven(3, 1)]
    monkeypatch.setattr(dlq, "read_to_end", lambda *_, **__: iter(messages))
    none, text, record = dead_letters.rows(KafkaConfig(), "main")
    assert [row["place"] for row in (none, text, record)] == ["0:2", "0:1", "0:0"]
    assert (none["preview"], none["bytes"], none["redriven"]) == ("", 0, False)
    assert (text["preview"], text["bytes"], text["redriven"]) == ("é" * 200, 2000, True)
    assert record["preview"].startswith('{"uid": "x-0"')
    assert len(record["preview"]) == 200


@pytest.fixture
def measured() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("measured")
def test_letters_of_megabytes_are_listed_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlq, "read_to_end", large_letters)
    rows = dead_letters.rows(KafkaConfig(), "main")
    assert [row["bytes"] for row in rows] == [MIB] * LETTERS
    assert tracemalloc.get_traced_memory()[1] / MIB < LETTERS / 4
