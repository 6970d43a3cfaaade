"""Loads steps one step ahead: the lead plans each step, and every process fetches and packs it.

A plan is final: a step that one process gets is delivered to all processes.
"""

import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import msgspec
import numpy as np

from rollstream.consumers.array_fetcher import ArrayFetcher
from rollstream.consumers.batch_reader import BatchFetcher, IndexedBatch, IndexReader
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.input.batch_selection import (
    BatchSelection,
    StepPlan,
    StepTotals,
    chosen_rows,
    index_between,
    share_of,
    totals_of,
    unfit_uses,
)
from rollstream.consumers.learner.input.followed_topics import Exclusions, PublisherSteps
from rollstream.consumers.learner.input.prefetch import Prefetcher
from rollstream.consumers.learner.input.row_checks import replayed_arrays, rows_without_arrays
from rollstream.consumers.learner.parallel.team import Team
from rollstream.consumers.learner.records.step_recorder import StepRecorder
from rollstream.consumers.learner.training.packing import PackedStep, TrainingSequence, pack_for, sequences_of
from rollstream.consumers.learner.training.train_step import PlacedStep
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import AccessDenied, DeadlineExceeded, RollstreamError, StateRefused, TopicError
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.logs import event
from rollstream.topics.records import BatchIndexEntry, BatchUse, TrainingBatch
from rollstream.topics.wire.catalogue import topic_name

logger = logging.getLogger(__name__)
_KEPT_BYTES = 256 * 1024 * 1024
_LISTEN_S = 1.0
"""Seconds after which a process that waits for a plan checks whether the plan is still wanted."""


@dataclass(frozen=True, kw_only=True)
class LoadedStep:
    """One step, ready to train on."""

    plan: StepPlan
    """Batches of the step, the same in every process."""
    packed: PackedStep
    """The whole step, the same in every process."""
    outcomes: StepTotals
    """Sums over the packed rollouts."""
    load_s: float
    """Seconds spent fetching, packing and placing the step."""
    placed: PlacedStep | None = None
    """This process's rows on its devices, if they were placed ahead."""


class StepSource(Protocol):
    """Source of rollouts: the lead plans steps, and every process loads what it needs."""

    skips: tuple[int, tuple[BatchUse, ...]] | None
    """Number of a step that waits for rollouts, and its skipped batches, which are to be recorded before the step."""

    def plan(self, step: int, stop: threading.Event) -> StepPlan | None:
        """Plan of the step after `step` steps; None if `stop` is set first, or if no step follows."""

    def load(self, plan: StepPlan) -> LoadedStep:
        """Fetch and pack what this process needs."""

    def close(self) -> None:
        """Close the consumers."""


class BatchLoader:
    """Fetches and packs steps for one process."""

    def __init__(self, config: LearnerConfig, kafka: KafkaConfig, run: str, process: int = 0) -> None:
        self._config = config
        self._process = process
        self._fetcher = BatchFetcher(kafka, config.input_run or run)
        self._arrays = ArrayFetcher(kafka, config.input_run or run, replayed_arrays(config))
        self._kept: OrderedDict[int, TrainingBatch] = OrderedDict()
        self._kept_bytes = 0

    def fetch(self, read: IndexedBatch) -> TrainingBatch:
        """Fetch a batch through a cache of up to 256 MiB. Raises the errors of BatchFetcher.fetch."""
        batch = self._kept.get(read.index_offset)
        if batch is None:
            batch = self._fetch(read)
            self._kept[read.index_offset] = batch
            self._kept_bytes += _size(batch)
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= _size(self._kept.popitem(last=False)[1])
        self._kept.move_to_end(read.index_offset)
        return batch

    def _fetch(self, read: IndexedBatch, *, check_digest: bool = True) -> TrainingBatch:
        """Fetch a batch, and its stored arrays that the model needs, unless they are missing."""
        return self._arrays.fetch(read.entry, self._fetcher.fetch(read.entry, check_digest=check_digest)).batch

    def load(self, plan: StepPlan) -> LoadedStep:
        """Fetch, leave out rows that cannot be trained on, and pack.

        Raises the errors of BatchFetcher.fetch and ArrayFetcher.fetch, and those of `packed_step`.
        """
        began, config = time.monotonic(), self._config
        own = share_of(plan.trained, self._process, config.processes)
        checked = {read.index_offset for read in own}
        batches: dict[int, TrainingBatch] = {}
        for read in plan.trained:
            if plan.drawn:
                batches[read.index_offset] = self.fetch(read)
                continue
            # One process checks each batch; if the check fails, all processes end.
            mine = read.index_offset in checked
            batches[read.index_offset] = self._fetch(read, check_digest=mine)
        packed, outcomes = packed_step(config, plan, batches)
        return LoadedStep(plan=plan, packed=packed, outcomes=outcomes, load_s=time.monotonic() - began)

    def close(self) -> None:
        """Close the consumer."""
        self._fetcher.close()


