"""Fixtures of tests on a real broker."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import RealRun
from topics.config import KafkaConfig


@pytest.fixture
def real_run(broker: str, run_name: str, tmp_path: Path) -> Iterator[RealRun]:
    """A run of its own, not yet prepared: change its settings, then call `prepare`."""
    run = RealRun(KafkaConfig(bootstrap_servers=broker), run_name, tmp_path)
    yield run
    run.stop()
