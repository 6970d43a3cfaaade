"""Row `buffer`: rollouts added to a full rollout buffer, and drawn from it, against a plain list and numpy's choice."""

import numpy as np

from rollstream.consumers.buffers.rollouts.buffer import RolloutReplayBuffer
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.codec import encode
from rollstream.topics.records import Rollout
from tests.bench.measure import Row, Settings, Stopwatch, Timing, interleaved

_CAPACITY = 4096
_SAMPLE = 256
_ALPHA = 3.0
_GROUPS_A_SAMPLE = 32
"""As many rollouts come as are drawn, where groups are of eight."""


def measure(settings: Settings) -> Row:
    """Groups are added to a buffer that is full, and a sample is drawn after so many of them."""
    figures: dict[str, float] = {}
    groups = _groups(settings)
    rollouts = len(groups) * settings.group_size
    buffer = RolloutReplayBuffer(
        capacity=_CAPACITY, local_batch_size=_SAMPLE, alpha=_ALPHA, max_samples=-1, max_rollout_timestamp_delay=-1.0
    )
    for group in groups[: 1 + _CAPACITY // settings.group_size]:
        buffer.add(group)
    held: list[tuple[Rollout, float]] = []
    generator = np.random.default_rng(0)

    def ours() -> Timing:
        watch, added, drawn = Stopwatch(), [], []
        for begin in range(0, len(groups), _GROUPS_A_SAMPLE):
            step = Stopwatch()
            for group in groups[begin : begin + _GROUPS_A_SAMPLE]:
                buffer.add(group)
            added.append(step.timing(1).seconds)
            step = Stopwatch()
            if len(buffer.sample() or ()) != _SAMPLE:
                raise RuntimeError(f"a buffer of {buffer.size()} gave no sample")
            drawn.append(step.timing(1).seconds)
        figures["added a second"] = rollouts / sum(added)
        figures[f"samples of {_SAMPLE} a second"] = len(drawn) / sum(drawn)
        return watch.timing(rollouts)

    def raw() -> Timing:
        watch = Stopwatch()
        for begin in range(0, len(groups), _GROUPS_A_SAMPLE):
            for group in groups[begin : begin + _GROUPS_A_SAMPLE]:
                total = sum(rollout.reward for rollout in group)
                held.extend((r, r.reward - (total - r.reward) / (len(group) - 1)) for r in group)
                del held[: len(held) - _CAPACITY]
            weights = np.arange(1, len(held) + 1) ** _ALPHA
            chosen = generator.choice(len(held), min(_SAMPLE, len(held)), replace=False, p=weights / weights.sum())
            _ = [held[i] for i in chosen]
        return watch.timing(rollouts)

    rates, baseline = interleaved(settings.repetitions, ours, raw)
    return Row(
        name="buffer",
        what=f"add rollouts in groups of {settings.group_size} to a full rollout buffer of {_CAPACITY:,} and draw "
        f"{_SAMPLE} by recency after each {_GROUPS_A_SAMPLE} groups",
        baseline="a list, the sums of leave-one-out and numpy's choice: no checks, no lock, no uses counted",
        size_bytes=len(encode(groups[0][0])),
        ours=rates,
        raw=baseline,
        figures=figures,
    )


def _groups(settings: Settings) -> list[list[Rollout]]:
    tokens = np.arange(settings.tokens, dtype="<i4")
    size = settings.group_size
    return [
        [example_rollout(f"{g}-{i}", float(i), example_id=str(g), tokens=tokens) for i in range(size)]
        for g in range(max(settings.rollouts, _SAMPLE) // size)
    ]
