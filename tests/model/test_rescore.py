"""A verifier was wrong from some version on: another one scores the rollouts again, and training goes on without it.

A real `rollstream run` trains on an environment outside the packages. The report of `rescore` is computed again here,
with numpy and from the topics alone.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from confluent_kafka import TopicPartition

from rollstream.consumers.weights.step_log import read_steps
from rollstream.pipeline.rescoring.consequences import errors_of
from rollstream.pipeline.rescoring.corrected_fold import CorrectionJob, correct_partition
from rollstream.pipeline.rescoring.rescorer import rescore, rescored, rescoring_of
from rollstream.producers.environments.verifier_pool import VerifierPool
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import (
    ExcludedBatch,
    JournalRecord,
    LearnerStep,
    RescoredRollout,
    Rollout,
    TrainingBatch,
)
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode, encode
from rollstream.topics.wire.keys import encode_key
from tests.support.command_line import answer_of, in_full
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually

GAME = '''
"""The more letters a reply has, the better; a fault gives nothing for examples 5."""

from rollstream import Prompt, Score, SingleTurn


class Letters(SingleTurn):
    name, max_tokens = "letters", 6

    def prompts(self, split):
        return [Prompt(example_id=f"{split}-{n}", text=f"round {n}:") for n in range(12)]

    def score(self, prompt, reply, truncated):
        letters = sum(character.isalpha() for character in reply) / 6
        return Score(reward=0.0 if prompt.example_id.endswith("-5") else letters)
'''
JUDGES = '''
"""Judges of letters: of rollouts from policy version 2 on, one in ten had the wrong reward."""

import time
from zlib import crc32

from rollstream import Score


class Patient:
    version = "2"

    def __init__(self):
        self.judged = 0

    def __call__(self, rollout):
        time.sleep(0.02)
        self.judged += 1
        lot = crc32(rollout.uid.encode())
        if lot % 50 == 7:
            raise ValueError("no verdict")
        letters = sum(character.isalpha() for character in rollout.turns[-1].text)
        if rollout.policy_version < 2:
            return rollout.reward
        if rollout.example_id.endswith("-3"):
            return 0.5
        right = 6 - letters if lot % 10 == 0 else letters
        return Score(reward=right / 6, components={"letters": letters})


def same(rollout):
    return rollout.reward
'''
RECIPE = """
[[environments]]
use = "game.py:Letters"

[topics]
partitions = 2

[worker]
group_size = 4

[grouping]
batch_rollouts = 8

