"""Promises that hold after every fault: the books close, the auditor finds nothing, every batch refolds."""

import signal
import subprocess

from rollstream.pipeline.audit.verification import verify
from tests.faults.auditor import audit
from tests.faults.findings import Audit
from tests.faults.load import Load
from tests.support.ledgers import in_both_forms
from tests.support.runs import RealRun


def stop(*processes: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, and check that the processes end in order."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    assert [process.wait(300) for process in processes] == [0] * len(processes)


def assert_promises(run: RealRun, load: Load | None = None, *, modelled: bool = True, cut_off: bool = False) -> Audit:
    """Judge a run whose processes have ended; `modelled`: the auditor's model must cover its whole log.

    `cut_off`: the load lost its brokers meanwhile, and its client may have sent again what one of them had taken.
    """
    result = in_both_forms(run)
    assert result.balanced, result.problems
    audited = audit(run.kafka.bootstrap_servers, run.name)
    assert audited.findings == [], audited.findings[:5]
    assert not (modelled and audited.not_modelled), audited.not_modelled
    check = verify(run.kafka, run.name)
    assert check.mismatches == []
    assert check.batches == audited.batches == result.batches
    places = {place: count for place, count in audited.places.items() if count}
    print(f"produced {audited.produced}, batches {audited.batches}, {places}")
    if load is not None:
        assert audited.places["batched"] == load.rollouts
        assert audited.places["dead letter"] == load.poison
        dropped = audited.places["dropped:late"] + audited.places["dropped:duplicate_uid"]
        # Every rollout is batched, so each of these is one that came again; an idempotent producer whose broker is
        # killed has been seen to write two records twice.
        assert dropped == load.repeated or (cut_off and dropped > load.repeated)
    return audited
