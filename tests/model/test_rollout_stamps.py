"""Stamps of rollouts: the weights that sampled each token, their learner step, server, process and time."""

import asyncio
import itertools
import os
import socket
import time
from collections import defaultdict

import numpy as np

from rollstream.consumers.buffers.rollouts.buffer import RolloutReplayBuffer
from rollstream.producers.config import WorkerConfig
from rollstream.producers.tasks import create_task
from rollstream.producers.tasks.environment_loading import with_settings
from rollstream.producers.worker.worker_process import run_worker
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.provisioning import apply
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import PolicyManifest, Rollout
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode_as, encode
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.rl_examples import WEIGHT_VERSION
from tests.support.producing import SortingGenerator, serving

STEPS = {0: 0, 1: 10, 2: 25, 5: 60}
"""Learner step of each policy version."""


def test_a_buffer_filled_by_hand_admits_what_a_worker_wrote_by_its_stamps(broker: str, run_name: str) -> None:
    kafka = KafkaConfig(bootstrap_servers=broker)
    apply(kafka, TopicsConfig(partitions=1), run_name)
    publish(kafka, run_name)
    began = time.time()
    later = iter([1, 2, 5])
    generator = SortingGenerator(before_generate=lambda _: generator.versions.extend(itertools.islice(later, 1)))
    with serving(generator, replica_id="infer-7", refresh_ms=1) as server:
        config = WorkerConfig(worker_id="w", inference_urls=(server.base_url,), group_size=4, groups=8, concurrency=1)
        environments = [with_settings(create_task("dsort3"), config)]
        asyncio.run(run_worker(environments, kafka, run_name, config, incarnation="1", stop=asyncio.Event()))
    rollouts = [decode_as(Rollout, message.value) for message in read_to_end(kafka, topic_name(run_name, "rollouts"))]
    assert len(rollouts) == 32
    for rollout in rollouts:
        stamp = rollout.metadata
        assert stamp.weight_step == STEPS[rollout.lowest_version]
        assert (stamp.worker_id, stamp.replica_id) == ("w", "infer-7")
        assert rollout.extra == {"host": socket.gethostname(), "process": str(os.getpid())}
        assert began <= rollout.turns[-1].timestamp == stamp.timestamp <= time.time()
        versions = rollout.token_arrays[WEIGHT_VERSION].array()
        assert (versions.dtype, versions.shape) == (np.dtype("<i8"), rollout.tokens.shape)
        assert (versions[~rollout.loss_mask] == -1).all()
        sampled = versions[rollout.loss_mask]
        assert (sampled.min(), sampled.max()) == (rollout.lowest_version, rollout.highest_version)
    assert {rollout.metadata.weight_step for rollout in rollouts} > {60}, "several versions answered"

    buffer = RolloutReplayBuffer(local_batch_size=8, max_rollout_step_delay=35)
    buffer.set_current_step(60)
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group_id].append(rollout)
    for group in groups.values():
        buffer.add(group)
    fresh = [rollout for rollout in rollouts if rollout.metadata.weight_step >= 25]
    assert 0 < buffer.size() == len(fresh) < len(rollouts)


def publish(kafka: KafkaConfig, run: str) -> None:
    """Write the manifests of versions that need no bytes."""
    producer = clients.producer(kafka)
    for version, step in STEPS.items():
        manifest = PolicyManifest(
            version=version, learner="default", step=step, epoch="e", tensors=(), chunks=(), digest=str(version)
        )
        producer.produce(topic_name(run, "policies"), encode(manifest), encode_key(version))
    assert producer.flush(120) == 0
