"""The last record of a partition, over a model of Kafka: transaction markers take offsets, but are no records. Readers
whose client loses all brokers, which a real client does only by chance.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable
from rollstream.topics.kafka import clients, connection
from rollstream.topics.kafka.reader import Place, Polled, Reader, ends_of_records, read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from tests.simulation.installation import World
from tests.simulation.partition_log import PartitionLog

KAFKA = KafkaConfig(bootstrap_servers="model:1")


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


class Client:
    """The parts of a consumer that a reader asks through; `reaches` says whether it reaches a broker."""

    def __init__(self, reaches: bool) -> None:
        self.reaches = reaches
        self.asked = 0

    def _ask(self) -> None:
        self.asked += 1
        if not self.reaches:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))

    def list_topics(self, _topic: str, timeout: float) -> None:
        assert timeout > 0
        self._ask()

    def committed(self, places: Sequence[TopicPartition], _timeout_s: float) -> Sequence[TopicPartition]:
        self._ask()
        return places

    offsets_for_times = committed

    def assign(self, places: Sequence[TopicPartition]) -> None:
        assert not places


QUESTIONS: dict[str, Callable[[Reader], object]] = {
    "committed": lambda reader: reader.committed("topic", [0], "reading offsets", timeout_s=0.0),
    "bounds": lambda reader: reader.bounds("topic", [0], timeout_s=0.0),
}


@pytest.fixture
def consumers(monkeypatch: pytest.MonkeyPatch) -> list[Client]:
    """The consumers of a process, the first of which reaches none of the brokers, which run."""
    consumers: list[Client] = []

    def reader(_kafka: KafkaConfig, **_settings: object) -> Client:
        consumers.append(Client(reaches=bool(consumers)))
        return consumers[-1]

    monkeypatch.setattr(connection, "SILENT_S", 0.0)
    monkeypatch.setattr(clients, "bare", lambda _kafka: Client(reaches=True))
    monkeypatch.setattr(clients, "reader", reader)
    return consumers


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_reader_that_only_asks_gets_a_new_client_if_the_old_one_is_stranded(
    consumers: list[Client], question: str
) -> None:
    reader = Reader(KAFKA)
    for _ in range(3):
        assert len(consumers) == 1
        with pytest.raises(BrokerUnavailable):
            QUESTIONS[question](reader)
    QUESTIONS[question](reader)
    assert [client.asked > 0 for client in consumers] == [True, True]


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_reader_that_gets_an_answer_between_examinations_keeps_its_client(
    consumers: list[Client], question: str
) -> None:
    reader = Reader(KAFKA)
    for _ in range(3):
        consumers[0].reaches = False
        with pytest.raises(BrokerUnavailable):
            QUESTIONS[question](reader)
        consumers[0].reaches = True
        QUESTIONS[question](reader)
    assert len(consumers) == 1


class HalfSilentReader(Reader):
    """A reader of two partitions: producers go on writing to the first, and nothing is heard of the other."""

    def __init__(self) -> None:
        self.now = 0.0
        self.offset = 0

    def partitions_of(self, topic: str) -> int:
        return 2

    def assign(self, positions: Mapping[Place, int]) -> None: ...

    def unassign(self) -> None: ...

    def passed_ends(
        self, places: Collection[Place], ends: dict[Place, int], records: Iterable[KafkaRecord]
    ) -> list[Place]:
        return []

    def poll(self, most: int, wait_s: float) -> Polled:
        assert self.now < 60, "the busy partition puts the error off for ever"
        self.now += wait_s
        self.offset += 1
        return Polled([KafkaRecord("topic", 0, self.offset - 1)], {("topic", 0): self.offset})


def test_a_partition_that_goes_on_does_not_hide_that_another_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = HalfSilentReader()
    monkeypatch.setattr("rollstream.topics.kafka.reader.time.monotonic", lambda: reader.now)
    read = []
    with pytest.raises(BrokerUnavailable, match=r"topic partitions \[1\] returned nothing for 2 s"):
        read.extend(read_to_end(KAFKA, "topic", timeout_s=2.0, reader=reader))
    assert [record.offset for record in read] == [0], "its end was that of the first poll"
