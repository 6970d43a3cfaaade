"""Folds a recorded partition again, from its beginning or a snapshot, under its own configuration or another.

Verification and replay share it. It runs the same fold as a grouping process, on records from the log.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.consumers.grouping.core.configuration_marks import Change, mark_outcome
from rollstream.consumers.grouping.core.effects import CORE_VERSION, Effects, InputRecord
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.core.plug_ins import PlugIns
from rollstream.consumers.grouping.core.task_state import TaskState
from rollstream.consumers.grouping.process.restoration import records_of
from rollstream.pipeline.audit.topic_reading import read_journal
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError, StateRefused
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import records_between
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import JournalRecord, Mark
from rollstream.topics.wire import codec
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode_as

_TAKE_EVERY = 200


def journal_of(kafka: KafkaConfig, run: str, partition: int, skipped: SkippedRecords) -> list[JournalRecord]:
    """Read the journal of a partition, oldest first. Raises StateRefused if a newer release wrote it."""
    records = [record for _offset, record in read_journal(kafka, run, partition, skipped)]
    newest = max((record.core_version for record in records), default=CORE_VERSION)
    if newest > CORE_VERSION:
        raise StateRefused(
            f"run {run} was cut by core version {newest}, but this release knows only versions up to {CORE_VERSION}; "
            f"verify with the release that cut it"
        )
    return records


def beginnings(journal: Sequence[JournalRecord], log_begin: int) -> list[int]:
    """Return the indices of journal records from which a fold can start, in order; empty if too much was pruned.

    A fold can start at the last part of a snapshot if the log, which begins at `log_begin`, still holds every record
    that was in flight, and the journal still names every group that the fold must remember.
    """
    if not journal:
        return []
    whole = journal[0].sequence == 0
    # By this time, all groups that only deleted journal records name had finished.
    told_ms = journal[0].stream_time_ms
    return [
        i
        for i, record in enumerate(journal)
        if ends_snapshot(journal, i)
        and record.watermark >= log_begin
        and (whole or told_ms < record.remembered_since_ms)
    ]


def ends_snapshot(journal: Sequence[JournalRecord], i: int) -> bool:
    """Whether record `i` is the last part of a complete snapshot."""
    record = journal[i]
    return record.snapshot and record.part == record.parts - 1 and i >= record.part


def emptied(record: JournalRecord, config: GroupingConfig) -> JournalRecord:
    """Return a state at the position of `record`, under `config`, with nothing in flight and no memory of groups.

    Under another configuration, or with other rewards, other groups would have been in flight.
    """
    position = record.position
    return replace(
        task_state.initial_record(record.partition, record.partitions, record.topic_id, GroupingConfig()),
        begin=position,
        position=position,
        watermark=position,
        stream_time_ms=record.stream_time_ms,
        watermark_stream_time_ms=record.stream_time_ms,
        policy_version=record.policy_version,
        watermark_policy_version=record.policy_version,
        generation=record.generation,
        watermark_generation=record.generation,
        watermark_configuration=config.to_json(),
        batch_number=record.batch_number,
    )


def configurations(
    kafka: KafkaConfig, run: str, journal: Sequence[JournalRecord], plug_ins: PlugIns
) -> dict[int, GroupingConfig]:
    """Return each configuration in force while `journal` was written, by generation; the last is in force at its end.

    A journal record contains the configuration at its watermark. Later configurations are read from their marks, which
    the log still holds because `journal` begins at one of `beginnings`. Raises StateRefused as the fold does.
    """
    first, last = journal[0], journal[-1]
    texts = {record.watermark_generation: record.watermark_configuration for record in journal}
    configs = {generation: GroupingConfig.from_json(text) for generation, text in texts.items()}
    current, position, skips = configs[first.watermark_generation], first.watermark, skips_in(journal)
    for record in journal:
        if record.generation > current.generation and position < record.position:
            for read, mark in _marks(kafka, run, record.partition, position, record.position):
                if read.offset in skips:
                    continue
                judged = mark_outcome(read, mark, record.partition, current, record.policy_version, plug_ins)
                current = current if judged.config is None else judged.config
                configs[current.generation] = current
        position = max(position, record.position)
    if last.generation not in configs:
        raise StateRefused(
            f"the journal of rollouts[{last.partition}] of run {run} ends under generation {last.generation}, and "
            f"neither it nor the log up to offset {last.position} holds that configuration"
        )
    return dict(sorted(configs.items()))


def _marks(kafka: KafkaConfig, run: str, partition: int, begin: int, end: int) -> Iterator[tuple[InputRecord, Mark]]:
    """Yield the marks of a partition between two offsets, each with its record."""
    for message in _fetched(kafka, run, partition, begin, end):
        value = message.value
        if codec.kind_of(value) == "Mark":
            try:
                yield records_of(message), decode_as(Mark, value)
            except RecordError:
                continue


def _fetched(kafka: KafkaConfig, run: str, partition: int, begin: int, stop: int) -> Iterator[KafkaRecord]:
    """Yield the records of a partition of `rollouts` from `begin` to `stop` - 1 that it still holds."""
    messages = records_between(kafka, topic_name(run, "rollouts"), partition, begin, stop, wait=False)
    return (message for message in messages if message is not None)


def log_begins(kafka: KafkaConfig, run: str, topic: str) -> dict[int, int]:
    """Return the first offset that each partition of a run's topic still holds."""
    return {partition: low for partition, (low, _end) in topic_admin.bounds(kafka, topic_name(run, topic)).items()}


