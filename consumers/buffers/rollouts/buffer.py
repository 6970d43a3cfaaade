"""The rollout buffer: fresh rollouts of several environments, drawn by recency and retired after a number of draws.

It is filled by hand, or from the log, whose batches have advantages. The index of batches is one sequence, so two
buffers of the same seed that are filled to the same position and drawn from equally often have the same content and
draws. Adding, drawing and saving are thread-safe.
"""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rollstream.consumers.batch_reader import ReadBatch
from rollstream.consumers.buffers.rollouts.rows import RLLossModule, RLOOLoss, rollouts_of, unsound
from rollstream.consumers.buffers.rollouts.shelf import Removal, Shelf, ShelfEntry, ShelfRules
from rollstream.consumers.buffers.rollouts.snapshot_file import (
    BufferSnapshot,
    SnapshotRollout,
    load_rollouts,
    save_rollouts,
)
from rollstream.consumers.buffers.storage.seeded_draws import generator_at
from rollstream.topics.errors import ConfigurationError, DeadlineExceeded, RecordError, RollstreamError
from rollstream.topics.logs import event
from rollstream.topics.records import Float32, Rollout, RolloutBatch, TrainingBatch
from rollstream.topics.wire.rollout_batch_upcast import upcast

_LEFT_OUT = "left_out."
logger = logging.getLogger(__name__)
Batch = RolloutBatch | Sequence[Sequence[Rollout]]
"""A batch added by hand: a RolloutBatch record, which is an older form, or groups of rollouts."""


@dataclass(frozen=True)
class RolloutWithCount:
    """One rollout of a sample."""

    rollout: Rollout
    advantage: float | Float32
    """One number, or float32 [T] for a rollout from the log whose tokens have different advantages."""
    usage_count: int
    """Number of draws, including this one."""
    weight_step: int
    """Learner step of the weights that sampled the rollout."""


@dataclass(frozen=True, kw_only=True)
class ReplayBufferConfig:
    """Settings of a rollout buffer."""

    capacity: int
    """Maximum number of rollouts of one environment; the newest stay."""
    alpha: float
    """Exponent of recency; 0 draws old and new rollouts alike."""
    max_samples: int
    """Number of draws after which a rollout is retired; negative: no limit."""
    max_rollout_step_delay: int
    """Maximum age of a rollout's weights in steps; negative: no limit."""
    max_rollout_timestamp_delay: float = 3600.0
    """Age in seconds from which a rollout is too old; negative: no limit."""


@dataclass(frozen=True, kw_only=True)
class TrainParams:
    """Settings of a training run, with the names in Marin's documentation."""

    optimizer: Any = None
    """Optimizer of the trainer; the buffer does not use it."""
    rl_loss: RLLossModule = field(default_factory=RLOOLoss)
    """Loss module that computes the advantages of groups."""
    max_samples_per_rollout: int = 1
    """Number of times a rollout is trained on; negative: no limit."""
    max_rollout_delay: int = 1
    """Maximum age of a rollout's weights in steps; negative: no limit."""
    max_rollout_timestamp_delay: float = 3600.0
    """Age in seconds from which a rollout is too old; negative: no limit."""
    replay_buffer_capacity: int = 4096
    """Maximum number of rollouts of one environment."""
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


class SequentialReader(Protocol):
    """A source of batches to fill a buffer from, such as a BatchReader."""

    def poll(self, timeout_s: float = 1.0) -> ReadBatch | None:
        """Return the next batch, or None if there is none in time."""


_Held = tuple[Rollout, float | Float32]
"""A rollout and its advantage."""


