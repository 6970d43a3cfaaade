"""Advantages of the members of sealed groups: the branches of an episode share the advantage of the episode.

The functions are pure. The first stage of an estimator runs once over each group, when the group seals. Its second
stage, if it has one, runs over the rows of a batch, when the batch is cut.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rollstream.consumers.grouping.core.estimators import ESTIMATORS, Estimator, Outcomes, mean, without_noise
from rollstream.consumers.grouping.core.groups import Group, Member, MemberAdvantage, episode_of
from rollstream.consumers.grouping.core.held_rollouts import with_advantage
from rollstream.topics.wire.rl_examples import RLExample


class GroupEpisodes(NamedTuple):
    """The N episodes of a group and their outcomes."""

    episodes: list[list[Member]]
    """Members of each episode, [N]: the branches that arrived."""
    outcomes: Outcomes


def group_episodes(group: Group) -> GroupEpisodes:
    """Return the episodes of a sealed group."""
    episodes: dict[str, list[Member]] = {}
    for member in group.members.values():
        episodes.setdefault(episode_of(member.rollout), []).append(member)
    branches_of = list(episodes.values())
    rewards = without_noise([mean([m.rollout.reward for m in branches]) for branches in branches_of])
    lengths = tuple(sum(m.rollout.sampled for m in branches) for branches in branches_of)
    return GroupEpisodes(branches_of, Outcomes(rewards=rewards, lengths=lengths))


def member_advantages(group: Group, episodes: GroupEpisodes, estimator: Estimator) -> dict[str, MemberAdvantage]:
    """Return the advantage of each member by uid, in order of arrival.

    The share of a branch that did not arrive is not redistributed.
    """
    advantages = estimator.within_group(episodes.outcomes)
    by_uid = {
        member.rollout.uid: MemberAdvantage(advantage, member.rollout.branches)
        for branches, advantage in zip(episodes.episodes, advantages, strict=True)
        for member in branches
    }
    return {uid: by_uid[uid] for uid in group.members}


def over_batch(
    examples: Sequence[RLExample], groups: Sequence[Group], estimators: Mapping[str, Estimator] = ESTIMATORS
) -> list[RLExample]:
    """Return the R examples of a batch after the second stage; `groups[r]` is the group of `examples[r]`.

    The second stage of an estimator gets all rows whose groups sealed under that estimator. The weight of a row is its
    number of sampled tokens divided by the number of branches of its episode. Other rows stay unchanged.
    """
    finished = list(examples)
    for name in dict.fromkeys(group.estimator for group in groups):
        stage = estimators[name].over_batch
        if stage is None:
            continue
        rows = [row for row, group in enumerate(groups) if group.estimator == name]
        advantages = [groups[row].advantages[examples[row].source.uid] for row in rows]
        sampled = (groups[row].members[examples[row].source.uid].rollout.sampled for row in rows)
        weights = [tokens / a.branches for tokens, a in zip(sampled, advantages, strict=True)]
        values = stage([a.episode for a in advantages], weights)
        for row, before, value in zip(rows, advantages, values, strict=True):
            finished[row] = with_advantage(examples[row], before._replace(episode=value).share)
    return finished
