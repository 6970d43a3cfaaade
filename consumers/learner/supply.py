"""Gets what each step is made of, a step ahead: the lead decides on batches, each process fetches and packs its own.

What is decided is decided: a step that was supplied to one process is supplied to all of them.
"""

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import numpy as np

from consumers.batch_reader import BatchFetcher, Indexed, IndexReader
from consumers.closing import Closing
from consumers.learner.config import LearnerConfig
from consumers.learner.exclusions import Exclusions
from consumers.learner.intake import Intake, Outcomes, Taken, chosen_rows, outcomes_of, share_of, unfit_uses
from consumers.learner.packing import PackedStep, TrainingSequence, pack_for, sequences_of
from consumers.learner.prefetch import Prefetcher
from consumers.learner.recorder import Recorder
from consumers.learner.step import PlacedStep
from consumers.learner.team import Team
from topics.config import KafkaConfig
from topics.records import BatchUse, TrainingBatch

_KEPT_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Supplied:
    """What one step trains on."""

    taken: Taken
    """Which batches, the same in every process."""
    packed: PackedStep
    """This process's share of them."""
    outcomes: Outcomes
    """Of this process's share."""
    load_s: float
    """Time it took to fetch, pack and place the share."""
    placed: PlacedStep | None = None
    """The same on the devices, where it was put there ahead."""


class Source(Protocol):
    """Where a step's rollouts come from: the lead takes, every process loads its share."""

    skips: tuple[int, tuple[BatchUse, ...]] | None
    """What a step skips, by its number, that has waited for the rest of it."""

    def take(self, step: int, stop: threading.Event) -> Taken | None:
        """What the step after `step` steps is made of; None once `stop` was set first."""

    def load(self, taken: Taken) -> Supplied:
        """This process's share, fetched and packed."""

    def close(self) -> None:
        """Let go of what it reads from."""


class Loader:
    """Fetches and packs one process's share of a step."""

    def __init__(self, config: LearnerConfig, kafka: KafkaConfig, run: str, process: int = 0) -> None:
        self._config = config
        self._process = process
        self._fetcher = BatchFetcher(kafka, config.input_run or run, check_digests=False)
        # Digests are a third of the work, and hashing lets other threads run.
        self._checks = ThreadPoolExecutor(1, "digests")
        self._kept: OrderedDict[int, TrainingBatch] = OrderedDict()
        self._kept_bytes = 0

    def fetch(self, read: Indexed) -> TrainingBatch:
        """A batch that may be asked for again: the last ones asked for are at hand, up to 256 MiB. Raises what
        BatchFetcher.fetch raises."""
        batch = self._kept.get(read.index_offset)
        if batch is None:
            batch = self._fetcher.fetch(read.entry)
            self._fetcher.check(read.entry, batch)
            self._kept[read.index_offset] = batch
            self._kept_bytes += _size(batch)
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= _size(self._kept.popitem(last=False)[1])
        self._kept.move_to_end(read.index_offset)
        return batch

    def load(self, taken: Taken) -> Supplied:
        """Fetch, leave out what cannot be trained on, and pack. Raises what BatchFetcher.fetch raises, and
        ConfigurationError as packing does.
        """
        began, config = time.monotonic(), self._config
        rows_of = {read.index_offset: rows for read, rows in zip(taken.trained, taken.rows_of_batches, strict=True)}
        # Rows left out keep their numbers: what others leave out, nobody knows here.
        counts = [
            read.entry.rollouts if rows is None or not taken.drawn else len(rows)
            for read, rows in zip(taken.trained, rows_of.values(), strict=True)
        ]
        first = itertools.accumulate(counts, initial=0)
        starts = {read.index_offset: start for read, start in zip(taken.trained, first, strict=False)}
        checks: list[Future[None]] = []
        batches: list[TrainingBatch] = []
        sequences: list[TrainingSequence] = []
        numbers: list[int] = []
        left_out: list[BatchUse] = []
        for read in share_of(taken.trained, self._process, config.processes):
            if taken.drawn:
                batch = self.fetch(read)
            else:
                batch = self._fetcher.fetch(read.entry)
                checks.append(self._checks.submit(self._fetcher.check, read.entry, batch))
            rows, start = rows_of[read.index_offset], starts[read.index_offset]
            if not taken.checked:
                unfit = unfit_uses(read, batch, config)
                left_out += unfit
                gone = {number for use in unfit for number in use.row_numbers or range(use.rows)}
                rows = tuple(row for row in range(len(batch)) if row not in gone) if gone else None
            if rows is not None:
                batch = chosen_rows(batch, rows)
            batches.append(batch)
            sequences += sequences_of(batch)
            in_step = rows if rows is not None and not taken.drawn else range(len(batch))
            numbers += (start + number for number in in_step)
        packed = pack_for(config, sequences, numbers=numbers, rollouts=sum(counts))
        for check in checks:
            check.result()
        outcomes = outcomes_of(batches, tuple(left_out))
        return Supplied(taken=taken, packed=packed, outcomes=outcomes, load_s=time.monotonic() - began)

    def close(self) -> None:
        """Close the consumer."""
        self._checks.shutdown()
        self._fetcher.close()


