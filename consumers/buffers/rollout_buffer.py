"""The rollout buffer: fresh rollouts of several environments, drawn by recency, used so often and no more.

Filled by hand, or from the log, whose batches bring their advantages. The index of batches is one sequence: filled to
the same position of it and drawn from as often, two buffers of a seed hold and give the same. Safe to add to, draw from
and save in several threads.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from consumers.batch_reader import ReadBatch
from consumers.buffers.draws import generator_at
from consumers.buffers.losses import RLLossModule, RLOOLoss
from consumers.buffers.rollout_files import Kept, KeptRollout, load_rollouts, save_rollouts
from consumers.buffers.rollout_rows import rollouts_of, unsound
from consumers.buffers.shelf import Entry, Left, Shelf, ShelfRules
from topics.errors import ConfigurationError, DeadlineExceeded, RecordError, RollstreamError
from topics.logs import event
from topics.records import Float32, Rollout, RolloutBatch, TrainingBatch
from topics.upcast import upcast

_LEFT_OUT = "left_out."
logger = logging.getLogger(__name__)
Batch = RolloutBatch | Sequence[Sequence[Rollout]]
"""A batch as it is added by hand: of the old form, or groups of rollouts."""


@dataclass(frozen=True)
class RolloutWithCount:
    """One rollout of a sample."""

    rollout: Rollout
    advantage: float | Float32
    """One number; from the log, where positions differ, one for each, float32 [T]."""
    usage_count: int
    """How often it was drawn, this time included."""
    weight_step: int
    """Learner step of the weights that sampled it."""


@dataclass(frozen=True, kw_only=True)
class ReplayBufferConfig:
    """Settings of a rollout buffer."""

    capacity: int
    """Rollouts of one environment; the newest stay."""
    alpha: float
    """Exponent of recency; 0 draws old and new alike."""
    max_samples: int
    """How often a rollout is drawn before it is retired; negative: never retired."""
    max_rollout_step_delay: int
    """Steps a rollout's weights may be old; negative: no limit."""
    max_rollout_timestamp_delay: float = 3600.0
    """Seconds at which a rollout is too old; negative: no limit."""


@dataclass(frozen=True, kw_only=True)
class TrainParams:
    """What a training run says of its rollouts."""

    optimizer: Any = None
    """Of the trainer; the buffer hands it through."""
    rl_loss: RLLossModule = field(default_factory=RLOOLoss)
    """Gives groups their advantages."""
    max_samples_per_rollout: int = 1
    """How often a rollout is trained on; negative: no limit."""
    max_rollout_delay: int = 1
    """Steps a rollout's weights may be old; negative: no limit."""
    max_rollout_timestamp_delay: float = 3600.0
    """Seconds at which a rollout is too old; negative: no limit."""
    replay_buffer_capacity: int = 4096
    """Rollouts of one environment."""
    replay_buffer_alpha: float = 3.0
    """Exponent of recency."""

    @property
    def replay_buffer(self) -> ReplayBufferConfig:
        """The settings of the buffer."""
        return ReplayBufferConfig(
            capacity=self.replay_buffer_capacity,
            alpha=self.replay_buffer_alpha,
            max_samples=self.max_samples_per_rollout,
            max_rollout_step_delay=self.max_rollout_delay,
            max_rollout_timestamp_delay=self.max_rollout_timestamp_delay,
        )


class Reader(Protocol):
    """What a buffer is filled from: a BatchReader."""

    def poll(self, timeout_s: float = 1.0) -> ReadBatch | None:
        """The next batch, or None when there is none in time."""


@dataclass(slots=True)
class _Held:
    """What the shelf carries for a rollout."""

    rollout: Rollout
    advantage: float | Float32


