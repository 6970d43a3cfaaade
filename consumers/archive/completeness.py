"""Whether an archive is complete: it holds the rollouts and batches that its journals count.

An archiver reads the journals first and the rollouts last. If it ends within a pass, the journals that it has archived
already are about records that are not in the archive, and no restored run could continue from them.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import takewhile

from rollstream.consumers.archive.manifest import LOG, ArchiveManifest
from rollstream.consumers.archive.tables import ArchivedRecord
from rollstream.consumers.archive.writer import records
from rollstream.topics.errors import RecordError, StateRefused
from rollstream.topics.files.stores import Store
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import JournalRecord, batch_numbers
from rollstream.topics.wire.keys import decode_key


def check_complete(store: Store, manifest: ArchiveManifest, *, incomplete: bool = False) -> None:
    """Raise StateRefused unless the archive reaches as far in `rollouts` and `batches` as its journals say, or, if
    `incomplete` is permitted, unless it holds topics.

    Reads the last files of these topics. Raises as `records` does.
    """
    topics, remedy = manifest.topics, f"run `rollstream archive --run {manifest.run}` to complete it, then restore it"
    if "rollouts" not in topics:
        raise StateRefused(f"the archive of run {manifest.run} in {store.url} holds no topics yet; {remedy}")
    if incomplete:
        return
    for p in sorted(topics["journal"].position) if {"journal", "batches"} <= topics.keys() else ():
        journal = _last_record(store, manifest, p)
        if journal is None:
            continue
        position, batches = topics["rollouts"].position[p], _batches(store, manifest, p, journal.batch_number)
        if journal.position > position:
            lacking = f"grouping had read rollouts[{p}] up to {journal.position}, but it is archived up to {position}"
        elif batches is not None and journal.batch_number > batches:
            lacking = f"the next batch of batches[{p}] was number {journal.batch_number}, but it is archived up to "
            lacking += f"number {batches - 1}" if batches else "none"
        else:
            continue
        raise StateRefused(
            f"the archive of run {manifest.run} in {store.url} is incomplete: when the last record of journal[{p}] was "
            f"written, {lacking}; {remedy}, or, if its brokers are gone for good, restore what it has with --incomplete"
        )


def _last_record(store: Store, manifest: ArchiveManifest, partition: int) -> JournalRecord | None:
    """Return the last archived record of a journal; None if there is none."""
    for entries in _from_last_file(store, manifest, "journal", partition):
        decoded = (record for entry in entries if (record := _journal_record(manifest, entry)) is not None)
        if last := deque(decoded, maxlen=1):
            return last[0]
    return None


def _batches(store: Store, manifest: ArchiveManifest, partition: int, due: int) -> int | None:
    """Return the number after that of the last archived batch, or a number from `due` on.

    None if it cannot be known, because all archived batches were pruned.
    """
    after = -1
    # Records of other programs may follow the last batch, so this goes on until it has what is due.
    for entries in _from_last_file(store, manifest, "batches", partition):
        after = max([after, *(number + 1 for entry in entries if (number := _batch_number(entry)) is not None)])
        if after >= due:
            break
    if after >= 0:
        return after
    entries = records(store, manifest, "journal", partition)
    first = next((record for entry in entries if (record := _journal_record(manifest, entry)) is not None), None)
    pruned = first is None or first.sequence > 0 or manifest.topics["batches"].begin[partition] > 0
    return None if pruned or first is None else first.batch_number


def _from_last_file(
    store: Store, manifest: ArchiveManifest, name: str, partition: int
) -> Iterator[Iterator[ArchivedRecord]]:
    """Yield the records of each file of a partition, the last file first."""
    for file in reversed(manifest.files_of(LOG)):
        if (file.topic, file.partition) == (name, partition):
            entries = records(store, manifest, name, partition, file.begin)
            yield takewhile(lambda entry, end=file.end: entry.offset < end, entries)  # type: ignore[misc]


def _journal_record(manifest: ArchiveManifest, entry: ArchivedRecord) -> JournalRecord | None:
    return SkippedRecords(logged=False).decode(JournalRecord, entry.message(manifest.run))


def _batch_number(entry: ArchivedRecord) -> int | None:
    with suppress(RecordError):
        partition, number = batch_numbers(str((*decode_key(entry.key), "")[0]))
        return number if partition == entry.partition else None
    return None
