"""Settings of a learner that could never train, or not as they say, are refused with the remedy."""

import pytest

from rollstream.consumers.learner.config import LearnerConfig, RolloutBufferConfig
from rollstream.topics.errors import ConfigurationError


def test_versions_are_published_before_the_newest_is_too_old_to_train_on() -> None:
    assert LearnerConfig(publish_every_steps=5).max_policy_lag == 4
    with pytest.raises(
        ConfigurationError,
        match=r"learner\.publish_every_steps is 6, so .* up to 5 steps old, but learner\.max_policy_lag 4 allows no "
        r"more: .* at least every 5 steps, or raise learner\.max_policy_lag to 5$",
    ):
        LearnerConfig(publish_every_steps=6)
    LearnerConfig(publish_every_steps=6, max_policy_lag=5)
    # The learner ends before its rollouts are too old.
    LearnerConfig(publish_every_steps=6, max_steps=5)


def test_with_a_rollout_buffer_its_own_limit_of_age_counts() -> None:
    buffer = RolloutBufferConfig(max_rollout_step_delay=7)
    LearnerConfig(source="rollout_buffer", buffer=buffer, publish_every_steps=8)
    with pytest.raises(ConfigurationError, match=r"raise learner\.buffer\.max_rollout_step_delay to 8$"):
        LearnerConfig(source="rollout_buffer", buffer=buffer, publish_every_steps=9)
    no_limit = RolloutBufferConfig(max_rollout_step_delay=-1)
    LearnerConfig(source="rollout_buffer", buffer=no_limit, publish_every_steps=1000)


def test_a_learner_of_another_runs_batches_publishes_as_seldom_as_it_likes() -> None:
    """The age of these batches is counted in the steps of the learner that published their versions."""
    LearnerConfig(publish_every_steps=100, input_run="main")
