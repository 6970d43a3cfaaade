"""A gateway reads on after an outage of the brokers, also if it counts as alone by then."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.producers.gateway.call_log import CallLog
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable
from rollstream.topics.kafka import provisioning, topic_admin
from rollstream.topics.records import SessionEvent
from tests.support.faulty_network import Weather
from tests.support.linked_broker import LinkedBroker, linked_broker
from tests.support.loops import loop_in_a_thread
from tests.support.runs import RealRun
from tests.support.waiting import eventually


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LinkedBroker]:
    with linked_broker(tmp_path / "broker", "gateway") as broker:
        yield broker


def start(group: str) -> SessionEvent:
    return SessionEvent(session=f"{group}.0", kind="start", author="b", group_id=group, environment="e", example_id="t")


async def opened(kafka: KafkaConfig, run: str, author: str) -> CallLog:
    """The log of a gateway that has read everything."""
    log = CallLog(kafka, run, author=author, remembered_sessions=10, on_read=lambda _session: None)
    await log.start()
    return log


@pytest.mark.long
def test_a_gateway_whose_neighbour_falls_silent_in_an_outage_reads_on_afterwards(
    broker: LinkedBroker, run_name: str, tmp_path: Path
) -> None:
    run = RealRun(KafkaConfig(bootstrap_servers=broker.bootstrap_servers), run_name, tmp_path)
    provisioning.apply(run.kafka, run.topics, run.name)
    link = broker.links["gateway"]
    kafka = KafkaConfig(bootstrap_servers=link.address)
    with loop_in_a_thread() as loop:

        def result(work):  # type: ignore[no-untyped-def]
            return asyncio.run_coroutine_threadsafe(work, loop).result(300)

        log, neighbour = result(opened(kafka, run.name, "a")), result(opened(run.kafka, run.name, "b"))
        try:
            result(neighbour.append(start("before")))
            eventually(lambda: not log.alone, 60, "the gateway to read a record of its neighbour")
            with link.during(Weather(refused=True)):
                eventually(lambda: log.alone, 120, "the neighbour to be silent for a minute")
                for _attempt in range(2):  # as long as a try to change the settings takes, and longer
                    with pytest.raises(BrokerUnavailable):
                        topic_admin.partitions_of(kafka, log.topic)
            result(neighbour.append(start("after")))
            eventually(
                lambda: log.error or "after.0" in log.folds[log.partition_of("after.0")].sessions,
                120,
                "the gateway to read on",
            )
            assert log.error is None
        finally:
            result(log.close())
            result(neighbour.close())
