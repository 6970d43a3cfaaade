"""Rollouts to measure with: random tokens and log-probabilities, so that compression has honest work to do.

Groups arrive as several workers send them: a window of groups is in flight and their members alternate.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rollstream.topics.records import InferenceMetadata, Rollout, RolloutMetadata, Turn
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.bench.measure import Settings

_IN_FLIGHT = 16


def rollouts(settings: Settings, seed: int = 0) -> Iterator[Rollout]:
    """Rollouts in whole groups, rewards alternating within each so that every group has variance."""
    rng = np.random.default_rng(seed)
    size = settings.group_size
    groups = settings.rollouts // size
    for first in range(0, groups, _IN_FLIGHT):
        for member in range(size):
            for group in range(first, min(first + _IN_FLIGHT, groups)):
                yield rollout(rng, settings.tokens, f"example-{group}", member, size)


def rollout(rng: np.random.Generator, length: int, example: str, member: int, group_size: int) -> Rollout:
    """One rollout of `length` tokens, the first eighth of them a prompt; two turns."""
    prompt = length // 8
    mask = np.arange(length) >= prompt
    return Rollout(
        uid=f"{example}.{member}",
        group_id=example,
        group_size=group_size,
        environment="bench",
        example_id=example,
        policy_version=0,
        lowest_version=0,
        highest_version=0,
        episode_uid=f"{example}.{member}",
        turns=(
            Turn(role="user", text="a question", start=0, stop=prompt),
            Turn(
                role="assistant",
                text="an answer",
                start=prompt,
                stop=length,
                has_logprobs=True,
                timestamp=1.0,
                inference=InferenceMetadata(model_version=0, sampling_params={"temperature": "1.0"}),
            ),
        ),
        tokens=rng.integers(0, 32_000, length).astype("<i4"),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.exponential(1.0, length), 0.0).astype("<f4"),
        reward=float(member % 2),
        metadata=RolloutMetadata(worker_id="bench", replica_id="bench", timestamp=1.0),
    )


def encoded(settings: Settings, seed: int = 0, *, incomplete: bool = False) -> list[tuple[bytes, bytes]]:
    """Keys and values of `rollouts`; `incomplete` leaves each group one member short."""
    subjects = (replace(r, group_size=r.group_size + incomplete) for r in rollouts(settings, seed))
    return [(encode_key(r.environment, r.example_id), encode(r)) for r in subjects]
