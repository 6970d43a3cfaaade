"""Compares recorded steps with batches and index.

A learner trains on a rollout for the first time, or skips it, at most once, and passes no batch that its steps do not
name.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.index import Entries
from rollstream.pipeline.audit.partition_journal import PartitionJournal
from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import BatchUse, LearnerStep, batch_numbers
from rollstream.topics.skip_reasons import OTHER


def read_steps(kafka: KafkaConfig, run: str, result: Ledger) -> list[LearnerStep]:
    """Read the newest record of each step, in order."""
    newest: dict[tuple[str, int], LearnerStep] = {}
    skipped = SkippedRecords("ledger", logged=False)
    for message, step in skipped.records(LearnerStep, read_to_end(kafka, topic_name(run, "steps"))):
        with skipped.passing(message):
            for use in step.uses:
                batch_numbers(use.batch_id)
                _check_rows(use)
            newest[step.learner, step.step] = step
    result.note_skipped(skipped)
    return [newest[key] for key in sorted(newest)]


def _check_rows(use: BatchUse) -> None:
    """Raise RecordError for an impossible number of rows, because rows are looked up individually."""
    if not 0 <= use.rows <= _MOST_ROWS or any(row < 0 for row in use.row_numbers):
        raise RecordError(f"uses {use.rows} rows of batch {use.batch_id}, which is no number of rows")


_MOST_ROWS = 2**24


def check_steps(
    steps: Sequence[LearnerStep],
    rows: Mapping[str, int],
    journals: Mapping[int, PartitionJournal],
    run: str,
    result: Ledger,
    carried: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Compare the uses of steps with batches, and count them by learner.

    `rows` and `carried` are the rows of batches by id: those of the run, and those of a run that was split into it.

    Each learner trains on a rollout for the first time, or skips it, at most once; it uses only rows that exist, and
    uses again only rows that it has trained on.
    """
    used: dict[tuple[str, str, str], set[int]] = {}
    kept = {partition: journal.batches for partition, journal in journals.items()}
    for batch_id in rows:
        partition, number = batch_numbers(batch_id)
        kept[partition] = min(kept[partition], number)
    for step in sorted(steps, key=lambda s: (s.learner, s.step)):
        result.steps += step.step > 0
        row = result.learners.setdefault(step.learner, {"steps": 0, "trained": 0, "skipped": 0, "skipped_as": {}})
        row["steps"] += step.step > 0
        row |= {
            "step": step.step,
            "input_run": step.input_run if step.input_run != run else "",
            "position": step.position,
        }
        for use in step.uses if step.input_run == run else ():
            source = f"step {step.step} of learner {step.learner}"
            _check_repetition(step, use, used, source, result)
            partition, number = batch_numbers(use.batch_id)
            deleted = result.pruned and number < kept.get(partition, 0)
            # An open transaction hides the journal of batches committed after the cut.
            later = partition in journals and journals[partition].hidden and number >= journals[partition].batches
            if not deleted and not later and not _are_rows(use, rows.get(use.batch_id, carried.get(use.batch_id))):
                result.problem(
                    f"{source} used {use.rows} rows of batch {use.batch_id}, which has {rows.get(use.batch_id, 'none')}"
                )
            if not use.again:
                row[use.use] += use.rows
                if use.use == "skipped":
                    code = use.code or OTHER
                    row["skipped_as"][code] = row["skipped_as"].get(code, 0) + use.rows
                    result.skipped_as[code] = result.skipped_as.get(code, 0) + use.rows
    result.trained = sum(row["trained"] for row in result.learners.values())
    result.skipped = sum(row["skipped"] for row in result.learners.values())


def _check_repetition(
    step: LearnerStep, use: BatchUse, used: dict[tuple[str, str, str], set[int]], source: str, result: Ledger
) -> None:
    """Report rows used a second time, and add the rows to `used`: by learner, batch and "trained" or "skipped"."""
    rows = set(use.row_numbers or range(use.rows))
    trained, skipped = (used.setdefault((step.learner, use.batch_id, kind), set()) for kind in ("trained", "skipped"))
    if use.again and not rows <= trained:
        result.problem(f"{source} uses rollouts of batch {use.batch_id} again that it had not trained on")
    elif not use.again and rows & (trained | skipped):
        result.problem(f"{source} uses batch {use.batch_id} a second time")
    (trained if use.use == "trained" else skipped).update(rows)


def untrained_rows(steps: Iterable[LearnerStep], run: str) -> dict[str, set[int]]:
    """Rows that a learner skipped and none trained on, by batch id."""
    used: dict[str, dict[str, set[int]]] = {"skipped": {}, "trained": {}}
    for step in steps:
        for use in step.uses if step.input_run == run else ():
            used[use.use].setdefault(use.batch_id, set()).update(use.row_numbers or range(use.rows))
    return {batch_id: rows - used["trained"].get(batch_id, set()) for batch_id, rows in used["skipped"].items()}


def check_positions(steps: Sequence[LearnerStep], entries: Entries, end: int, run: str, result: Ledger) -> None:
    """Check that the steps up to a learner's position name every entry of the index before it, each at its offset.

    `steps` are in order, and `end` is the end of the index. Steps that draw from a rollout buffer name a batch when
    they use it, however far they have read.
    """
    positions: dict[str, int] = {}
    """Position of a learner after its last step."""
    offsets = list(entries)
    for step in steps:
        if step.input_run != run:
            continue
        source = f"step {step.step} of learner {step.learner}"
        named = {use.index_offset: use.batch_id for use in step.uses}
        if step.position > end:
            result.problem(f"{source} stands at index offset {step.position}, and batch-index ends at {end}")
        for offset, batch_id in named.items():
            if offset in entries and entries[offset].batch_id != batch_id:
                result.problem(
                    f"{source} names batch {batch_id} at index offset {offset}, which is of batch "
                    f"{entries[offset].batch_id}"
                )
        begin = positions.get(step.learner, min(named, default=step.position))
        passed = offsets[bisect_left(offsets, begin) : bisect_left(offsets, step.position)]
        past = [offset for offset in passed if offset not in named]
        if past and step.stream_time_ms < 0:
            result.problem(
                f"{source} moved past {len(past)} batches that no step names, the first is "
                f"{entries[past[0]].batch_id} at index offset {past[0]}"
            )
        positions[step.learner] = step.position
    for row in result.learners.values():
        if not row["input_run"]:
            row["waiting"] = len(offsets) - bisect_left(offsets, row["position"])


def _are_rows(use: BatchUse, rows: int | None) -> bool:
    """Whether a batch with this number of rows has the rows of a use: all of them, or some by number."""
    if not use.row_numbers:
        return rows == use.rows
    return rows is not None and len(set(use.row_numbers)) == use.rows and max(use.row_numbers) < rows
