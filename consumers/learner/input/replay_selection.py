"""Selection of rollouts from a rollout buffer for each step, with a record of every rollout that leaves the buffer.

The selection depends on the index up to the position on record, the manifests, the settings, the seed and the step. So
a step executed again draws the same rollouts, or raises StateRefused. The log is the state: the contents of a buffer
after a step follow from the steps on record, and are stored nowhere else.
"""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

from rollstream.consumers.batch_reader import IndexedBatch
from rollstream.consumers.buffers.rollouts.shelf import Removal, Shelf, ShelfEntry, ShelfRules
from rollstream.consumers.buffers.storage.seeded_draws import generator_at
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.input.batch_selection import StepPlan
from rollstream.consumers.learner.input.row_checks import nothing_to_train_on, unfit_rows
from rollstream.topics.errors import StateRefused
from rollstream.topics.logs import event
from rollstream.topics.records import BatchUse, LearnerStep, TrainingBatch
from rollstream.topics.records.fates import ENDED, EXCLUDED, ROW_CODES, UNKNOWN_VERSION, Skip
from rollstream.topics.records.learner import is_left_out, trained_rows
from rollstream.topics.wire.rl_examples import stamp_of

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_LEFT_AT_THE_END = Skip(ENDED, "the run ended before a step drew it")
_NOT_ON_RECORD = -(2**63)
"""Weight step of a rollout whose policy version is not on record: below the step of any version."""
REPORT_SKIPS_AFTER_S = 1.0
"""Seconds that a step waits to fill up before its skipped rollouts are recorded without it."""
_LOG_EVERY_S = 60.0
"""Seconds between log lines about the skipped rollouts of steps that wait."""


class BatchRow(NamedTuple):
    """A rollout, named by its row and the index offset of its batch."""

    index_offset: int
    number: int


class IndexCursor(Protocol):
    """The part of an IndexReader that is used here."""

    position: int

    @property
    def at_end(self) -> bool:
        """Whether the index has no further entry."""

    def poll(self, timeout_s: float = 1.0) -> IndexedBatch | None:
        """The next entry, or None if none arrives in time."""


@dataclass(frozen=True, kw_only=True)
class PastUses:
    """Uses, in steps on record, of batches whose rows a buffer may still hold after the last of these steps."""

    first: int
    """First index offset whose batch may still be held."""
    position: int
    """Next index offset to read."""
    stream_time_ms: int = -1
    """Stream time of the last step."""
    counts: Mapping[BatchRow, int] = field(default_factory=dict)
    """Number of times each rollout was trained on."""
    gone: frozenset[BatchRow] = frozenset()
    """Rollouts that left the buffer before they were used up."""

    @classmethod
    def after(cls, step: int, position: int, records: Iterable[LearnerStep]) -> "PastUses":
        """Uses of the steps up to `step`; without a step on record, the buffer starts empty at `position`."""
        past = [record for record in records if record.step <= step]
        last = max(past, key=lambda record: record.step, default=None)
        if last is None:
            return cls(first=position, position=position)
        first = last.position if last.oldest < 0 else last.oldest
        counts: Counter[BatchRow] = Counter()
        gone: set[BatchRow] = set()
        for record in past:
            for use in record.uses:
                if use.index_offset >= first:
                    rows = [BatchRow(use.index_offset, number) for number in use.row_numbers or range(use.rows)]
                    counts.update(rows) if use.use == "trained" else gone.update(rows)
        return cls(
            first=first,
            position=last.position,
            stream_time_ms=last.stream_time_ms,
            counts=counts,
            gone=frozenset(gone),
        )


