"""Folding a recorded partition again, from its beginning or from a snapshot, under its own configuration or another.

What verification and replay share: the very fold a consumer runs, fed with the log, its effects taken now and then.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from consumers.grouping import state
from consumers.grouping.changes import CORE_VERSION, Output, Record
from consumers.grouping.config import ForeignConfiguration, GroupingConfig
from consumers.grouping.configuring import judge_mark
from consumers.grouping.fold import Fold
from consumers.grouping.makers import MakerFactory
from consumers.grouping.restore import records_of
from pipeline.reading import read_journal
from topics import clients, codec
from topics.catalogue import topic_name
from topics.codec import decode_as, encode
from topics.config import KafkaConfig
from topics.errors import ConfigurationError, RecordError, StateRefused
from topics.records import JournalRecord, Mark
from topics.skipped import SkippedRecords

Change = Callable[[GroupingConfig], GroupingConfig]
"""Another configuration in the place of one."""
_TAKE_EVERY = 200


def journal_of(kafka: KafkaConfig, run: str, partition: int, skipped: SkippedRecords) -> list[JournalRecord]:
    """The journal of a partition, oldest first. Raises StateRefused when a newer release wrote it."""
    records = [record for _offset, record in read_journal(kafka, run, partition, skipped)]
    newest = max((record.core_version for record in records), default=CORE_VERSION)
    if newest > CORE_VERSION:
        raise StateRefused(
            f"run {run} was cut by core version {newest}, this release knows versions up to {CORE_VERSION}; verify "
            f"with the release that cut it"
        )
    return records


def beginnings(journal: Sequence[JournalRecord], log_begin: int) -> list[int]:
    """Indices of records up to which a state can be restored and folded on from: the last parts of snapshots, all that
    was in flight then still in the log, which begins at `log_begin`, and all groups remembered then in the journal.

    In order; empty where too much was pruned.
    """
    if not journal:
        return []
    whole = journal[0].sequence == 0
    # Whatever finished in records that were deleted finished by then.
    told_ms = journal[0].stream_time_ms
    return [
        i
        for i, record in enumerate(journal)
        if ends_snapshot(journal, i)
        and record.watermark >= log_begin
        and (whole or told_ms < record.remembered_since_ms)
    ]


def ends_snapshot(journal: Sequence[JournalRecord], i: int) -> bool:
    """Whether record `i` is the last part of a snapshot all parts of which are there."""
    record = journal[i]
    return record.snapshot and record.part == record.parts - 1 and i >= record.part


def configurations(
    kafka: KafkaConfig, run: str, journal: Sequence[JournalRecord], makers: Mapping[str, MakerFactory]
) -> dict[int, GroupingConfig]:
    """Each configuration in force while `journal` was written, by generation; the last is the one where it ends.

    A journal record carries the configuration at its watermark. One put in force after that is read from its mark,
    which the log still holds, as `journal` begins at one of `beginnings`. Raises StateRefused as the fold does.
    """
    first, last = journal[0], journal[-1]
    told = {record.watermark_generation: record.watermark_configuration for record in journal}
    found = {generation: GroupingConfig.from_json(text) for generation, text in told.items()}
    current, position, left_out = found[first.watermark_generation], first.watermark, skips_in(journal)
    for record in journal:
        if record.generation > current.generation and position < record.position:
            for offset, mark in _marks(kafka, run, record.partition, position, record.position):
                if offset in left_out:
                    continue
                judged = judge_mark(mark, current, record.policy_version, makers)
                current = current if judged.config is None else judged.config
                found[current.generation] = current
        position = max(position, record.position)
    if last.generation not in found:
        raise StateRefused(
            f"the journal of rollouts[{last.partition}] of run {run} ends under generation {last.generation}, and "
            f"neither it nor the log up to offset {last.position} holds that configuration"
        )
    return dict(sorted(found.items()))


def _marks(kafka: KafkaConfig, run: str, partition: int, begin: int, end: int) -> Iterator[tuple[int, Mark]]:
    """Marks of a partition between two offsets, each with its own."""
    rollouts = topic_name(run, "rollouts")
    for message in clients.read_to_end(kafka, rollouts, partitions=[partition], start={partition: begin}):
        if (message.offset() or 0) >= end:
            return
        value = message.value()
        if value is not None and value.startswith(codec.frames("Mark")):
            try:
                yield message.offset() or 0, decode_as(Mark, value)
            except RecordError:
                continue


def log_begins(kafka: KafkaConfig, run: str, topic: str) -> dict[int, int]:
    """First offset each partition of a run's topic still holds."""
    return {partition: low for partition, (low, _end) in clients.bounds(kafka, topic_name(run, topic)).items()}


def refold(
    kafka: KafkaConfig,
    run: str,
    journal: Sequence[JournalRecord],
    stop: int,
    makers: Mapping[str, MakerFactory],
    change: Change | None = None,
    skips: Mapping[int, str] = MappingProxyType({}),
) -> Iterator[Output]:
    """The effects of a partition's records from where `journal` ends up to offset `stop`, in pieces; the last piece's
    journal record is a snapshot.

    `journal` is generation 0, or goes on up to a snapshot. `skips` are the offsets that were left out unread, as
    `skips_in` the whole journal tells. `change` alters every configuration the log holds, and needs
    `journal` to be generation 0. Raises StateRefused where log and journal do not belong together.
    """
    restored = state.restore(journal)
    if change is not None:
        changed = change(GroupingConfig.from_json(restored.watermark_configuration))
        restored = replace(restored, watermark_configuration=changed.to_json())
    fold = Fold(restored, makers, skips)
    read = 0
    topic = topic_name(run, "rollouts")
    # Nothing lies at an offset a partition has not reached: reading from the end of the log on finds nothing.
    begin = {restored.partition: restored.watermark}
    if restored.watermark < stop:
        for message in clients.read_to_end(kafka, topic, partitions=[restored.partition], start=begin):
            record = records_of(message)
            if record.offset >= stop:
                break
            if fold.replaying:
                if record.offset < restored.position:
                    fold.replay(record)
                    continue
                fold.resume()
            fold.apply(record if change is None or record.offset in skips else _changed(record, change))
            read += 1
            if read % _TAKE_EVERY == 0:
                yield fold.take()
    if fold.replaying:
        fold.resume()
    yield fold.take(snapshot=True)


def skips_in(journal: Iterable[JournalRecord]) -> dict[int, str]:
    """Offsets that the journal says were left out unread, and why."""
    return {drop.offset: drop.detail for record in journal for drop in record.drops if drop.reason == "skipped"}


def _changed(record: Record, change: Change) -> Record:
    """The record, with another configuration where it is a mark that carries one."""
    if record.value is None or not record.value.startswith(codec.frames("Mark")):
        return record
    try:
        mark = decode_as(Mark, record.value)
    except RecordError:
        return record
    if mark.kind != "configuration":
        return record
    try:
        configuration = change(GroupingConfig.from_json(mark.configuration)).to_json()
    except (ConfigurationError, ForeignConfiguration):
        return record  # No code can run it, or this cannot: the fold passes it over, as it is or changed.
    return record._replace(value=encode(replace(mark, configuration=configuration)))
