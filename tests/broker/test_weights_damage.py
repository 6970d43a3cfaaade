"""Faults of weights on a real broker: damage is refused by name and place, never held, and healed by the next full
version; a broker that is killed amid a publication costs time only.
"""

import signal
from pathlib import Path

import pytest

from rollstream.consumers.weights.follower import WeightsFollower
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.consumers.weights.step_log import read_steps
from rollstream.infra.broker.broker import LocalBroker
from rollstream.infra.config import BrokerConfig
from rollstream.pipeline.process.role_process import TERMINATED
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.wire.keys import decode_key
from tests.broker.test_learner import SETTINGS
from tests.support.batches import random_batch, send_batches
from tests.support.runs import RealRun, with_batches
from tests.support.versions import visible_manifests
from tests.support.waiting import eventually


@pytest.mark.long
@pytest.mark.parametrize("publish_every_steps", [1, 3])
def test_a_learner_whose_weights_were_lost_publishes_at_its_start_whatever_the_step(
    real_run: RealRun, publish_every_steps: int
) -> None:
    run = with_batches(real_run, 8)
    directory = run.directory / "weights"
    settings = {
        **SETTINGS,
        "learner__publish_every_steps": publish_every_steps,
        "learner__weights__transport": "files",
        "learner__weights__url": directory,
    }
    process = run.start("learn", **settings)
    eventually(lambda: 4 in read_steps(run.kafka, run.name, "default"), 90, "step 4 of 8, and no more batches")
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == TERMINATED, run.log_of(process)[-3000:]
    newest = max(read_manifests(run.kafka, run.name))
    for path in directory.glob("*/*/*"):
        path.unlink()

    resumed = run.start("learn", **settings)
    manifest = visible_manifests(run, newest + 1)[newest + 1]
    assert (manifest.step, manifest.kind) == (4, "full")
    assert manifest.params_digest == read_steps(run.kafka, run.name, "default")[4].params_digest
    with WeightsFollower(run.kafka, run.name) as follower:
        assert follower.wait_for(newest + 1, 300)[0] == newest + 1
    send_batches(run.kafka, run.name, [random_batch(number) for number in range(8, 16)])
    assert resumed.wait(300) == 0, run.log_of(resumed)[-3000:]
    assert '"versions_lost"' in run.log_of(resumed)


@pytest.mark.long
def test_a_broker_killed_amid_a_publication_costs_the_learner_time_only(tmp_path: Path) -> None:
    with LocalBroker.start(config=BrokerConfig(data_dir=tmp_path / "broker"), bound_to_parent=True) as broker:
        run = with_batches(RealRun(KafkaConfig(bootstrap_servers=broker.bootstrap_servers), "amid", tmp_path), 8)
        # Thousands of chunks a version, so that publishing takes longer than a step.
        slow = {
            "learner__model__hidden_size": 128,
            "learner__weights__chunk_bytes": 32,
            "learner__weights__anchor_every": 1,
        }
        learner = run.start("learn", **{**SETTINGS, **slow, "learner__max_steps": 4})
        try:
            for kill in (broker.kill, broker.stop):
                before = len(read_manifests(run.kafka, run.name))
                eventually(
                    lambda before=before: under_way(run) >= before, 300, "chunks of a version without a manifest"
                )
                kill()
                broker.restart()
            assert learner.wait(600) == 0, run.log_of(learner)[-3000:]
        finally:
            run.stop()
        committed = read_to_end(run.kafka, run.topic("policies"), isolation="read_committed")
        assert [decode_key(message.key) for message in committed] == [(version,) for version in range(5)], "each once"
        steps = read_steps(run.kafka, run.name, "default")
        assert {step: record.policy_version for step, record in steps.items()} == {step: step for step in range(5)}
        with WeightsFollower(run.kafka, run.name) as follower:
            assert follower.wait_for(4, 300)[0] == 4
            assert follower.manifest is not None
            assert follower.manifest.params_digest == steps[4].params_digest


def under_way(run: RealRun) -> int:
    """The version of the newest chunk if it has no manifest yet, else -1."""
    topic, newest = run.topic("weights"), -1
    for partition, (_begin, end) in topic_admin.bounds(run.kafka, topic).items():
        last = read_to_end(run.kafka, topic, start={partition: max(0, end - 1)}, isolation="read_uncommitted")
        newest = max([newest, *(decode_key(message.key)[0] for message in last if message.key)])
    return -1 if newest in read_manifests(run.kafka, run.name) else newest
