"""The index against batches and journal: it names each batch once, in order, and where it is.

A batch that no entry names is lost to every learner; one that two entries name would be trained on twice.
"""

import time
from collections.abc import Mapping

from pipeline.journals import PartitionJournal
from pipeline.ledger.book import PATIENCE_S, Ledger
from pipeline.ledger.hidden import Hidden
from pipeline.ledger.tail import Tail
from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.records import BatchIndexEntry, batch_numbers
from topics.skipped import SkippedRecords

Entries = Mapping[int, BatchIndexEntry]
"""What the index holds, by offset, ascending."""
Place = tuple[int, int]
"""Partition and offset in `batches`."""


def check_index(
    kafka: KafkaConfig,
    run: str,
    journals: Mapping[int, PartitionJournal],
    places: Mapping[str, Place],
    cut: int,
    hidden: Hidden,
    result: Ledger,
) -> Entries:
    """The index against the batches found at `places`. What lay before offset `cut` of it was committed before the
    journal was read, and must be told of there. Returns what the index holds.
    """
    tail, skipped = Tail(kafka, run, "batch-index"), SkippedRecords("ledger", logged=False)
    entries: dict[int, BatchIndexEntry] = {}
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for message, entry in skipped.records(BatchIndexEntry, tail.messages()):
            with skipped.passing(message):
                batch_numbers(entry.batch_id)
                entries[message.offset() or 0] = entry
        missing = unnamed(entries, journals)
        if not missing or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    result.note_skipped(skipped)
    later = {entry.batch_id for entry in _hidden_entries(hidden)} if missing else set()
    for batch_id in sorted(later.intersection(missing)):
        result.undecide(f"entry of batch {batch_id} in batch-index", hidden.places("batch-index"))
    lost = [batch_id for batch_id in missing if batch_id not in later]
    if lost:
        begin = clients.bounds(kafka, topic_name(run, "batch-index"))[0][0]
        result.problem(
            f"{len(lost)} batches have no entry in batch-index, which begins at offset {begin}: no learner finds "
            f"them; the first is {lost[0]}"
        )
    check_entries(entries, journals, places, cut, result)
    return entries


def unnamed(entries: Entries, journals: Mapping[int, PartitionJournal]) -> list[str]:
    """Batches that no entry names: of each partition from the first that is named, or that the journal tells of."""
    named = {batch_numbers(entry.batch_id) for entry in entries.values()}
    found = []
    for partition, journal in journals.items():
        first = min((number for p, number in named if p == partition), default=journal.base_batches)
        numbers = range(min(first, journal.base_batches), journal.batches)
        found += [f"{partition}-{number}" for number in numbers if (partition, number) not in named]
    return found


def check_entries(
    entries: Entries,
    journals: Mapping[int, PartitionJournal],
    places: Mapping[str, Place],
    cut: int,
    result: Ledger,
) -> None:
    """Entries against what they name; `cut` as in `check_index`."""
    first: dict[str, int] = {}
    newest: dict[int, tuple[int, str]] = {}
    for offset, entry in entries.items():
        name, place, what = entry.batch_id, (entry.partition, entry.offset), f"batch-index offset {offset}"
        partition, number = batch_numbers(name)
        if partition not in journals or number >= journals[partition].batches:
            if offset < cut and not (partition in journals and journals[partition].hidden):
                result.problem(f"{what} names batch {name}, which no journal tells of")
            continue
        if places.get(name) != place:
            where = f"it is at offset {places[name][1]}" if name in places else "which is nowhere"
            result.problem(f"{what} names batch {name} at batches[{place[0]}] offset {place[1]}; {where}")
        if name in first:
            result.problem(f"{what} names batch {name} again, which offset {first[name]} names")
            continue
        first[name] = offset
        if partition in newest and newest[partition][0] > number:
            result.problem(f"{what} names batch {name} after batch {newest[partition][1]}")
        newest[partition] = number, name


def _hidden_entries(hidden: Hidden) -> list[BatchIndexEntry]:
    messages = hidden.messages("batch-index")
    return [entry for _message, entry in SkippedRecords("ledger", logged=False).records(BatchIndexEntry, messages)]
