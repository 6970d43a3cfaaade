"""What each member of a sealed group is worth: its episode's advantage, shared by the episode's branches.

Pure. A group's own stage is done once, when it seals; an estimator's second stage when a batch is cut, over its rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from consumers.grouping.assemble import advantage_array
from consumers.grouping.estimators import ESTIMATORS, Outcomes, estimator, mean
from consumers.grouping.groups import Group, Member, Worth, episode_of
from topics.examples import RLExample
from topics.records import Bool


class Judged(NamedTuple):
    """The episodes of a group, N of them, and what they came to."""

    episodes: list[list[Member]]
    """Members of each, [N]: the branches that came."""
    outcomes: Outcomes


def judged(group: Group, core_version: int) -> Judged:
    """The episodes of a sealed group. Core version 1 took every branch for an episode of its own."""
    episodes: dict[str, list[Member]] = {}
    for uid, member in group.members.items():
        episodes.setdefault(uid if core_version < 2 else episode_of(member.rollout), []).append(member)
    found = list(episodes.values())
    rewards = tuple(mean([m.rollout.reward for m in branches]) for branches in found)
    lengths = tuple(sum(_sampled(m.rollout.loss_mask) for m in branches) for branches in found)
    return Judged(found, Outcomes(rewards=rewards, lengths=lengths))


def worths(group: Group, found: Judged, estimator_name: str, core_version: int) -> dict[str, Worth]:
    """What each member is worth, by uid in the order they came. A branch that did not come takes its share along."""
    advantages = estimator(estimator_name).within_group(found.outcomes)
    by_uid = {
        member.rollout.uid: Worth(advantage, 1 if core_version < 2 else member.rollout.branches)
        for branches, advantage in zip(found.episodes, advantages, strict=True)
        for member in branches
    }
    return {uid: by_uid[uid] for uid in group.members}


def over_batch(examples: Sequence[RLExample], groups: Sequence[Group]) -> list[RLExample]:
    """The R examples of a batch after the second stage; `groups[r]` is the group of `examples[r]`.

    Rows of groups that sealed under an estimator with a second stage are taken together, each weighted by its sampled
    tokens over its episode's branches; other rows stay as they are.
    """
    finished = list(examples)
    for name in dict.fromkeys(group.estimator for group in groups):
        stage = ESTIMATORS[name].over_batch
        if stage is None:
            continue
        rows = [row for row, group in enumerate(groups) if group.estimator == name]
        worth = [groups[row].worths[examples[row].source.uid] for row in rows]
        weights = [_sampled(examples[row].loss_mask) / w.branches for row, w in zip(rows, worth, strict=True)]
        for row, before, advantage in zip(rows, worth, stage([w.advantage for w in worth], weights), strict=True):
            made = Worth(advantage, before.branches)
            finished[row] = replace(examples[row], advantage=advantage_array(made.share, len(examples[row].tokens)))
    return finished


def _sampled(loss_mask: Bool) -> int:
    return int(np.count_nonzero(loss_mask))
