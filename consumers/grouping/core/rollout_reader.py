"""Reads rollouts without decoding them: one scan a record, and the checks of `validation.problems` over many at once.

It returns a rollout only if it is certain that `codec.decode` and `validation.problems` accept the record. Any other
record is left to them. Tests compare both (docs/decisions/0063-two-readers-of-a-rollout.md).
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.grouping.core.held_rollouts import NOTHING, HeldRollout
from rollstream.topics.records import NamedArray
from rollstream.topics.wire.frame_scanner import frame_scanner
from rollstream.topics.wire.validation import (
    LOGPROB_TOLERANCE,
    NAME_LIMIT,
    NO_LOGPROB,
    REWARD_LIMIT,
    arrays_problems,
)

_CHOSEN = (
    *("uid", "group_id", "group_size", "environment", "example_id", "policy_version", "lowest_version"),
    *("highest_version", "episode_uid", "branch", "branches", "turns.start", "turns.stop", "tokens", "loss_mask"),
    *("logprobs", "logprobs_mode", "sampling.temperature", "sampling.top_p", "sampling.top_k", "sampling.min_p"),
    *("token_rewards", "reward", "reward_components", "truncated", "metadata.worker_id", "metadata.timestamp"),
    *("metadata.weight_step", "token_arrays.dtype", "token_arrays.shape", "token_arrays.data", "token_arrays.stored"),
)
_AT_ONCE_BYTES = 2**18
"""Bytes of arrays that are checked at once: few enough for a processor's cache."""
_INT_MAX = 2**31 - 1
_Fields = tuple[Any, ...]
"""Fields of a HeldRollout up to its length."""
# Logprobs are compared as numbers of 32 bits: those below 0 grow with their magnitude, and NaN lies beyond all others.
_LEAST_BITS = int(np.float32(NO_LOGPROB).view("<u4"))
_MOST_BITS = int(np.nextafter(np.float32(LOGPROB_TOLERANCE), np.float32(0)).view("<i4"))


_scanner = cache(lambda: frame_scanner("Rollout", _CHOSEN))


def read_rollouts(values: Sequence[bytes | None]) -> list[HeldRollout | None]:
    """Return the rollout of each value; None for a value that must be decoded."""
    rollouts: list[HeldRollout | None] = [None] * len(values)
    together: list[tuple[int, _Fields]] = []
    size_bytes = 0
    for number, value in enumerate(values):
        fields = None if value is None else _fields(value)
        if fields is None:
            continue
        together.append((number, fields))
        size_bytes += 9 * fields[-1]
        if size_bytes >= _AT_ONCE_BYTES:
            _check(together, rollouts)
            together, size_bytes = [], 0
    _check(together, rollouts)
    return rollouts


def read_again(value: bytes | None) -> HeldRollout | None:
    """Return the rollout of a record whose arrays were checked when it was first read; None if it must be decoded."""
    fields = None if value is None else _fields(value)
    if value is None or fields is None:
        return None
    mask = np.frombuffer(value, "|u1", fields[-1], fields[-2][1])
    if np.maximum.reduce(mask) > 1:
        return None
    return HeldRollout._make((*fields, int(np.count_nonzero(mask)), _INT_MAX, None))


def _fields(value: bytes) -> _Fields | None:
    """Return the fields of a rollout if all its names and numbers are valid."""
    fields = _scanner()(value)
    if fields is None:
        return None
    # fmt: off
    (
        uid, group_id, group_size, environment, example_id, policy_version, lowest, highest, episode_uid, branch,
        branches, turns, tokens, tokens_end, mask, mask_end, logprobs, logprobs_end, logprobs_mode, temperature,
        top_p, top_k, min_p, token_rewards, token_rewards_end, reward, components, truncated, worker_id, timestamp,
        weight_step, arrays,
    ) = fields
    # fmt: on
    length = mask_end - mask
    size_bytes = 4 * length
    if not (
        0 < len(uid) <= NAME_LIMIT
        and 0 < len(environment) <= NAME_LIMIT
        and 0 < len(example_id) <= NAME_LIMIT
        and len(group_id) <= NAME_LIMIT
        and len(episode_uid) <= NAME_LIMIT
        and 0 < size_bytes == tokens_end - tokens == logprobs_end - logprobs
        and -REWARD_LIMIT <= reward <= REWARD_LIMIT
        and policy_version >= 0
        and 0 <= lowest <= highest
        and 0 < group_size <= _INT_MAX
        and 0 <= branch < branches <= _INT_MAX
        and (branches == 1 or episode_uid)
        and 0.0 <= temperature < math.inf
        and 0.0 <= top_p <= 1.0
        and 0.0 <= min_p <= 1.0
    ):
        return None
    if turns and not all(0 <= start <= stop <= length for start, stop in turns):
        return None
    if components and not all(map(math.isfinite, components.values())):
        return None
    if token_rewards_end != token_rewards and not (
        token_rewards_end - token_rewards == size_bytes
        and np.isfinite(np.frombuffer(value, "<f4", length, token_rewards)).all()
    ):
        return None
    token_arrays: Mapping[str, NamedArray] = NOTHING
    if arrays:
        token_arrays = {
            name: NamedArray(dtype=dtype, shape=tuple(shape), data=value[begin:end], stored=stored)
            for name, (dtype, shape, begin, end, stored) in arrays.items()
        }
        if arrays_problems(token_arrays, length):
            return None
    # fmt: off
    return (
        uid, group_id, group_size, environment, example_id, policy_version, lowest, highest, episode_uid, branch,
        branches, logprobs_mode, temperature, top_p, top_k, min_p, reward, truncated, worker_id, timestamp,
        weight_step, token_arrays, value, (tokens, mask, logprobs), length,
    )
    # fmt: on


def _check(together: list[tuple[int, _Fields]], rollouts: list[HeldRollout | None]) -> None:
    """Enter the rollouts whose arrays are valid."""
    if not together:
        return
    tokens, masks, logprobs = [], [], []
    for _number, (*_names, value, begins, length) in together:
        view, (begin, mask_begin, logprobs_begin) = memoryview(value), begins
        tokens.append(view[begin : begin + 4 * length])
        masks.append(view[mask_begin : mask_begin + length])
        logprobs.append(view[logprobs_begin : logprobs_begin + 4 * length])
    mask = np.frombuffer(b"".join(masks), "|u1")
    bound = int(np.maximum.reduce(np.frombuffer(b"".join(tokens), "<u4")))
    if bound > _INT_MAX or not _are_sound(mask, np.frombuffer(b"".join(logprobs), "<i4")):
        for one in together if len(together) > 1 else ():
            _check([one], rollouts)
        return
    end = 0
    for number, fields in together:
        begin, end = end, end + fields[-1]
        rollouts[number] = HeldRollout._make((*fields, int(np.count_nonzero(mask[begin:end])), bound, None))


def _are_sound(mask: NDArray[np.uint8], bits: NDArray[np.int32]) -> bool:
    """Whether loss masks and the bits of log-probabilities are valid."""
    if np.maximum.reduce(mask) > 1 or np.maximum.reduce(bits) > _MOST_BITS:
        return False
    if np.maximum.reduce(bits.view("<u4")) >= _LEAST_BITS:
        return False
    return not np.greater(bits.view("<f4") != 0, mask).any()
