"""The soak watches every role of a real run, each of which has something to do."""

from pathlib import Path

import pytest

from tests.bench.soak import ROLES, soaked


@pytest.mark.long
def test_every_role_of_a_run_is_watched_while_it_works(broker: str, tmp_path: Path) -> None:
    roles, done = soaked(broker, tmp_path, 5.0)
    assert [role.role for role in roles] == list(ROLES)
    assert all(min(role.sizes_bytes) > 2**20 for role in roles)
    assert min(done.values()) > 0
