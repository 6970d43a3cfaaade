"""Advantages of the members of sealed groups, and assembly of RL examples and of a TrainingBatch from them.

The functions are pure. Rows keep the maker's order, and groups are in the order of their first row. The first stage of
an estimator runs once over each group, when the group seals. Its second stage, if it has one, runs over the rows of a
batch, when the batch is cut.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np

from rollstream.consumers.grouping.core.effects import EncodedBatch
from rollstream.consumers.grouping.core.estimators import ESTIMATORS, Estimator, Outcomes, mean, without_noise
from rollstream.consumers.grouping.core.groups import Group, Member, MemberAdvantage, episode_of
from rollstream.consumers.grouping.core.held_rollouts import (
    LOGPROBS,
    LOSS_MASK,
    TOKENS,
    HeldRollout,
    advantage_bytes,
    with_advantage,
)
from rollstream.consumers.grouping.makers.batch_maker import array_bytes, group_bytes, row_bytes
from rollstream.topics.records import BatchIndexEntry
from rollstream.topics.wire import codec
from rollstream.topics.wire.codec import column_bytes
from rollstream.topics.wire.frame_pieces import FramePieces, Piece, frame_pieces
from rollstream.topics.wire.media import is_medium
from rollstream.topics.wire.rl_examples import REFERENCE, RLExample, digested


def name_bytes(group: Group) -> int:
    """Return the maximum number of bytes that a group takes in a batch in addition to its rows."""
    return group_bytes(group.key.environment, group.key.example_id, group.key.group_id)


def batch_bytes(group: Group) -> int:
    """Return the maximum number of bytes that a sealed group takes in a batch, as makers count them."""
    size_bytes = name_bytes(group)
    for uid, member in group.members.items():
        arrays = member.rollout.token_arrays
        size_bytes += row_bytes(member.rollout.length, uid, REFERENCE in arrays)
        size_bytes += sum(array_bytes(n, a.record_bytes, len(a.shape)) for n, a in arrays.items() if n != REFERENCE)
    return size_bytes


def with_equal_references(examples: Sequence[RLExample], room_bytes: int) -> list[RLExample]:
    """Return the rows of a batch so that either all or none carry reference log-probabilities.

    If only some rows carry them, the other rows get NaN if that takes at most `room_bytes`; otherwise all rows lose
    their reference log-probabilities.
    """
    missing = [e for e in examples if e.reference_log_probs is None]
    if len(missing) in (0, len(examples)):
        return list(examples)
    if 4 * sum(e.length for e in missing) > room_bytes:
        return [replace(e, reference_log_probs=None) for e in examples]
    return [
        replace(e, reference_log_probs=np.full(e.length, np.nan, "<f4")) if e.reference_log_probs is None else e
        for e in examples
    ]


def joined_arrays(rollouts: Sequence[HeldRollout]) -> list[dict[str, Any]]:
    """Join the named arrays of a batch's rows: one array per name, dtype and shape of a token, sorted in that order.

    An array that lies in the store stays one of its own, and is not read; so does an image in the record.
    """
    rows: dict[tuple[str, str, tuple[int, ...], int, str], list[int]] = {}
    for row, rollout in enumerate(rollouts):
        for name, array in rollout.token_arrays.items():
            if name != REFERENCE:
                alone = row if array.stored or is_medium(name) else -1
                rows.setdefault((name, array.dtype, array.shape[1:], alone, array.stored), []).append(row)
    joined = []
    for (name, dtype, shape, _row, stored), numbers in sorted(rows.items()):
        carriers = [rollouts[row] for row in numbers]
        data = [carrier.token_arrays[name].data for carrier in carriers]
        length = sum(carrier.token_arrays[name].shape[0] for carrier in carriers)
        whole = {"dtype": dtype, "shape": (length, *shape), "data": data, "stored": stored}
        joined.append({"name": name, "array": whole, "rows": _column("i", numbers)})
    return joined


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
) -> EncodedBatch:
    """Return the batch of R examples; `groups[r]` is the group of `examples[r]`, and `metadata` is the maker's JSON.

    All examples or none carry reference log-probabilities. The record is joined from the bytes of the rollouts' arrays,
    each of which is copied once.
    """
    index = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    rollouts = [g.members[e.source.uid].rollout for e, g in zip(examples, groups, strict=True)]
    references = [e.reference_log_probs for e in examples if e.reference_log_probs is not None]
    offsets, timestamps = [e.source.offset for e in examples], [r.timestamp for r in rollouts]
    lowest, highest = [r.lowest_version for r in rollouts], [r.highest_version for r in rollouts]
    splits = [0, *accumulate(r.length for r in rollouts)]
    columns: dict[str, Any] = {
        "batch_id": f"{partition}-{number}",
        "partition": partition,
        "number": number,
        "core_version": core_version,
        "generation": generation,
        "cut": cut,
        "cut_ms": cut_ms,
        "groups": [
            {**g.key._asdict(), "size": len(g.members), "opened_ms": g.opened_ms, "sealed_ms": g.sealed_ms}
            for g in index
        ],
        "group_index": _column("i", [index[g] for g in groups]),
        "source_offsets": _column("q", offsets),
        "uids": [e.source.uid for e in examples],
        "splits": _column("q", splits),
        "tokens": [r.bytes_of(TOKENS) for r in rollouts],
        "loss_mask": [r.bytes_of(LOSS_MASK) for r in rollouts],
        "logprobs": [r.bytes_of(LOGPROBS) for r in rollouts],
        "advantages": list(map(advantage_bytes, examples)),
        "reference_logprobs": [column_bytes(logprobs, "<f4") for logprobs in references],
        "rewards": _column("d", [r.reward for r in rollouts]),
        "truncated": _column("?", [r.truncated for r in rollouts]),
        "lowest_versions": _column("q", lowest),
        "highest_versions": _column("q", highest),
        "temperatures": _column("d", [r.temperature for r in rollouts]),
        "logprobs_processed": _column("?", [r.logprobs_mode == "processed" for r in rollouts]),
        "weight_steps": _column("q", [r.weight_step for r in rollouts]),
        "timestamps": _column("d", timestamps),
        "token_arrays": joined_arrays(rollouts),
        "metadata": metadata,
    }
    frame, digest = digested(b"".join(_pieces()(columns)))
    entry = BatchIndexEntry(
        batch_id=columns["batch_id"],
        partition=partition,
        offset=-1,
        rollouts=len(rollouts),
        tokens=splits[-1],
        trained_tokens=sum(r.sampled for r in rollouts),
        lowest_version=min(lowest),
        highest_version=max(highest),
        size_bytes=13 * splits[-1],
        digest=digest,
    )
    return EncodedBatch(frame=frame, cut=cut, entry=entry, source_offsets=offsets, timestamps=timestamps)


@cache
def _pieces() -> FramePieces:
    schema = codec.schemas()["TrainingBatch"][-1]
    return frame_pieces(schema.source, codec.MAGIC + schema.fingerprint, without=("digest",))


def _column(form: str, values: Sequence[float]) -> list[Piece]:
    """Return the bytes of a column of numbers, in a form of the module struct."""
    return [struct.pack(f"<{len(values)}{form}", *values)]


class GroupEpisodes(NamedTuple):
    """The N episodes of a group and their outcomes."""

    episodes: list[list[Member]]
    """Members of each episode, [N]: the branches that arrived."""
    outcomes: Outcomes


def group_episodes(group: Group, *, details: bool = False) -> GroupEpisodes:
    """Return the episodes of a sealed group; with `details`, which its members then hold, for an estimator."""
    episodes: dict[str, list[Member]] = {}
    for member in group.members.values():
        episodes.setdefault(episode_of(member.rollout), []).append(member)
    branches_of = list(episodes.values())
    rewards = without_noise([mean([m.rollout.reward for m in branches]) for branches in branches_of])
    lengths = tuple(sum(m.rollout.sampled for m in branches) for branches in branches_of)
    held = tuple(tuple(m.rollout.details for m in branches if m.rollout.details) for branches in branches_of)
    return GroupEpisodes(branches_of, Outcomes(rewards=rewards, lengths=lengths, details=held if details else ()))


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
