"""Rollouts as a fold holds them: names, numbers, and offsets into the bytes of their records.

Arrays are made when a batch maker or an estimator asks for them; a batch is joined from the bytes alone.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.grouping.core.estimators import RolloutDetails, TurnOutcome
from rollstream.topics.records import Bool, Float32, Int32, NamedArray, Rollout, SamplingParams
from rollstream.topics.wire.codec import column_bytes
from rollstream.topics.wire.media import is_medium
from rollstream.topics.wire.rl_examples import REFERENCE, REPLAYED, RLExample, Source

SPARE_BYTES = 1024
"""Most bytes besides its arrays with which a record is held as it is. The arrays of other records are copied, so that
texts of no use do not stay in memory."""
TOKENS, LOSS_MASK, LOGPROBS = range(3)
"""Numbers of the arrays of a rollout, see `HeldRollout.bytes_of`."""
NOTHING: Mapping[str, Any] = MappingProxyType({})
_SEGMENT = np.int32(1)
"""Segment of every position. Grouping does not pack examples; learners do."""


class _Fields(NamedTuple):
    """Fields of `Rollout` on which fate and batch depend, under its names except for those described here."""

    uid: str
    group_id: str
    group_size: int
    environment: str
    example_id: str
    policy_version: int
    lowest_version: int
    highest_version: int
    episode_uid: str
    branch: int
    branches: int
    logprobs_mode: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    reward: float
    truncated: bool
    worker_id: str
    timestamp: float
    weight_step: int
    token_arrays: Mapping[str, NamedArray]
    data: bytes
    """The bytes that hold the arrays of the tokens."""
    begins: tuple[int, int, int]
    """Offsets in `data` where tokens, loss_mask and logprobs begin."""
    length: int
    """Number of tokens, T."""
    sampled: int
    """Number of tokens that the policy sampled."""
    token_bound: int
    """No token id is larger."""
    details: RolloutDetails | None = None
    """Only in groups of a fold with an estimator that needs them."""


class HeldRollout(_Fields):
    """A rollout in a group, or on its way into one."""

    @classmethod
    def of(cls, rollout: Rollout) -> "HeldRollout":
        """Return a decoded rollout as a fold holds it."""
        sampling, about = rollout.sampling, rollout.metadata
        tokens, mask = rollout.tokens, rollout.loss_mask
        return cls(
            uid=rollout.uid,
            group_id=rollout.group_id,
            group_size=rollout.group_size,
            environment=rollout.environment,
            example_id=rollout.example_id,
            policy_version=rollout.policy_version,
            lowest_version=rollout.lowest_version,
            highest_version=rollout.highest_version,
            episode_uid=rollout.episode_uid,
            branch=rollout.branch,
            branches=rollout.branches,
            logprobs_mode=rollout.logprobs_mode,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            reward=rollout.reward,
            truncated=rollout.truncated,
            worker_id=about.worker_id,
            timestamp=about.timestamp,
            weight_step=about.weight_step,
            token_arrays=rollout.token_arrays or NOTHING,
            data=b"".join((tokens.tobytes(), mask.tobytes(), rollout.logprobs.tobytes())),
            begins=(0, tokens.nbytes, tokens.nbytes + mask.nbytes),
            length=len(tokens),
            sampled=int(np.count_nonzero(mask)),
            token_bound=int(tokens.max(initial=0)),
        )

    def trimmed(self, token_arrays: Collection[str] = ()) -> "HeldRollout":
        """Return it with the reference log-probabilities, the arrays REPLAYED, images and the named `token_arrays`
        only, and without the bytes of its record if many of them are of no use."""
        held = self
        if arrays := self.token_arrays:
            kept = {name: arrays[name] for name in (REFERENCE, *REPLAYED, *token_arrays) if name in arrays}
            kept |= {name: array for name, array in arrays.items() if is_medium(name)}
            held = held._replace(token_arrays=kept or NOTHING)
        if len(self.data) - 9 * self.length > SPARE_BYTES:
            begins = (0, 4 * self.length, 5 * self.length)
            held = held._replace(data=b"".join(map(self.bytes_of, range(3))), begins=begins)
        return held

    def bytes_of(self, array: int) -> memoryview:
        """Return the bytes of the array with this number."""
        begin = self.begins[array]
        return memoryview(self.data)[begin : begin + self.length * (1 if array == LOSS_MASK else 4)]

    def _array(self, dtype: str, array: int) -> NDArray[Any]:
        return np.frombuffer(self.data, dtype, self.length, self.begins[array])

    @cached_property
    def tokens(self) -> Int32:
        return self._array("<i4", TOKENS)

    @cached_property
    def loss_mask(self) -> Bool:
        return self._array("|b1", LOSS_MASK)

    @cached_property
    def logprobs(self) -> Float32:
        return self._array("<f4", LOGPROBS)

    @property
    def filtered(self) -> bool:
        """As `SamplingParams.filtered`."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p)


