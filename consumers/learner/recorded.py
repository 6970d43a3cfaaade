"""Finds the batches of steps on record again, where their records say. Needs no JAX.

Whatever is not there any more, or is another, is named at once, before anybody trains on the rest.
"""

from collections.abc import Sequence
from contextlib import closing

from consumers.batch_reader import Indexed
from consumers.learner.intake import Taken, taken_rows, trained_rows
from topics import clients
from topics.catalogue import topic_name
from topics.codec import decode_as
from topics.config import KafkaConfig
from topics.errors import TopicError
from topics.records import BatchIndexEntry, BatchUse, LearnerStep

_MOST_NAMED = 5


def batches_of(kafka: KafkaConfig, position: int, steps: Sequence[LearnerStep]) -> dict[int, Taken]:
    """Which batches consecutive steps are made of, by step, found where their records say; `position` is where the
    first of them began to read the index.

    Raises TopicError naming batches that are gone, are others, or, but for those a rollout buffer may still hold, that
    no step names though it read past them.
    """
    if not steps:
        return {}
    input_run = steps[0].input_run
    first = min((use.index_offset for step in steps for use in step.uses), default=position)
    entries = index_between(kafka, input_run, min(first, position), steps[-1].position)
    beginnings = {p: low for p, (low, _end) in clients.bounds(kafka, topic_name(input_run, "batches")).items()}
    wrong: list[str] = []
    found = {}
    named = set()
    for step in steps:
        trained: dict[int, Indexed] = {}
        drawn = step.stream_time_ms >= 0
        rows = trained_rows(step.uses) if drawn else taken_rows(step.uses)
        for use in step.uses:
            named.add(use.index_offset)
            entry = entries.get(use.index_offset)
            what = f"batch {use.batch_id} of step {step.step}"
            if entry is None:
                wrong.append(f"{what} is not at offset {use.index_offset} of batch-index any more")
            elif entry.batch_id != use.batch_id or not _fits(use, entry):
                wrong.append(
                    f"{what} had {use.rows} rollouts; at offset {use.index_offset} of batch-index is {entry.batch_id} "
                    f"with {entry.rollouts}"
                )
            elif use.index_offset in rows and entry.offset < beginnings[entry.partition]:
                wrong.append(f"{what} was deleted from batches[{entry.partition}]")
            elif use.index_offset in rows:
                trained[use.index_offset] = Indexed(entry, use.index_offset)
        found[step.step] = Taken(
            uses=step.uses,
            trained=tuple(trained[at] for at in sorted(trained)),
            lags=(0,) * len(trained),
            position=step.position,
            wait_s=0.0,
            rows=tuple(None if len(rows[at]) == trained[at].entry.rollouts else rows[at] for at in sorted(trained)),
            stream_time_ms=step.stream_time_ms,
            checked=True,
        )
    if all(step.stream_time_ms < 0 for step in steps):
        skimmed = (at for at in entries.keys() - named if at >= position)
        wrong += [f"no step names batch {entries[at].batch_id}" for at in sorted(skimmed)]
    if wrong:
        more = f", and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise TopicError(
            f"steps {steps[0].step} to {steps[-1].step} cannot be executed again from run {input_run}: "
            f"{'; '.join(wrong[:_MOST_NAMED])}{more}. Begin at a later checkpoint"
        )
    return found


def _fits(use: BatchUse, entry: BatchIndexEntry) -> bool:
    """Whether a batch has the rows a use names: all of them, or some by number."""
    if not use.row_numbers:
        return use.rows == entry.rollouts
    return use.rows == len(use.row_numbers) and use.row_numbers[-1] < entry.rollouts


def index_between(kafka: KafkaConfig, run: str, first: int, end: int) -> dict[int, BatchIndexEntry]:
    """What batch-index still holds from offset `first` on, before `end`."""
    topic = topic_name(run, "batch-index")
    low, high = clients.bounds(kafka, topic)[0]
    found: dict[int, BatchIndexEntry] = {}
    if max(first, low) >= min(end, high):
        return found
    with closing(clients.read_to_end(kafka, topic, start={0: max(first, low)})) as messages:
        for message in messages:
            offset = message.offset() or 0
            if offset >= end:
                break
            found[offset] = decode_as(BatchIndexEntry, message.value())
    return found
