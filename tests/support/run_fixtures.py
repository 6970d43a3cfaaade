"""Fixtures of a run for the tests in tests/broker and in tests/model; their conftest.py files import them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka.provisioning import apply
from tests.support.runs import RealRun


@pytest.fixture
def real_run(broker: str, run_name: str, tmp_path: Path) -> Iterator[RealRun]:
    """A run of its own, not yet prepared: change its settings, then call `prepare`."""
    run = RealRun(KafkaConfig(bootstrap_servers=broker), run_name, tmp_path)
    yield run
    run.stop()


@pytest.fixture
def run(real_run: RealRun) -> RealRun:
    """A run whose weights lie in two partitions."""
    real_run.topics = TopicsConfig(partitions=1, weights_partitions=2)
    apply(real_run.kafka, real_run.topics, real_run.name)
    return real_run


@pytest.fixture
def kafka(broker: str, run_name: str) -> KafkaConfig:
    """A broker with the topics of the test's run."""
    config = KafkaConfig(bootstrap_servers=broker)
    apply(config, TopicsConfig(partitions=2), run_name)
    return config


@pytest.fixture(scope="session")
def compiled() -> Path:
    """Directory in which JAX keeps compiled functions: one for all processes that run tests, and for later runs."""
    return Path(os.environ["JAX_COMPILATION_CACHE_DIR"])


@pytest.fixture(autouse=True)
def _compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roles also share functions that compile in milliseconds, of which a learner has dozens."""
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