def _size(batch: TrainingBatch) -> int:
    return sum(value.nbytes for value in vars(batch).values() if isinstance(value, np.ndarray))


class LogSource:
    """What sources that read the log have in common: a loader, a stack of what is to be closed, and skips to report."""

    def __init__(self, config: LearnerConfig, kafka: KafkaConfig, run: str, process: int) -> None:
        self._stack = ExitStack()
        self._loader = self._stack.enter_context(closing(Loader(config, kafka, run, process)))
        self._step = -1
        self.skips: tuple[int, tuple[BatchUse, ...]] | None = None
        """What a step skipped, by its number, that has waited for the rest of it."""

    def load(self, taken: Taken) -> Supplied:
        """This process's share, fetched and packed."""
        return self._loader.load(taken)

    def close(self) -> None:
        """Close the consumers."""
        self._stack.close()

    def _skipped(self, uses: tuple[BatchUse, ...]) -> None:
        self.skips = (self._step + 1, uses)


class Batches(LogSource):
    """The source `batches`: the index of the input run, read by the lead alone."""

    def __init__(
        self,
        config: LearnerConfig,
        kafka: KafkaConfig,
        run: str,
        position: int,
        process: int = 0,
        recorder: Recorder | None = None,
    ) -> None:
        """With a `recorder`, that is in the lead, it reads the index from `position` on."""
        super().__init__(config, kafka, run, process)
        if recorder is None:
            return
        input_run = config.input_run or run
        self._index = self._stack.enter_context(IndexReader(kafka, input_run, position))
        exclusions = self._stack.enter_context(Exclusions(kafka, input_run))
        self._intake = Intake(
            self._index,
            rollouts_per_step=config.rollouts_per_step,
            max_policy_lag=config.max_policy_lag,
            read_version_steps=recorder.version_steps,
            skipped=self._skipped,
            decided=recorder.decided,
            excluded=exclusions.reason,
        )

    def take(self, step: int, stop: threading.Event) -> Taken | None:
        """Whole batches in the order of the index until they are enough."""
        self._step = step
        return self._intake.take(step, stop)


class Supply(Closing):
    """The steps of a learner, one after another, each got ready while the one before is made."""

    def __init__(
        self,
        source: Source,
        team: Team,
        first: int,
        last: int,
        stop: threading.Event,
        place: Callable[[PackedStep], PlacedStep] | None = None,
    ) -> None:
        """Steps `first` to `last`. Once `stop` is set in the lead, nothing more is decided.

        `place` puts what was packed on the devices, if that may be done beside other work on them.
        """
        self._source = source
        self._team = team
        self._stop = stop
        self._place = place
        self._prefetcher = Prefetcher(self._make, first, last)

    def next(self, timeout_s: float) -> Supplied | None:
        """What the next step is made of; None when it is not ready in time, or never will be: see `ended`.

        Raises what reading, packing or losing the team raised.
        """
        return self._prefetcher.next(timeout_s)

    @property
    def ended(self) -> bool:
        """Whether no further step comes."""
        return self._prefetcher.ended

    def close(self) -> None:
        """Stop getting ready; the source stays open."""
        self._prefetcher.close()

    def _make(self, step: int, unwanted: threading.Event) -> Supplied | None:
        """Step number `step`, after `step - 1` steps."""
        taken = self._decide(step, unwanted)
        if taken is None:
            return None
        supplied = self._source.load(taken)
        if self._place is None:
            return supplied
        began = time.monotonic()
        placed = self._place(supplied.packed)
        return replace(supplied, placed=placed, load_s=supplied.load_s + time.monotonic() - began)

    def _decide(self, step: int, unwanted: threading.Event) -> Taken | None:
        key = f"step/{step}"
        if self._team.process:
            return msgspec.json.decode(self._team.hear(key), type=Taken | None)
        taken = self._source.take(step - 1, _Either(self._stop, unwanted))
        self._team.tell(key, msgspec.json.encode(taken))
        return taken


class _Either(threading.Event):
    """Set when one of two events is."""

    def __init__(self, one: threading.Event, other: threading.Event) -> None:
        super().__init__()
        self._both = (one, other)

    def is_set(self) -> bool:
        return any(event.is_set() for event in self._both)