def refold(
    kafka: KafkaConfig,
    run: str,
    journal: Sequence[JournalRecord],
    stop: int,
    plug_ins: PlugIns,
    change: Change | None = None,
    skips: Mapping[int, str] = MappingProxyType({}),
    *,
    rewards: Mapping[int, float] = MappingProxyType({}),
    drain: bool = False,
) -> Iterator[Effects]:
    """Yield the effects of a partition's records from the end of `journal` to offset `stop`, in pieces.

    The journal record of the last piece is a snapshot. `journal` ends with a complete snapshot. `skips` are the records
    skipped after it, as `skips_in` returns them for the records after `journal`. `change` alters every
    configuration of the log, and `rewards` replaces the rewards of rollouts by offset; both require that `journal`
    holds nothing in flight. `drain` cuts sealed groups into batches at the end.
    Raises StateRefused if the log and the journal do not belong together.
    """
    restored = task_state.restored_state(journal)
    if change is not None:
        changed = change(GroupingConfig.from_json(restored.watermark_configuration))
        restored = replace(restored, watermark_configuration=changed.to_json())
    # No records follow the end of the partition, even if `stop` is beyond it.
    messages = _fetched(kafka, run, restored.partition, restored.watermark, stop)
    records = map(records_of, messages)
    yield from fold_again(restored, records, stop, plug_ins, change, skips, rewards=rewards, drain=drain)


def fold_again(
    restored: TaskState,
    records: Iterable[InputRecord],
    stop: int,
    plug_ins: PlugIns,
    change: Change | None = None,
    skips: Mapping[int, str] = MappingProxyType({}),
    *,
    rewards: Mapping[int, float] = MappingProxyType({}),
    drain: bool = False,
) -> Iterator[Effects]:
    """Yield the effects of a partition's records from a state's watermark to `stop`; the options are as in `refold`."""
    fold = Fold(restored, plug_ins, skips, change, rewards)
    read = 0
    for record in records:
        if fold.replaying:
            if record.offset < restored.position:
                fold.replay(record)
                continue
            fold.resume()
        fold.apply(record)
        read += 1
        if read % _TAKE_EVERY == 0:
            yield fold.prepare_commit()
    if fold.replaying:
        fold.resume()
    if drain:
        fold.drain()
    yield fold.prepare_commit(snapshot=True)


def skips_in(journal: Iterable[JournalRecord]) -> dict[int, str]:
    """Return the records that were skipped according to the journal; the reasons are in their dead letters only."""
    return {offset: "by an operator" for record in journal for offset in record.skipped}
