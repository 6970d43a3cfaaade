"""Clients whose broker leaves all brokers out of its answers, as a fenced broker does, go on once it names them again.

librdkafka does not always find the way back: it depends on how many answers named brokers before, and on its threads.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import pytest

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable
from rollstream.topics.kafka import clients, connection, provisioning
from rollstream.topics.kafka.groups import GroupMember, MembershipLost
from rollstream.topics.kafka.reader import Poller, Reader
from rollstream.topics.kafka.recovering_sender import RecoveringSender
from rollstream.topics.kafka.sender import Delivery, Failure
from tests.support.brokerless_metadata import BrokerlessLink
from tests.support.linked_broker import LinkedBroker, linked_broker
from tests.support.runs import RealRun
from tests.support.waiting import eventually

pytestmark = pytest.mark.long
ATTEMPTS = tuple(range(8)) * 2
"""Answers with brokers before those without, for each client."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LinkedBroker]:
    directory = tmp_path_factory.mktemp("brokerless") / "broker"
    # The controller would fence a broker that was stopped for nine seconds; only the link may leave out brokers here.
    unfenced = {"broker.session.timeout.ms": "120000"}
    with linked_broker(directory, "clients", link=BrokerlessLink, **unfenced) as broker:
        yield broker


@pytest.fixture
def run(broker: LinkedBroker, run_name: str, tmp_path: Path) -> RealRun:
    """A run, seen by a client that always learns of the broker."""
    run = RealRun(KafkaConfig(bootstrap_servers=broker.bootstrap_servers), run_name, tmp_path)
    provisioning.apply(run.kafka, run.topics, run.name)
    return run


@pytest.fixture
def kafka(broker: LinkedBroker) -> KafkaConfig:
    return KafkaConfig(bootstrap_servers=broker.links["clients"].address)


def ask(client: Poller, topic: str) -> None:
    """Have a client ask for metadata as often as it may take to lose all brokers."""
    with suppress(BrokerUnavailable, MembershipLost):
        for _ in range(6):
            client.partitions_of(topic)
            client.poll(1, 0.05)


def joining(kafka: KafkaConfig, group: str, topic: str) -> GroupMember:
    """A member that joins a group of its own, and reads from the first offset."""
    member = GroupMember(kafka, group, "member", topic)
    member.join(lambda numbers: dict.fromkeys(numbers, 0), lambda _numbers: None, lambda _numbers: None)
    return member


def produce(run: RealRun) -> None:
    producer = clients.producer(run.kafka)
    for partition in range(2):
        producer.produce(run.topic("rollouts"), b"value", partition=partition)
    assert producer.flush(120) == 0


def test_a_command_waits_for_brokers_that_are_fenced_and_says_so_if_they_stay_so(
    broker: LinkedBroker, kafka: KafkaConfig, run: RealRun
) -> None:
    with ThreadPoolExecutor() as pool:
        with broker.links["clients"].brokerless():
            with pytest.raises(BrokerUnavailable, match="names no broker that is up"):
                clients.check_broker(kafka, 1.0)
            describing = pool.submit(provisioning.describe, kafka, run.name)
            assert not wait([describing], timeout=1.0).done
        assert describing.result(60) == provisioning.describe(run.kafka, run.name)


def test_readers_read_on(
    broker: LinkedBroker, kafka: KafkaConfig, run: RealRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENT_S", 1.0)
    topic, readers = run.topic("rollouts"), []
    for whole in ATTEMPTS:
        with broker.links["clients"].brokerless(after=whole):
            readers.append(Reader(kafka, isolation="read_uncommitted"))
            readers[-1].assign({(topic, 0): 0})
            ask(readers[-1], topic)
    produce(run)
    for each in readers:
        assert eventually(lambda each=each: each.poll(1, 0.05).records, 60, "a record")
        each.close()


def test_clients_that_only_wait_are_kept(
    broker: LinkedBroker,
    kafka: KafkaConfig,
    run: RealRun,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The topic has no records, and then the broker does not answer for a while."""
    monkeypatch.setattr(connection, "SILENT_S", 0.0)
    topic = run.topic("rollouts")
    member = joining(kafka, run.name, topic)
    with Reader(kafka) as idle, member:
        idle.assign({(topic, 0): 0})
        eventually(lambda: member.poll(1, 0.05).ends, 60, "the end of a partition")
        for client in (idle, member):
            for _ in range(10):
                client.poll(1, 0.05)
        with broker.stopped():
            for client in (idle, member):
                client.poll(1, 0.05)
        for _ in range(4):
            idle.poll(1, 0.05)
        assert reads_on_or_was_fenced(member)
    assert "client_stranded" not in caplog.text


def reads_on_or_was_fenced(member: GroupMember) -> bool:
    """A broker that was stopped may take the repeated request of a member to join for that of another member."""
    try:
        for _ in range(4):
            member.poll(1, 0.05)
    except MembershipLost as lost:
        return lost.fenced
    return True


def test_group_members_read_on_or_say_that_they_are_lost(
    broker: LinkedBroker, kafka: KafkaConfig, run: RealRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENT_S", 1.0)
    topic, members = run.topic("rollouts"), []
    for number, whole in enumerate(ATTEMPTS):
        with broker.links["clients"].brokerless(after=whole):
            member = joining(kafka, f"{run.name}-{number}", topic)
            ask(member, topic)
            members.append(member)
    produce(run)

    def goes_on(member: GroupMember) -> bool:
        try:
            return bool(member.poll(1, 0.05).records)
        except MembershipLost as lost:
            return not lost.fenced

    for member in members:
        eventually(lambda member=member: goes_on(member), 120, "a record, or the news")
        member.close()


def test_senders_report_lost_records_and_send_on(
    broker: LinkedBroker,
    kafka: KafkaConfig,
    run: RealRun,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those that only send and never wait, as writers of metrics do."""
    monkeypatch.setattr(connection, "SILENT_S", 1.0)
    topic, senders = run.topic("rollouts"), []
    for whole in (*range(4), *range(4)):
        failures: list[Failure] = []
        delivered: list[Delivery] = []
        with broker.links["clients"].brokerless(after=whole):
            sender = RecoveringSender(kafka, on_failure=failures.append, **{"topic.metadata.refresh.interval.ms": 200})
            for number in range(30):
                sender.send(
                    topic, b"value", partition=number % 2, name=f"record {number}", on_delivery=delivered.append
                )
                sender.poll(0.1)
        senders.append((sender, failures, delivered))
    for sender, failures, delivered in senders:
        latest: list[Delivery] = []

        def goes_on(sender: RecoveringSender = sender, latest: list[Delivery] = latest) -> bool:
            sender.send(topic, b"value", partition=0, on_delivery=latest.append)
            return bool(latest)

        eventually(goes_on, 60, "a record to be delivered")
        sender.flush(60)
        assert len(delivered) + sum(failure.name.startswith("record ") for failure in failures) == 30
        assert {failure.reason for failure in failures} <= {"the client had lost all brokers"}
        assert bool(failures) <= ("client_stranded" in caplog.text)
