from pathlib import Path

import pytest

from tests.support.machine import JAR, Machine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with nothing installed, for which one small jar is locked."""
    monkeypatch.setattr("rollstream.infra.broker.java_runtime.locked_jars", lambda: (JAR,))
    made = Machine(tmp_path)
    made.bin.mkdir()
    return made
