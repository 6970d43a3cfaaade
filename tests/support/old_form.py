"""Rollouts as programs of the old form wrote them: a RolloutBatch of groups, with metadata on the batch."""

from collections.abc import Sequence

from rollstream.topics.records import NO_FLOATS, OldGroup, OldMetadata, OldRollout, Rollout, RolloutBatch


def old_form(groups: Sequence[Sequence[Rollout]], metadata: OldMetadata) -> RolloutBatch:
    """Return groups of rollouts as a batch. A response is everything from the first sampled token on."""
    return RolloutBatch(
        groups=tuple(OldGroup(rollouts=tuple(map(_old, group))) for group in groups), metadata=(metadata,)
    )


def _old(rollout: Rollout) -> OldRollout:
    own = rollout.metadata
    return OldRollout(
        env_name=rollout.environment,
        env_example_id=rollout.example_id,
        prompt_tokens=rollout.prompt_tokens,
        response_tokens=rollout.response_tokens,
        response_logprobs=rollout.response_logprobs,
        token_rewards=rollout.token_rewards[rollout.prompt_length :] if len(rollout.token_rewards) else NO_FLOATS,
        episode_reward=rollout.reward,
        metadata=(OldMetadata(worker_id=own.worker_id, timestamp=own.timestamp, weight_step=own.weight_step),),
    )