def details_of(rollout: Rollout) -> RolloutDetails:
    """Return the details of a rollout for an estimator."""
    turns = tuple(TurnOutcome(turn.role, turn.start, turn.stop, turn.reward) for turn in rollout.turns)
    return RolloutDetails(rollout.reward_components, rollout.truncated, turns)


def advantage_array(advantage: float, length: int) -> Float32:
    """Return an array with a scalar advantage at every position, float32 [T]."""
    return np.full(length, advantage, "<f4")


class HeldExample(RLExample):
    """The example of a held rollout. Its arrays are made when they are asked for, and kept."""

    held: HeldRollout | None = None
    """Its rollout; None if a batch maker made the example from another one."""
    share: float = 0.0
    """Advantage of every position."""

    @classmethod
    def of(cls, rollout: HeldRollout, source: Source, share: float) -> "HeldExample":
        """Return the example of a rollout with an advantage."""
        example = object.__new__(cls)
        # Sets nothing else, so that the properties below provide the arrays.
        example.__dict__.update(
            held=rollout, share=share, source=source, weight_step=rollout.weight_step, timestamp=rollout.timestamp
        )
        if not rollout.token_arrays:
            example.__dict__.update(reference_log_probs=None, token_arrays={}, stored_arrays={})
        return example

    def plain(self) -> RLExample:
        """Return the same example with all its arrays."""
        return RLExample(**{field.name: getattr(self, field.name) for field in fields(RLExample)})

    @property
    def _rollout(self) -> HeldRollout:
        assert self.held is not None, "other examples have all fields"
        return self.held

    @property
    def length(self) -> int:
        return len(self.tokens) if self.held is None else self.held.length

    @cached_property
    def tokens(self) -> Int32:
        return self._rollout.tokens

    @cached_property
    def loss_mask(self) -> Bool:
        return self._rollout.loss_mask

    @cached_property
    def advantage(self) -> Float32:
        return advantage_array(self.share, self._rollout.length)

    @cached_property
    def generator_log_probs(self) -> Float32:
        return self._rollout.logprobs

    @cached_property
    def segment_ids(self) -> Int32:
        return np.broadcast_to(_SEGMENT, self._rollout.length)

    @cached_property
    def reference_log_probs(self) -> Float32 | None:
        reference = self._rollout.token_arrays.get(REFERENCE)
        return None if reference is None else reference.array().astype("<f4")

    @cached_property
    def token_arrays(self) -> Mapping[str, NDArray[Any]]:
        arrays = self._rollout.token_arrays
        return {name: a.array() for name, a in arrays.items() if name != REFERENCE and not a.stored}

    @cached_property
    def stored_arrays(self) -> Mapping[str, NamedArray]:
        return {name: array for name, array in self._rollout.token_arrays.items() if array.stored}


def with_advantage(example: RLExample, share: float) -> RLExample:
    """Return the same example with a scalar advantage."""
    if not isinstance(example, HeldExample) or example.held is None:
        return replace(example, advantage=advantage_array(share, example.length))
    other = object.__new__(HeldExample)
    other.__dict__.update(example.__dict__, share=share)
    other.__dict__.pop("advantage", None)
    return other


def is_of(example: RLExample, rollout: HeldRollout) -> bool:
    """Whether an example has the arrays of a rollout, and an advantage for each of its positions."""
    if isinstance(example, HeldExample) and example.held is rollout:
        return True
    return (
        example.tokens is rollout.tokens
        and example.loss_mask is rollout.loss_mask
        and example.generator_log_probs is rollout.logprobs
        and example.advantage.shape == (rollout.length,)
    )


def advantage_bytes(example: RLExample) -> bytes:
    """Return the bytes of an example's advantages; no array is made of a scalar."""
    if isinstance(example, HeldExample) and example.held is not None and "advantage" not in example.__dict__:
        return np.float32(example.share).tobytes() * example.held.length
    return column_bytes(example.advantage, "<f4")
