"""A follower over a model of Kafka: it begins with the newest version, and never goes back."""

import numpy as np
import pytest

from rollstream.consumers.trainers.step_writer import StepWriter
from rollstream.consumers.weights.follower import VersionSource
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.codec import decode_as
from tests.simulation.installation import World
from tests.support.modelled_run import KAFKA, RUN, ModelledRun


def test_a_follower_begins_with_the_newest_version_and_never_goes_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, poll = ModelledRun(world), TopicFollower.poll
    # The client may return one manifest at a time.
    monkeypatch.setattr(TopicFollower, "poll", lambda follower, _most, wait_s: poll(follower, 1, wait_s))

    def publish() -> None:
        # A source keeps the manifests of the versions on which the newest one builds.
        with StepWriter(KAFKA, RUN, take_over=True) as writer:
            for number in range(1, 4):
                writer.publish_version({"w": np.where(np.arange(400) == 7, number, 0).astype("<f4")})

    def follow(source: VersionSource) -> list[int]:
        versions = (source.poll() for _ in range(20))
        return [version.manifest.version for version in versions if version is not None]

    def late() -> list[list[int]]:
        with VersionSource(KAFKA, RUN) as source:
            first = follow(source)
            for entry in [entry for entry in run.log("policies").entries if entry.value is not None]:
                assert entry.value is not None
                if decode_as(PolicyManifest, entry.value).version == 2:
                    run.write("policies", entry.key or b"", entry.value)
            return [first, follow(source)]

    world.result_of(publish)
    manifests = [decode_as(PolicyManifest, e.value) for e in run.log("policies").entries if e.value is not None]
    assert [manifest.kind for manifest in manifests] == ["full", "full", "delta", "delta"]
    world.scheduler.run(lambda: run.cluster.at_rest)
    assert world.result_of(late) == [[3], []]
