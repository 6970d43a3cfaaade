"""The figures of the benchmark as plain text."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from tests.bench.measure import LatencyRow, Row, Settings

WIDTH = 80


def report(
    settings: Settings,
    machine: dict[str, Any],
    rows: Sequence[Row | LatencyRow],
    failed: Mapping[str, str] | None = None,
) -> str:
    """Plain tables no wider than 80 columns, what the columns mean, and why rows are missing."""
    lines = [
        f"{settings.rollouts:,} rollouts of {settings.tokens:,} tokens, {settings.repetitions} repetitions, medians",
        f"{machine['cores']} cores shared with the broker; load {machine['load_before']} before, "
        f"{machine['load_after']} after",
    ]
    rates = [row for row in rows if isinstance(row, Row)]
    latencies = [row for row in rows if isinstance(row, LatencyRow)]
    if rates:
        lines += [
            "",
            "                      rollouts/s             ratio                CPU us/rollout",
            "row                   ours     raw noise median  lowest..highest  ours     raw",
        ]
    for row in rates:
        values = row.as_dict()
        lines.append(
            f"{row.name:19}{values['rollouts_per_s']:>7,.0f}{values['baseline_rollouts_per_s']:>8,.0f}"
            f"{row.noise:>6.0%}{row.ratio:>7.2f}{min(row.ratios):>8.2f}..{max(row.ratios):<7.2f}"
            f"{values['cpu_us_per_rollout']:>6,.0f}{values['baseline_cpu_us_per_rollout']:>8,.0f}"
        )
    if latencies:
        lines += [
            "",
            "                    ours, ms        raw, ms         ratio of p99",
            "row                 p50     p99     p50     p99     median  lowest..highest",
        ]
    for late in latencies:
        values = late.as_dict()
        lines.append(
            f"{late.name:16}{values['p50_ms']:>7,.1f}{values['p99_ms']:>8,.1f}{values['baseline_p50_ms']:>8,.1f}"
            f"{values['baseline_p99_ms']:>8,.1f}{late.ratio:>11.2f}{min(late.ratios):>8.2f}..{max(late.ratios):<7.2f}"
        )
    if sized := [row for row in rates if row.tokens]:
        lines += ["", "row                 tokens a rollout      MB/s  raw MB/s      tokens/s"]
    for row in sized:
        values = row.as_dict()
        lines.append(
            f"{row.name:20}{row.tokens:>16,.0f}{values['mb_per_s']:>10,.1f}{values['baseline_mb_per_s']:>10,.1f}"
            f"{values['tokens_per_s']:>14,.0f}"
        )
    lines.append("")
    for each in rows:
        lines += textwrap.wrap(f"{each.name}: {each.what}; raw: {each.baseline}", WIDTH, subsequent_indent="  ")
        if each.figures:
            seen = "; ".join(f"{name} {value:,.3g}" for name, value in each.figures.items())
            lines += textwrap.wrap(f"  seen: {seen}", WIDTH, subsequent_indent="  ")
    lines.append("ratio: ours over raw in the same repetition; noise: how far raw alone varied.")
    for name, error in (failed or {}).items():
        lines += ["", *textwrap.wrap(f"{name} FAILED: {error}", WIDTH, subsequent_indent="  ")]
    return "\n".join(lines)
