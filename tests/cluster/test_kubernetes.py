"""A run on a real Kubernetes outlives what a cluster does to pods, and what helm does to releases."""

import pytest

from tests.cluster.kubernetes_programs import dns, kubernetes, missing
from tests.cluster.namespaces import enter
from tests.support.helm import helm


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
def test_a_chart_that_is_killed_scaled_and_upgraded_while_it_trains_closes_its_books() -> None:
    if lacking := missing():
        pytest.skip("; ".join(lacking))
    # Go fetches what it compiles, which it cannot in namespaces without a network.
    for compiled in (kubernetes, dns, helm):
        compiled()
    assert enter("tests.cluster.kubernetes_story") == 0
