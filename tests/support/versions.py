"""Policy versions that a test has just committed, once readers see them."""

from rollstream.consumers.weights.manifests import read_manifests
from rollstream.topics.records import PolicyManifest
from tests.support.runs import RealRun
from tests.support.waiting import eventually


def visible_manifests(run: RealRun, newest: int) -> dict[int, PolicyManifest]:
    """All manifests by version, once that of `newest` is visible: Kafka answers a commit before it has written the
    markers that end the transaction in the partitions."""

    def manifests() -> dict[int, PolicyManifest]:
        known = read_manifests(run.kafka, run.name)
        return known if newest in known else {}

    return eventually(manifests, 60, f"policy version {newest} is visible")