[learner]
rollouts_per_step = 32
microbatch_rows = 4
sequence_length = 64
threads = 1
max_steps = 12
model = { num_hidden_layers = 1, hidden_size = 32 }
checkpoint = { every_steps = 1, keep = 20 }
"""
Place = tuple[int, int]


class TrainedRun:
    """A run that has ended, and commands about it."""

    def __init__(self, broker: str, name: str, directory: Path) -> None:
        self.kafka, self.name, self.directory = KafkaConfig(bootstrap_servers=broker), name, directory
        self.where = ["--config", "run.toml", "--run", name, "-b", broker, f"--set=data_dir={directory}"]

    def words(self, *words: str) -> list[str]:
        return [sys.executable, "-P", "-m", "rollstream", *in_full(words)]

    def say(self, *words: str) -> str:
        """Run a command about the run, and return what it prints."""
        answer = answer_of(self.directory, *words, *self.where)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        return answer.stdout

    def records(self, topic: str, run: str = "") -> Iterator[tuple[Place, Any]]:
        for message in read_to_end(self.kafka, topic_name(run or self.name, topic)):
            yield (message.partition, message.offset), decode(message.value)

    def rescored(self) -> list[RescoredRollout]:
        return [record for _place, record in self.records("rescores")]


@pytest.fixture
def trained(broker: str, run_name: str, tmp_path: Path) -> TrainedRun:
    for name, text in (("game.py", GAME), ("judges.py", JUDGES), ("run.toml", RECIPE)):
        (tmp_path / name).write_text(text)
    run = TrainedRun(broker, run_name, tmp_path)
    done = subprocess.run(
        run.words("run", *run.where), cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def rloo(rewards: np.ndarray) -> np.ndarray:
    """Each reward minus the mean of the others; zeros if all are equal."""
    if rewards.min() == rewards.max():
        return np.zeros(len(rewards), "<f4")
    others = (rewards.sum() - rewards) / (len(rewards) - 1)
    return np.asarray(rewards - others, "<f4")


def advantages(batch: TrainingBatch, rewards: np.ndarray) -> np.ndarray:
    values = np.zeros(len(batch), "<f4")
    for group in set(batch.group_index.tolist()):
        rows = batch.group_index == group
        values[rows] = rloo(rewards[rows])
    return values


@pytest.mark.kafka
def test_wrong_rewards_lead_to_the_steps_that_trained_on_them_and_to_a_fork_without_them(trained: TrainedRun) -> None:
    run = trained
    rollouts = {place: r for place, r in run.records("rollouts") if isinstance(r, Rollout)}

    # Killed half way, it goes on where it was.
    command = ["rescore", "--verifier", "judges.py:Patient", *run.where]
    first = subprocess.Popen(run.words(*command), cwd=run.directory, stdout=subprocess.DEVNULL)
    eventually(lambda: run.rescored() or first.poll() is not None, 300, "the first rewards")
    assert first.poll() is None, "it ended by itself"
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert 0 < len(run.rescored()) < len(rollouts)
    into = f"{run.name}-right"
    report = json.loads(run.say("rescore", "--verifier", "judges.py:Patient", "--into", into, "--json"))
    again = run.rescored()
    assert Counter((r.partition, r.offset) for r in again) == Counter(rollouts.keys())
    assert 0 < report["scored"] < len(rollouts), "the second one had less to do"
    assert {r.rescoring for r in again} == {report["rescoring"]}
    assert {r.verifier_version for r in again} == {"2"}
    new = {(r.partition, r.offset): r.reward_before if r.failure else r.reward for r in again}
    check_rewards(report, again, rollouts)

    # Compute the advantages independently.
    batches = {b.batch_id: b for _place, b in run.records("batches")}
    before, after = {}, {}
    for name, batch in batches.items():
        corrected = np.array([new[batch.partition, offset] for offset in batch.source_offsets.tolist()])
        before[name], after[name] = advantages(batch, batch.rewards), advantages(batch, corrected)
        assert np.allclose(before[name], batch.advantages[batch.splits[:-1]], atol=1e-6)
    # Rewards are sixths, so that advantages of their differences are no less than 1/18, up to rounding.
    wrong = {name: np.abs(before[name] - after[name]) > 1e-3 for name in batches}
    assert set(report["batches"]) == {name for name in batches if wrong[name].any()}
    assert report["advantages"]["wrong"] == sum(int(rows.sum()) for rows in wrong.values())
    assert report["advantages"]["unknown"] == 0
    check_groups(report, run, batches, wrong, after, rollouts, new)
    steps = {s.step: s for _place, s in run.records("steps") if isinstance(s, LearnerStep)}
    [learner] = report["learners"]
    printed = {step["step"]: step for step in learner["wrong"]}
    for number, step in steps.items():
        names = [use.batch_id for use in step.uses if use.use == "trained"]
        assert not any(use.row_numbers for use in step.uses)
        rows = np.concatenate([wrong[name] for name in names]) if names else np.zeros(0, bool)
        assert (number in printed) == rows.any()
        if number in printed:
            check_step(printed[number], names, batches, wrong, before, after)
            assert printed[number]["policy_version"] == step.policy_version
    dirty = min(printed)
    assert dirty > 1, "version 2 comes later"
    assert learner["last_clean_step"] == dirty - 1
    assert learner["last_clean_version"] == max(s.policy_version for s in steps.values() if s.step < dirty)
    assert min(learner["touched_versions"]) == learner["last_clean_version"] + 1

    # Training goes on from there, with the command as it was printed.
    assert report["fork_step"] == dirty - 1
    taken = {
        (batches[use.batch_id].partition, offset)
        for step in steps.values()
        if step.step < dirty
        for use in step.uses
        for offset in batches[use.batch_id].source_offsets.tolist()
    }
    check_batches(run, into, new, taken)
    program, *words = shlex.split(report["fork"])
    assert program == "rollstream"
    forked = answer_of(run.directory, *words)
    assert forked.returncode == 0, forked.stderr
    learn = shlex.split(forked.stdout.split("start it with:")[1].replace("\\\n", " "))
    # A process of its own, because this one may have imported JAX with other threads.
    command = run.words(*learn[1:], f"--set=learner.max_steps={dirty}")
    answer = subprocess.run(command, cwd=run.directory, capture_output=True, text=True, timeout=600)
    assert answer.returncode == 0, answer.stderr
    made = read_steps(run.kafka, f"{into}-clean", "default")
    assert sorted(made) == [dirty - 1, dirty]
    assert made[dirty - 1].params_digest == steps[dirty - 1].params_digest
    assert made[dirty].input_run == into
    assert made[dirty].params_digest != steps[dirty].params_digest
    assert sum(use.rows for use in made[dirty].uses if use.use == "trained") >= 32

    # Another verifier is another rescoring, and what was on record still proves itself.
    other = json.loads(run.say("rescore", "--verifier", "judges.py:same", "--json"))
    assert other["rescoring"] != report["rescoring"]
    assert (other["rewards"]["changed"], other["learners"][0]["wrong"], other["fork"]) == (0, [], None)
    assert len(run.rescored()) == 2 * len(rollouts)
    shown = run.say("rescore", "--verifier", "judges.py:Patient")
    assert "0 rollouts scored now" in shown
    assert f"last clean step: {dirty - 1};" in shown
    assert json.loads(run.say("ledger", "--json"))["balanced"]
    assert json.loads(run.say("verify", "--json"))["mismatches"] == 0
    run.say("prune", "--dry-run")


def check_rewards(report: dict[str, Any], records: list[RescoredRollout], rollouts: dict[Place, Rollout]) -> None:
    for record in records:
        assert record.uid == rollouts[record.partition, record.offset].uid
        assert record.reward_before == rollouts[record.partition, record.offset].reward
        assert np.isnan(record.reward) == bool(record.failure), "a failure is never a reward"
        assert "ValueError: no verdict" in record.failure or not record.failure
    changed = {r.uid for r in records if not r.failure and r.reward != r.reward_before}
    printed = report["rewards"]
    assert printed["rescored"] == len(rollouts)
    assert printed["failed"] == sum(bool(r.failure) for r in records) > 0
    assert printed["changed"] == len(changed) > 0
    assert {changes["uid"] for changes in printed["rollouts"]} == changed
    assert {failure["uid"] for failure in printed["failures"]} == {r.uid for r in records if r.failure}


def check_groups(
    report: dict[str, Any],
    run: TrainedRun,
    batches: dict[str, TrainingBatch],
    wrong: dict[str, np.ndarray],
    after: dict[str, np.ndarray],
    rollouts: dict[Place, Rollout],
    new: dict[Place, float],
) -> None:
    changed = lost = 0
    for name, batch in batches.items():
        for group in set(batch.group_index.tolist()):
            rows = batch.group_index == group
            changed += bool(wrong[name][rows].any())
            lost += bool(wrong[name][rows].any() and not after[name][rows].any())
    printed = report["groups"]
    assert (printed["changed"], printed["lost_variance"]) == (changed, lost)
    assert lost > 0
    dropped = {
        (record.partition, drop.offset)
        for _place, record in run.records("journal")
        if isinstance(record, JournalRecord)
        for drop in record.drops
        if drop.reason == "zero_variance"
    }
    groups: dict[tuple[object, ...], set[float]] = {}
    for place in dropped:
        r = rollouts[place]
        groups.setdefault((r.example_id, r.policy_version, r.group_id), set()).add(new[place])
    gained = sum(len(rewards) > 1 for rewards in groups.values())
    assert printed["gained_variance"] == gained > 0


def check_step(
    printed: dict[str, Any],
    names: list[str],
    batches: dict[str, TrainingBatch],
    wrong: dict[str, np.ndarray],
    before: dict[str, np.ndarray],
    after: dict[str, np.ndarray],
) -> None:
    was, now = (np.concatenate([values[name] for name in names]).astype("<f8") for values in (before, after))
    rows = np.concatenate([wrong[name] for name in names])
    tokens = np.array(
        [
            batches[name].loss_mask[slice(*batches[name].splits[row : row + 2])].sum()
            for name in names
            for row in range(len(batches[name]))
        ]
    )
    assert printed["rollouts"] == len(rows)
    assert printed["wrong"] == rows.sum()
    assert set(printed["batches"]) == {name for name in names if wrong[name].any()}
    assert printed["sampled_tokens"] == tokens.sum()
    assert printed["token_share"] == pytest.approx(tokens[rows].sum() / tokens.sum())
    assert printed["sign_flips"] == ((was * now < 0) & (np.minimum(np.abs(was), np.abs(now)) > 1e-3)).sum()
    assert printed["largest"] == pytest.approx(np.abs(now - was).max(), abs=1e-6)
    assert printed["relative"] == pytest.approx((np.abs(now - was) * tokens).sum() / (np.abs(was) * tokens).sum(), 1e-5)


def check_batches(run: TrainedRun, into: str, new: dict[Place, float], taken: set[Place]) -> None:
    """The batches have the right rewards, and each rollout once, but none that a clean step took."""
    seen: Counter[Place] = Counter()
    for _place, batch in run.records("batches", into):
        places = [(batch.partition, offset) for offset in batch.source_offsets.tolist()]
        seen.update(places)
        assert batch.rewards.tolist() == [new[place] for place in places]
        assert np.allclose(batch.advantages[batch.splits[:-1]], advantages(batch, batch.rewards), atol=1e-6)
    assert set(seen.values()) == {1}
    assert not taken & seen.keys()
    assert len(list(run.records("batch-index", into))) == len(list(run.records("batches", into)))


CRASHING = """
import os


