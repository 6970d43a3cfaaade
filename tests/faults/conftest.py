"""Fixtures of the fault tests: a broker that may be broken, and runs on it with short sessions."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.infra.broker.broker import LocalBroker
from rollstream.infra.config import BrokerConfig
from rollstream.topics.config import KafkaConfig, TopicsConfig
from tests.support.runs import RealRun

SESSION_S = 2.0


@pytest.fixture(scope="session")
def breakable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    """A broker of these tests' own, to kill and to restart."""
    properties = {"group.consumer.session.timeout.ms": "2000", "group.consumer.heartbeat.interval.ms": "300"}
    config = BrokerConfig(data_dir=tmp_path_factory.mktemp("breakable"), provider="java", properties=properties)
    with LocalBroker.start(config=config, bound_to_parent=True) as broker:
        yield broker


@pytest.fixture
def fault_run(breakable: LocalBroker, run_name: str, tmp_path: Path) -> Iterator[RealRun]:
    """A run with four partitions, not yet prepared."""
    run = make_run(breakable.bootstrap_servers, run_name, tmp_path)
    yield run
    run.stop()


def make_run(bootstrap_servers: str, name: str, directory: Path, **topics: int) -> RealRun:
    return RealRun(
        KafkaConfig(bootstrap_servers=bootstrap_servers),
        name,
        directory,
        topics=TopicsConfig(partitions=4, **topics),
        grouping=GroupingConfig(batch_rollouts=16, max_batch_age_s=1.0),
    )