class ReplaySelection:
    """Draws the rollouts of each step from the batches it reads.

    `fetch` returns a batch, `read_version_steps` the learner step of every published version, `recorded` the record of
    a step, and `excluded` the reason to leave a batch out. `earlier_steps` has the steps of versions that other
    learners of the run published, counted in this learner's steps: their rollouts carry the other learners' steps.
    `nothing_after` tells whether the index will have no entry from an offset on: then only as many steps follow as can
    draw the rollouts that were never drawn. `skipped` receives skipped rollouts whose step waits to fill up, and those
    left at the end.
    """

    def __init__(
        self,
        config: LearnerConfig,
        index: IndexCursor,
        *,
        fetch: Callable[[IndexedBatch], TrainingBatch],
        read_version_steps: Callable[[int], dict[int, int]],
        recorded: Callable[[int], LearnerStep | None],
        skipped: Callable[[tuple[BatchUse, ...]], None],
        excluded: Callable[[str], str] = lambda _batch_id: "",
        earlier_steps: Mapping[int, int] = MappingProxyType({}),
        nothing_after: Callable[[int], bool] = lambda _position: False,
    ) -> None:
        buffer = config.buffer
        self._seed = config.seed
        self._rollouts_per_step = config.rollouts_per_step
        self._shelf: Shelf[BatchRow] = Shelf(
            ShelfRules(
                capacity=buffer.capacity,
                alpha=buffer.alpha,
                max_samples=buffer.max_samples,
                max_rollout_step_delay=buffer.max_rollout_step_delay,
                max_rollout_timestamp_delay=buffer.max_rollout_timestamp_delay,
                balanced=buffer.balanced,
            )
        )
        self._index = index
        self._fetch = fetch
        self._read_version_steps = read_version_steps
        self._version_steps: dict[int, int] = {}
        self._recorded = recorded
        self._skipped = skipped
        self._excluded = excluded
        self._earlier_steps = earlier_steps
        self._nothing_after = nothing_after
        self._learner = config
        self._unfit: dict[BatchRow, Skip] = {}
        """Reason for each held row that cannot be trained on and that no step on record left out."""
        self._batches: dict[int, IndexedBatch] = {}
        self._now_ms = -1
        self._steps_left: int | None = None
        """Steps that may still follow, once the index has ended."""
        self._log_again_s = -math.inf

    @property
    def size(self) -> int:
        """Number of rollouts held."""
        return len(self._shelf)

    @property
    def held(self) -> set[int]:
        """Index offsets of batches with at least one rollout held."""
        return set(self._batches)

    def restore(self, uses: PastUses, entries: Sequence[IndexedBatch], recorded: Sequence[LearnerStep]) -> None:
        """Restore the buffer as it was after the last step of `uses`.

        `entries` are the index entries from `uses.first` to `uses.position`; `recorded` are the records of the steps.
        """
        self._now_ms = uses.stream_time_ms
        positions = sorted((record.position, record.step) for record in recorded)
        for read in entries:
            # The number of steps made when the batch was read limits weight steps: another run's learner may be ahead.
            step = next((step - 1 for position, step in positions if position > read.index_offset), 0)
            rows = [BatchRow(read.index_offset, number) for number in range(read.entry.rollouts)]
            alive = {row for row in rows if row not in uses.gone and not self._used_up(uses.counts.get(row, 0))}
            if not alive:
                continue
            batch = self._fetch(read)
            held = [entry for entry in self._entries(read, batch, step) if entry.item in alive]
            self._unfit |= self._unfit_rows(read, batch)
            for entry in held:
                entry.usage_count = uses.counts.get(entry.item, 0)
            self._batches[read.index_offset] = read
            self._shelf.put_back(held)

    def plan(self, step: int, stop: threading.Event) -> StepPlan | None:
        """Plan the step after `step` steps; None if `stop` is set first, or if no step follows.

        Reads the index to its present end, and on until the buffer holds enough rollouts; for a step on record, it
        reads to the recorded position. Raises StateRefused if a step on record draws other rollouts than its record
        names, ConfigurationError if a step waits although enough rollouts came, because none of them can be trained on.
        """
        began = time.monotonic()
        report_at: float | None = None
        recorded = self._recorded(step + 1)
        forced = None if recorded is None else _forced(recorded)
        left = list(self._shelf.refresh(step, self._now_ms / 1000))
        left += self._leave_out(forced)
        reported, begin = 0, self._index.position
        while True:
            if stop.is_set():
                return None
            if recorded is not None and self._index.position >= recorded.position:
                break
            enough = recorded is None and self._index.at_end and len(self._shelf) >= self._rollouts_per_step
            read = self._index.poll(0.0 if enough else _POLL_S)
            if read is not None:
                self._steps_left = None
                left += self._admit(read, step, forced)
            elif recorded is None and self._ends_at(begin, enough):
                if self._draws_once_more():
                    break
                left += self._shelf.remove(lambda entry: None if entry.usage_count else _LEFT_AT_THE_END)
                if uses := tuple(use for use in self._named(left, ()) if not use.again):
                    self._log_left(step, uses)
                    self._skipped(uses)
                return None
            elif enough:
                break
            if len(left) == reported:
                report_at = None
            elif report_at is None:
                report_at = time.monotonic() + REPORT_SKIPS_AFTER_S
            elif time.monotonic() > report_at:
                if recorded is None and self._index.at_end:
                    self._refuse_unfit(step, [entry for entry in left if entry.entry.item.index_offset >= begin])
                uses = tuple(use for use in self._named(left, ()) if not use.again)
                if time.monotonic() >= self._log_again_s:
                    self._log_again_s = time.monotonic() + _LOG_EVERY_S
                    self._log_left(step, uses)
                self._skipped(uses)
                reported, report_at = len(left), None
        drawn = self._shelf.draw(self._rollouts_per_step, generator_at(self._seed, step + 1)) or []
        uses = self._named(left, drawn)
        if recorded is not None:
            self._compare(recorded, uses)
        return self._plan_of(uses, step, drawn, time.monotonic() - began)

    # ---------------------------------------------------------------- internals

    def _ends_at(self, begin: int, enough: bool) -> bool:
        """Whether the index has ended, and this step has read nothing from it since position `begin` or cannot be
        filled."""
        position = self._index.position
        return (position == begin or not enough) and self._nothing_after(position)

    def _draws_once_more(self) -> bool:
        """Whether a step follows though the index has ended. A rollout that was drawn before may be drawn again
        instead of a new one, so the number of steps is limited.

        No step is short: one of a few rollouts might have none to train on, and would end the learner with an error.
        """
        if len(self._shelf) < self._rollouts_per_step:
            return False
        new = sum(entry.usage_count == 0 for entry in self._shelf.entries())
        if self._steps_left is None:
            self._steps_left = math.ceil(new / self._rollouts_per_step)
        self._steps_left -= 1
        return new > 0 and self._steps_left >= 0

    def _admit(self, read: IndexedBatch, step: int, forced: Mapping[BatchRow, Skip] | None) -> list[Removal[BatchRow]]:
        """Admit the rollouts of a batch; return those that leave or are not admitted."""
        batch = self._fetch(read)
        self._now_ms = max(self._now_ms, batch.cut_ms)
        self._batches[read.index_offset] = read
        excluded = None if forced is not None else self._exclusion(read)
        unfit = self._unfit_rows(read, batch)
        if forced is not None:
            self._unfit |= unfit
        # Remove after each batch, not at the end of the index: removals must not depend on the speed of the reader.
        fit, left = [], self._shelf.refresh(step, self._now_ms / 1000)
        for entry in self._entries(read, batch, step):
            skip = excluded or unfit.get(entry.item) if forced is None else forced.get(entry.item)
            if not skip and entry.weight_step == _NOT_ON_RECORD and forced is None:
                version = int(batch.lowest_versions[entry.item.number])
                skip = Skip(UNKNOWN_VERSION, f"policy version {version} is not on record")
            if skip:
                left.append(Removal(entry, skip.reason, skip.code))
            else:
                fit.append(entry)
        return left + self._shelf.add(fit, step, self._now_ms / 1000)

    def _entries(self, read: IndexedBatch, batch: TrainingBatch, step: int) -> list[ShelfEntry[BatchRow]]:
        """Entries of a batch read after `step` steps, with the stamps of their rollouts.

        A row without a weight step, or of an earlier learner, gets the step of its lowest version; it is
        `_NOT_ON_RECORD` if that version is not on record.
        """
        entries = []
        for number, version in enumerate(batch.lowest_versions.tolist()):
            weight_step, timestamp = stamp_of(batch, number)
            if version in self._earlier_steps:
                weight_step = self._earlier_steps[version]
            elif weight_step < 0:
                if version not in self._version_steps:
                    self._version_steps = self._read_version_steps(version)
                weight_step = self._version_steps.get(version, _NOT_ON_RECORD)
            environment = batch.groups[int(batch.group_index[number])].environment
            row = BatchRow(read.index_offset, number)
            entries.append(ShelfEntry(row, environment, min(weight_step, step), timestamp))
        return entries

    def _exclusion(self, read: IndexedBatch) -> Skip | None:
        reason = self._excluded(read.entry.batch_id)
        return Skip(EXCLUDED, reason) if reason else None

    def _leave_out(self, forced: Mapping[BatchRow, Skip] | None) -> list[Removal[BatchRow]]:
        """Remove rollouts excluded since their admission, and unfit rollouts that only a step on record admitted."""
        if forced is not None:
            return self._shelf.remove(lambda entry: forced.get(entry.item))
        excluded = {at: self._exclusion(read) for at, read in self._batches.items()}
        if not self._unfit and not any(excluded.values()):
            return []
        unfit, self._unfit = self._unfit, {}
        return self._shelf.remove(lambda entry: excluded[entry.item.index_offset] or unfit.get(entry.item))

    def _unfit_rows(self, read: IndexedBatch, batch: TrainingBatch) -> dict[BatchRow, Skip]:
        return {
            BatchRow(read.index_offset, number): skip
            for skip, rows in unfit_rows(batch, self._learner).items()
            for number in rows
        }

    def _named(self, left: Iterable[Removal[BatchRow]], drawn: Iterable[ShelfEntry[BatchRow]]) -> tuple[BatchUse, ...]:
        """Uses by batch, in index order: rows trained on for the first time, rows trained on again, rows removed."""
        rows: dict[tuple[int, str, bool, str], list[int]] = {}
        for entry in drawn:
            rows.setdefault((entry.item.index_offset, "", entry.usage_count > 1, ""), []).append(entry.item.number)
        for entry, reason, code in left:
            use_key = (entry.item.index_offset, reason, entry.usage_count > 0, code)
            rows.setdefault(use_key, []).append(entry.item.number)
        uses = []
        for (offset, reason, again, code), numbers in sorted(rows.items()):
            entry_of = self._batches[offset].entry
            uses.append(
                BatchUse(
                    batch_id=entry_of.batch_id,
                    index_offset=offset,
                    rows=len(numbers),
                    use="skipped" if reason else "trained",
                    reason=reason,
                    row_numbers=() if len(numbers) == entry_of.rollouts else tuple(sorted(numbers)),
                    again=again,
                    code=code,
                )
            )
        return tuple(uses)

    def _log_left(self, step: int, uses: tuple[BatchUse, ...]) -> None:
        """Log how many rollouts left the buffer without the step after `step` steps, by code."""
        reasons: Counter[str] = Counter()
        for use in uses:
            reasons[use.code] += use.rows if use.use == "skipped" else 0
        if reasons.total():
            event(logger, "rollouts_left", step=step + 1, rollouts=reasons.total(), reasons=+reasons)

    def _refuse_unfit(self, step: int, left: Sequence[Removal[BatchRow]]) -> None:
        """Raise ConfigurationError if the buffer is empty, and the rollouts that came for the step, of which `left` did
        not stay, are enough for it but cannot be trained on. Excluded rollouts do not count."""
        came = [entry for entry in left if entry.code != EXCLUDED]
        if len(self._shelf) or len(came) < self._rollouts_per_step or any(it.code not in ROW_CODES for it in came):
            return
        batches = dict.fromkeys(self._batches[entry.entry.item.index_offset].entry.batch_id for entry in came)
        reasons = Counter(entry.reason for entry in came)
        raise nothing_to_train_on(self._learner.name, step + 1, reasons, list(batches))

    def _compare(self, recorded: LearnerStep, uses: tuple[BatchUse, ...]) -> None:
        if (recorded.uses, recorded.stream_time_ms) == (uses, self._now_ms):
            return
        was, now = (sum(map(len, trained_rows(used).values())) for used in (recorded.uses, uses))
        first = next((a for a, b in zip(recorded.uses, uses, strict=False) if a != b), None)
        where = "" if first is None else f"; the first difference is at batch {first.batch_id}"
        raise StateRefused(
            f"step {recorded.step} of learner {recorded.learner!r}, executed again, draws different rollouts than "
            f"before ({now} rollouts in {len(uses)} uses; on record are {was} in {len(recorded.uses)}{where}). "
            "Restore the settings of learner.buffer, learner.rollouts_per_step and learner.seed, or start another "
            "learner.name with learner.take_over"
        )

    def _plan_of(
        self, uses: tuple[BatchUse, ...], step: int, drawn: Sequence[ShelfEntry[BatchRow]], wait_s: float
    ) -> StepPlan:
        rows = trained_rows(uses)
        trained = tuple(self._batches[offset] for offset in rows)
        alive = {entry.item.index_offset for entry in self._shelf.entries()}
        self._batches = {offset: read for offset, read in self._batches.items() if offset in alive}
        self._log_left(step, uses)
        return StepPlan(
            uses=uses,
            trained=trained,
            lags=tuple(step - entry.weight_step for entry in drawn),
            position=self._index.position,
            wait_s=wait_s,
            rows=tuple(
                None if len(numbers) == read.entry.rollouts else numbers
                for read, numbers in zip(trained, rows.values(), strict=True)
            ),
            oldest=min(alive, default=-1),
            stream_time_ms=self._now_ms,
            checked=True,
        )

    def _used_up(self, count: int) -> bool:
        return 0 <= self._shelf.rules.max_samples <= count


def _forced(recorded: LearnerStep) -> dict[BatchRow, Skip]:
    """Rows that a step on record left out for reasons that may have changed since."""
    return {
        BatchRow(use.index_offset, number): Skip(use.code, use.reason)
        for use in recorded.uses
        if use.use == "skipped" and (use.code in (EXCLUDED, UNKNOWN_VERSION) or is_left_out(use))
        for number in use.row_numbers or range(use.rows)
    }
