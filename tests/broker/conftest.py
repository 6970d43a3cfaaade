"""Fixtures of tests on a real broker."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.topics.config import KafkaConfig
from tests.support.runs import RealRun

LONGEST = (
    *("demo", "environment_run", "interruption", "learner", "gateway_chat", "retrain", "replay", "slow_learner"),
    *("agent_environment", "object_store", "commands", "foreign_trainer", "inference_server", "control_run"),
)
"""Files of tests that take half a minute and more, in the order in which they begin."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that tests that run beside each other end at about the same time."""
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


@pytest.fixture
def real_run(broker: str, run_name: str, tmp_path: Path) -> Iterator[RealRun]:
    """A run of its own, not yet prepared: change its settings, then call `prepare`."""
    run = RealRun(KafkaConfig(bootstrap_servers=broker), run_name, tmp_path)
    yield run
    run.stop()


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory in which JAX keeps compiled functions: one for all processes that run tests."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "jax"


@pytest.fixture(autouse=True)
def _compile_once(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes of a session share compiled functions: some compile and others load them, with equal bits."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
