"""Rows `learn` and `feed`: what it costs a learner that its batches come from Kafka.

`learn` follows, fetches and packs batches while it trains; its baseline trains the same steps on data packed before.
`feed` only gets steps ready; its baseline reads the bytes of the same batches and decodes none.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import psutil

from rollstream.consumers.batch_reader import IndexReader
from rollstream.consumers.grouping.core.effects import CORE_VERSION
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.reproducibility import prepare_environment
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.records import TrainingBatch
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.rl_examples import batch_digest
from tests.bench.measure import Row, Settings, Stopwatch, Timing, interleaved
from tests.bench.runs import prepared
from tests.support.batches import random_batch, send_batches

_ROWS = 16
"""Rollouts of a batch."""
_PER_STEP = 64
_SPARE_S = 120.0


def learn_config(settings: Settings) -> LearnerConfig:
    """A learner whose steps take some tenths of a second on one core: rollouts of about 64 tokens."""
    return LearnerConfig(
        rollouts_per_step=_PER_STEP,
        max_steps=max(2, settings.rollouts // 4 // _PER_STEP),
        max_policy_lag=1_000_000,
        microbatch_rows=8,
        sequence_length=128,
        length_buckets=(64,),
        threads=1,
    )


def feed_config(settings: Settings) -> LearnerConfig:
    """A learner of rollouts as long as those of the other rows; it makes no step."""
    return LearnerConfig(
        rollouts_per_step=_PER_STEP,
        max_steps=max(4, settings.rollouts // _PER_STEP),
        max_policy_lag=1_000_000,
        microbatch_rows=16,
        sequence_length=settings.tokens + 16,
        threads=1,
    )


def measure_learn(settings: Settings) -> Row:
    """Train on batches from Kafka, and on the same batches in memory."""
    config = learn_config(settings)
    prepare_environment(config)
    import jax

    from rollstream.consumers.learner.training.train_step import TrainStep

    train_step = TrainStep(config)
    start = train_step.initial_state()
    train_step.warm_up(start)
    with _run(settings, config, "learn", (16, 112)) as run:
        with _supply(settings, config, run) as supply:
            steps = [_next(supply) for _ in range(config.max_steps)]
        rollouts = sum(use.rows for step in steps for use in step.plan.uses)
        waits: list[float] = []
        memory: list[float] = []

        def ours() -> Timing:
            state, waited = jax.tree.map(jax.numpy.copy, start), 0.0
            with _supply(settings, config, run) as supply:
                watch = Stopwatch()
                for number in range(config.max_steps):
                    began = time.perf_counter()
                    loaded = _next(supply)
                    waited += time.perf_counter() - began if number else 0.0
                    state, _metrics = train_step.train(state, loaded.packed)
                    memory.append(psutil.Process().memory_info().rss / 2**20)
                timing = watch.timing(rollouts)
            waits.append(waited / timing.seconds)
            return timing

        def raw() -> Timing:
            state = jax.tree.map(jax.numpy.copy, start)
            watch = Stopwatch()
            for step in steps:
                state, _metrics = train_step.train(state, step.packed)
            return watch.timing(rollouts)

        compiled = train_step.compilations
        from_kafka, in_memory = interleaved(settings.repetitions, ours, raw)
        if train_step.compilations != compiled:
            raise RuntimeError(f"{train_step.compilations - compiled} compilations in steady state")
    tokens = sum(step.packed.tokens for step in steps)
    return Row(
        name="learn",
        what="train on batches followed, fetched and packed while the step before is made",
        baseline="the same steps on data packed before",
        size_bytes=0,
        ours=from_kafka,
        raw=in_memory,
        figures={
            "tokens/s": tokens / rollouts * sorted(timing.rate for timing in from_kafka)[len(from_kafka) // 2],
            "packing efficiency": 1.0 - sum(step.packed.padding_fraction for step in steps) / len(steps),
            "share of time waiting for batches": max(waits),
            "most memory, MiB": max(memory),
            "of it grown after the first repetition, MiB": max(memory) - max(memory[: config.max_steps]),
        },
    )


def measure_feed(settings: Settings) -> Row:
    """Get steps ready for the device as fast as they come."""
    config = feed_config(settings)
    prepare_environment(config)
    import jax

    from rollstream.consumers.learner.training.train_step import TrainStep

    place = TrainStep(config).place
    with _run(settings, config, "feed", (settings.tokens // 2, settings.tokens)) as run:
        sizes: list[float] = []
        tokens: list[float] = []

        def ours() -> Timing:
            rollouts = tokens_seen = 0
            with _supply(settings, config, run, place) as supply:
                # Neither side measures connections and first use.
                _next(supply)
                watch = Stopwatch()
                for _ in range(config.max_steps - 1):
                    loaded = _next(supply)
                    jax.block_until_ready([update.microbatches for update in loaded.placed.updates])
                    rollouts += sum(use.rows for use in loaded.plan.uses)
                    tokens_seen += loaded.packed.tokens
                timing = watch.timing(rollouts)
            tokens.append(tokens_seen / rollouts)
            return timing

        def raw() -> Timing:
            timing, size = _read_all(settings, run, config.max_steps * _PER_STEP // _ROWS)
            sizes.append(size / timing.rollouts)
            return timing

        fed, read = interleaved(settings.repetitions, ours, raw)
    return Row(
        name="feed",
        what="from the index to arrays on the device: fetch, check digests, pack, put",
        baseline="read the bytes of the same batches and look at none",
        size_bytes=round(sizes[0]),
        tokens=tokens[0],
        ours=fed,
        raw=read,
    )


@contextmanager
def _run(settings: Settings, config: LearnerConfig, name: str, answers: tuple[int, int]) -> Iterator[str]:
    """A run whose log holds the batches of every step."""
    batches = config.max_steps * _PER_STEP // _ROWS
    made = [cut_batch(number, partition=number % settings.partitions, answers=answers) for number in range(batches)]
    with prepared(settings, name) as run:
        send_batches(settings.kafka, run, made)
        yield run


def cut_batch(number: int, *, rows: int = _ROWS, partition: int = 0, answers: tuple[int, int]) -> TrainingBatch:
    """A batch as grouping cuts it by default: one advantage for all positions of a row, and stamps."""
    batch = random_batch(number, rows=rows, partition=partition, answers=answers)
    advantages = (batch.rewards - batch.rewards.mean()) / batch.rewards.std()
    batch = replace(
        batch,
        core_version=CORE_VERSION,
        advantages=np.repeat(advantages, np.diff(batch.splits)).astype("<f4"),
        weight_steps=np.zeros(len(batch), "<i8"),
        timestamps=np.ones(len(batch), "<f8"),
    )
    return replace(batch, digest=batch_digest(batch))


@contextmanager
def _supply(
    settings: Settings, config: LearnerConfig, run: str, place: Callable[[Any], Any] | None = None
) -> Iterator[Any]:
    """The steps of a run, as a learner gets them."""
    from rollstream.consumers.learner.input.batch_selection import BatchSelection
    from rollstream.consumers.learner.input.step_loader import BatchLoader, StepLoader
    from rollstream.consumers.learner.parallel.team import Alone

    class BenchSource:
        def __init__(self, stack: ExitStack) -> None:
            loader = stack.enter_context(closing(BatchLoader(config, settings.kafka, run)))
            self.load: Callable[[Any], Any] = loader.load
            self._selection = BatchSelection(
                stack.enter_context(IndexReader(settings.kafka, run)),
                rollouts_per_step=config.rollouts_per_step,
                max_policy_lag=config.max_policy_lag,
                read_version_steps=lambda _version: {0: 0},
                skipped=lambda _uses: None,
            )

        def plan(self, step: int, stop: threading.Event) -> Any:
            return self._selection.plan(step, stop)

        def close(self) -> None:
            """Do nothing: the stack closes the readers."""

    with ExitStack() as stack:
        source, stop = BenchSource(stack), threading.Event()
        yield stack.enter_context(StepLoader(source, Alone(), 1, config.max_steps, stop, place))


def _next(supply: Any) -> Any:
    """The next step; RuntimeError when there is none."""
    loaded = supply.next(_SPARE_S)
    if loaded is None:
        raise RuntimeError(f"no step was ready within {_SPARE_S:g} s")
    return loaded


def _read_all(settings: Settings, run: str, batches: int) -> tuple[Timing, int]:
    """Read a run's batches; return the timing and the bytes of those after the first."""
    topic = topic_name(run, "batches")
    with Reader(settings.kafka, isolation="read_uncommitted") as reader:
        reader.assign({(topic, partition): 0 for partition in range(settings.partitions)})
        received = size = 0
        watch: Stopwatch | None = None
        deadline = time.monotonic() + _SPARE_S
        while received < batches:
            records = reader.poll(1 if watch is None else 100, 0.05).records
            received += len(records)
            if watch is not None:
                size += sum(len(record.value or b"") for record in records)
            elif records:
                watch = Stopwatch()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{received} of {batches} batches came within {_SPARE_S:g} s")
        assert watch is not None
        return watch.timing((received - 1) * _ROWS), size
