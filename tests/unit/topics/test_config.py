"""Settings of topics that contradict each other are refused."""

import pytest

from rollstream.topics.config import TopicsConfig
from rollstream.topics.errors import ConfigurationError


@pytest.mark.parametrize(("replicas", "in_sync"), [(1, 2), (2, 3), (3, 4)])
def test_more_replicas_in_sync_than_there_are_is_refused(replicas: int, in_sync: int) -> None:
    says = f"min_insync_replicas is {in_sync}, above topics.replication_factor, {replicas}: .*lower the first or raise"
    with pytest.raises(ConfigurationError, match=says):
        TopicsConfig(replication_factor=replicas, min_insync_replicas=in_sync)


@pytest.mark.parametrize(("replicas", "in_sync"), [(1, 1), (2, 2), (3, 2), (-1, 2)])
def test_as_many_replicas_in_sync_as_there_may_be_are_accepted(replicas: int, in_sync: int) -> None:
    config = TopicsConfig(replication_factor=replicas, min_insync_replicas=in_sync)
    assert (config.replication_factor, config.min_insync_replicas) == (replicas, in_sync)
