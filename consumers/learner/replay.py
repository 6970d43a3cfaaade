"""Decides which rollouts make a step that draws from a rollout buffer, and accounts for every one that leaves it.

The choice depends on the index up to the position on record, the manifests, the settings, the seed and the step: so a
step that is executed again draws the same, or StateRefused says that it does not. The log is the state: what a buffer
held after a step follows from the steps on record, so that nothing of it is kept anywhere else.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from consumers.batch_reader import Indexed
from consumers.buffers.draws import generator_at
from consumers.buffers.shelf import Entry, Left, Shelf, ShelfRules
from consumers.learner.config import LearnerConfig
from consumers.learner.intake import Taken, trained_rows
from consumers.learner.row_checks import is_left_out, unfit_rows
from topics.errors import StateRefused
from topics.logs import event
from topics.records import BatchUse, LearnerStep, TrainingBatch
from topics.skip_codes import EXCLUDED, UNKNOWN_VERSION, Skip

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_REPORT_SKIPS_AFTER_S = 1.0


class Row(NamedTuple):
    """A rollout: a row of a batch, by the offset of its entry in batch-index."""

    index_offset: int
    number: int


class Index(Protocol):
    """What an IndexReader offers here."""

    position: int

    @property
    def at_end(self) -> bool:
        """Whether there is no further entry."""

    def poll(self, timeout_s: float = 1.0) -> Indexed | None:
        """The next entry, or None when there is none in time."""


@dataclass(frozen=True, kw_only=True)
class Uses:
    """What the steps on record did with rows of batches that a buffer may still hold after the last of them."""

    first: int
    """Index offsets below it are done with."""
    position: int
    """Next index offset to read."""
    stream_time_ms: int = -1
    """Time of the last step."""
    counts: Mapping[Row, int] = field(default_factory=dict)
    """How often a rollout was trained on."""
    gone: frozenset[Row] = frozenset()
    """Rollouts that left without being used up."""

    @classmethod
    def after(cls, step: int, position: int, records: Iterable[LearnerStep]) -> "Uses":
        """Those of the steps up to `step`, which has the record the last of them left, at `position` of the index."""
        past = [record for record in records if record.step <= step]
        last = max(past, key=lambda record: record.step, default=None)
        if last is None:
            return cls(first=position, position=position)
        first = last.position if last.oldest < 0 else last.oldest
        counts: Counter[Row] = Counter()
        gone: set[Row] = set()
        for record in past:
            for use in record.uses:
                if use.index_offset >= first:
                    rows = [Row(use.index_offset, number) for number in use.row_numbers or range(use.rows)]
                    counts.update(rows) if use.use == "trained" else gone.update(rows)
        return cls(
            first=first,
            position=last.position,
            stream_time_ms=last.stream_time_ms,
            counts=counts,
            gone=frozenset(gone),
        )


class Replay:
    """Draws one step after another from the rollouts of the batches it reads.

    `fetch` brings a batch, `read_version_steps` the learner step of every published version, `recorded` a step as it is
    on record, and `excluded` says why a batch is left out. `skipped` hears of skipped rollouts that have waited for the
    rest of their step.
    """

    def __init__(
        self,
        config: LearnerConfig,
        index: Index,
        *,
        fetch: Callable[[Indexed], TrainingBatch],
        read_version_steps: Callable[[int], dict[int, int]],
        recorded: Callable[[int], LearnerStep | None],
        skipped: Callable[[tuple[BatchUse, ...]], None],
        excluded: Callable[[str], str] = lambda _batch_id: "",
    ) -> None:
        of = config.buffer
        self._seed = config.seed
        self._rollouts_per_step = config.rollouts_per_step
        self._shelf: Shelf[Row] = Shelf(
            ShelfRules(
                capacity=of.capacity,
                alpha=of.alpha,
                max_samples=of.max_samples,
                max_step_delay=of.max_rollout_step_delay,
                max_timestamp_delay_s=of.max_rollout_timestamp_delay,
                balanced=of.balanced,
            )
        )
        self._index = index
        self._fetch = fetch
        self._read_version_steps = read_version_steps
        self._version_steps: dict[int, int] = {}
        self._recorded = recorded
        self._skipped = skipped
        self._excluded = excluded
        self._learner = config
        self._unfit: dict[Row, Skip] = {}
        """Rows held that cannot be trained on, which steps on record did not leave out, and why."""
        self._batches: dict[int, Indexed] = {}
        self._now_ms = -1

    @property
    def size(self) -> int:
        """Rollouts held."""
        return len(self._shelf)

    @property
    def held(self) -> set[int]:
        """Index offsets of the batches of which a rollout is held."""
        return set(self._batches)

    def restore(self, uses: Uses, entries: Sequence[Indexed], recorded: Sequence[LearnerStep]) -> None:
        """Hold what was held after the last of the steps of `uses`; `entries` are the index from `uses.first` to
        `uses.position`, `recorded` those steps."""
        self._now_ms = uses.stream_time_ms
        positions = sorted((record.position, record.step) for record in recorded)
        for read in entries:
            # Of another run's learner a version may be ahead: it counts as new when its batch was read.
            step = next((step - 1 for position, step in positions if position > read.index_offset), 0)
            rows = [Row(read.index_offset, number) for number in range(read.entry.rollouts)]
            alive = {row for row in rows if row not in uses.gone and not self._used_up(uses.counts.get(row, 0))}
            if not alive:
                continue
            batch = self._fetch(read)
            found = [entry for entry in self._entries(read, batch, step) if entry.item in alive]
            self._unfit |= self._unfit_rows(read, batch)
            for entry in found:
                entry.usage_count = uses.counts.get(entry.item, 0)
            self._batches[read.index_offset] = read
            self._shelf.put_back(found)

    def take(self, step: int, stop: threading.Event) -> Taken | None:
        """What the step after `step` steps is made of, read from where the index ends now, or ended when the step was
        made; None when `stop` was set first.

        Raises StateRefused when a step on record draws something else than it did.
        """
        began = time.monotonic()
        report_at: float | None = None
        recorded = self._recorded(step + 1)
        forced = None if recorded is None else _forced(recorded)
        left = list(self._shelf.refresh(step, self._now_ms / 1000))
        left += self._leave_out(forced)
        reported = 0
        while True:
            if stop.is_set():
                return None
            if recorded is not None and self._index.position >= recorded.position:
                break
            enough = recorded is None and self._index.at_end and len(self._shelf) >= self._rollouts_per_step
            read = self._index.poll(0.0 if enough else _POLL_S)
            if read is not None:
                left += self._admit(read, step, forced)
            elif enough:
                break
            if len(left) == reported:
                report_at = None
            elif report_at is None:
                report_at = time.monotonic() + _REPORT_SKIPS_AFTER_S
            elif time.monotonic() > report_at:
                self._skipped(tuple(use for use in self._named(left, ()) if not use.again))
                reported, report_at = len(left), None
        drawn = self._shelf.draw(self._rollouts_per_step, generator_at(self._seed, step + 1)) or []
        uses = self._named(left, drawn)
        if recorded is not None:
            self._compare(recorded, uses)
        return self._taken(uses, step, drawn, time.monotonic() - began)

    # ------------------------------------------------------------------ within

    def _admit(self, read: Indexed, step: int, forced: Mapping[Row, Skip] | None) -> list[Left[Row]]:
        """Take the rollouts of a batch in; returns what leaves, or never is in."""
        batch = self._fetch(read)
        self._now_ms = max(self._now_ms, batch.cut_ms)
        self._batches[read.index_offset] = read
        excluded = None if forced is not None else self._exclusion(read)
        unfit = self._unfit_rows(read, batch)
        if forced is not None:
            self._unfit |= unfit
        # After each batch, and not when the index ends for now: what leaves must not depend on who was quick.
        fit, left = [], self._shelf.refresh(step, self._now_ms / 1000)
        for entry in self._entries(read, batch, step):
            why = excluded or unfit.get(entry.item) if forced is None else forced.get(entry.item)
            if not why and entry.weight_step < 0 and forced is None:
                version = int(batch.lowest_versions[entry.item.number])
                why = Skip(UNKNOWN_VERSION, f"policy version {version} is not on record")
            if why:
                left.append(Left(entry, why.reason, why.code))
            else:
                fit.append(entry)
        return left + self._shelf.add(fit, step, self._now_ms / 1000)

    def _entries(self, read: Indexed, batch: TrainingBatch, step: int) -> list[Entry[Row]]:
        """The rollouts of a batch that was read after `step` steps; of a version not on record, weight step -1."""
        found = []
        for number, version in enumerate(batch.lowest_versions.tolist()):
            if version not in self._version_steps:
                self._version_steps = self._read_version_steps(version)
            group = batch.groups[int(batch.group_index[number])]
            of = self._version_steps.get(version, -1)
            found.append(
                Entry(Row(read.index_offset, number), group.environment, min(of, step), group.opened_ms / 1000)
            )
        return found

    def _exclusion(self, read: Indexed) -> Skip | None:
        reason = self._excluded(read.entry.batch_id)
        return Skip(EXCLUDED, reason) if reason else None

    def _leave_out(self, forced: Mapping[Row, Skip] | None) -> list[Left[Row]]:
        """Take out what was excluded since it came in, and what only a step on record let in."""
        if forced is not None:
            return self._shelf.remove(lambda entry: forced.get(entry.item))
        excluded = {at: self._exclusion(read) for at, read in self._batches.items()}
        if not self._unfit and not any(excluded.values()):
            return []
        unfit, self._unfit = self._unfit, {}
        return self._shelf.remove(lambda entry: excluded[entry.item.index_offset] or unfit.get(entry.item))

    def _unfit_rows(self, read: Indexed, batch: TrainingBatch) -> dict[Row, Skip]:
        return {
            Row(read.index_offset, number): skip
            for skip, rows in unfit_rows(batch, self._learner).items()
            for number in rows
        }

    def _named(self, left: Iterable[Left[Row]], drawn: Iterable[Entry[Row]]) -> tuple[BatchUse, ...]:
        """By batch and in index order: what was trained on for the first time, and again; what left, and why."""
        rows: dict[tuple[int, str, bool, str], list[int]] = {}
        for entry in drawn:
            rows.setdefault((entry.item.index_offset, "", entry.usage_count > 1, ""), []).append(entry.item.number)
        for entry, reason, code in left:
            its = (entry.item.index_offset, reason, entry.usage_count > 0, code)
            rows.setdefault(its, []).append(entry.item.number)
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

    def _compare(self, recorded: LearnerStep, uses: tuple[BatchUse, ...]) -> None:
        if (recorded.uses, recorded.stream_time_ms) == (uses, self._now_ms):
            return
        was, now = (sum(map(len, trained_rows(of).values())) for of in (recorded.uses, uses))
        first = next((a for a, b in zip(recorded.uses, uses, strict=False) if a != b), None)
        where = "" if first is None else f", first at batch {first.batch_id}"
        raise StateRefused(
            f"step {recorded.step} of learner {recorded.learner!r}, executed again, draws other rollouts than it did "
            f"({now} of {len(uses)} uses; on record are {was} of {len(recorded.uses)}{where}). Restore the settings of "
            "learner.buffer, learner.rollouts_per_step and learner.seed, or give another learner.name"
        )

    def _taken(self, uses: tuple[BatchUse, ...], step: int, drawn: Sequence[Entry[Row]], wait_s: float) -> Taken:
        rows = trained_rows(uses)
        trained = tuple(self._batches[offset] for offset in rows)
        alive = {entry.item.index_offset for entry in self._shelf.entries()}
        self._batches = {offset: read for offset, read in self._batches.items() if offset in alive}
        reasons: Counter[str] = Counter()
        for use in uses:
            reasons[use.code] += use.rows if use.use == "skipped" else 0
        if reasons.total():
            event(logger, "rollouts_left", step=step + 1, rollouts=reasons.total(), reasons=+reasons)
        return Taken(
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


def _forced(recorded: LearnerStep) -> dict[Row, Skip]:
    """What a step on record left out for reasons that may have changed since."""
    return {
        Row(use.index_offset, number): Skip(use.code, use.reason)
        for use in recorded.uses
        if use.use == "skipped" and (use.code in (EXCLUDED, UNKNOWN_VERSION) or is_left_out(use))
        for number in use.row_numbers or range(use.rows)
    }
