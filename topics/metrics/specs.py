"""Entries of the catalogue of metrics, one for each served metric, and functions that make entries."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]
PREFIX = "rollstream_"


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """One served metric."""

    name: str
    """Name in Prometheus; the name of a counter ends in `_total`."""
    roles: tuple[str, ...]
    """Roles that serve it."""
    help: str
    kind: Kind = "gauge"
    unit: str = ""
    """seconds, bytes, rollouts, ...; empty for numbers without a unit."""
    labels: tuple[str, ...] = ()
    """Labels in addition to `COMMON`."""
    source: str = ""
    """Name on topic `metrics`. `left_out/*` serves each name that begins with `left_out/`; the remainder of the name is
    the value of the last label. Empty: the code sets the metric by its served name."""
    when: str = ""
    """When it is served, if not always."""
    change: bool = False
    """Whether it is the time, in seconds since the Unix epoch, at which the source last changed its value."""


def metric_rows(
    role: str,
    prefix: str,
    rows: Mapping[str, str],
    *,
    labels: tuple[str, ...] = (),
    when: str = "",
    units: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
) -> Iterator[MetricSpec]:
    """Yield metrics that are served as `rollstream_{prefix}_{source}`, or with the name in `names`.

    A metric whose name ends in `_total` is a counter.
    """
    for source, meaning in rows.items():
        words = (names or {}).get(source, source.replace("/", "_").removesuffix("_*"))
        yield MetricSpec(
            name=f"{PREFIX}{prefix}_{words}",
            roles=(role,),
            help=meaning,
            kind="counter" if words.endswith("_total") else "gauge",
            unit=(units or {}).get(source, _unit(words)),
            labels=labels,
            source=source,
            when=when,
        )


def _unit(words: str) -> str:
    parts = words.removesuffix("_total").split("_")
    return next((unit for unit in ("seconds", "bytes", "tokens", "rollouts") if unit in parts), "")


def time_of_change(role: str, name: str, source: str, meaning: str) -> MetricSpec:
    return MetricSpec(name=PREFIX + name, roles=(role,), help=meaning, unit="seconds", source=source, change=True)
