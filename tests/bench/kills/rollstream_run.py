"""rollstream as a contender: a real `rollstream run` of the demo's task, whose overseer starts killed processes again.

The tally is read from the topics by uid, with the codec alone: it asks neither ledger nor journal what was trained on.
"""

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import JournalRecord, LearnerStep, Rollout, TrainingBatch
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode, kind_of
from tests.bench.kills.peers import MORE, victims
from tests.bench.kills.tally import Tally
from tests.support.steered_run import VALUES, SteeredRun
from tests.support.waiting import eventually

NAME = "rollstream"
ROLES = ("env", "group", "infer", "learn")
_SETTINGS = {
    **VALUES,
    "supervisor.workers": 2,
    "grouper.processes": 2,
    "learner.checkpoint.every_steps": 5,
    # The default allows three restarts of a process in ten minutes; this run restarts processes on purpose.
    "supervisor.restarts": 1000,
}


def tally_of(broker: str, name: str, directory: Path, kills: int, seed: int) -> Tally:
    """Start a run, kill processes of its roles at random, let it end in order, and count."""
    directory.mkdir(parents=True)
    run, rng, killed = SteeredRun(broker, name, directory, values=_SETTINGS), random.Random(seed), Counter[str]()
    try:
        run.start()
        for role in victims(ROLES, kills, rng):
            _await_rollouts(run, rng.randrange(*MORE))
            _kill(run, role, rng)
            killed[role] += 1
        _await_rollouts(run, MORE[0])
        run.say("stop", "--drain")
        assert run.process.wait(600) == 0, run.output
        return counted(run.kafka, name, killed)
    finally:
        run.close()


def _kill(run: SteeredRun, role: str, rng: random.Random) -> None:
    """kill -9 one process of a role, as soon as there is one."""
    eventually(lambda: run.pids(role) or _ended(run), 60, f"a process of {role}")
    assert not _ended(run), run.output
    os.kill(rng.choice(sorted(run.pids(role))), signal.SIGKILL)


def _ended(run: SteeredRun) -> bool:
    return run.process.poll() is not None


def _await_rollouts(run: SteeredRun, more: int) -> None:
    def records() -> int:
        return sum(end for _low, end in topic_admin.bounds(run.kafka, topic_name(run.name, "rollouts")).values())

    wanted = records() + more
    eventually(lambda: records() >= wanted or _ended(run), 300, f"{wanted} records of rollouts")
    assert not _ended(run), run.output


def counted(kafka: KafkaConfig, name: str, killed: Counter[str]) -> Tally:
    """Count the rollouts of a run that has ended."""

    def records(topic: str) -> Iterator[tuple[int, int, object]]:
        for message in read_to_end(kafka, topic_name(name, topic)):
            if kind_of(message.value):
                yield message.partition, message.offset, decode(message.value)

    uid_at = {(p, offset): record.uid for p, offset, record in records("rollouts") if isinstance(record, Rollout)}
    batches = {record.batch_id: record for _p, _o, record in records("batches") if isinstance(record, TrainingBatch)}
    # The record of a step that was executed again replaces the first one.
    steps = {record.step: record for _p, _o, record in records("steps") if isinstance(record, LearnerStep)}
    trained, on_record = list[str](), list[str]()
    for step in steps.values():
        for use in step.uses:
            rows = use.row_numbers or range(use.rows)
            uids = trained if use.use == "trained" else on_record
            uids += [batches[use.batch_id].uids[row] for row in rows]
    for partition, _offset, record in records("journal"):
        if isinstance(record, JournalRecord):
            on_record += [uid_at[partition, drop.offset] for drop in record.drops if (partition, drop.offset) in uid_at]
    return Tally.of(NAME, killed, uid_at.values(), trained, on_record)