def packed_step(
    config: LearnerConfig, plan: StepPlan, batches: Mapping[int, TrainingBatch]
) -> tuple[PackedStep, StepTotals]:
    """Pack the batches of a plan, and return the packed step with its totals.

    `batches` maps index offsets to all batches of the plan. The result depends on the arguments only. Rows that cannot
    be trained on are left out. Raises ConfigurationError if a sequence cannot be packed, and StateRefused if rows that
    are on record as trained lack an array.
    """
    # Rows left out keep their numbers, so that the other rows stay in the same minibatches.
    counts = [
        read.entry.rollouts if rows is None or not plan.drawn else len(rows)
        for read, rows in zip(plan.trained, plan.rows_of_batches, strict=True)
    ]
    starts = itertools.accumulate(counts, initial=0)
    trained: list[TrainingBatch] = []
    sequences: list[TrainingSequence] = []
    numbers: list[int] = []
    left_out: list[BatchUse] = []
    for read, rows, start in zip(plan.trained, plan.rows_of_batches, starts, strict=False):
        batch = batches[read.index_offset]
        if not plan.checked:
            unfit = unfit_uses(read, batch, config)
            left_out += unfit
            gone = {number for use in unfit for number in use.row_numbers or range(use.rows)}
            rows = tuple(row for row in range(len(batch)) if row not in gone) if gone else None
        if rows is not None:
            batch = chosen_rows(batch, rows)
        if lacking := np.flatnonzero(rows_without_arrays(batch, config)).tolist():
            raise StateRefused(
                f"batch {read.entry.batch_id} is to be trained on as before, but a stored array of uid "
                f"{batch.uids[lacking[0]]} is missing or damaged (the log names it as array_missing): put the object "
                "back into kafka.arrays.url"
            )
        trained.append(batch)
        sequences += sequences_of(batch)
        in_step = rows if rows is not None and not plan.drawn else range(len(batch))
        numbers += (start + number for number in in_step)
    packed = pack_for(config, sequences, numbers=numbers, rollouts=sum(counts))
    return packed, totals_of(trained, tuple(left_out))


def _size(batch: TrainingBatch) -> int:
    return sum(value.nbytes for value in vars(batch).values() if isinstance(value, np.ndarray))


class IndexEnd:
    """Tells whether the index of a run will have no entry from an offset on."""

    def __init__(self, kafka: KafkaConfig, run: str, drained: Callable[[], bool]) -> None:
        self._kafka, self._topic, self._drained = kafka, topic_name(run, "batch-index"), drained

    def __call__(self, position: int) -> bool:
        """Whether no entry follows; False while brokers do not answer. Reads the log only once the run is drained.

        Records that are no entries do not count: no reader of the index gets beyond them at its end.
        """
        if not self._drained():
            return False
        try:
            records = read_to_end(self._kafka, self._topic, start={0: position})
            # The reader of the index logs what it skips.
            return not any(SkippedRecords(logged=False).records(BatchIndexEntry, records))
        except RollstreamError:
            return False


class StepSelection(Protocol):
    """Selects the rollouts that a step trains on."""

    def plan(self, step: int, stop: threading.Event) -> StepPlan | None:
        """Plan of the step after `step` steps; None if `stop` is set first, or if no step follows."""


S = TypeVar("S", bound=StepSelection)


class LogSource(ABC, Generic[S]):
    """Base of sources that read the log: the lead follows the index, and every process loads what it needs."""

    def __init__(
        self,
        config: LearnerConfig,
        kafka: KafkaConfig,
        run: str,
        position: int,
        process: int = 0,
        recorder: StepRecorder | None = None,
        drained: Callable[[], bool] = lambda: False,
    ) -> None:
        """With a `recorder`, which only the lead has, read the index of the input run from `position` on. `drained`
        tells whether the index gets no further entry."""
        self._kafka = kafka
        self._stack = ExitStack()
        self._loader = self._stack.enter_context(closing(BatchLoader(config, kafka, run, process)))
        self._step = -1
        self.skips: tuple[int, tuple[BatchUse, ...]] | None = None
        """See `StepSource.skips`."""
        if recorder is not None:
            input_run = config.input_run or run
            self._nothing_after = IndexEnd(kafka, input_run, drained)
            index = self._stack.enter_context(IndexReader(kafka, input_run, position))
            exclusions = self._stack.enter_context(Exclusions(kafka, input_run))
            self._selection = self._new_selection(config, index, exclusions, recorder)

    @abstractmethod
    def _new_selection(
        self, config: LearnerConfig, index: IndexReader, exclusions: Exclusions, recorder: StepRecorder
    ) -> S:
        """Return the lead's selection, which calls `_skipped` with skipped batches whose step waits for rollouts."""

    def plan(self, step: int, stop: threading.Event) -> StepPlan | None:
        """Plan of the step after `step` steps; None if `stop` is set first, or if no step follows."""
        self._step = step
        return self._selection.plan(step, stop)

    def load(self, plan: StepPlan) -> LoadedStep:
        """Fetch and pack what this process needs."""
        return self._loader.load(plan)

    def close(self) -> None:
        """Close the consumers."""
        self._stack.close()

    def _skipped(self, uses: tuple[BatchUse, ...]) -> None:
        self.skips = (self._step + 1, uses)


