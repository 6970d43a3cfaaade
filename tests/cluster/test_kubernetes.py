"""A run on a real Kubernetes outlives what a cluster does to pods, and what helm does to releases."""

import pytest

from tests.cluster.kubernetes_programs import missing
from tests.cluster.namespaces import enter


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
def test_a_chart_that_is_killed_scaled_and_upgraded_while_it_trains_closes_its_books() -> None:
    if lacking := missing():
        pytest.skip("; ".join(lacking))
    assert enter("tests.cluster.kubernetes_story") == 0
