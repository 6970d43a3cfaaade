"""The main path on Kafka in a container: the official image's contract, whoever built the image."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rollstream.consumers.batch_reader import BatchReader
from rollstream.consumers.trainers.step_writer import publish_version
from rollstream.consumers.weights.state_manager import StateManager
from rollstream.infra.broker.broker import LocalBroker
from rollstream.infra.config import BrokerConfig
from rollstream.infra.testing import KafkaContainer
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually


@pytest.fixture
def contained_run(kafka_image: str, run_name: str, tmp_path: Path) -> Iterator[RealRun]:
    """A prepared run on a container of its own."""
    with KafkaContainer(kafka_image, properties={"log.retention.ms": "-1"}) as kafka:
        run = RealRun(KafkaConfig(bootstrap_servers=kafka.bootstrap_servers), run_name, tmp_path)
        run.prepare()
        yield run
        run.stop()


def test_rollouts_become_batches_and_weights_come_back_on_kafka_in_a_container(contained_run: RealRun) -> None:
    run = contained_run
    run.start("group", "--ordinal=0")
    run.start("group", "--ordinal=1")
    with RolloutProducer(run.kafka, run.name) as producer:
        for example in range(16):
            for member in range(4):
                producer.send(rollout(f"x{example}", member))
    uids: list[str] = []

    def all_read() -> bool:
        read = reader.poll(0.5)
        uids.extend(read.batch.uids if read else ())
        return len(uids) >= 64

    with BatchReader(run.kafka, run.name) as reader:
        eventually(all_read, 60, "64 rollouts in batches")
    assert sorted(uids) == sorted(f"x{example}-{member}" for example in range(16) for member in range(4))
    result = ledger(run.kafka, run.name)
    assert result.balanced, result.problems
    assert verify(run.kafka, run.name).mismatches == []
    assert publish_version(run.kafka, run.name, {"kernel": np.ones(3, np.float32)}, learner="test") == 1
    with StateManager(run.kafka, run.name) as states:
        version, parameters = states.wait_for(1, 300)
    assert (version, parameters["kernel"].tolist()) == (1, [1.0] * 3)


@pytest.mark.long
def test_an_image_that_is_nowhere_is_one_line_with_the_remedy(kafka_image: str) -> None:
    assert kafka_image
    with pytest.raises(BrokerUnavailable, match=r"rollstream/nothing:none is not on this machine .*; load it with"):
        KafkaContainer("rollstream/nothing:none").start()


@pytest.mark.long
def test_a_container_that_ends_while_starting_shows_its_log_and_is_removed(kafka_image: str) -> None:
    container = KafkaContainer(kafka_image, properties={"num.io.threads": "0"})
    with pytest.raises(BrokerUnavailable, match=r"num\.io\.threads"):
        container.start()
    left = subprocess.run(["docker", "ps", "--all", "--quiet"], capture_output=True, text=True, check=True).stdout
    assert container.get_container_id()[:12] not in left


@pytest.mark.long
def test_the_docker_provider_of_the_local_broker_keeps_its_data(kafka_image: str, tmp_path: Path) -> None:
    config = BrokerConfig(data_dir=tmp_path, provider="docker", image=kafka_image)
    with LocalBroker.start(config=config, bound_to_parent=True) as broker:
        assert broker.provider == "docker"
        address = broker.bootstrap_servers
        run = RealRun(KafkaConfig(bootstrap_servers=address), "kept", tmp_path)
        run.prepare()
        run.send([rollout()])
        broker.kill()
        broker.restart()
        assert broker.bootstrap_servers == address
        assert len(run.read("rollouts")) == 1