class BatchSource(LogSource[BatchSelection]):
    """The source `batches`: whole batches of the input run, in index order, with enough rollouts."""

    def _new_selection(
        self, config: LearnerConfig, index: IndexReader, exclusions: Exclusions, recorder: StepRecorder
    ) -> BatchSelection:
        publisher_step, past_versions = None, set[int]()
        if not recorder.publishes_input_versions:
            publisher_step = self._publisher_step(config.input_run)
            if publisher_step(index.position) is None:
                past = index_between(self._kafka, config.input_run, 0, index.position)
                past_versions = {entry.highest_version for entry in past.values()}
        return BatchSelection(
            index,
            rollouts_per_step=config.rollouts_per_step,
            max_policy_lag=config.max_policy_lag,
            read_version_steps=recorder.version_steps,
            skipped=self._skipped,
            decided=recorder.decided,
            excluded=exclusions.reason,
            last_of=recorder.last_batch,
            nothing_after=self._nothing_after,
            publisher_step=publisher_step,
            past_versions=past_versions,
        )

    def _publisher_step(self, run: str) -> Callable[[int], int | None]:
        try:
            return self._stack.enter_context(PublisherSteps(self._kafka, run)).completed_at
        except (AccessDenied, TopicError) as error:
            event(logger, "publisher_steps_unreadable", level=logging.WARNING, run=run, error=str(error))
            return lambda _index_offset: None


class StepLoader(Closing):
    """Loads the steps of a learner in order, each while the previous step trains."""

    def __init__(
        self,
        source: StepSource,
        team: Team,
        first: int,
        last: int,
        stop: threading.Event,
        place: Callable[[PackedStep], PlacedStep] | None = None,
        last_wanted: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Load steps `first` to `last`. The lead plans no further step once `stop` is set, and no step after the one
        that `last_wanted` returns; it calls `last_wanted` repeatedly while it waits for a step to fill up.

        `place` puts packed arrays on the devices.
        """
        self._source = source
        self._team = team
        self._stop = stop
        self._place = place
        self._last_wanted = last_wanted
        self._prefetcher = Prefetcher(self._make, first, last)

    def next(self, timeout_s: float) -> LoadedStep | None:
        """The next step; None if it is not ready in time, or if there is no further step (see `ended`).

        Raises errors of reading and packing, and TeamLost.
        """
        return self._prefetcher.next(timeout_s)

    @property
    def ended(self) -> bool:
        """Whether there is no further step."""
        return self._prefetcher.ended

    def close(self) -> None:
        """Stop loading; the source stays open."""
        self._prefetcher.close()

    def _make(self, step: int, unwanted: threading.Event) -> LoadedStep | None:
        """Load step number `step`."""
        plan = self._plan(step, unwanted)
        if plan is None:
            return None
        loaded = self._source.load(plan)
        if self._place is None:
            return loaded
        began = time.monotonic()
        placed = self._place(loaded.packed)
        return replace(loaded, placed=placed, load_s=loaded.load_s + time.monotonic() - began)

    def _plan(self, step: int, unwanted: threading.Event) -> StepPlan | None:
        key = f"step/{step}"
        if self._team.process:
            return self._received(key, unwanted)
        beyond = _Beyond(step, self._last_wanted)
        plan = None if beyond.is_set() else self._source.plan(step - 1, _Either(self._stop, unwanted, beyond))
        self._team.publish(key, msgspec.json.encode(plan))
        return plan

    def _received(self, key: str, unwanted: threading.Event) -> StepPlan | None:
        """Wait for the lead's plan; None once it is unwanted, because a lead that waits for this process sends none."""
        while not unwanted.is_set():
            with suppress(DeadlineExceeded):
                return msgspec.json.decode(self._team.receive(key, _LISTEN_S), type=StepPlan | None)
        return None


class _Either(threading.Event):
    """An event that is set when any of several events is set."""

    def __init__(self, *events: threading.Event) -> None:
        super().__init__()
        self._events = events

    def is_set(self) -> bool:
        return any(event.is_set() for event in self._events)


class _Beyond(threading.Event):
    """An event that is set while a step is later than the last step that is wanted."""

    def __init__(self, step: int, last_wanted: Callable[[], int | None]) -> None:
        super().__init__()
        self._step, self._last_wanted = step, last_wanted

    def is_set(self) -> bool:
        last = self._last_wanted()
        return last is not None and self._step > last