class RolloutReplayBuffer:
    """See the module. `sample` draws for `total_processes` at once and returns the share of `process_id`.

    `now` is asked for the time in seconds; without it a buffer that is filled from the log goes by stream time, the
    newest cut it has read, and any other by the clock. `weight_step_of` gives the learner step of a policy version, for
    rollouts from the log: by default each step publishes one.
    """

    def __init__(
        self,
        *,
        capacity: int = 4096,
        local_batch_size: int,
        alpha: float = 3.0,
        total_processes: int = 1,
        process_id: int = 0,
        max_samples: int = 1,
        max_rollout_step_delay: int = 1,
        max_rollout_timestamp_delay: float = 3600.0,
        loss_module: RLLossModule | None = None,
        balanced: bool = False,
        drop_zero_variance: bool = False,
        seed: int = 0,
        now: Callable[[], float] | None = None,
        weight_step_of: Callable[[int], int] = lambda version: version,
    ) -> None:
        """Raises ConfigurationError for settings that make no buffer."""
        if local_batch_size < 1 or not 0 <= process_id < total_processes:
            raise ConfigurationError(
                f"local_batch_size {local_batch_size}, process {process_id} of {total_processes}: give at least 1 "
                "rollout a process, and a process_id from 0 to one below total_processes"
            )
        self.local_batch_size = local_batch_size
        self.total_processes = total_processes
        self.process_id = process_id
        self.loss_module = loss_module or RLOOLoss()
        self._drop_zero_variance = drop_zero_variance
        self._now = now
        self._weight_step_of = weight_step_of
        self._lock = threading.RLock()
        self._rules = ShelfRules(
            capacity=capacity,
            alpha=alpha,
            max_samples=max_samples,
            max_step_delay=max_rollout_step_delay,
            max_timestamp_delay_s=max_rollout_timestamp_delay,
            balanced=balanced,
        )
        self._shelf: Shelf[_Held] = Shelf(self._rules)
        self._seed = seed
        self._draws = 0
        self._step = 0
        self._stream_s = 0.0
        self._position: dict[int, int] = {}
        self._batches_offered = 0
        self._batches_added = 0
        self._batches_sampled = 0
        self._left_out: Counter[str] = Counter()

    @classmethod
    def of(cls, config: ReplayBufferConfig, *, local_batch_size: int, **others: Any) -> "RolloutReplayBuffer":
        """A buffer with these settings; `others` are arguments of the constructor."""
        return cls(
            capacity=config.capacity,
            alpha=config.alpha,
            max_samples=config.max_samples,
            max_rollout_step_delay=config.max_rollout_step_delay,
            max_rollout_timestamp_delay=config.max_rollout_timestamp_delay,
            local_batch_size=local_batch_size,
            **others,
        )

    # ------------------------------------------------------------------ in

    def set_current_step(self, step: int) -> int:
        """Go by this learner step from now on; returns how many rollouts left because they are not fresh any more."""
        with self._lock:
            self._step = step
            return self._count(self._shelf.refresh(step, self._time()))

    def add(self, rollouts: Sequence[Rollout], /) -> int:
        """One group, whose rewards are compared; returns how many of it are held.

        Each is filed under its own environment and judged by its own metadata; what is not held is counted in `stats`
        and logged. Raises RecordError when one is unsound or gets an advantage that is no number; then none of the
        group is in.
        """
        try:
            entries = self._with_advantages(rollouts)
        except RecordError:
            self._leave_out(unsound=len(rollouts))
            raise
        return self._put(entries)

    def add_batches(self, new_batches: Iterable[Batch]) -> int:
        """Batches of groups; returns how many rollouts are held of them; what is not held is counted and logged.

        Raises RecordError naming what was wrong with batches that are unsound; all others are in.
        """
        held, wrong = 0, []
        for number, batch in enumerate(new_batches):
            groups: list[list[Rollout]] = []
            try:
                groups = self._groups_of(batch)
                entries = [entry for group in groups for entry in self._with_advantages(group)]
            except (RollstreamError, AttributeError, TypeError, ValueError) as error:
                wrong.append(f"batch {number}: {error}")
                self._leave_out(unsound=sum(map(len, groups)))
                continue
            with self._lock:
                stamps = (rollout.metadata for group in groups for rollout in group)
                self._batches_added += self._any_fresh((of.weight_step, of.timestamp) for of in stamps)
                held += self._put(entries)
        if wrong:
            raise RecordError(f"{'; '.join(wrong)}. All other batches are in; leave these out or mend them")
        return held

    def add_training_batch(self, batch: TrainingBatch) -> int:
        """The rows of a batch of the log, with their advantages; returns how many are held."""
        return self._put_batch(batch, None)

    def add_read(self, read: ReadBatch) -> int:
        """What a BatchReader returns; what lies before `position` is in already, and is passed over."""
        return self._put_batch(read.batch, read)

    def fill(self, reader: Reader, position: int, *, timeout_s: float = 60.0) -> None:
        """Read on up to a position of the index: so a buffer that lost its disk is rebuilt.

        Raises DeadlineExceeded where the reader brings nothing more for `timeout_s`.
        """
        while self.position.get(0, 0) < position:
            read = reader.poll(timeout_s)
            if read is None:
                raise DeadlineExceeded(
                    f"the index did not reach position {position} within {timeout_s:g} s, it stands at "
                    f"{self.position.get(0, 0)}; ask for a position that was read before"
                )
            self.add_read(read)

    # ------------------------------------------------------------------ out

    def sample(self, batch_size: int | None = None) -> list[RolloutWithCount] | None:
        """`batch_size` rollouts for this process, by default `local_batch_size`; None while fewer than that are held
        for each of the processes.

        Processes with the same content and seed that draw equally often get shares of one draw, which are disjoint.
        """
        count = self.local_batch_size if batch_size is None else batch_size
        if count < 1:
            raise ConfigurationError(f"a sample of {count}; draw at least 1")
        with self._lock:
            self._count(self._shelf.refresh(self._step, self._time()))
            if len(self._shelf) < count * self.total_processes:
                return None
            drawn = self._shelf.draw(count * self.total_processes, generator_at(self._seed, self._draws))
            assert drawn is not None, "as many are held"
            self._draws += 1
            self._batches_sampled += 1
            mine = drawn[self.process_id * count : (self.process_id + 1) * count]
            return [
                RolloutWithCount(entry.item.rollout, entry.item.advantage, entry.usage_count, entry.weight_step)
                for entry in mine
            ]

    def size(self) -> int:
        """Rollouts held."""
        with self._lock:
            return len(self._shelf)

    def stats(self) -> dict[str, Any]:
        """total_size, env_sizes, num_environments, total_batches_added (those of which a rollout was fresh),
        total_batches_sampled, and left_out: rollouts that were not taken, or left before they were used up, by reason
        (ahead, old_step, too_old, capacity, used_up, zero_variance, unsound)."""
        with self._lock:
            sizes = self._shelf.sizes
            return {
                "total_size": sum(sizes.values()),
                "env_sizes": sizes,
                "num_environments": len(sizes),
                "total_batches_added": self._batches_added,
                "total_batches_sampled": self._batches_sampled,
                "left_out": dict(self._left_out),
            }

    @property
    def position(self) -> dict[int, int]:
        """Next offset of batch-index, as its partition 0; empty where nothing came from the log."""
        with self._lock:
            return dict(self._position)

    # ------------------------------------------------------------------ on disk

    def save(self, directory: Path, /) -> None:
        """Keep everything in one file there, atomically. Raises StoreError; what was saved before is then as it was."""
        with self._lock:
            kept = Kept(
                rollouts=tuple(
                    KeptRollout(e.item.rollout, e.item.advantage, e.usage_count, e.weight_step, e.timestamp)
                    for e in self._shelf.entries()
                ),
                counts={
                    "seed": self._seed,
                    "draws": self._draws,
                    "step": self._step,
                    "batches_offered": self._batches_offered,
                    "batches_added": self._batches_added,
                    "batches_sampled": self._batches_sampled,
                    **{_LEFT_OUT + reason: count for reason, count in self._left_out.items()},
                },
                stream_s=self._stream_s,
                position=dict(self._position),
            )
        save_rollouts(Path(directory), kept)

    def load(self, directory: Path, /) -> None:
        """Become what was saved there, seed included; settings stay. Raises StoreError where nothing whole is."""
        kept = load_rollouts(Path(directory))
        shelf: Shelf[_Held] = Shelf(self._rules)
        entries = [
            Entry(_Held(k.rollout, k.advantage), k.rollout.environment, k.weight_step, k.timestamp, k.usage_count)
            for k in kept.rollouts
        ]
        with self._lock:
            self._seed, self._draws = kept.counts["seed"], kept.counts["draws"]
            self._batches_offered = kept.counts["batches_offered"]
            self._batches_added = kept.counts["batches_added"]
            self._batches_sampled = kept.counts["batches_sampled"]
            self._left_out = Counter(
                {name.removeprefix(_LEFT_OUT): n for name, n in kept.counts.items() if name.startswith(_LEFT_OUT)}
            )
            self._step, self._stream_s = kept.counts["step"], kept.stream_s
            self._position = dict(kept.position)
            self._shelf = shelf
            self._count(shelf.add(entries, self._step, self._time()))

    # ------------------------------------------------------------------ within

    def _time(self) -> float:
        if self._now is not None:
            return self._now()
        return self._stream_s if self._position else time.time()

    def _groups_of(self, batch: Batch) -> list[list[Rollout]]:
        """The groups of a batch; of the old form, rollouts that inherit its metadata."""
        if not isinstance(batch, RolloutBatch):
            return [list(group) for group in batch]
        with self._lock:
            place = f"memory#{self._batches_offered}"
            self._batches_offered += 1
        found = upcast(batch, place)
        if found.refused:
            raise RecordError(f"rollout {found.refused[0].place}: {found.refused[0].reason}")
        groups: dict[tuple[str, str, str], list[Rollout]] = {}
        for rollout in found.rollouts:
            groups.setdefault((rollout.group_id, rollout.environment, rollout.example_id), []).append(rollout)
        return list(groups.values())

    def _with_advantages(self, rollouts: Sequence[Rollout]) -> list[Entry[_Held]]:
        for rollout in rollouts:
            if why := unsound(rollout):
                raise RecordError(f"rollout {rollout.uid!r}: {why}")
        rewards = [rollout.reward for rollout in rollouts]
        if not rewards or (self._drop_zero_variance and min(rewards) == max(rewards)):
            self._leave_out(zero_variance=len(rewards))
            return []
        advantages = [float(value) for value in self.loss_module.compute_advantages(rollouts)]
        if len(advantages) != len(rollouts) or not np.isfinite(advantages).all():
            raise RecordError(
                f"the loss module gives {len(advantages)} advantages, {advantages[:8]}, for a group of {len(rollouts)}"
            )
        return [
            Entry(_Held(rollout, advantage), rollout.environment, of.weight_step, of.timestamp)
            for rollout, advantage in zip(rollouts, advantages, strict=True)
            for of in (rollout.metadata,)
        ]

    def _put_batch(self, batch: TrainingBatch, read: ReadBatch | None) -> int:
        entries = [
            Entry(
                _Held(rollout, advantage),
                rollout.environment,
                rollout.metadata.weight_step,
                rollout.metadata.timestamp,
            )
            for rollout, advantage in rollouts_of(batch, self._weight_step_of)
        ]
        with self._lock:
            if read is not None:
                if read.index_offset < self._position.get(0, 0):
                    return 0
                self._position[0] = read.position
            self._stream_s = max(self._stream_s, batch.cut_ms / 1000)
            self._batches_added += self._any_fresh((entry.weight_step, entry.timestamp) for entry in entries)
            return self._put(entries)

    def _any_fresh(self, stamps: Iterable[tuple[int, float]]) -> bool:
        """Whether a batch of rollouts of these weight steps and times is not stale as a whole."""
        now = self._time()
        return any(not self._rules.stale_code(step, at, self._step, now) for step, at in stamps)

    def _count(self, left: Sequence[Left[_Held]]) -> int:
        """Count rollouts that left the shelf, by reason; how many they are."""
        self._leave_out(**Counter(rollout.code for rollout in left))
        return len(left)

    def _leave_out(self, **reasons: int) -> None:
        counts = {reason: count for reason, count in reasons.items() if count}
        if counts:
            with self._lock:
                self._left_out.update(counts)
            event(logger, "rollouts_left_out", **counts)

    def _put(self, entries: list[Entry[_Held]]) -> int:
        with self._lock:
            left = self._shelf.add(entries, self._step, self._time())
            self._count(left)
            new = {id(entry) for entry in entries}
            return len(entries) - sum(id(gone.entry) in new for gone in left)
