"""The auditor passes a run that kept its promises, and names what is wrong with one that did not."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.task_journal import split_record
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.topics.records import BatchIndexEntry, JournalRecord, Rollout, TrainingBatch
from rollstream.topics.wire.codec import decode_as, encode
from rollstream.topics.wire.rl_examples import batch_digest
from tests.faults.auditor import digest_of, judge
from tests.faults.evidence import Evidence, Raw, decode
from tests.faults.findings import Audit
from tests.support.paths import ROOT

CONFIG = GroupingConfig(batch_rollouts=8, max_batch_age_s=10.0, group_deadline_s=5.0)
POISON = b"\xc3\x01 nothing of ours"


def member(example: int, number: int, **fields: object) -> Rollout:
    return example_rollout(
        f"{example}-{number}", reward=float(number), **{"example_id": str(example), "group_size": 4, **fields}
    )


def driven() -> GroupingTestDriver:
    """A log with complete groups, a repeated uid, a late one, one without variance, poison, and groups left behind."""
    driver = GroupingTestDriver(CONFIG)
    for example in range(6):
        for number in range(4):
            driver.pipe(member(example, number))
        if example == 1:
            driver.pipe(member(2, 0))
            driver.pipe(POISON)
            driver.pipe(member(1, 1))
            driver.commit()
    for number in range(4):
        driver.pipe(replace(member(6, number), reward=1.0))
    driver.pipe(member(7, 0))
    driver.advance(6000)
    driver.pipe(member(8, 0))
    for number in range(4):
        driver.pipe(member(9, number, policy_version=1))
    driver.commit(snapshot=True)
    driver.advance(11000)
    driver.publish_policy_version(1)
    for example in (10, 11):
        for number in range(4):
            driver.pipe(member(example, number))
    driver.commit()
    driver.advance(11000)
    return driver


def evidence_of(driver: GroupingTestDriver) -> Evidence:
    """The records that a broker would hold after this driver."""
    batches = driver.batches
    return Evidence(
        topics={
            "rollouts": [Raw(0, r.offset, r.timestamp_ms, r.key, r.value) for r in driver.log],
            "batches": [Raw(0, 3 * at, 0, b"", encode(batch)) for at, batch in enumerate(batches)],
            "batch-index": [
                Raw(0, 2 * at, 0, b"", encode(BatchIndexEntry.of(b, 3 * at))) for at, b in enumerate(batches)
            ],
            "journal": [Raw(0, at, 0, b"", encode(record)) for at, record in enumerate(driver.journal)],
            "dead-letters": [
                Raw(
                    0,
                    at,
                    0,
                    letter.record.key,
                    letter.record.value,
                    {"__streams.errors.partition": b"0", "__streams.errors.offset": b"%d" % letter.record.offset},
                )
                for at, letter in enumerate(driver.dead_letters)
            ],
        },
        committed={0: driver.journal[-1].position},
    )


@pytest.fixture
def sound() -> Evidence:
    return evidence_of(driven())


def change(evidence: Evidence, topic: str, at: int, alter: Callable[[object], object]) -> Evidence:
    """The evidence with one record of a topic decoded, altered and put back."""
    kind = {"batches": TrainingBatch, "batch-index": BatchIndexEntry, "journal": JournalRecord}[topic]
    raw = evidence.topics[topic][at]
    value = encode(alter(decode_as(kind, raw.value)))
    records = [*evidence.topics[topic][:at], replace(raw, value=value), *evidence.topics[topic][at + 1 :]]
    return replace(evidence, topics={**evidence.topics, topic: records})


def with_digest(batch: TrainingBatch, **changes: object) -> TrainingBatch:
    """The batch with changes and a digest that matches them, like a batch that was cut wrongly."""
    altered = replace(batch, **changes)  # type: ignore[arg-type]
    return replace(altered, digest=batch_digest(altered))


def recut(evidence: Evidence, at: int, **changes: object) -> Evidence:
    """The evidence with a batch altered and its index entry to match."""
    altered = change(evidence, "batches", at, lambda batch: with_digest(batch, **changes))  # type: ignore[arg-type]
    batch = decode_as(TrainingBatch, altered.topics["batches"][at].value)
    return change(altered, "batch-index", at, lambda entry: BatchIndexEntry.of(batch, entry.offset))  # type: ignore[attr-defined]


def promises(audit: Audit) -> set[str]:
    return {finding.partition(":")[0] for finding in audit.findings}


def test_the_auditor_shares_no_code_with_what_it_audits() -> None:
    script = "import sys, tests.faults.auditor; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    listed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {"fastavro", "tests"} <= set(listed.split())
    assert not {"consumers", "producers", "pipeline", "topics", "infra"} & set(listed.split())


def test_a_run_that_kept_its_promises_passes_and_is_modelled(sound: Evidence) -> None:
    audit = judge(sound)
    assert audit.findings == []
    assert audit.refolded == [0]
    assert audit.batches == 5
    assert sum(audit.places.values()) == audit.produced
    kinds = {place for place, count in audit.places.items() if count}
    dropped = {"duplicate_uid", "late", "zero_variance", "group_too_small"}
    assert kinds == {"batched", "dead letter", "control", *(f"dropped:{reason}" for reason in dropped)}


def test_digests_are_worked_out_as_the_application_does(sound: Evidence) -> None:
    for raw in sound.topics["batches"]:
        record = decode(raw.value)
        assert record is not None
        assert digest_of(raw.value) == batch_digest(decode_as(TrainingBatch, raw.value))


def test_a_batch_that_is_there_twice_is_found(sound: Evidence) -> None:
    again = replace(sound.topics["batches"][1], offset=100)
    sound.topics["batches"].append(again)
    audit = judge(sound)
    assert {"exactly once", "conservation"} <= promises(audit)
    assert any("batch 0-1 is there 2 times" in finding for finding in audit.findings)
    assert any("is batched and batched" in finding for finding in audit.findings)


def test_an_index_entry_that_is_there_twice_or_missing_is_found(sound: Evidence) -> None:
    index = sound.topics["batch-index"]
    twice = replace(sound, topics={**sound.topics, "batch-index": [*index, replace(index[0], offset=100)]})
    assert any("is in the index 2 times" in finding for finding in judge(twice).findings)
    missing = replace(sound, topics={**sound.topics, "batch-index": index[1:]})
    assert any("is in the index 0 times" in finding for finding in judge(missing).findings)


def test_an_offset_that_is_nowhere_is_found(sound: Evidence) -> None:
    def forget(record: JournalRecord) -> JournalRecord:
        return replace(record, drops=record.drops[1:])

    assert any("is nowhere" in finding for finding in judge(change(sound, "journal", 1, forget)).findings)  # type: ignore[arg-type]
    sound.topics["dead-letters"].clear()
    assert any("is nowhere" in finding for finding in judge(sound).findings)


def test_a_lost_batch_is_found(sound: Evidence) -> None:
    del sound.topics["batches"][2], sound.topics["batch-index"][2]
    audit = judge(sound)
    assert {"conservation", "exactly once", "refold"} <= promises(audit)


def test_a_gap_in_the_journal_is_found(sound: Evidence) -> None:
    del sound.topics["journal"][1]
    assert "exactly once" in promises(judge(sound))


def test_a_committed_offset_that_is_not_the_journals_is_found(sound: Evidence) -> None:
    audit = judge(replace(sound, committed={0: 3}))
    assert any("offset 3 is committed" in finding for finding in audit.findings)


def test_an_advantage_the_formula_does_not_give_is_found(sound: Evidence) -> None:
    batch = decode_as(TrainingBatch, sound.topics["batches"][0].value)
    wrong = batch.advantages.copy()
    wrong[batch.splits[1] : batch.splits[2]] += np.float32(0.01)
    audit = judge(recut(sound, 0, advantages=wrong))
    assert promises(audit) == {"advantage"}


def test_a_group_without_its_last_member_is_found(sound: Evidence) -> None:
    """The group is torn so cleanly that digest, index and columns agree."""
    batch = decode_as(TrainingBatch, sound.topics["batches"][0].value)
    rows, tokens = len(batch) - 1, int(batch.splits[-2])
    groups = (*batch.groups[:-1], replace(batch.groups[-1], size=batch.groups[-1].size - 1))
    by_row = ("group_index", "source_offsets", "uids", "rewards", "truncated", "lowest_versions", "highest_versions")
    by_row += ("temperatures", "logprobs_processed")
    shorter = {name: getattr(batch, name)[:rows] for name in by_row}
    shorter |= {name: getattr(batch, name)[:tokens] for name in ("tokens", "loss_mask", "logprobs", "advantages")}
    audit = judge(recut(sound, 0, groups=groups, splits=batch.splits[:-1], **shorter))
    assert {"purity", "conservation", "refold"} <= promises(audit)
    assert any("has 3 episodes, it declared {4}" in finding for finding in audit.findings)


def test_a_row_in_another_groups_place_is_found(sound: Evidence) -> None:
    batch = decode_as(TrainingBatch, sound.topics["batches"][0].value)
    swapped = batch.group_index.copy()
    swapped[[0, 4]] = swapped[[4, 0]]
    audit = judge(recut(sound, 0, group_index=swapped))
    assert any("its group of" in finding for finding in audit.findings)


def test_content_that_is_not_what_was_sent_is_found(sound: Evidence) -> None:
    batch = decode_as(TrainingBatch, sound.topics["batches"][0].value)
    audit = judge(recut(sound, 0, tokens=batch.tokens + np.int32(1)))
    assert promises(audit) == {"purity"}
    assert all("other tokens than were sent" in finding for finding in audit.findings)


def test_content_that_does_not_match_its_digest_is_found(sound: Evidence) -> None:
    altered = change(sound, "batches", 0, lambda b: replace(b, rewards=b.rewards[::-1].copy()))  # type: ignore[attr-defined,type-var]
    assert "digest" in promises(judge(altered))


def test_another_cut_than_the_models_is_found(sound: Evidence) -> None:
    """Two groups change places between batches: both stay whole, pure and single, but not in the order of sealing."""
    first, second = (decode_as(TrainingBatch, sound.topics["batches"][at].value) for at in (0, 1))
    moved = recut(sound, 0, **{f: getattr(second, f) for f in _CONTENT})
    moved = recut(moved, 1, **{f: getattr(first, f) for f in _CONTENT})
    assert promises(judge(moved)) == {"refold"}


_CONTENT = (
    *("groups", "group_index", "source_offsets", "uids", "splits", "tokens", "loss_mask", "logprobs", "advantages"),
    *("rewards", "truncated", "lowest_versions", "highest_versions", "temperatures", "logprobs_processed"),
)


def test_a_drop_for_another_reason_is_found(sound: Evidence) -> None:
    def relabel(record: JournalRecord) -> JournalRecord:
        return replace(record, drops=tuple(replace(drop, reason="stale_version") for drop in record.drops))

    audit = judge(change(sound, "journal", 1, relabel))  # type: ignore[arg-type]
    assert promises(audit) == {"refold", "conservation"}
    assert any("the model for" in finding for finding in audit.findings)
    assert any("counts of" in finding for finding in audit.findings)


@pytest.mark.parametrize("name", ["rollouts", "tokens", "sampled_tokens", "reward", "reward_squared"])
def test_a_count_or_a_sum_that_is_not_so_is_found(sound: Evidence, name: str) -> None:
    def miscount(record: JournalRecord) -> JournalRecord:
        batched = next(count for count in record.counts if count.fate == "batched")
        others = tuple(count for count in record.counts if count is not batched)
        return replace(record, counts=(*others, replace(batched, **{name: getattr(batched, name) + 1})))

    audit = judge(change(sound, "journal", len(sound.topics["journal"]) - 1, miscount))  # type: ignore[arg-type]
    assert promises(audit) == {"conservation"}
    assert any("counts of ('env', 'batched')" in finding for finding in audit.findings)


def test_a_count_that_changed_and_was_not_written_is_found_though_a_snapshot_mends_it(sound: Evidence) -> None:
    audit = judge(change(sound, "journal", 1, lambda record: replace(record, counts=())))  # type: ignore[arg-type,type-var]
    assert promises(audit) == {"conservation"}
    assert "sequence 1 grow by 0, and" in audit.findings[0]


@pytest.fixture
def in_pieces(sound: Evidence) -> Evidence:
    """The evidence of the sound run, with several journal records for each transaction."""
    pieces: list[JournalRecord] = []
    for raw in sound.topics["journal"]:
        whole = decode_as(JournalRecord, raw.value)
        pieces += split_record(replace(whole, sequence=len(pieces)), 200)
    assert len(pieces) > 2 * len(sound.topics["journal"])
    journal = [Raw(0, at, 0, b"", encode(record)) for at, record in enumerate(pieces)]
    return replace(sound, topics={**sound.topics, "journal": journal})


def test_transactions_that_wrote_several_journal_records_are_added_up(in_pieces: Evidence) -> None:
    audit = judge(in_pieces)
    assert audit.findings == []
    assert audit.refolded == [0]


def test_a_part_of_a_transaction_that_is_missing_is_found(in_pieces: Evidence) -> None:
    journal = in_pieces.topics["journal"]
    last = max(at for at, raw in enumerate(journal) if decode_as(JournalRecord, raw.value).part > 0)
    del journal[last:]
    assert any("ends in the middle of a transaction" in finding for finding in judge(in_pieces).findings)
    del journal[1]
    assert any("after 1 others" in finding for finding in judge(in_pieces).findings)


def test_a_dead_letter_with_other_bytes_is_found(sound: Evidence) -> None:
    sound.topics["dead-letters"][0] = replace(sound.topics["dead-letters"][0], value=b"something else")
    assert any("is not what was sent" in finding for finding in judge(sound).findings)


@pytest.fixture
def branched() -> Evidence:
    """Groups of two episodes with two branches each. The rewards within an episode are far apart; one group has no
    variance between its episodes, and one group never completes."""
    driver = GroupingTestDriver(CONFIG)
    rewards = {"a": (1.0, 0.0, 0.25, 0.0), "b": (0.75, 0.25, 0.5, 0.0), "even": (1.0, 0.0, 0.25, 0.75), "open": (1.0,)}
    for branch, episode in ((0, "e"), (0, "f"), (1, "f"), (1, "e")):
        for example, of_example in rewards.items():
            number = 2 * "ef".index(episode) + branch
            if number < len(of_example):
                fields = {"episode_uid": episode, "branch": branch, "branches": 2, "group_size": 2}
                driver.pipe(example_rollout(f"{example}{number}", of_example[number], example_id=example, **fields))
    driver.commit()
    driver.advance(11000)
    return evidence_of(driver)


def test_branches_share_what_their_episode_is_worth(branched: Evidence) -> None:
    audit = judge(branched)
    assert audit.findings == []
    assert audit.refolded == [0]
    assert (audit.places["batched"], audit.places["dropped:zero_variance"]) == (8, 4)


def test_advantages_as_if_branches_were_episodes_are_found(branched: Evidence) -> None:
    batch = decode_as(TrainingBatch, branched.topics["batches"][0].value)
    rewards = batch.rewards[batch.group_index == 0]
    wrong = batch.advantages.copy()
    for row, advantage in zip(
        np.flatnonzero(batch.group_index == 0), rewards - (rewards.sum() - rewards) / 3, strict=True
    ):
        wrong[batch.splits[row] : batch.splits[row + 1]] = advantage
    assert promises(judge(recut(branched, 0, advantages=wrong))) == {"advantage"}


@pytest.mark.parametrize("estimator", ["rloo_normalized", "grpo", "dr_grpo", "opo"])
def test_other_estimators_are_known(estimator: str) -> None:
    driver = GroupingTestDriver(replace(CONFIG, estimator=estimator))
    for number in range(4):
        driver.pipe(member(0, number))
    driver.commit()
    driver.advance(11000)
    audit = judge(evidence_of(driver))
    assert audit.findings == []
    assert audit.places["batched"] == 4
