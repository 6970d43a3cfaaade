"""Topics on a real broker: provisioning any number of times, and refusing what cannot be mended."""

import re
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka.cimpl import NewTopic

from rollstream.infra.broker.broker import LocalBroker
from rollstream.infra.broker.ports import free_port
from rollstream.infra.config import BrokerConfig
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.errors import BrokerUnavailable
from rollstream.topics.kafka import clients, provisioning
from rollstream.topics.wire.catalogue import CATALOGUE, topic_name
from tests.support.command_line import answer_of
from tests.support.runs import RealRun
from tests.support.waiting import eventually


def test_another_number_of_replicas_is_shown_with_the_remedy_and_left(real_run: RealRun, tmp_path: Path) -> None:
    real_run.prepare()
    three = replace(real_run.topics, replication_factor=3)
    for plans in (provisioning.plan, provisioning.apply):
        assert {plan.replicas for plan in plans(real_run.kafka, three, real_run.name)} == {(1, 3)}
    for factor in (1, -1):
        same = replace(real_run.topics, replication_factor=factor)
        assert {plan.replicas for plan in provisioning.plan(real_run.kafka, same, real_run.name)} == {None}
    assert {topic.replicas for topic in provisioning.describe(real_run.kafka, real_run.name)} == {1}
    flags = real_run.command("--set", "topics.replication_factor=3")[4:]
    for action in ("plan", "apply"):
        shown = answer_of(tmp_path, "topics", action, *flags)
        assert shown.returncode == 0, shown.stderr
        assert re.search(rf"{real_run.name}\.rollouts +2 +(keep|kept) +replicas are 1, not 3\n", shown.stdout)
        assert "change the replicas with kafka-reassign-partitions" in shown.stdout
    examined = answer_of(tmp_path, "doctor", *flags)
    assert examined.returncode == 1
    assert f"topic {real_run.name}.rollouts: replicas of each partition are 1, not 3" in examined.stdout
    assert "-> change the replicas with kafka-reassign-partitions" in examined.stdout


@pytest.mark.long
def test_topics_are_applied_once_the_broker_is_up_for_those_who_wait(tmp_path: Path, run_name: str) -> None:
    port = free_port("127.0.0.1")
    run = RealRun(KafkaConfig(bootstrap_servers=f"127.0.0.1:{port}"), run_name, tmp_path)
    refused = answer_of(tmp_path, *run.command("topics", "apply", "--wait", "0.5")[4:])
    assert refused.returncode == 2
    assert f"0 of 1 brokers answer at 127.0.0.1:{port} after 0.5 s; start more brokers" in refused.stderr
    waiting = run.start("topics", "apply", "--wait", "300")
    try:
        with LocalBroker.start(tmp_path / "broker", port, bound_to_parent=True):
            assert waiting.wait(300) == 0, run.log_of(waiting)
            assert len(provisioning.describe(run.kafka, run_name)) == len(CATALOGUE)
    finally:
        run.stop()


@contextmanager
def fenced_at_creation(
    tmp_path: Path, run_name: str, monkeypatch: pytest.MonkeyPatch, *, every_ms: int, session_ms: int
) -> Iterator[tuple[KafkaConfig, list[str]]]:
    """Settings for a broker that is fenced when topics are first created, until a heartbeat; and the first answers.

    It is as on a busy machine: a heartbeat comes every `every_ms`, and `session_ms` after it the controller fences the
    only broker, so that it creates no topic.
    """
    late = {"broker.heartbeat.interval.ms": str(every_ms), "broker.session.timeout.ms": str(session_ms)}
    config = BrokerConfig(data_dir=tmp_path / "broker", port=free_port("127.0.0.1"), properties=late)
    with LocalBroker.start(config=config, bound_to_parent=True) as broker:
        kafka = KafkaConfig(bootstrap_servers=broker.bootstrap_servers)
        client = clients.admin(kafka)
        create = client.create_topics
        first: list[str] = []

        def is_fenced() -> bool:
            probe = create([NewTopic(f"{run_name}-probe", 1, 1)], validate_only=True)[f"{run_name}-probe"]
            return "All brokers are currently fenced" in str(probe.exception(300))

        def create_while_fenced(topics: list[NewTopic], **words: float) -> dict[str, Future[None]]:
            if first:
                return create(topics, **words)
            # A heartbeat has just passed, so the broker stays fenced for a while.
            eventually(lambda: not is_fenced(), 300, "a heartbeat", every_s=0.02)
            eventually(is_fenced, 60, "the broker is fenced", every_s=0.02)
            created: dict[str, Future[None]] = create(topics, **words)
            first.extend(str(future.exception(300)) for future in created.values())
            return created

        monkeypatch.setattr(client, "create_topics", create_while_fenced)
        monkeypatch.setattr(clients, "admin", lambda _kafka: client)
        yield kafka, first


@pytest.mark.long
def test_topics_are_created_once_a_fenced_broker_is_back(
    tmp_path: Path, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fenced = fenced_at_creation(tmp_path, run_name, monkeypatch, every_ms=6000, session_ms=1000)
    with fenced as (kafka, first):
        provisioning.apply(kafka, TopicsConfig(partitions=1), run_name)
        assert len(first) == len(CATALOGUE)
        assert all("All brokers are currently fenced" in reason for reason in first)
        assert {topic.topic for topic in provisioning.describe(kafka, run_name)} == {
            topic_name(run_name, spec.name) for spec in CATALOGUE
        }


@pytest.mark.long
def test_brokers_that_stay_fenced_are_named_with_the_remedy(
    tmp_path: Path, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fenced = fenced_at_creation(tmp_path, run_name, monkeypatch, every_ms=60_000, session_ms=5000)
    with (
        fenced as (kafka, _first),
        pytest.raises(BrokerUnavailable, match=r"cannot be created: .*fenced.* This lasted 30 s: .*; try again, and"),
    ):
        provisioning.apply(kafka, TopicsConfig(partitions=1), run_name)


def test_the_first_record_of_a_producer_does_not_wait_for_a_timer(real_run: RealRun) -> None:
    real_run.prepare()

    def seconds() -> float:
        begun = time.perf_counter()
        real_run.send_bytes("evals", b"value", b"key")
        return time.perf_counter() - begun

    # One fast write suffices: on shared processors any may be slow, but with the timer all would be.
    assert any(seconds() < 0.4 for _ in range(50)), "librdkafka's timer has half a second"
