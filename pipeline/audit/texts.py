"""Ledgers and verifications as text for people."""

from collections.abc import Mapping
from typing import Any

from rollstream.consumers.grouping.selection_bias import MEASURES, TOLERANCE, warning
from rollstream.pipeline.command_line.text_tables import table


def ledger_text(book: Mapping[str, Any]) -> str:
    """Table of a ledger: the fate of every record of `rollouts`."""
    rows: list[tuple[object, ...]] = [("produced", book["produced"]), ("  batched", book["batched"])]
    rows += [(f"    of these {name}", book[name]) for name in ("trained", "skipped")]
    rows += [(f"      as {code.replace('_', ' ')}", count) for code, count in book.get("skipped_as", {}).items()]
    rows += [(f"  dropped: {reason.replace('_', ' ')}", count) for reason, count in sorted(book["dropped"].items())]
    rows += [
        (f"  {name.replace('_', ' ')}", book[name]) for name in ("dead_lettered", "control", "in_flight", "unread")
    ]
    verdict = "every record is in exactly one place" if book["balanced"] else "THE LEDGER DOES NOT BALANCE"
    undecided = book.get("undecided", ())
    if undecided and book["balanced"]:
        verdict = "every record is in exactly one place, as far as it is decided yet"
    lines = [*book.get("problems", ()), *(f"undecided: {line}" for line in undecided)]
    books = "\n".join([table(("ledger of rollouts", "records"), rows), verdict, *lines])
    return f"{books}\n\n{selection_text(book['selection'])}" if book["selection"] else books


def selection_text(selections: Mapping[str, Any]) -> str:
    """Table of mean length and reward by environment and kind, with a warning if losses bias the training data."""
    rows: list[tuple[object, ...]] = []
    lines = []
    for environment, selection in selections.items():
        for name in ("produced", "batched", "without_gradient", "lost"):
            kind = selection[name]
            unknown = "unknown" if kind["rollouts"] else ""
            means = (unknown if kind[f"mean_{f}"] is None else f"{kind[f'mean_{f}']:.4g}" for f in MEASURES)
            # The means do not cover invalid rollouts.
            measured = kind["measured"] if kind["measured"] < kind["rollouts"] else "all"
            label = environment if name == "produced" else f"  {name.replace('_', ' ')}"
            rows.append((label, kind["rollouts"], measured if kind["rollouts"] else "", *means))
        lines += [warning(environment, figure, selection) for figure in selection["alerts"]]
    verdict = [f"WARNING: {line}" for line in lines] or [
        f"the lost rollouts shift no mean by more than {TOLERANCE} standard deviations, beyond chance"
    ]
    header = ("environment", "rollouts", "measured", *(f"mean {figure}" for figure in MEASURES))
    return "\n".join([table(header, rows), *verdict])


def verification_text(result: Mapping[str, Any]) -> str:
    """The result of a verification in a line, and a line for each difference."""
    verdict = f"verify: {result['batches']:,} batches computed again from the log, {result['mismatches']:,} differences"
    return "\n".join([verdict, *result.get("differences", ())])
