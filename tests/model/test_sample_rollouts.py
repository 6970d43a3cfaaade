"""`rollstream import samples:RUN`: samples of a TransferQueue become rollouts, which the ledger and grouping know."""

import io
import json
from collections.abc import Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from rollstream.consumers.ordinal_claim import OrdinalClaim
from rollstream.consumers.trainers.sample_log import SampleWriter, cleared_marks, record_of
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.command_line.cli import main
from rollstream.topics.records import Rollout, SampleField, TrainingBatch
from tests.support.runs import RealRun
from tests.support.waiting import eventually

GROUPS, SIZE, PARTITION = 4, 4, "train_0"


def fields(group: int, member: int, **others: Any) -> dict[str, Any]:
    """A sample as verl puts it."""
    length = 3 + member
    return {
        "prompts": np.arange(2 + group, dtype=np.int64),
        "responses": np.arange(length, dtype=np.int64) + 10,
        "response_mask": np.array([1] * (length - 1) + [0], np.int64),
        "rollout_log_probs": -np.arange(1, length + 1).astype(ml_dtypes.bfloat16) / 8,
        "rm_scores": np.array([0.0] * (length - 1) + [float(member % 2)], np.float32),
        "uid": f"prompt-{group}",
        "data_source": "gsm8k",
    } | others


def records(sample: str, values: dict[str, Any]) -> Iterator[SampleField]:
    for name, value in values.items():
        names = {"partition_id": PARTITION, "sample": sample, "field": name}
        if isinstance(value, np.ndarray):
            yield SampleField(**names, dtype=value.dtype.name, shape=value.shape, data=value.tobytes())
        elif value is not None:
            yield SampleField(**names, data=msgspec.msgpack.encode(value))


@pytest.fixture
def run(real_run: RealRun) -> RealRun:
    return real_run.prepare()


def put(run: RealRun, samples: dict[str, dict[str, Any]], cleared: list[str]) -> None:
    claim = OrdinalClaim(run.kafka, run.name, f"{run.name}.samples", "writers")
    claim.take()
    with closing(SampleWriter(run.kafka, run.name, 0, claim)) as writer:
        for sample, values in samples.items():
            writer.write([record_of(field, run.topics.partitions) for field in records(sample, values)])
        writer.write(cleared_marks([(PARTITION, sample) for sample in cleared], run.topics.partitions))


def imported(run: RealRun, *flags: str) -> tuple[int, dict[str, Any], str]:
    _python, _safe, _m, _pipeline, *words = run.command(
        "import", f"samples:{run.name}", f"run:{run.name}", "--json", *flags
    )
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        code = main(words)
    return code, json.loads(out.getvalue() or "{}"), errors.getvalue()


def rollouts(run: RealRun) -> dict[str, Rollout]:
    return {record.uid.partition("@")[0]: record for record in run.read("rollouts") if isinstance(record, Rollout)}


def test_samples_become_rollouts_once_and_are_batched_in_their_groups(run: RealRun) -> None:
    names = [f"{group}.{member}" for group in range(GROUPS) for member in range(SIZE)]
    put(run, {name: fields(*map(int, name.split("."))) for name in names}, cleared=names[::3])
    code, report, _errors = imported(run)
    assert (code, report["complete"]) == (0, True)
    assert report["environments"]["gsm8k"]["written"] == 16
    code, report, _errors = imported(run)
    assert (code, report["total"]["there_before"], report["total"]["written"]) == (0, 16, 0)

    made = rollouts(run)
    assert sorted(made) == sorted(f"{PARTITION}/{name}" for name in names)
    one = made[f"{PARTITION}/1.2"]
    assert (one.environment, one.example_id, one.group_size, one.reward) == ("gsm8k", "prompt-1", SIZE, 0.0)
    assert one.tokens.tolist() == [0, 1, 2, 10, 11, 12, 13, 14]
    assert one.loss_mask.tolist() == [False] * 3 + [True] * 4 + [False]
    assert one.logprobs.tolist() == [0, 0, 0, -1 / 8, -2 / 8, -3 / 8, -4 / 8, 0]
    assert made[f"{PARTITION}/1.3"].reward == 1.0

    run.start("group")

    def batched() -> set[str]:
        return {uid for batch in run.read("batches") if isinstance(batch, TrainingBatch) for uid in batch.uids}

    eventually(lambda: batched() == {rollout.uid for rollout in made.values()}, 60, "every group is whole, and batched")
    book = ledger(run.kafka, run.name)
    assert book.balanced, book.problems


def test_a_sample_that_makes_no_rollout_is_refused_with_its_reason_and_its_group_is_smaller(run: RealRun) -> None:
    odd = {"response_mask": np.ones(2, np.int64)}
    samples = {
        "0.0": fields(0, 0),
        "0.1": fields(0, 1),
        "0.2": fields(0, 2, rm_scores=None),
        "0.3": fields(0, 3, **odd),
    }
    put(run, samples, cleared=["0.2"])
    code, report, _errors = imported(run)
    assert code == 1
    assert [(refused["place"].partition(":")[0], refused["reason"]) for refused in report["refused"]] == [
        (run.topic("samples"), "it lacks rm_scores"),
        (run.topic("samples"), "response_mask has 2 values for 6 tokens of responses"),
    ]
    assert {rollout.group_size for rollout in rollouts(run).values()} == {2}


def test_a_group_has_the_lowest_version_of_its_samples(run: RealRun) -> None:
    put(run, {f"0.{m}": fields(0, m, policy_version=np.array(7 + m)) for m in range(2)}, cleared=[])
    assert imported(run)[0] == 0
    made = [rollout for _uid, rollout in sorted(rollouts(run).items())]
    assert [(r.policy_version, r.lowest_version, r.highest_version) for r in made] == [(7, 7, 7), (7, 8, 8)]


def test_fields_of_other_names_are_named(run: RealRun) -> None:
    put(run, {"a": fields(0, 1, rm_scores=None, score=0.5, data_source=None, step=np.array([7], np.int64))}, cleared=[])
    assert imported(run)[0] == 1
    assert imported(run, "--field", "reward=score", "--field", "version=step")[0] == 0
    [made] = rollouts(run).values()
    assert (made.environment, made.reward, made.policy_version, made.highest_version) == ("samples", 0.5, 7, 7)
    code, _report, errors = imported(run, "--field", "rewards=score")
    assert code
    assert "--field rewards: give NAME=FIELD, with a name of prompt, response" in errors
