"""What makes a rollout senseless though it decodes: the same checks where it is produced and where it is grouped.

Pure: a list of problems in plain words, empty when the rollout is sound.
"""

import math

import numpy as np

from topics.records import GroupCancelled, Rollout

NAME_LIMIT = 512
"""Most characters of a uid, an environment and the like: names are repeated in batches, drops and counts."""

LOGPROB_TOLERANCE = 1e-3
"""Largest positive log-probability put down to rounding (float16 servers reach 5e-4)."""


def problems(rollout: Rollout) -> list[str]:
    """Everything wrong with a rollout: lengths, numbers that are none, versions, group and branch counts, spans."""
    found: list[str] = []
    length = len(rollout.tokens)
    if length == 0:
        found.append("tokens is empty")
    for name, array in (("loss_mask", rollout.loss_mask), ("logprobs", rollout.logprobs)):
        if len(array) != length:
            found.append(f"{name} has {len(array)} entries for {length} tokens")
    if len(rollout.token_rewards) not in (0, length):
        found.append(f"token_rewards has {len(rollout.token_rewards)} entries for {length} tokens")
    if length and int(rollout.tokens.min()) < 0:
        found.append("tokens holds a negative id")
    if not np.isfinite(rollout.logprobs).all():
        found.append("logprobs holds NaN or infinity")
    elif len(rollout.logprobs) and float(rollout.logprobs.max()) > LOGPROB_TOLERANCE:
        found.append(f"logprobs holds {float(rollout.logprobs.max()):g}, above 0")
    elif len(rollout.logprobs) == len(rollout.loss_mask) == length and rollout.logprobs[~rollout.loss_mask].any():
        found.append("logprobs is not 0 where loss_mask is false")
    if len(rollout.token_rewards) and not np.isfinite(rollout.token_rewards).all():
        found.append("token_rewards holds NaN or infinity")
    if not math.isfinite(rollout.reward):
        found.append(f"reward is {rollout.reward}")
    found += [f"reward component {k} is {v}" for k, v in rollout.reward_components.items() if not math.isfinite(v)]
    if rollout.policy_version < 0:
        found.append(f"policy_version is {rollout.policy_version}")
    if not 0 <= rollout.lowest_version <= rollout.highest_version:
        found.append(
            f"lowest_version {rollout.lowest_version} and highest_version {rollout.highest_version} are no range"
        )
    if rollout.group_size < 1:
        found.append(f"group_size is {rollout.group_size}")
    if not 0 <= rollout.branch < rollout.branches:
        found.append(f"branch {rollout.branch} is not among {rollout.branches} branches")
    if not rollout.uid:
        found.append("uid is empty")
    if not rollout.sampling.temperature >= 0.0 or math.isinf(rollout.sampling.temperature):
        found.append(f"sampling temperature is {rollout.sampling.temperature}")
    for i, turn in enumerate(rollout.turns):
        if not 0 <= turn.start <= turn.stop <= length:
            found.append(f"turn {i} covers tokens {turn.start} to {turn.stop} of {length}")
    for name, extra in rollout.token_arrays.items():
        found += _array_problems(name, extra.dtype, extra.shape, len(extra.data), length)
    return found


def cancellation_problems(cancelled: GroupCancelled) -> list[str]:
    """Everything wrong with a cancellation."""
    found: list[str] = []
    if cancelled.policy_version < 0:
        found.append(f"policy_version is {cancelled.policy_version}")
    if cancelled.group_size < 1:
        found.append(f"group_size is {cancelled.group_size}")
    if not cancelled.uids or not all(cancelled.uids):
        found.append("uids is empty, or holds an empty uid")
    return found


def _array_problems(name: str, dtype: str, shape: tuple[int, ...], size_bytes: int, length: int) -> list[str]:
    try:
        item = np.dtype(dtype)
    except TypeError:
        return [f"token array {name} has unknown dtype {dtype!r}"]
    if item.hasobject:
        return [f"token array {name} has dtype {dtype!r}, which holds objects"]
    if not shape or shape[0] != length or math.prod(shape) * item.itemsize != size_bytes:
        return [f"token array {name} has shape {shape} of {dtype} in {size_bytes} bytes for {length} tokens"]
    return []
