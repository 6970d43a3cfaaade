"""The newest metrics of each worker, evaluator, server, gateway and grouping process of a run, and tables of them.

Pure: it takes the records of `metrics` in the order a reader gets them. Records of other components, such as learners,
are left out, because their figures are in `steps`. Records of a grouping process about a single partition or
environment are left out, too.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rollstream.pipeline.command_line.text_tables import printable
from rollstream.producers.metrics_publisher import RUNNING
from rollstream.topics.records import Metrics

GONE_S = 60.0
"""Time after its last record at which a component is left out of the tables, if others of its role still write."""
_LARGEST = 999e15
_GROUPING = "group"


@dataclass(frozen=True, kw_only=True)
class ComponentMetrics:
    """The newest record of one component."""

    component: str
    role: str
    """Command that runs it."""
    timestamp: float
    """Wall time of the record, seconds since the Unix epoch."""
    age_s: float = 0.0
    """Time since the record."""
    values: Mapping[str, float] = field(default_factory=dict)
    components: int = 1
    """Number of components that this entry sums up."""

    @property
    def running(self) -> bool:
        """Whether it ran when it wrote the record."""
        return self.values.get(RUNNING, 1.0) > 0

    @property
    def alive(self) -> bool:
        """Whether it runs, as far as its newest record tells."""
        return self.running and self.age_s < GONE_S


@dataclass(frozen=True)
class _Column:
    title: str
    metric: str
    kind: str = "count"
    """count, rate, fraction or version."""


_TABLES: Mapping[str, tuple[str, tuple[_Column, ...]]] = {
    "env": (
        "workers",
        (
            _Column("rollouts/s", "rollouts_per_s", "rate"),
            _Column("tokens/s", "tokens_per_s", "rate"),
            _Column("rollouts", "rollouts_total"),
            _Column("cancelled", "cancelled_total"),
            _Column("failed", "failed_total"),
            _Column("waits", "capacity_wait_seconds_per_s", "fraction"),
            _Column("version", "policy_version", "version"),
        ),
    ),
    "infer": (
        "servers",
        (
            _Column("requests/s", "requests_per_s", "rate"),
            _Column("tokens/s", "completion_tokens_per_s", "rate"),
            _Column("decoding", "decoding_rows"),
            _Column("queue", "waiting_requests"),
            _Column("errors", "errors_total"),
            _Column("swaps", "weight_swaps_total"),
            _Column("version", "policy_version", "version"),
        ),
    ),
    "group": (
        "grouping",
        (
            _Column("partitions", "partitions"),
            _Column("lag", "lag"),
            _Column("in flight", "in_flight"),
            _Column("batches", "batches_total"),
            _Column("dropped", "dropped_total"),
            _Column("dead", "dead_lettered_total"),
            _Column("restoring", "partitions_restoring"),
        ),
    ),
    "serve-weights": (
        "engines",
        (
            _Column("engines", "replicas"),
            _Column("serving", "serving_replicas"),
            _Column("drained", "drained_replicas"),
            _Column("swaps", "weight_swaps_total"),
            _Column("failed", "failed_updates_total"),
            _Column("paused", "paused_seconds_per_s", "fraction"),
            _Column("version", "policy_version", "version"),
        ),
    ),
    "gateway": (
        "gateways",
        (
            _Column("calls/s", "calls_per_s", "rate"),
            _Column("calls", "calls_total"),
            _Column("sessions", "open_sessions"),
            _Column("errors", "errors_total"),
            _Column("version", "policy_version", "version"),
        ),
    ),
    "eval": (
        "evaluators",
        (
            _Column("evaluations", "evaluations_total"),
            _Column("prompts", "prompts_total"),
            _Column("failed", "failed_total"),
            _Column("version", "policy_version", "version"),
        ),
    ),
}
_NAME_WIDTH = 17
_WIDTH = 7
_FORMATS: Mapping[str, Callable[[float], str]] = {
    "count": lambda value: _short(value),
    "rate": lambda value: _short(value) if value >= 100 else f"{value:.1f}",
    "fraction": lambda value: f"{100 * min(value, 1.0):.0f} %",
    "version": lambda value: _short(value) if value >= 1e6 else f"{value:.0f}",
}


class NewestMetrics:
    """Keeps the newest record of each component."""

    def __init__(self) -> None:
        self._newest: dict[str, ComponentMetrics] = {}

    def add(self, record: Metrics) -> None:
        """Add the next record of the topic. A value that is not finite is left out."""
        role, component = record.labels.get("role", ""), record.component
        if _is_of_grouping_process(record):
            # The name of a grouping process contains the name of the run, for which a row has no room.
            role, component = _GROUPING, f"{_GROUPING}-{component.rpartition('-')[2]}"
        if role not in _TABLES:
            return
        values = {name: value for name, value in record.values.items() if math.isfinite(value)}
        timestamp = record.timestamp if math.isfinite(record.timestamp) else 0.0
        self._newest[component] = ComponentMetrics(component=component, role=role, timestamp=timestamp, values=values)

    def at(self, now_s: float) -> tuple[ComponentMetrics, ...]:
        """Return the components as seen at a wall time, sorted by role and name, as `present` chooses them."""
        order = list(_TABLES)
        shown = present(self._newest.values(), now_s)
        return tuple(sorted(shown, key=lambda each: (order.index(each.role), each.component)))


def present(components: Iterable[ComponentMetrics], now_s: float) -> list[ComponentMetrics]:
    """Return the components with their age at a wall time.

    Components that ended or fell silent are left out while others of their role still write.
    """
    aged = [replace(each, age_s=max(0.0, now_s - each.timestamp)) for each in components]
    alive = {each.role for each in aged if each.alive}
    return [each for each in aged if each.alive or each.role not in alive]


def _is_of_grouping_process(record: Metrics) -> bool:
    """Whether a record is about a grouping process as a whole."""
    return record.labels.keys() == {"consumergroup", "topic"} and "finished_groups_total" in record.values


def component_lines(components: Sequence[ComponentMetrics], most: int) -> list[str]:
    """Return tables of the components, one for each role, in at most `most` lines of 80 columns.

    A role whose components do not fit becomes one row of sums; a table that still does not fit is left out.
    """
    by_role = {role: [each for each in components if each.role == role] for role in _TABLES}
    by_role = {role: members for role, members in by_role.items() if members}
    least = 2 * len(by_role)
    lines: list[str] = []
    for role, members in by_role.items():
        if most - len(lines) < 2:
            break
        rows = members if len(members) - 1 <= most - len(lines) - least else [_sum(members)]
        lines += _table(role, rows)
        least -= 2
    return lines


def _sum(members: Sequence[ComponentMetrics]) -> ComponentMetrics:
    """Sum up components of one role, with the lowest version and the mean of fractions."""
    kinds = {column.metric: column.kind for column in _TABLES[members[0].role][1]}
    values: dict[str, float] = {RUNNING: max(float(each.running) for each in members)}
    for metric, kind in kinds.items():
        numbers = [each.values[metric] for each in members if metric in each.values]
        if numbers and kind == "version":
            values[metric] = min(numbers)
        elif numbers:
            values[metric] = sum(numbers) / (len(numbers) if kind == "fraction" else 1)
    return replace(
        members[0],
        component=f"{len(members):,} together",
        values=values,
        components=len(members),
        age_s=min(each.age_s for each in members),
    )


def _table(role: str, rows: Sequence[ComponentMetrics]) -> list[str]:
    title, columns = _TABLES[role]
    widths = [max(len(column.title), _WIDTH) for column in columns]
    heads = (f"{column.title:>{width}}" for column, width in zip(columns, widths, strict=True))
    lines = [f" {title:{_NAME_WIDTH - 1}}{' '.join(heads)}"]
    for row in rows:
        cells = [
            f"{_text(row.values.get(column.metric), column.kind):>{width}}"[:width]
            for column, width in zip(columns, widths, strict=True)
        ]
        state = "" if row.alive else " silent" if row.running else " ended"
        name = printable(row.component, keep="")[: _NAME_WIDTH - 2 - len(state)] + state
        lines.append(f" {name:{_NAME_WIDTH - 1}}{' '.join(cells)}")
    return lines


def _short(value: float) -> str:
    """Return a number in at most seven characters."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:,.0f}"


def _text(value: float | None, kind: str) -> str:
    if value is None:
        return "-"
    return _FORMATS[kind](min(max(value, -1.0), _LARGEST))
