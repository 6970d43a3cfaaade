"""An archiver that follows a run while its broker is killed and started again."""

import pytest

from rollstream.consumers.archive.manifest import newest
from rollstream.consumers.archive.writer import check_files
from rollstream.infra.broker.broker import LocalBroker
from rollstream.topics.files.stores import LocalStore
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_an_archiver_that_follows_a_run_outlives_an_outage_of_the_broker(
    fault_run: RealRun, breakable: LocalBroker
) -> None:
    store, run = LocalStore(fault_run.directory / "archive"), fault_run.prepare()
    process = run.start("archive", "--follow", "--every", "0.05")

    def archived(count: int) -> bool:
        assert process.poll() is None, run.log_of(process)
        manifest = newest(store, run.name)
        return manifest is not None and manifest.rows("rollouts") == count

    run.send(rollout(f"g{number}", 0) for number in range(20))
    eventually(lambda: archived(20), 60, "the rollouts before the outage")
    breakable.kill()
    noticed = '"event": "not_archived"'
    eventually(lambda: process.poll() is not None or noticed in run.log_of(process), 120, "the outage is noticed")
    assert process.poll() is None, run.log_of(process)
    breakable.restart()
    run.send(rollout(f"g{number}", 0) for number in range(20, 50))
    eventually(lambda: archived(50), 120, "the rollouts after the outage")
    whole = newest(store, run.name)
    assert whole is not None
    assert check_files(store, whole).rows("rollouts") == 50
