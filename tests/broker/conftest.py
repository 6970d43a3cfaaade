"""Fixtures of tests on a real broker."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.topics.config import KafkaConfig
from tests.support.runs import RealRun


@pytest.fixture
def real_run(broker: str, run_name: str, tmp_path: Path) -> Iterator[RealRun]:
    """A run of its own, not yet prepared: change its settings, then call `prepare`."""
    run = RealRun(KafkaConfig(bootstrap_servers=broker), run_name, tmp_path)
    yield run
    run.stop()


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory in which JAX keeps compiled functions."""
    return tmp_path_factory.getbasetemp() / "jax"


@pytest.fixture(autouse=True)
def _compile_once(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes of a session share compiled functions: some compile and others load them, with equal bits."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
