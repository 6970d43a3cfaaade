"""The ledger in both forms, which must agree: one reads everything, the other what is new since its last file."""

from typing import Any

from rollstream.pipeline.audit.ledger import Ledger, LiveLedger, ledger
from tests.support.runs import RealRun


def live(run: RealRun) -> LiveLedger:
    """A ledger that reads only what is new, from the file of the one before."""
    return LiveLedger(run.kafka, run.name, run.directory / "books" / "live", run.grouper.group_id(run.name))


def plain(book: Ledger) -> dict[str, Any]:
    return book.as_dict()


def in_both_forms(run: RealRun) -> Ledger:
    """The full ledger; the one that reads what is new must equal it, unless the run went on between their readings."""
    with live(run) as reader:
        before = plain(reader.poll())
    whole = ledger(run.kafka, run.name, run.grouper.group_id(run.name))
    with live(run) as reader:
        after = plain(reader.poll())
    if before == after:
        assert after == plain(whole)
    return whole
