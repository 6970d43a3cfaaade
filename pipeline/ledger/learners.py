"""Steps on record against batches: a learner trains on a rollout for the first time, or skips it, at most once."""

from pipeline.journals import PartitionJournal
from pipeline.ledger.book import Ledger
from topics import clients
from topics.catalogue import topic_name
from topics.codec import decode_as
from topics.config import KafkaConfig
from topics.records import BatchUse, LearnerStep, batch_numbers


def read_steps(kafka: KafkaConfig, run: str) -> list[LearnerStep]:
    """The newest record of each step."""
    newest: dict[tuple[str, int], LearnerStep] = {}
    for message in clients.read_to_end(kafka, topic_name(run, "steps")):
        step = decode_as(LearnerStep, message.value())
        newest[step.learner, step.step] = step
    return list(newest.values())


def check_steps(
    steps: list[LearnerStep],
    rows: dict[str, int],
    journals: dict[int, PartitionJournal],
    run: str,
    result: Ledger,
) -> None:
    """Uses against batches: each rollout is trained on for the first time, or skipped, at most once a learner, and
    never one that does not exist; only what was trained on is used again.
    """
    used: dict[tuple[str, str, str], set[int]] = {}
    kept = {partition: journal.batches for partition, journal in journals.items()}
    for batch_id in rows:
        partition, number = batch_numbers(batch_id)
        kept[partition] = min(kept[partition], number)
    for step in sorted(steps, key=lambda s: (s.learner, s.step)):
        result.steps += step.step > 0
        for use in step.uses if step.input_run == run else ():
            what = f"step {step.step} of learner {step.learner}"
            named = set(use.row_numbers or range(use.rows))
            trained, skipped = (
                used.setdefault((step.learner, use.batch_id, kind), set()) for kind in ("trained", "skipped")
            )
            if use.again and not named <= trained:
                result.problem(f"{what} uses rollouts of batch {use.batch_id} again that it had not trained on")
            elif not use.again and named & (trained | skipped):
                result.problem(f"{what} uses batch {use.batch_id} a second time")
            (trained if use.use == "trained" else skipped).update(named)
            partition, number = batch_numbers(use.batch_id)
            deleted = result.pruned and number < kept.get(partition, 0)
            if not deleted and not _are_rows(use, rows.get(use.batch_id)):
                result.problem(
                    f"{what} used {use.rows} rows of batch {use.batch_id}, which has {rows.get(use.batch_id, 'none')}"
                )
            if use.again:
                continue
            if use.use == "trained":
                result.trained += use.rows
            else:
                result.skipped += use.rows


def _are_rows(use: BatchUse, rows: int | None) -> bool:
    """Whether a batch of so many rows has those a use names: all of them, or some by number."""
    if not use.row_numbers:
        return rows == use.rows
    return rows is not None and len(set(use.row_numbers)) == use.rows and max(use.row_numbers) < rows
