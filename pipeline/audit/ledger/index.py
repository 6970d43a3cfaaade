"""Compares the index with batches and journal: it must name each batch once, in order, at its place.

No learner finds a batch that no entry names, and learners would train twice on one that two entries name.
"""

from collections.abc import Mapping

from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.hidden_records import HiddenRecords
from rollstream.pipeline.audit.ledger.topic_tail import TopicTail, read_until_complete
from rollstream.pipeline.audit.partition_journal import PartitionJournal
from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import BatchIndexEntry, batch_numbers

Entries = Mapping[int, BatchIndexEntry]
"""Entries of the index by offset, ascending."""
BatchPlace = tuple[int, int]
"""Partition and offset in `batches`."""


def check_index(
    kafka: KafkaConfig,
    run: str,
    journals: Mapping[int, PartitionJournal],
    places: Mapping[str, BatchPlace],
    cut: int,
    hidden: HiddenRecords,
    result: Ledger,
) -> Entries:
    """Compare the index with the batches found at `places`, and return its entries.

    Entries before offset `cut` were committed before the journal was read, so the journal must name their batches.
    """
    tail, skipped = TopicTail(kafka, run, "batch-index"), SkippedRecords("ledger", logged=False)
    entries: dict[int, BatchIndexEntry] = {}

    def read() -> list[str]:
        for message, entry in skipped.records(BatchIndexEntry, tail.messages()):
            with skipped.passing(message):
                batch_numbers(entry.batch_id)
                entries[message.offset] = entry
        return unnamed(entries, journals)

    missing = read_until_complete(read)
    result.note_skipped(skipped)
    invisible = {entry.batch_id for entry in _hidden_entries(hidden)} if missing else set()
    for batch_id in sorted(invisible.intersection(missing)):
        result.undecide(f"entry of batch {batch_id} in batch-index", hidden.places("batch-index"))
    lost = [batch_id for batch_id in missing if batch_id not in invisible]
    if lost:
        begin = topic_admin.bounds(kafka, topic_name(run, "batch-index"))[0][0]
        result.problem(
            f"{len(lost)} batches have no entry in batch-index, which begins at offset {begin}: no learner finds "
            f"them; the first is {lost[0]}"
        )
    check_entries(entries, journals, places, cut, result)
    return entries


def unnamed(entries: Entries, journals: Mapping[int, PartitionJournal]) -> list[str]:
    """Batches that no entry names, of each partition from the first batch that an entry or the journal names."""
    named = {batch_numbers(entry.batch_id) for entry in entries.values() if not entry.run}
    batch_ids = []
    for partition, journal in journals.items():
        first = min((number for p, number in named if p == partition), default=journal.base_batches)
        numbers = range(min(first, journal.base_batches), journal.batches)
        batch_ids += [f"{partition}-{number}" for number in numbers if (partition, number) not in named]
    return batch_ids


def check_entries(
    entries: Entries,
    journals: Mapping[int, PartitionJournal],
    places: Mapping[str, BatchPlace],
    cut: int,
    result: Ledger,
) -> None:
    """Compare entries with the batches they name; `cut` is as in `check_index`."""
    first: dict[str, int] = {}
    newest: dict[int, tuple[int, str]] = {}
    for offset, entry in entries.items():
        if entry.run:
            continue  # The ledger of that run compares the batch.
        name, place, source = entry.batch_id, (entry.partition, entry.offset), f"batch-index offset {offset}"
        partition, number = batch_numbers(name)
        if partition not in journals or number >= journals[partition].batches:
            if offset < cut and not (partition in journals and journals[partition].hidden):
                result.problem(f"{source} names batch {name}, which no journal tells of")
            continue
        if places.get(name) != place:
            where = f"it is at offset {places[name][1]}" if name in places else "which is nowhere"
            result.problem(f"{source} names batch {name} at batches[{place[0]}] offset {place[1]}; {where}")
        if name in first:
            result.problem(f"{source} names batch {name} again, which offset {first[name]} names")
            continue
        first[name] = offset
        if partition in newest and newest[partition][0] > number:
            result.problem(f"{source} names batch {name} after batch {newest[partition][1]}")
        newest[partition] = number, name


def _hidden_entries(hidden: HiddenRecords) -> list[BatchIndexEntry]:
    messages = hidden.messages("batch-index")
    return [entry for _message, entry in SkippedRecords("ledger", logged=False).records(BatchIndexEntry, messages)]
