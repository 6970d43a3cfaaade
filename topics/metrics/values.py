"""The newest values of this process's metrics, and their text in the format of Prometheus at /metrics.

There is one object per process, as with logs. The metrics that a component writes to topic `metrics` are kept here,
too, under the names of the catalogue. Any thread may write; nothing here raises or waits.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0, generate_latest

from rollstream.topics.logs import event
from rollstream.topics.metrics.catalogue import (
    CATALOGUE_OF_METRICS,
    LATENCIES_S,
    NOT_SERVED,
    SUBJECTS,
    SUMS,
    MetricSpec,
    of_role,
)

logger = logging.getLogger(__name__)


class MetricValues:
    """Values of metrics by name and labels."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns seconds since the Unix epoch."""
        self._clock = clock
        self._lock = threading.Lock()
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[str, Histogram] = {}
        self._sources: dict[tuple[str, str], float] = {}
        self.uncatalogued: set[str] = set()
        """Recorded names that the catalogue lacks."""

    def record(self, role: str, values: Mapping[str, float], labels: Mapping[str, str] | None = None) -> None:
        """Store values as a component writes them to topic `metrics`.

        A record about a partition or an environment replaces the earlier record about it: a metric that it does not
        name, such as the progress of a restore that is over, is served no longer.
        """
        subject = {name: (labels or {})[name] for name in SUBJECTS if name in (labels or {})}
        with self._lock:
            if subject:
                self._forget(role, subject)
            for source, value in values.items():
                specs, wildcard = _specs(role, source, tuple(subject))
                if not specs and not _is_left_out(role, source, tuple(subject)):
                    self._report(f"{role}: {source}")
                for spec in specs:
                    if not spec.change:
                        self._store(spec.name, (*subject.values(), *wildcard), value)
                    elif self._sources.get((spec.name, source)) != value:
                        self._sources[spec.name, source] = value
                        self._store(spec.name, (), self._clock())

    def put(self, name: str, value: float, *labels: str) -> None:
        """Set a metric by its served name, with the values of its labels in the order of the catalogue."""
        with self._lock:
            self._store(name, labels, value)

    def count(self, name: str, more: float = 1) -> None:
        """Add `more` to a counter without labels."""
        with self._lock:
            self._store(name, (), self._values.get(name, {}).get((), 0.0) + more)

    def observe(self, name: str, values: Iterable[float]) -> None:
        """Add values to a histogram."""
        histogram = self.histogram_of(name)
        for value in values:
            histogram.observe(value)

    def keep(self, role: str, label: str, names: Collection[str]) -> None:
        """Keep only the values of a role whose label is in `names`, for example its present partitions."""
        with self._lock:
            for spec in of_role(role):
                if label in spec.labels:
                    place = spec.labels.index(label)
                    kept = self._values.get(spec.name, {}).items()
                    self._values[spec.name] = {key: value for key, value in kept if key[place] in names}

    def values_of(self, spec: MetricSpec) -> dict[tuple[str, ...], float]:
        """Return the values of a gauge or counter by its labels."""
        with self._lock:
            return dict(self._values.get(spec.name, {}))

    def histogram_of(self, name: str) -> Histogram:
        """Return the histogram of that name, empty before its first value."""
        with self._lock:
            if name not in self._histograms:
                [spec] = (spec for spec in CATALOGUE_OF_METRICS if spec.name == name)
                self._histograms[name] = Histogram(name, spec.help, buckets=LATENCIES_S, registry=None)
            return self._histograms[name]

    def _forget(self, role: str, subject: Mapping[str, str]) -> None:
        """Drop the values that earlier records about a subject had."""
        names, place = tuple(subject), tuple(subject.values())
        for spec in of_role(role):
            if spec.source and spec.labels[: len(names)] == names:
                kept = self._values.get(spec.name, {}).items()
                self._values[spec.name] = {key: value for key, value in kept if key[: len(place)] != place}

    def _report(self, name: str) -> None:
        if name not in self.uncatalogued:
            self.uncatalogued.add(name)
            event(logger, "metric_not_served", level=logging.WARNING, metric=name)

    def _store(self, name: str, labels: tuple[str, ...], value: float) -> None:
        self._values.setdefault(name, {})[labels] = value


def _is_left_out(role: str, source: str, subject: tuple[str, ...]) -> bool:
    return (role == "group" and source in SUMS and not subject) or any(
        fnmatchcase(source, pattern) for pattern in NOT_SERVED
    )


@cache
def _specs(role: str, source: str, subject: tuple[str, ...]) -> tuple[tuple[MetricSpec, ...], tuple[str, ...]]:
    """Return the entries of a source whose subject has these labels, and the values of their other labels."""
    entries = [spec for spec in CATALOGUE_OF_METRICS if role in spec.roles and spec.source]
    exact = tuple(spec for spec in entries if spec.source == source and spec.labels == subject)
    if exact:
        return exact, ()
    for spec in entries:
        start = spec.source.removesuffix("*")
        if spec.source.endswith("*") and source.startswith(start) and spec.labels[:-1] == subject:
            return (spec,), (source.removeprefix(start),)
    return (), ()


VALUES = MetricValues()
"""The values of this process."""


CONTENT_TYPE = CONTENT_TYPE_PLAIN_1_0_0


def text_of(role: str, figures: Mapping[str, float]) -> bytes:
    """Return the metrics of a role from its figures alone, for a role that serves them at its own port."""
    values = MetricValues()
    values.record(role, figures)
    return Exposition((spec for spec in of_role(role) if spec.source and not spec.change), values, {}).text()


class Exposition:
    """Text of the metrics of one process."""

    def __init__(
        self,
        specs: Iterable[MetricSpec],
        values: MetricValues,
        labels: Mapping[str, str],
        *,
        process: bool = False,
    ) -> None:
        """`labels` are added to every sample; `process` adds start time, memory, processor time and open files of the
        process."""
        self._specs, self._values, self._labels = tuple(specs), values, labels
        self._process = ProcessCollector(registry=None) if process else None
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """Return the present values of all metrics as text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each histogram and each other metric that has a value, for prometheus_client."""
        for spec in self._specs:
            if spec.kind == "histogram":
                yield from map(self._labeled, self._values.histogram_of(spec.name).collect())
            elif values := self._values.values_of(spec):
                yield self._numbers(spec, values)
        yield from map(self._labeled, self._process.collect() if self._process else ())

    def _labeled(self, family: Metric) -> Metric:
        samples = (sample for sample in family.samples if not sample.name.endswith("_created"))
        family.samples = [sample._replace(labels={**self._labels, **sample.labels}) for sample in samples]
        return family

    def _numbers(self, spec: MetricSpec, values: Mapping[tuple[str, ...], float]) -> Metric:
        kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
        family = kind(spec.name, spec.help, labels=(*self._labels, *spec.labels))
        for labels, value in sorted(values.items()):
            family.add_metric((*self._labels.values(), *labels), value)
        return family
