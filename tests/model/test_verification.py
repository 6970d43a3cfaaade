"""`verify` answers for every batch that the index names: equal, different, missing from the journal or unverifiable."""

from typing import Any

import pytest

from rollstream.pipeline.audit import verification
from rollstream.pipeline.audit.verification import index_of, verify
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.open_transactions import await_decided
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.wire.codec import decode
from tests.support.batches import patient
from tests.support.planted import end
from tests.support.runs import RealRun, rollout, with_batches
from tests.support.settled import settled


def grouped(run: RealRun) -> list[str]:
    """Cut at least one batch of each partition, end grouping, and return the names of the batches."""
    run.prepare()
    process = run.start("group")
    run.send(rollout(f"x{n}", member) for n in range(16) for member in range(4))
    settled(run, batched=64)
    end(process)
    return list(index_of(run.kafka, run.name))


def verify_command(run: RealRun, *words: str) -> tuple[int, str]:
    answer = run.said("verify", *words)
    return answer.returncode, answer.stdout


def test_batches_of_a_partition_without_journal_are_unverifiable(real_run: RealRun) -> None:
    names = grouped(real_run)
    lost = [name for name in names if name.startswith("0-")]
    _begin, journal_end = topic_admin.bounds(real_run.kafka, real_run.topic("journal"))[0]
    topic_admin.delete_records(real_run.kafka, {(real_run.topic("journal"), 0): journal_end})
    whole = verify(real_run.kafka, real_run.name)
    assert (whole.batches, whole.unverifiable, whole.mismatches) == (len(names) - len(lost), len(lost), [])
    some = verify(real_run.kafka, real_run.name, only=lost[:1])
    assert (some.batches, some.unverifiable, some.mismatches) == (0, 1, [])
    assert verify_command(real_run, lost[0])[0] == 1


def test_a_run_that_has_only_batches_does_not_fail_but_its_batches_are_not_taken_for_equal(real_run: RealRun) -> None:
    with_batches(real_run, 6)
    code, text = verify_command(real_run)
    assert (code, text.splitlines()) == (
        0,
        [
            "verify: 0 batches computed again from the log, 0 differences",
            "6 batches are not verifiable: the log lacks their rollouts or journal",
        ],
    )
    assert verify_command(real_run, "0-0")[0] == 1


def test_a_whole_run_is_compared_once_the_journal_of_an_indexed_batch_is_visible(
    real_run: RealRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, topic = grouped(real_run), real_run.topic("journal")
    journal = list(read_to_end(real_run.kafka, topic, partitions=[0]))
    topic_admin.delete_records(real_run.kafka, {(topic, 0): journal[-1].offset + 2})
    naming = next(at for at, message in enumerate(journal) if decode(message.value).batch_ids)
    for message in journal[:naming]:
        real_run.send_bytes("journal", message.value, message.key or b"", 0)
    producer = clients.transactional_producer(patient(real_run.kafka), f"{real_run.name}-later")
    producer.init_transactions(120)
    producer.begin_transaction()
    for message in journal[naming:]:
        producer.produce(topic, message.value, message.key, 0)
    producer.flush(120)
    waits: list[object] = []

    def commits_while_it_is_waited_for(*place: Any, **among: Any) -> None:
        waits.append(place)
        producer.commit_transaction(120)
        await_decided(*place, **among)

    monkeypatch.setattr(verification, "await_decided", commits_while_it_is_waited_for)
    whole = verify(real_run.kafka, real_run.name)
    assert (whole.batches, whole.unverifiable, whole.mismatches) == (len(names), 0, [])
    assert len(waits) == 1
