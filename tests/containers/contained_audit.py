"""The independent auditor as a program, for a container on the network of the brokers; its last line is JSON."""

import json
import sys

from tests.faults.auditor import judge
from tests.faults.evidence import collect, decode


def main(run: str, brokers: str) -> None:
    """Judge a run that has come to rest, and list the rewards of the rollouts that are on record, by uid."""
    evidence = collect(brokers, run)
    audited = judge(evidence)
    records = (decode(raw.value) for raw in evidence.topics["rollouts"])
    rewards = {record["uid"]: record["reward"] for record in records if record is not None and record.name == "Rollout"}
    result = {
        "findings": audited.findings,
        "not_modelled": audited.not_modelled,
        "batches": audited.batches,
        "places": {place: count for place, count in audited.places.items() if count},
        "rewards": rewards,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
