"""A run as a job of Slurm outlives what Slurm does to jobs."""

import pytest

from tests.cluster.namespaces import enter
from tests.cluster.slurm_story import missing


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
def test_a_job_that_is_requeued_and_cancelled_in_the_middle_closes_its_books() -> None:
    if lacking := missing():
        pytest.skip("; ".join(lacking))
    assert enter("tests.cluster.slurm_story") == 0
