"""The promises over a whole run that was killed in every part, and the commands that only read it."""

import re
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from rollstream.consumers.weights.rollback import note_of
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import GroupCancelled, LearnerStep, ModelCall, PolicyManifest, Rollout, TrainingBatch
from rollstream.topics.wire.catalogue import topic_name
from tests.faults.auditor import audit
from tests.museum.conftest import Museum


def test_every_rollout_is_in_one_place_and_every_batch_folds_again(museum: Museum) -> None:
    kafka, name = museum.run.kafka, museum.run.name
    book = ledger(kafka, name)
    assert book.balanced, book.problems
    checked = verify(kafka, name)
    assert (checked.mismatches, checked.batches) == ([], book.batches)
    audited = audit(kafka.bootstrap_servers, name)
    assert (audited.findings, audited.batches) == ([], book.batches)
    assert book.trained >= 8 * 32


def test_what_each_part_played_is_on_the_log_once_and_was_trained_on(museum: Museum) -> None:
    rollouts = museum.records("rollouts", Rollout)
    assert Counter(r.uid for r in rollouts).most_common(1)[0][1] == 1
    played = Counter(r.environment for r in rollouts)
    assert played.keys() == {"dsort3", "essays", "outside"}
    essays = [r for r in rollouts if r.environment == "essays"]
    assert all(r.reward == len(set(r.turns[-1].text)) / 10 for r in essays)
    unjudged = {r.uid for r in museum.records("unlabelled", Rollout) if sum(map(ord, r.turns[-1].text)) % 8 == 0}
    cancelled = {uid for record in museum.records("rollouts", GroupCancelled) for uid in record.uids}
    assert cancelled & unjudged
    assert not unjudged & {r.uid for r in essays}
    calls = museum.records("calls", ModelCall)
    for rollout in (r for r in rollouts if r.environment == "outside"):
        assert rollout.reward == museum.rewards.get(str(rollout.extra["session"]), rollout.reward)
        own = [call for call in calls if call.session == rollout.extra["session"]]
        sampled = [token for call in own for token in call.answers[0].tokens]
        assert Counter(rollout.tokens[rollout.loss_mask].tolist()) <= Counter(sampled)
    batches = museum.records("batches", TrainingBatch)
    uids = {r.uid: r.environment for r in rollouts}
    assert {uids[uid] for batch in batches for uid in batch.uids} == played.keys()
    evaluated = museum.records("evals", Rollout)
    assert {r.policy_version % 4 for r in evaluated} == {0}


def test_versions_only_rise_and_the_rollback_is_on_record(museum: Museum) -> None:
    steps = museum.records("steps", LearnerStep)
    assert [step.step for step in steps] == sorted(step.step for step in steps)
    versions = [manifest.version for manifest in museum.records("policies", PolicyManifest)]
    assert versions == sorted(versions)
    messages = read_to_end(museum.run.kafka, topic_name(museum.run.name, "policies"))
    notes = [(note.source, note.reason) for note in filter(None, map(note_of, messages))]
    assert notes == [(versions[-3], "reward hacking")]
    museum.run.say("weights", "verify")


def test_lineage_leads_from_a_step_to_offsets_and_from_a_rollout_to_the_step(museum: Museum) -> None:
    step = museum.records("steps", LearnerStep)[-1]
    batch_id = next(use.batch_id for use in step.uses if use.use == "trained")
    batch = next(batch for batch in museum.records("batches", TrainingBatch) if batch.batch_id == batch_id)
    assert f"batch {batch_id}" in museum.run.say("lineage", "--step", str(step.step))
    for rollout in (("--rollout", batch.uids[0]), ("--offset", f"{batch.partition}:{batch.source_offsets[0]}")):
        forward = museum.run.say("lineage", *rollout)
        assert (f"batch {batch_id}" in forward, f"step default/{step.step}" in forward) == (True, True), forward


def test_a_run_that_is_stopped_says_how_far_it_came_and_how_to_go_on(museum: Museum) -> None:
    assert re.search(
        r"stopping: step +\d+ .*; logs and checkpoints lie in .*the same command goes on", museum.run.output
    )


def test_commands_that_only_read_agree_with_the_ledger(museum: Museum, tmp_path: Path) -> None:
    book = museum.ask("ledger")
    assert museum.ask("verify")["batches"] == book["batches"]
    top = museum.ask("top")
    assert top["step"] == museum.records("steps", LearnerStep)[-1].step
    assert len(museum.run.say("cat", "rollouts").splitlines()) >= book["produced"]
    page = tmp_path / "report.html"
    museum.run.say("report", "-o", str(page))
    assert f"{book['produced']:,}" in page.read_text(encoding="utf-8")
    museum.run.say("archive", str(tmp_path / "archive"))
    assert sum(pq.read_metadata(path).num_rows for path in (tmp_path / "archive").rglob("*.parquet")) > book["produced"]
    replayed = museum.ask("replay")
    assert replayed["recorded"]["batches"] == book["batches"]
