"""Assembly of RL examples from members of sealed groups, and of a TrainingBatch from a maker's examples.

The functions are pure. Rows keep the maker's order, and groups are in the order of their first row.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

import numpy as np

from rollstream.consumers.grouping.core.groups import Group, Member
from rollstream.consumers.grouping.makers.batch_maker import array_bytes, group_bytes, row_bytes
from rollstream.topics.records import BatchGroup, BatchTokenArray, Float32, Int32, NamedArray, Rollout, TrainingBatch
from rollstream.topics.rl_examples import REFERENCE, RLExample, batch_digest

_SEGMENT = np.int32(1)
"""Segment of every position. Grouping does not pack examples; learners do."""


@lru_cache(maxsize=4096)
def _segment_ids(length: int) -> Int32:
    return np.broadcast_to(_SEGMENT, length)


def advantage_array(advantage: float, length: int) -> Float32:
    """Return an array with a scalar advantage at every position, float32 [T]."""
    return np.full(length, advantage, "<f4")


def example(member: Member, advantage: float) -> RLExample:
    """Return the example of a member, with its advantage at every position, float32 [T]."""
    rollout = member.rollout
    reference = rollout.token_arrays.get(REFERENCE)
    return RLExample(
        tokens=rollout.tokens,
        loss_mask=rollout.loss_mask,
        advantage=advantage_array(advantage, len(rollout.tokens)),
        generator_log_probs=rollout.logprobs,
        segment_ids=_segment_ids(len(rollout.tokens)),
        source=member.source,
        reference_log_probs=None if reference is None else reference.array().astype("<f4"),
        weight_step=rollout.metadata.weight_step,
        timestamp=rollout.metadata.timestamp,
        token_arrays={name: array.array() for name, array in rollout.token_arrays.items() if name != REFERENCE},
    )


def name_bytes(group: Group) -> int:
    """Return the maximum number of bytes that a group takes in a batch in addition to its rows."""
    return group_bytes(group.key.environment, group.key.example_id, group.key.group_id)


def batch_bytes(group: Group) -> int:
    """Return the maximum number of bytes that a sealed group takes in a batch, as makers count them."""
    size_bytes = name_bytes(group)
    for uid, member in group.members.items():
        arrays = member.rollout.token_arrays
        size_bytes += row_bytes(len(member.rollout.tokens), uid, REFERENCE in arrays)
        size_bytes += sum(array_bytes(n, len(a.data), len(a.shape)) for n, a in arrays.items() if n != REFERENCE)
    return size_bytes


def with_equal_references(examples: Sequence[RLExample], room_bytes: int) -> list[RLExample]:
    """Return the rows of a batch so that either all or none carry reference log-probabilities.

    If only some rows carry them, the other rows get NaN if that takes at most `room_bytes`; otherwise all rows lose
    their reference log-probabilities.
    """
    missing = [e for e in examples if e.reference_log_probs is None]
    if len(missing) in (0, len(examples)):
        return list(examples)
    if 4 * sum(len(e.tokens) for e in missing) > room_bytes:
        return [replace(e, reference_log_probs=None) for e in examples]
    return [
        replace(e, reference_log_probs=np.full(len(e.tokens), np.nan, "<f4")) if e.reference_log_probs is None else e
        for e in examples
    ]


def joined_arrays(rollouts: Sequence[Rollout]) -> tuple[BatchTokenArray, ...]:
    """Join the named arrays of a batch's rows: one array per name, dtype and shape of a token, sorted in that order."""
    rows: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for row, rollout in enumerate(rollouts):
        for name, array in rollout.token_arrays.items():
            if name != REFERENCE:
                rows.setdefault((name, array.dtype, array.shape[1:]), []).append(row)
    joined = []
    for (name, dtype, shape), numbers in sorted(rows.items()):
        carriers = [rollouts[row] for row in numbers]
        data = b"".join(carrier.token_arrays[name].data for carrier in carriers)
        whole = NamedArray(dtype=dtype, shape=(sum(len(c.tokens) for c in carriers), *shape), data=data)
        joined.append(BatchTokenArray(name=name, array=whole, rows=np.array(numbers, "<i4")))
    return tuple(joined)


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
    """Return the batch of R examples; `groups[r]` is the group of `examples[r]`, and `metadata` is the maker's JSON."""
    index = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    rollouts = [g.members[e.source.uid].rollout for e, g in zip(examples, groups, strict=True)]
    lengths = [len(e.tokens) for e in examples]
    references = [e.reference_log_probs for e in examples]
    carried = [r for r in references if r is not None]
    undigested = TrainingBatch(
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
        weight_steps=np.array([r.metadata.weight_step for r in rollouts], "<i8"),
        timestamps=np.array([r.metadata.timestamp for r in rollouts], "<f8"),
        token_arrays=joined_arrays(rollouts),
        metadata=metadata,
    )
    return replace(undigested, digest=batch_digest(undigested))
