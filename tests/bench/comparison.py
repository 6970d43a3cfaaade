"""Compares two measurements, and names the rows that differ by more than their usual variation.

Ratios are compared, never rates, because the second machine may be another one, or busier. A row differs if the ranges
of its ratios do not overlap; this needs at least two repetitions in each measurement.
"""

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

Verdict = Literal["better", "worse", "same", "once"]


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """The ratios of one row in the earlier measurement (then) and in the later one (now)."""

    name: str
    then: tuple[float, ...]
    now: tuple[float, ...]
    lower_is_better: bool
    """Whether the ratios are of latencies."""

    @property
    def change(self) -> float:
        """Change of the median ratio, relative to the earlier median."""
        return median(self.now) / median(self.then) - 1

    @property
    def verdict(self) -> Verdict:
        """`better` or `worse` if the ranges do not overlap, else `same`; `once` if a measurement has one repetition."""
        if min(len(self.then), len(self.now)) < 2:
            return "once"
        if min(self.now) > max(self.then):
            return "worse" if self.lower_is_better else "better"
        if max(self.now) < min(self.then):
            return "better" if self.lower_is_better else "worse"
        return "same"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of two measurements."""

    rows: tuple[ComparedRow, ...]
    only_then: tuple[str, ...]
    only_now: tuple[str, ...]
    other_settings: tuple[str, ...]
    """Settings that differ, with both values."""

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        rows = [{**asdict(row), "change": row.change, "verdict": row.verdict} for row in self.rows]
        return {**asdict(self), "rows": rows}


def compared(then: Mapping[str, Any], now: Mapping[str, Any]) -> Comparison:
    """Compare two documents that `python -m tests.bench` wrote."""
    before, after = ({row["name"]: row for row in document["rows"]} for document in (then, now))
    settings = {name: (then["settings"].get(name), now["settings"].get(name)) for name in now["settings"]}
    return Comparison(
        rows=tuple(
            ComparedRow(
                name=name,
                then=tuple(before[name]["ratios"]),
                now=tuple(row["ratios"]),
                lower_is_better="p99_ms" in row,
            )
            for name, row in after.items()
            if name in before
        ),
        only_then=tuple(before.keys() - after.keys()),
        only_now=tuple(after.keys() - before.keys()),
        other_settings=tuple(f"{name} {a} then, {b} now" for name, (a, b) in settings.items() if a != b),
    )


def read_document(path: Path) -> dict[str, Any]:
    """Read the document of a measurement. Raises ValueError for a file that is not one."""
    document: dict[str, Any] = json.loads(path.read_text())
    if not isinstance(document, dict) or not {"settings", "rows"} <= document.keys():
        raise ValueError(f"{path} is not a measurement; give a file that `python -m tests.bench` wrote")
    return document


def comparison_table(comparison: Comparison, old: str, width: int) -> str:
    """Return a table with the ratios of both measurements side by side; `old` names the earlier measurement."""
    lines = ["row                   then  lowest..high     now  lowest..high"]
    for row in comparison.rows:
        then, now = (_ranged(values) for values in (row.then, row.now))
        change = f"  {row.verdict} {row.change:+.0%}" if row.verdict in ("better", "worse") else f"  {row.verdict}"
        lines.append(f"{row.name:19}{then}{now}{change}")
    lines.append("")
    notes = [f"compared with {old}: better or worse where no ratio of one lies within the range of the other"]
    for what, names in (("only then", comparison.only_then), ("only now", comparison.only_now)):
        notes += [f"{what}: {', '.join(sorted(names))}"] if names else []
    notes += [f"other settings: {'; '.join(comparison.other_settings)}"] if comparison.other_settings else []
    return "\n".join(
        lines
        + [
            line
            for note in notes
            for line in textwrap.wrap(note, width, subsequent_indent="  ", break_on_hyphens=False)
        ]
    )


def _ranged(values: Sequence[float]) -> str:
    return f"{median(values):>7.2f}{min(values):>7.2f}..{max(values):<5.2f}"
