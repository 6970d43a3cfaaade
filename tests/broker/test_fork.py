"""A run that needs more partitions is drained and forked: a run with more of them goes on from its last step."""

import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.grouping.process.bootstrap import initialise
from rollstream.consumers.learner.checkpoint_paths import META
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.consumers.weights.step_log import read_steps
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.producers.flow.mixture_states import MIXTURE, newest_states
from rollstream.topics.config import TopicsConfig
from rollstream.topics.control.named_records import write
from rollstream.topics.kafka import provisioning
from rollstream.topics.records import EnvironmentState, LearnerStep, Metrics, MixtureState, TrainingBatch
from rollstream.topics.wire.codec import encode
from tests.support.runs import SMALL_LEARNER, RealRun, rollout
from tests.support.waiting import eventually

SETTINGS = SMALL_LEARNER | {"learner__publish_every_steps": 4}
"""The last step of the run that is drained publishes no version, so its fork has to."""


def said(run: RealRun, *words: str) -> str:
    answer = run.said(*words, **SETTINGS)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def steps(run: RealRun) -> dict[int, LearnerStep]:
    return read_steps(run.kafka, run.name, "default")


def batched(run: RealRun) -> Counter[str]:
    return Counter(uid for batch in run.read("batches") if isinstance(batch, TrainingBatch) for uid in batch.uids)


def state_in(checkpoint: Path) -> dict[str, bytes]:
    """Files of a checkpoint with parameters, optimizer and generator, and without the position."""
    paths = (path for path in checkpoint.rglob("*") if path.is_file() and path != checkpoint / META)
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in paths}


def closed(run: RealRun) -> Any:
    """The ledger of a run, in which every record has a fate."""
    book = ledger(run.kafka, run.name)
    assert book.balanced, book.problems
    assert (book.in_flight, book.unread) == (0, 0)
    assert verify(run.kafka, run.name).mismatches == []
    return book


@pytest.mark.long
@pytest.mark.usefixtures("compiled")
def test_a_drained_run_goes_on_in_a_fork_with_more_partitions(real_run: RealRun) -> None:
    run = real_run
    run.topics = TopicsConfig(partitions=2)
    run.grouping = replace(run.grouping, batch_rollouts=8)
    provisioning.apply(run.kafka, run.topics, run.name)
    initialise(run.kafka, run.name, run.grouping, run.grouper)
    roles = [run.start("group"), run.start("learn", **SETTINGS)]
    eventually(lambda: 0 in steps(run), 300, "the first version")
    run.send(rollout(f"x{example}", member) for example in range(10) for member in range(4))
    run.send(rollout("open", member) for member in range(2))
    eventually(lambda: 1 in steps(run), 300, "a step")
    drawn = MixtureState(worker_id="env-0", environments=(EnvironmentState(environment="env", drawn=11),))
    write(run.kafka, run.name, MIXTURE, {"env-0": drawn})

    said(run, "steer", "stop", "--drain")
    ended = Metrics(component="env-0", timestamp=time.time(), labels={"role": "env"}, values={"running": 0.0})
    run.send_bytes("metrics", encode(ended), b"env-0")
    assert [role.wait(300) for role in roles] == [0, 0], run.log_of(roles[1])[-3000:]
    old, last = closed(run), steps(run)[2]
    assert (old.batched, old.trained, old.dropped) == (40, 40, {"cancelled": 2})
    assert (last.policy_version, old.learners["default"]["waiting"]) == (-1, 0)

    answer = json.loads(said(run, "fork", "--into", f"{run.name}-5", "--partitions", "5", "--json"))
    assert (answer["from_step"], answer["parameters"], answer["position"]) == (2, last.params_digest, 0)
    assert answer["command"] == f"rollstream run --config {answer['configuration']}"
    wide = replace(run, name=answer["run"], topics=TopicsConfig(partitions=5), processes=[])
    copy = run.directory / answer["checkpoints"] / wide.name / "default" / "2"
    [source] = run.directory.rglob(f"{run.name}/default/2")
    assert state_in(copy) == state_in(source)
    assert newest_states(run.kafka, wide.name) == {"env-0": drawn}
    try:
        wide.start("group")
        learner = wide.start("learn", **SETTINGS)
        eventually(lambda: 2 in steps(wide), 300, "the step from which it goes on")
        first = steps(wide)[2]
        assert (first.params_digest, first.policy_version, first.trained_total) == (last.params_digest, 1, 0)
        [manifest] = read_manifests(run.kafka, wide.name).values()
        assert (manifest.version, manifest.step, manifest.params_digest) == (1, 2, last.params_digest)

        newer = {"policy_version": 1, "lowest_version": 1, "highest_version": 1}
        wide.send(rollout(f"y{example}", member, **newer) for example in range(16) for member in range(4))
        eventually(lambda: 4 in steps(wide), 300, "steps on batches of its own", every_s=0.5)
        made = steps(wide)
        assert [made[step].trained_total for step in (3, 4)] == [32, 64], wide.log_of(learner)[-3000:]
        assert made[4].policy_version == 2
        new = closed(wide)
    finally:
        wide.stop()
    assert closed(run) == old
    expected = {
        f"{name}{example}-{member}" for name, n in (("x", 10), ("y", 16)) for example in range(n) for member in range(4)
    }
    assert batched(run) + batched(wide) == Counter(expected)
    assert old.rollouts + new.rollouts == len(expected) + sum(old.dropped.values())
