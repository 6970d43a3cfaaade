"""Rows that add rollouts to a full rollout buffer and draw from it: `buffer` against a plain list and numpy's choice,
`buffer-reverb` against DeepMind's Reverb, if ROLLSTREAM_REVERB names a Python that has it.
"""

import os
from collections.abc import Callable

import numpy as np

from rollstream.consumers.buffers.rollouts.buffer import RolloutReplayBuffer
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.records import Rollout
from rollstream.topics.wire.codec import encode
from tests.bench.measure import Row, Settings, Stopwatch, Timing, in_child, interleaved
from tests.bench.reverb_buffer import CAPACITY, GROUPS_A_SAMPLE, SAMPLE

PEER = "ROLLSTREAM_REVERB"
_ALPHA = 3.0


def measure(settings: Settings) -> Row:
    """Return the row whose baseline is a list."""
    baseline = "a list, the sums of leave-one-out and numpy's choice: no checks, no lock, no uses counted"
    return _measured(settings, "buffer", _list_of, baseline)


def measure_peer(settings: Settings) -> Row:
    """Return the row whose baseline is Reverb."""

    def peer(_: list[list[Rollout]]) -> Callable[[], Timing]:
        return lambda: in_child("reverb_buffer", settings, "", python=os.environ[PEER])

    baseline = (
        "a table of Reverb's in one process, first in first out, drawn from uniformly; it copies what it is given"
    )
    return _measured(settings, "buffer-reverb", peer, baseline)


def _measured(
    settings: Settings, name: str, other: Callable[[list[list[Rollout]]], Callable[[], Timing]], baseline: str
) -> Row:
    """Add groups to a full buffer, and draw a sample after every GROUPS_A_SAMPLE groups; `other` returns the
    baseline's measurement for these groups."""
    figures: dict[str, float] = {}
    groups = _groups(settings)
    rollouts = len(groups) * settings.group_size
    buffer = RolloutReplayBuffer(
        capacity=CAPACITY, local_batch_size=SAMPLE, alpha=_ALPHA, max_samples=-1, max_rollout_timestamp_delay=-1.0
    )
    for group in groups[: 1 + CAPACITY // settings.group_size]:
        buffer.add(group)

    def ours() -> Timing:
        watch, added, drawn = Stopwatch(), [], []
        for begin in range(0, len(groups), GROUPS_A_SAMPLE):
            step = Stopwatch()
            for group in groups[begin : begin + GROUPS_A_SAMPLE]:
                buffer.add(group)
            added.append(step.timing(1).seconds)
            step = Stopwatch()
            if len(buffer.sample() or ()) != SAMPLE:
                raise RuntimeError(f"a buffer of {buffer.size()} gave no sample")
            drawn.append(step.timing(1).seconds)
        figures["added a second"] = rollouts / sum(added)
        figures[f"samples of {SAMPLE} a second"] = len(drawn) / sum(drawn)
        return watch.timing(rollouts)

    rates, raw = interleaved(settings.repetitions, ours, other(groups))
    return Row(
        name=name,
        what=f"add rollouts in groups of {settings.group_size} to a full rollout buffer of {CAPACITY:,} and draw "
        f"{SAMPLE} by recency after each {GROUPS_A_SAMPLE} groups",
        baseline=baseline,
        size_bytes=len(encode(groups[0][0])),
        ours=rates,
        raw=raw,
        figures=figures,
    )


def _list_of(groups: list[list[Rollout]]) -> Callable[[], Timing]:
    held: list[tuple[Rollout, float]] = []
    generator = np.random.default_rng(0)

    def raw() -> Timing:
        watch = Stopwatch()
        for begin in range(0, len(groups), GROUPS_A_SAMPLE):
            for group in groups[begin : begin + GROUPS_A_SAMPLE]:
                total = sum(rollout.reward for rollout in group)
                held.extend((r, r.reward - (total - r.reward) / (len(group) - 1)) for r in group)
                del held[: len(held) - CAPACITY]
            weights = np.arange(1, len(held) + 1) ** _ALPHA
            chosen = generator.choice(len(held), min(SAMPLE, len(held)), replace=False, p=weights / weights.sum())
            _ = [held[i] for i in chosen]
        return watch.timing(sum(map(len, groups)))

    return raw


def _groups(settings: Settings) -> list[list[Rollout]]:
    tokens = np.arange(settings.tokens, dtype="<i4")
    size = settings.group_size
    return [
        [example_rollout(f"{g}-{i}", float(i), example_id=str(g), tokens=tokens) for i in range(size)]
        for g in range(max(settings.rollouts, SAMPLE) // size)
    ]