class RolloutReplayBuffer:
    """Fresh rollouts, drawn by recency. `sample` draws for all `total_processes` and returns the share of `process_id`.

    `clock` returns the time in seconds. Without it, a buffer filled from the log uses the time of the newest batch it
    has read, and any other buffer uses the system clock. `weight_step_of` returns the learner step of a policy version,
    for rollouts from the log; by default each step publishes one version.
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
        clock: Callable[[], float] | None = None,
        weight_step_of: Callable[[int], int] = lambda version: version,
    ) -> None:
        """Create an empty buffer. Raises ConfigurationError for invalid settings."""
        if local_batch_size < 1 or not 0 <= process_id < total_processes:
            raise ConfigurationError(
                f"local_batch_size {local_batch_size}, process {process_id} of {total_processes}: give at least 1 "
                "rollout for each process, and a process_id from 0 to one below total_processes"
            )
        self.local_batch_size = local_batch_size
        self.total_processes = total_processes
        self.process_id = process_id
        self.loss_module = loss_module or RLOOLoss()
        self._drop_zero_variance = drop_zero_variance
        self._clock = clock
        self._weight_step_of = weight_step_of
        self._lock = threading.RLock()
        self._rules = ShelfRules(
            capacity=capacity,
            alpha=alpha,
            max_samples=max_samples,
            max_rollout_step_delay=max_rollout_step_delay,
            max_rollout_timestamp_delay=max_rollout_timestamp_delay,
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
        """Create a buffer with these settings; `others` are further arguments of the constructor."""
        return cls(
            capacity=config.capacity,
            alpha=config.alpha,
            max_samples=config.max_samples,
            max_rollout_step_delay=config.max_rollout_step_delay,
            max_rollout_timestamp_delay=config.max_rollout_timestamp_delay,
            local_batch_size=local_batch_size,
            **others,
        )

    # ------------------------------------------------------------------ adding

    def set_current_step(self, step: int) -> int:
        """Set the learner step, and return the number of rollouts removed because they are no longer fresh."""
        with self._lock:
            self._step = step
            return self._count(self._shelf.refresh(step, self._time()))

    def add(self, rollouts: Sequence[Rollout], /) -> int:
        """Add one group, whose rewards are compared, and return how many of its rollouts were kept.

        The metadata of each rollout decide whether it is fresh, and its environment decides where it counts. Rollouts
        that are not kept are counted in `stats` and logged. Raises RecordError if a rollout is invalid or its advantage
        is not finite; then no rollout of the group is added.
        """
        try:
            entries = self._with_advantages(rollouts)
        except RecordError:
            self._leave_out(["unsound"] * len(rollouts))
            raise
        self._leave_out(["zero_variance"] * (len(rollouts) - len(entries)))
        return self._put(entries)

    def add_batches(self, new_batches: Iterable[Batch]) -> int:
        """Add batches of groups, and return how many of their rollouts were kept; the others are counted and logged.

        Raises RecordError naming the problems of invalid batches, after all other batches were added.
        """
        held, wrong = 0, []
        for number, batch in enumerate(new_batches):
            groups: list[list[Rollout]] = []
            try:
                groups = self._groups_of(batch)
                entries = [entry for group in groups for entry in self._with_advantages(group)]
            except (RollstreamError, AttributeError, TypeError, ValueError) as error:
                wrong.append(f"batch {number}: {error}")
                self._leave_out(["unsound"] * sum(map(len, groups)))
                continue
            self._leave_out(["zero_variance"] * (sum(map(len, groups)) - len(entries)))
            with self._lock:
                stamps = (rollout.metadata for group in groups for rollout in group)
                self._batches_added += self._any_fresh((stamp.weight_step, stamp.timestamp) for stamp in stamps)
                held += self._put(entries)
        if wrong:
            raise RecordError(f"{'; '.join(wrong)}. All other batches were added; omit or correct these")
        return held

    def add_training_batch(self, batch: TrainingBatch) -> int:
        """Add the rows of a batch of the log, with their advantages, and return how many were kept."""
        return self._put_batch(batch, None)

    def add_read(self, read: ReadBatch) -> int:
        """Add a batch from a BatchReader; skip a batch before `position`, because the buffer already has it."""
        return self._put_batch(read.batch, read)

    def fill(self, reader: SequentialReader, position: int, *, timeout_s: float = 60.0) -> None:
        """Read batches up to a position of the index, for example to rebuild a buffer whose file was lost.

        Raises DeadlineExceeded if the reader returns nothing for `timeout_s`.
        """
        while self.position.get(0, 0) < position:
            read = reader.poll(timeout_s)
            if read is None:
                raise DeadlineExceeded(
                    f"the index did not reach position {position} within {timeout_s:g} s and is at "
                    f"{self.position.get(0, 0)}; give a position that was read before"
                )
            self.add_read(read)

    # ------------------------------------------------------------------ drawing

    def sample(self, batch_size: int | None = None) -> list[RolloutWithCount] | None:
        """Draw `batch_size` rollouts for this process, by default `local_batch_size`; None if the buffer has fewer than
        that for each process.

        Processes with the same content, seed and number of draws get disjoint shares of one draw.
        """
        count = self.local_batch_size if batch_size is None else batch_size
        if count < 1:
            raise ConfigurationError(f"a sample of {count} rollouts; draw at least 1")
        with self._lock:
            self._count(self._shelf.refresh(self._step, self._time()))
            if len(self._shelf) < count * self.total_processes:
                return None
            drawn = self._shelf.draw(count * self.total_processes, generator_at(self._seed, self._draws))
            assert drawn is not None, "as many are held"
            self._draws += 1
            self._batches_sampled += 1
            mine = drawn[self.process_id * count : (self.process_id + 1) * count]
            return [RolloutWithCount(*entry.item, entry.usage_count, entry.weight_step) for entry in mine]

    def size(self) -> int:
        """Number of rollouts held."""
        with self._lock:
            return len(self._shelf)

    def stats(self) -> dict[str, Any]:
        """Return total_size, env_sizes, num_environments, total_batches_added (batches with a fresh rollout),
        total_batches_sampled, and left_out: numbers of rollouts that were refused, or removed before they were used up,
        by reason (old_step, too_old, capacity, used_up, zero_variance, unsound)."""
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
        """Next offset of batch-index, as its partition 0; empty if no batch is from the log."""
        with self._lock:
            return dict(self._position)

    # ------------------------------------------------------------------ on disk

    def save(self, directory: Path, /) -> None:
        """Save everything in one file, atomically. If it raises StoreError, an earlier file is unchanged."""
        with self._lock:
            snapshot = BufferSnapshot(
                rollouts=tuple(
                    SnapshotRollout(*e.item, e.usage_count, e.weight_step, e.timestamp) for e in self._shelf.entries()
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
        save_rollouts(Path(directory), snapshot)

    def load(self, directory: Path, /) -> None:
        """Replace the content and the seed by a saved content and seed; settings stay. Raises StoreError if the file is
        missing or damaged."""
        snapshot = load_rollouts(Path(directory))
        shelf: Shelf[_Held] = Shelf(self._rules)
        entries: list[ShelfEntry[_Held]] = [
            ShelfEntry((k.rollout, k.advantage), k.rollout.environment, k.weight_step, k.timestamp, k.usage_count)
            for k in snapshot.rollouts
        ]
        with self._lock:
            self._seed, self._draws = snapshot.counts["seed"], snapshot.counts["draws"]
            self._batches_offered = snapshot.counts["batches_offered"]
            self._batches_added = snapshot.counts["batches_added"]
            self._batches_sampled = snapshot.counts["batches_sampled"]
            self._left_out = Counter(
                {name.removeprefix(_LEFT_OUT): n for name, n in snapshot.counts.items() if name.startswith(_LEFT_OUT)}
            )
            self._step, self._stream_s = snapshot.counts["step"], snapshot.stream_s
            self._position = dict(snapshot.position)
            self._shelf = shelf
            self._count(shelf.add(entries, self._step, self._time()))

    # ------------------------------------------------------------------ helpers

    def _time(self) -> float:
        if self._clock is not None:
            return self._clock()
        return self._stream_s if self._position else time.time()

    def _groups_of(self, batch: Batch) -> list[list[Rollout]]:
        """Return the groups of a batch; rollouts of a RolloutBatch inherit its metadata."""
        if not isinstance(batch, RolloutBatch):
            return [list(group) for group in batch]
        with self._lock:
            place = f"memory#{self._batches_offered}"
            self._batches_offered += 1
        upcasted = upcast(batch, place)
        if upcasted.refused:
            raise RecordError(f"rollout {upcasted.refused[0].place}: {upcasted.refused[0].reason}")
        groups: dict[tuple[str, str, str], list[Rollout]] = {}
        for rollout in upcasted.rollouts:
            groups.setdefault((rollout.group_id, rollout.environment, rollout.example_id), []).append(rollout)
        return list(groups.values())

    def _with_advantages(self, rollouts: Sequence[Rollout]) -> list[ShelfEntry[_Held]]:
        """Return an entry for each rollout of a group, or none if its rewards have no variance and such groups are
        dropped."""
        for rollout in rollouts:
            if problem := unsound(rollout):
                raise RecordError(f"rollout {rollout.uid!r}: {problem}")
        rewards = [rollout.reward for rollout in rollouts]
        if not rewards or (self._drop_zero_variance and min(rewards) == max(rewards)):
            return []
        advantages = list(map(float, self.loss_module.compute_advantages(rollouts)))
        if len(advantages) != len(rollouts) or not all(map(math.isfinite, advantages)):
            raise RecordError(
                f"the loss module gave {len(advantages)} advantages, {advantages[:8]}, for a group of {len(rollouts)}"
                "; it must return one finite number for each rollout"
            )
        return _entries_of(zip(rollouts, advantages, strict=True))

    def _put_batch(self, batch: TrainingBatch, read: ReadBatch | None) -> int:
        entries = _entries_of(rollouts_of(batch, self._weight_step_of))
        with self._lock:
            if read is not None:
                if read.index_offset < self._position.get(0, 0):
                    return 0
                self._position[0] = read.position
            self._stream_s = max(self._stream_s, batch.cut_ms / 1000)
            self._batches_added += self._any_fresh((entry.weight_step, entry.timestamp) for entry in entries)
            return self._put(entries)

    def _any_fresh(self, stamps: Iterable[tuple[int, float]]) -> bool:
        """Whether any rollout of these weight steps and times is fresh."""
        now = self._time()
        return any(not self._rules.stale_code(step, at, self._step, now) for step, at in stamps)

    def _count(self, left: Sequence[Removal[_Held]]) -> int:
        """Count rollouts that left the shelf, by reason, and return their number."""
        return self._leave_out([rollout.code for rollout in left])

    def _leave_out(self, reasons: list[str]) -> int:
        if reasons:
            counts = {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}
            with self._lock:
                for reason, count in counts.items():
                    self._left_out[reason] += count
            event(logger, "rollouts_left_out", **counts)
        return len(reasons)

    def _put(self, entries: list[ShelfEntry[_Held]]) -> int:
        with self._lock:
            left = self._shelf.add(entries, self._step, self._time())
            if not left:
                return len(entries)
            self._count(left)
            new = set(map(id, entries))
            return len(entries) - sum(id(gone.entry) in new for gone in left)


def _entries_of(held: Iterable[_Held]) -> list[ShelfEntry[_Held]]:
    return [
        ShelfEntry(pair, pair[0].environment, pair[0].metadata.weight_step, pair[0].metadata.timestamp) for pair in held
    ]
