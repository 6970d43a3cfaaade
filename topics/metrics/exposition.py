"""Metrics in the text format of Prometheus, from the catalogue and the values of this process."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0, generate_latest

from rollstream.topics.metrics.catalogue import MetricSpec, of_role
from rollstream.topics.metrics.values import MetricValues

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
