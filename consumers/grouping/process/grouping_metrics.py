"""Metrics of a grouping process on the `metrics` topic: by partition, by environment for lost rollouts, and as a whole.

Totals count from the start of the process; the journal has the counts of the whole run.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from types import MappingProxyType

from rollstream.consumers.grouping.core.effects import Effects
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.process.restoration import RestoreProgress
from rollstream.consumers.grouping.selection_bias import MEASURES, Selection, SelectionWatch, selections
from rollstream.topics.metrics.values import VALUES
from rollstream.topics.metrics.writer import MetricsWriter
from rollstream.topics.records import FateCount
from rollstream.topics.records.fates import READ, fate_and_reason


class GroupingFigures:
    """Collects the metrics of one process and writes them every `interval_s` seconds."""

    def __init__(
        self,
        writer: MetricsWriter,
        group: str,
        topic: str,
        interval_s: float,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._writer = writer
        self._labels = {"consumergroup": group, "topic": topic}
        self._interval_s = interval_s
        self._clock = clock or time.monotonic
        self._due_s = self._clock()
        self._totals = dict.fromkeys(
            ("transactions", "batches", "batched", "dropped", "dead_lettered", "finished_groups"), 0
        )
        self._commits = 0
        self._commit_s = self._longest_commit_s = 0.0
        """Sum and maximum of the durations of the commits since the last `write`, which may never be called."""
        self._watch = SelectionWatch()
        self._told: dict[str, Selection] = {}
        self._last: dict[str, float] = {}
        """The newest metrics of the process as a whole."""

    def committed(self, outputs: Iterable[Effects], seconds: float) -> None:
        """Add a committed transaction and its duration from the first record to the commit."""
        self._commits += 1
        self._commit_s += seconds
        self._longest_commit_s = max(self._longest_commit_s, seconds)
        self._totals["transactions"] += 1
        for output in outputs:
            self._totals["batches"] += len(output.encoded)
            self._totals["batched"] += sum(batch.entry.rollouts for batch in output.encoded)
            self._totals["dropped"] += len(output.journal.drops)
            self._totals["dead_lettered"] += len(output.dead_letters)
            self._totals["finished_groups"] += len(output.journal.finished_groups)
            now_s = time.time()
            for batch in output.encoded:
                ages = (max(0.0, now_s - ended) for ended in batch.timestamps if ended > 0)
                VALUES.observe("rollstream_grouping_rollout_to_batch_seconds", ages)

    @property
    def due(self) -> bool:
        """Whether it is time for `write`."""
        return self._clock() >= self._due_s

    def write(
        self,
        folds: Iterable[Fold],
        lags: Mapping[int, int],
        restoring: Mapping[int, RestoreProgress],
        more: Mapping[str, float] = MappingProxyType({}),
        paused: Collection[int] = (),
        retention_s: float = math.inf,
    ) -> None:
        """Write the metrics now.

        `lags` holds the number of unread records by partition, as far as it is known, `more` further metrics of the
        whole process, and `paused` the partitions that are not being read. `retention_s` is how long brokers keep a
        record; infinity means forever.
        """
        self._due_s = self._clock() + self._interval_s
        whole = dict.fromkeys(("lag", "in_flight", "open_groups", "held_bytes"), 0)
        counts: list[FateCount] = []
        served: list[int] = []
        for fold in folds:
            served.append(fold.partition)
            counts += fold.counts
            values = {
                "position": fold.position,
                "in_flight": fold.in_flight,
                "open_groups": fold.open_groups,
                "held_bytes": fold.held_bytes,
                "policy_version": fold.policy_version,
                "stream_time_s": fold.stream_time_ms / 1000,
                "paused": float(fold.partition in paused),
            }
            if fold.partition in lags:
                values["lag"] = lags[fold.partition]
                if values["lag"] and math.isfinite(retention_s):
                    # Unread records are no older than the newest that was read; before the first, any age is possible.
                    age_s = time.time() - fold.stream_time_ms / 1000
                    values["seconds_to_retention"] = max(0.0, retention_s - age_s)
            _serve_fates(fold)
            for name in whole.keys() & values.keys():
                whole[name] += int(values[name])
            self._writer.write(values, {**self._labels, "partition": str(fold.partition)})
        owned = {str(partition) for partition in (*served, *restoring)}
        VALUES.keep("group", "partition", owned)
        for partition, progress in restoring.items():
            values = {f"restore_{name}": float(value) for name, value in asdict(progress).items()}
            self._writer.write(values, {**self._labels, "partition": str(partition)})
        by_environment = selections(counts)
        self._watch.check(by_environment)
        VALUES.keep("group", "environment", by_environment)
        for environment, selection in by_environment.items():
            if selection != self._told.get(environment):
                self._writer.write(_of_selection(selection), {**self._labels, "environment": environment})
        self._told = by_environment
        values = {**whole, **{f"{name}_total": count for name, count in self._totals.items()}}
        values |= {"partitions": len(served), "partitions_restoring": len(restoring)}
        values |= more
        if self._commits:
            values["commit_seconds_mean"] = self._commit_s / self._commits
            values["commit_seconds_max"] = self._longest_commit_s
            self._commits, self._commit_s, self._longest_commit_s = 0, 0.0, 0.0
        self._last = values
        self._writer.write(values, self._labels)

    def close(self) -> None:
        """Write a last record, which says that the process has ended, and send all unsent metrics."""
        if self._last:
            # Without this record, the process would seem to hang.
            self._writer.write({**self._last, "running": 0.0}, self._labels)
        self._writer.close()


def _serve_fates(fold: Fold) -> None:
    """Set the metric that counts the rollouts of a partition by fate, summed over environments."""
    totals: Counter[str] = Counter()
    for count in fold.counts:
        totals[count.fate] += count.rollouts
    for counted, rollouts in totals.items():
        if counted != READ:
            fate, reason = fate_and_reason(counted)
            VALUES.put("rollstream_grouping_rollouts_total", rollouts, str(fold.partition), fate, reason)


def _of_selection(selection: Selection) -> dict[str, float]:
    """Return the number of rollouts of each kind, their known means, how far lost rollouts shifted the means, and
    whether each shift is an alert."""
    alerts = selection.alerts()
    values: dict[str, float] = {f"shift_{figure}": selection.shift(figure) for figure in MEASURES}
    values |= {f"biased/{figure}": float(figure in alerts) for figure in MEASURES}
    for name in ("produced", "batched", "without_gradient", "lost"):
        kind = getattr(selection, name)
        values[f"{name}_rollouts"] = kind.rollouts
        for figure in MEASURES:
            if (mean := getattr(kind, figure).mean) is not None:
                values[f"{name}_mean_{figure}"] = mean
    return values
