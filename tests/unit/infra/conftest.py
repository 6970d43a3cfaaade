from pathlib import Path

import pytest

from tests.unit.infra.machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with nothing on it."""
    made = Machine(tmp_path)
    made.bin.mkdir()
    return made
