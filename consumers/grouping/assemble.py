"""From members of sealed groups to RL examples, and from a maker's examples to a TrainingBatch with its digest.

Pure; the order of rows is the maker's, the order of groups that of their first row.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from consumers.grouping.batch_maker import group_bytes, row_bytes
from consumers.grouping.groups import Group, Member
from topics.examples import REFERENCE, RLExample, batch_digest
from topics.records import BatchGroup, Float32, TrainingBatch

_SEGMENT = np.int32(1)
"""Of every position: examples are packed by learners."""


def advantage_array(advantage: float, length: int) -> Float32:
    """A scalar advantage on every position, float32 [T]."""
    return np.full(length, advantage, "<f4")


def example(member: Member, advantage: float) -> RLExample:
    """A member as an example: its advantage as float32 on every position, [T]."""
    rollout = member.rollout
    reference = rollout.token_arrays.get(REFERENCE)
    return RLExample(
        tokens=rollout.tokens,
        loss_mask=rollout.loss_mask,
        advantage=advantage_array(advantage, len(rollout.tokens)),
        generator_log_probs=rollout.logprobs,
        segment_ids=np.broadcast_to(_SEGMENT, len(rollout.tokens)),
        source=member.source,
        reference_log_probs=None if reference is None else reference.array().astype("<f4"),
    )


def name_bytes(group: Group) -> int:
    """Most bytes a group takes in a batch besides its rows."""
    return group_bytes(group.key.environment, group.key.example_id, group.key.group_id)


def batch_bytes(group: Group) -> int:
    """Most bytes a sealed group takes in a batch, as makers count them."""
    return name_bytes(group) + sum(
        row_bytes(len(m.rollout.tokens), uid, REFERENCE in m.rollout.token_arrays) for uid, m in group.members.items()
    )


def batch(
    examples: Sequence[RLExample],
    groups: Sequence[Group],
    *,
    partition: int,
    number: int,
    core_version: int,
    generation: int,
    cut: Literal["size", "age", "drain"],
    cut_ms: int,
    metadata: str,
) -> TrainingBatch:
    """The batch of R examples; `groups[r]` is the group of `examples[r]`, `metadata` JSON of the maker's."""
    index = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    rollouts = [g.members[e.source.uid].rollout for e, g in zip(examples, groups, strict=True)]
    lengths = [len(e.tokens) for e in examples]
    references = [e.reference_log_probs for e in examples]
    carried = [r for r in references if r is not None]
    made = TrainingBatch(
        batch_id=f"{partition}-{number}",
        partition=partition,
        number=number,
        core_version=core_version,
        generation=generation,
        cut=cut,
        cut_ms=cut_ms,
        groups=tuple(
            BatchGroup(
                environment=g.key.environment,
                example_id=g.key.example_id,
                policy_version=g.key.policy_version,
                group_id=g.key.group_id,
                size=len(g.members),
                opened_ms=g.opened_ms,
                sealed_ms=g.sealed_ms,
            )
            for g in index
        ),
        group_index=np.array([index[g] for g in groups], "<i4"),
        source_offsets=np.array([e.source.offset for e in examples], "<i8"),
        uids=tuple(e.source.uid for e in examples),
        splits=np.concatenate(([0], np.cumsum(lengths))).astype("<i8"),
        tokens=np.concatenate([e.tokens for e in examples]),
        loss_mask=np.concatenate([e.loss_mask for e in examples]),
        logprobs=np.concatenate([e.generator_log_probs for e in examples]),
        advantages=np.concatenate([e.advantage for e in examples]),
        reference_logprobs=(
            np.concatenate(carried) if carried and len(carried) == len(references) else np.empty(0, "<f4")
        ),
        rewards=np.array([r.reward for r in rollouts], "<f8"),
        truncated=np.array([r.truncated for r in rollouts], "|b1"),
        lowest_versions=np.array([r.lowest_version for r in rollouts], "<i8"),
        highest_versions=np.array([r.highest_version for r in rollouts], "<i8"),
        temperatures=np.array([r.sampling.temperature for r in rollouts], "<f8"),
        logprobs_processed=np.array([r.logprobs_mode == "processed" for r in rollouts], "|b1"),
        metadata=metadata,
    )
    return replace(made, digest=batch_digest(made))
