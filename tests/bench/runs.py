"""Runs to measure in: topics made, generation 0 written, and all of it deleted afterwards."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.process.bootstrap import initialise
from rollstream.topics.config import TopicsConfig
from rollstream.topics.kafka import clients, provisioning
from rollstream.topics.records import Mark
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.bench.measure import Settings


@contextmanager
def prepared(settings: Settings, name: str, grouping: GroupingConfig | None = None) -> Iterator[str]:
    """A run of that name, grouped as `grouping` says, with its policy clock at version 0 before the first rollout."""
    run = f"bench-{name}-{uuid.uuid4().hex[:6]}"
    provisioning.apply(settings.kafka, TopicsConfig(partitions=settings.partitions), run)
    initialise(settings.kafka, run, grouping or GroupingConfig(), GrouperConfig())
    producer = clients.producer(settings.kafka)
    mark = encode(Mark(kind="policy_version", policy_version=0, author="bench"))
    for partition in range(settings.partitions):
        producer.produce(topic_name(run, "rollouts"), mark, encode_key("mark", "policy_version"), partition)
    producer.flush(30)
    try:
        yield run
    finally:
        topics = [d.topic for d in provisioning.describe(settings.kafka, run)]
        client = clients.admin(settings.kafka)
        for future in client.delete_topics(topics).values():
            future.result(30)
