"""The report of a demo of scaling, for programs and for people. Pure."""

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from rollstream.pipeline.audit.texts import ledger_text, verification_text
from rollstream.pipeline.command_line.text_tables import command_text, table
from rollstream.pipeline.launch.scale_series import Coverage, Handover, ScaleSeries
from rollstream.pipeline.report.document import figure, page
from rollstream.pipeline.report.line_chart import Curve


@dataclass(frozen=True, kw_only=True)
class ScaleReport:
    """Results of a demo of scaling."""

    run: str
    seed: int
    partitions: int
    limit_per_s: float
    """Maximum number of records per second that one process was allowed to read."""
    high_per_s: float
    """Highest rate of the load, in rollouts per second."""
    fewest: int
    """Minimum number of processes under the autoscaling rule."""
    rule: str
    """The autoscaling rule, in words."""
    written: int
    """Rollouts that the workers wrote, by the broker's acknowledgements."""
    series: ScaleSeries
    coverage: Coverage
    handovers: tuple[Handover, ...]
    ledger: Mapping[str, Any]
    verify: Mapping[str, Any]
    seconds: float
    """Time from the start of the command to this report."""
    kept: bool
    places: Mapping[str, str] = field(default_factory=dict)
    """Paths of picture, report, logs and data."""
    next: tuple[str, ...] = ()
    """Commands to try next."""

    @property
    def rollouts(self) -> dict[str, int]:
        """Rollouts by place: batched, dropped for each reason, open in an incomplete group or batch, and unread."""
        dropped = {f"dropped: {reason}": count for reason, count in sorted(self.ledger["dropped"].items())}
        return {
            "batched": self.ledger["batched"],
            **dropped,
            "open": self.ledger["in_flight"],
            "unread": self.ledger["unread"],
        }

    @property
    def failures(self) -> tuple[str, ...]:
        """Promises that did not hold; empty if the demo passed."""
        failures = []
        placed = sum(self.rollouts.values())
        last = self.series.points[-1].processes if self.series.points else 0
        if self.series.most_processes <= self.fewest:
            failures.append(f"there were never more than {self.fewest} grouping processes")
        if last != self.fewest:
            failures.append(f"{last} grouping processes were left, but {self.fewest} were expected")
        if placed != self.written:
            failures.append(f"{self.written:,} rollouts were written, but {placed:,} are accounted for")
        if self.rollouts["unread"]:
            failures.append(f"{self.rollouts['unread']:,} records were left unread")
        if self.coverage.twice or self.coverage.missing:
            failures.append(f"{self.coverage.twice:,} offsets were read twice, {self.coverage.missing:,} never")
        if not self.ledger["balanced"]:
            failures.append("the ledger does not balance")
        if self.verify["mismatches"]:
            failures.append(f"verification found {self.verify['mismatches']:,} differences")
        return tuple(failures)

    @property
    def passed(self) -> bool:
        """Whether every promise held."""
        return not self.failures

    @property
    def waits(self) -> tuple[float, ...]:
        """Seconds that the records of each partition waited when it went to another process, in ascending order."""
        return tuple(sorted(change.seconds for change in self.handovers))

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values for JSON."""
        values = {name: value for name, value in vars(self).items() if name not in ("series", "coverage", "handovers")}
        return {
            **values,
            "rollouts": self.rollouts,
            "batches": self.verify["batches"],
            "peak_lag": self.series.peak_lag,
            "most_processes": self.series.most_processes,
            "processes": [list(change) for change in self.series.changes],
            "read": asdict(self.coverage),
            "handovers": [asdict(change) for change in self.handovers],
            "points": self.series.as_list(),
            "passed": self.passed,
            "failures": list(self.failures),
        }

    def as_text(self) -> str:
        """The report for people."""
        return "\n\n".join((self._load(), self._processes(), self._rollouts(), self._books(), self._places()))

    def as_page(self) -> str:
        """The report's charts as a page of HTML."""
        held = f"; one process reads at most {self.limit_per_s:,.0f} per second" if self.limit_per_s else ""
        rollouts = f"{self.written:,} rollouts over {self.partitions} partitions{held}"
        lines = (f"run {self.run}, seed {self.seed}: {rollouts}", self.rule)
        seconds = [round(at_s) for at_s in self.series.times]
        panels = self.series.panels if seconds else {}
        figures = (
            figure(title, "by second", [Curve(name, seconds, values) for name, values in curves.items()], number)
            for number, (title, curves) in enumerate(panels.items())
        )
        head = "<h1>Grouping scales with its lag</h1>" + "".join(f"<p>{escape(line)}</p>" for line in lines)
        return page(f"{self.run}: scaling", f'<header>{head}</header>\n<div class="charts">{"".join(figures)}</div>\n')

    def _load(self) -> str:
        lines = [
            f"{self.written:,} rollouts, up to {self.high_per_s:,.0f} per second, over {self.partitions} partitions; "
            f"{self.seconds:.0f} s in all."
        ]
        if self.limit_per_s:
            lines += [
                f"One grouping process may read {self.limit_per_s:,.0f} records per second (grouper.records_per_s):",
                "with this limit, a small machine can show how grouping scales.",
            ]
        return "\n".join([*lines, self.rule])

    def _processes(self) -> str:
        rows = [(f"{at_s:.0f} s", count) for at_s, count in self.series.changes]
        waits = self.waits
        changed = "no partition changed hands"
        if waits:
            changed = (
                f"{len(waits)} times a partition went to another process; its records waited "
                f"{statistics.median(waits):.1f} s (median), {waits[-1]:.1f} s at most"
            )
        return f"{table(('at', 'processes'), rows)}\n\npeak lag {self.series.peak_lag:,} records; {changed}"

    def _rollouts(self) -> str:
        rows: list[tuple[object, ...]] = [("written", self.written)]
        rows += [(f"  {name.replace('_', ' ')}", count) for name, count in self.rollouts.items()]
        return (
            f"{table(('rollouts', 'records'), rows)}\n{self.coverage.offsets:,} offsets read in committed "
            f"transactions, {self.coverage.twice:,} of them twice, {self.coverage.missing:,} passed over"
        )

    def _books(self) -> str:
        return f"{ledger_text(self.ledger)}\n{verification_text(self.verify)}"

    def _places(self) -> str:
        lines = [f"{name}: {place}" for name, place in self.places.items()]
        lines += ["", "what to try next:", *(command_text(command, "    ") for command in self.next)]
        lines += ["", "PASSED" if self.passed else "FAILED: " + "; ".join(self.failures)]
        return "\n".join(lines)
