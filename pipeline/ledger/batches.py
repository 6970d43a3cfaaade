"""Batches against the journal: the same ones, each once, made of exactly the offsets that it calls batched."""

import time
from collections import Counter
from collections.abc import Mapping

from consumers.grouping.changes import BATCHED
from pipeline.journals import IN_FLIGHT, PartitionJournal
from pipeline.ledger.book import PATIENCE_S, Ledger
from topics import clients
from topics.catalogue import topic_name
from topics.codec import decode_as
from topics.config import KafkaConfig
from topics.records import TrainingBatch, batch_numbers


def check_batches(
    kafka: KafkaConfig, run: str, journals: dict[int, PartitionJournal], evals: set[str], result: Ledger
) -> dict[str, int]:
    """Batches against the journal: the same batches, made of exactly the offsets it calls batched and of nothing that
    was made for evaluation. Rows by batch id.
    """
    expected = {batch_id for journal in journals.values() for batch_id in journal.batch_ids}
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = Ledger()
        carried: dict[int, Counter[int]] = {p: Counter() for p in journals}
        rows: dict[str, int] = {}
        oldest: dict[int, int] = {}
        for message in clients.read_to_end(kafka, topic_name(run, "batches")):
            batch = decode_as(TrainingBatch, message.value())
            journal = journals[batch.partition]
            oldest.setdefault(batch.partition, batch.number)
            if batch.number >= journal.batches:
                continue  # Committed after the cut.
            if batch.batch_id in rows:
                found.problem(f"batch {batch.batch_id} is in batches twice")
            rows[batch.batch_id] = len(batch)
            for uid in evals.intersection(batch.uids):
                found.evals_batched += 1
                found.problem(f"rollout {uid} of evals is in batch {batch.batch_id}")
            if batch.batch_id in expected:
                carried[batch.partition].update(batch.source_offsets.tolist())
            elif batch.number >= journal.base_batches:
                found.problem(f"batch {batch.batch_id} is in batches and not in the journal")
        missing = expected - rows.keys()
        deleted = {p for p, (low, _end) in clients.bounds(kafka, topic_name(run, "batches")).items() if low > 0}
        gone = {name for name in missing if batch_numbers(name)[0] in deleted and _is_older(name, oldest)}
        if missing == gone or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for text in found.problems:
        result.problem(text)
    result.evals_batched = found.evals_batched
    for batch_id in sorted(missing - gone):
        result.problem(f"batch {batch_id} is in the journal and not in batches")
    for number, journal in journals.items():
        in_flight = journal.offsets(IN_FLIGHT)
        named = (journal.offsets(BATCHED) | (journal.delivered & in_flight)) - journal.delivered_before
        batches = carried[number]
        # Which rollouts a deleted batch held, nothing says.
        lost = named - batches.keys() if any(batch_numbers(name)[0] == number for name in gone) else set()
        for offset in sorted((named - lost).symmetric_difference(batches)):
            place = "journal and no batch" if offset in named else "a batch and not the journal"
            result.problem(f"rollouts[{number}] offset {offset} is batched in {place}")
        for offset, times in batches.items():
            if times > 1:
                result.problem(f"rollouts[{number}] offset {offset} is in {times} batches")
    result.batches = sum(journal.batches for journal in journals.values())
    return rows


def _is_older(batch_id: str, oldest: Mapping[int, int]) -> bool:
    """Whether a batch came before all that its partition still holds; `oldest` has the number of the first of them."""
    partition, number = batch_numbers(batch_id)
    return partition not in oldest or number < oldest[partition]
