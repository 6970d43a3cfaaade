"""Settings of topics that contradict each other are refused, and keys of the clients that are not the user's."""

import pytest

from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.wire.catalogue import CATALOGUE


@pytest.mark.parametrize(("replicas", "in_sync"), [(1, 2), (2, 3), (3, 4)])
def test_more_replicas_in_sync_than_there_are_is_refused(replicas: int, in_sync: int) -> None:
    says = f"min_insync_replicas is {in_sync}, above topics.replication_factor, {replicas}: .*lower the first or raise"
    with pytest.raises(ConfigurationError, match=says):
        TopicsConfig(replication_factor=replicas, min_insync_replicas=in_sync)


@pytest.mark.parametrize(("replicas", "in_sync"), [(1, 1), (2, 2), (3, 2), (-1, 2)])
def test_as_many_replicas_in_sync_as_there_may_be_are_accepted(replicas: int, in_sync: int) -> None:
    config = TopicsConfig(replication_factor=replicas, min_insync_replicas=in_sync)
    assert (config.replication_factor, config.min_insync_replicas) == (replicas, in_sync)


def test_tiered_storage_is_for_topics_that_keep_everything() -> None:
    config = TopicsConfig(local_retention_s=90)
    tiered = {"remote.storage.enable": "true", "local.retention.ms": "90000", "segment.ms": "90000"}
    for spec in CATALOGUE:
        before, settings = (spec.settings(each, KafkaConfig()) for each in (TopicsConfig(), config))
        assert settings == (before if spec.cleanup == "compact" else before | tiered)
        assert not before.keys() & {"remote.storage.enable", "local.retention.ms"}
    with pytest.raises(ConfigurationError, match=r"local_retention_s is -1; give the seconds, or 0"):
        TopicsConfig(local_retention_s=-1)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("group.id", "", "set run"),
        ("group.instance.id", "me", "derived from the run's name"),
        ("transactional.id", "me", "derived from the run's name"),
        ("group.protocol", "consumer", r"set kafka\.group_protocol"),
        ("transaction.timeout.ms", "60000", r"set kafka\.transaction_timeout_s"),
        ("isolation.level", "read_uncommitted", "must not read aborted records"),
        ("isolation.level", "read_committed", "depends on the reader"),
        ("auto.offset.reset", "earliest", "must be an error"),
        ("enable.partition.eof", "false", "the end of a partition"),
        ("enable.auto.commit", "true", "in transactions only"),
        ("enable.auto.offset.store", "true", "in transactions only"),
        ("partitioner", "consistent_random", "gives its partition"),
        ("enable.idempotence", "false", "lost or doubled"),
        ("acks", "1", "lost or doubled"),
        ("request.required.acks", "1", "lost or doubled"),
    ],
)
def test_a_key_of_the_clients_on_which_a_promise_rests_is_refused(key: str, value: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"kafka\.client sets {key}, .*{reason}"):
        KafkaConfig(client={"security.protocol": "SSL", key: value})


def test_other_keys_of_the_clients_are_accepted() -> None:
    client = {"security.protocol": "SSL", "max.poll.interval.ms": "9000", "partition.assignment.strategy": "range"}
    assert KafkaConfig(client=client).client == client
