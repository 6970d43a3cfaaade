"""The last record of a partition, over a model of Kafka: transaction markers take offsets, but are no records."""

from collections.abc import Iterator

import pytest

from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.reader import ends_of_records
from tests.simulation.installation import World, installed
from tests.simulation.partition_log import PartitionLog

KAFKA = KafkaConfig(bootstrap_servers="model:1")


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    with installed(world):
        yield world


def write(log: PartitionLog, content: str) -> None:
    """Write a record outside transactions (r), a committed or an aborted one with its marker (c, a), or an open one."""
    for letter in content:
        log.append(0, b"key", b"value", [], (7, log.end), 0, transactional=letter != "r")
        if letter in "ac":
            log.mark(0, 7, letter == "c")


@pytest.mark.parametrize(
    ("content", "position", "end"),
    [
        ("", 0, 0),
        ("rrr", 0, 3),
        ("rrr", 2, 3),
        ("rrr", 3, 3),
        ("c", 0, 1),
        ("c", 1, 1),
        ("rc", 1, 2),
        ("ra", 1, 1),
        # Behind more offsets without a record than the first look back covers.
        ("r" + 40 * "a", 0, 1),
        ("r" + 40 * "a", 1, 1),
        ("rrc" + 300 * "a", 1, 3),
        ("rco", 0, 2),
        ("rco", 2, 2),
    ],
)
def test_the_end_of_the_records_counts_no_markers(world: World, content: str, position: int, end: int) -> None:
    cluster = world.begin()
    cluster.create("topic", 2)
    write(cluster.topics["topic"][0], content)
    write(cluster.topics["topic"][1], "rr")
    ends = world.result_of(lambda: ends_of_records(KAFKA, "topic", {0: position, 1: 1}))
    assert ends == {0: end, 1: 2}