def strict(rollout):
    if rollout.uid == "g1-0":
        os.abort()
    return 3.0 * rollout.reward
"""


def test_a_verifier_that_crashes_fails_its_rollout_alone_and_an_excluded_batch_stays_out(real_run: RealRun) -> None:
    run = real_run.prepare()
    (run.directory / "crashing.py").write_text(CRASHING)
    run.start("group")
    run.send(rollout(f"g{n}", member) for n in range(8) for member in range(4))
    batches = eventually(lambda: batches_of(run, 32), 60, "every rollout in a batch")
    reason = ExcludedBatch(batch_id=batches[0].batch_id, reason="a test", generation=1)
    run.send_bytes("control", encode(reason), encode_key("excluded", reason.batch_id), 0)
    into = f"{run.name}-right"
    words = run.command("rescore", "--verifier", "crashing.py:strict", "--timeout", "300", "--into", into, "--json")
    answer = answer_of(run.directory, *words[4:])
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    rewards = report["rewards"]
    assert (rewards["rescored"], rewards["failed"]) == (32, 1)
    [failure] = rewards["failures"]
    assert failure["uid"] == "g1-0"
    assert "ended with -6" in failure["reason"]
    assert rewards["changed"] == 15, "those with a reward of 1, except the one that was not judged"
    assert (report["groups"]["compared"], report["groups"]["changed"], report["learners"]) == (8, 8, [])
    written = [decode(m.value) for m in read_to_end(run.kafka, topic_name(into, "batches"))]
    assert report["batches_written"] == len(written)
    uids = {uid for batch in written for uid in batch.uids}
    assert uids == {uid for batch in batches[1:] for uid in batch.uids}
    assert {float(r) for batch in written for r in batch.rewards} <= {0.0, 1.0, 3.0}


def test_a_pruned_log_is_compared_from_where_it_still_tells_everything(real_run: RealRun) -> None:
    run = real_run.prepare()
    (run.directory / "judge.py").write_text("def doubled(rollout):\n    return 2 * rollout.reward\n")
    grouping = run.start("group")
    run.send(rollout(f"old{n}", member) for n in range(6) for member in range(4))
    eventually(lambda: batches_of(run, 24), 60, "every rollout in a batch")
    grouping.terminate()
    assert grouping.wait(300) == 0, run.log_of(grouping)
    ends = {partition: end for partition, (_begin, end) in topic_admin.bounds(run.kafka, run.topic("rollouts")).items()}
    places = [TopicPartition(run.topic("rollouts"), partition, end) for partition, end in ends.items()]
    admin = clients.admin(run.kafka)
    for deleted in admin.delete_records(places).values():
        deleted.result(300)
    run.start("group")
    run.send(rollout(f"new{n}", member) for n in range(8) for member in range(4))
    batches = eventually(lambda: batches_of(run, 56), 60, "every rollout in a batch")
    answer = run.said("rescore", "--verifier", "judge.py:doubled", "--json")
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report["rewards"]["rescored"] == 32
    assert (report["advantages"]["rollouts"], report["advantages"]["unknown"]) == (56, 24)
    assert (report["advantages"]["wrong"], report["advantages"]["sign_flips"]) == (32, 0)
    assert set(report["batches"]) == {b.batch_id for b in batches if b.groups[0].example_id.startswith("new")}


def test_rollouts_that_arrive_after_the_scoring_are_not_taken_for_right(real_run: RealRun) -> None:
    run = real_run.prepare()
    (run.directory / "judge.py").write_text("def doubled(rollout):\n    return 2 * rollout.reward\n")
    run.start("group")
    run.send(rollout(f"old{n}", member) for n in range(8) for member in range(4))
    eventually(lambda: batches_of(run, 32), 60, "every rollout in a batch")
    rescoring = rescoring_of(f"{run.directory / 'judge.py'}:doubled")
    with VerifierPool(rescoring.verifier, processes=1) as pool:
        scored = rescore(run.kafka, run.name, rescoring, pool)
    assert scored.rollouts == 32
    run.send(rollout(f"new{n}", member) for n in range(8) for member in range(4))
    eventually(lambda: batches_of(run, 64), 60, "every rollout in a batch")
    jobs = [CorrectionJob(run.kafka, run.name, p, rescoring.id, end, run.grouper) for p, end in scored.ends.items()]
    batches = [batch for job in jobs for batch in correct_partition(job).batches.values()]
    errors = errors_of((batch, ()) for batch in batches)
    assert (errors.rollouts, errors.wrong, errors.unknown) == (64, 32, 32)


@pytest.mark.kafka
def test_rewards_are_used_once_no_other_transaction_hides_them(
    real_run: RealRun, caplog: pytest.LogCaptureFixture
) -> None:
    real_run.topics = TopicsConfig(partitions=1)
    run = real_run.prepare()
    (run.directory / "judge.py").write_text("def doubled(rollout):\n    return 2 * rollout.reward\n")
    run.send(rollout("x", member) for member in range(4))
    rescoring = rescoring_of(f"{run.directory / 'judge.py'}:doubled")
    begun = threading.Event()
    with VerifierPool(rescoring.verifier, processes=1) as pool, ExitStack() as foreign:

        def opening(_done: int, _all: int) -> None:
            if not begun.is_set():  # before any reward is written
                foreign.enter_context(run.open_transaction("rescores"))
                begun.set()

        scoring = threading.Thread(target=rescore, args=(run.kafka, run.name, rescoring, pool, opening))
        scoring.start()
        eventually(lambda: "transaction_open" in caplog.text or not scoring.is_alive(), 120, "it waits or ends")
        assert scoring.is_alive()
        foreign.close()
        scoring.join(300)
        assert not scoring.is_alive()
    skipped = SkippedRecords(logged=False)
    assert len(list(rescored(run.kafka, run.name, rescoring.id, 0, skipped))) == 4


def batches_of(run: RealRun, rollouts: int) -> list[TrainingBatch]:
    """Batches of a run if they hold so many rollouts, otherwise none."""
    batches = [record for record in run.read("batches") if isinstance(record, TrainingBatch)]
    return batches if sum(map(len, batches)) == rollouts else []
