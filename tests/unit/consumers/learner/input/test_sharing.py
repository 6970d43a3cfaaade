"""Processes share a step evenly: whatever their number, they compute as many useful positions as one process would.

A position is useful if it holds a token. `pytest -s` shows the figures, by rows and by whole batches as earlier
releases shared them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from rollstream.consumers.batch_reader import IndexedBatch
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.input.batch_selection import StepPlan, share_of
from rollstream.consumers.learner.input.packing import PackedStep, rows_by_length
from rollstream.consumers.learner.input.step_loader import packed_step
from rollstream.consumers.learner.step_rules import NEWEST, StepRules, rules_of
from rollstream.consumers.models.config import DecoderConfig
from rollstream.topics.errors import StateRefused
from rollstream.topics.records import BatchIndexEntry, LearnerStep, TrainingBatch
from tests.support.batches import random_batch

PROCESSES = (1, 2, 4, 16, 64)
CONFIG = LearnerConfig(
    model=DecoderConfig(), microbatch_rows=64, sequence_length=2048, length_buckets=(512, 1024), too_long="truncate"
)
RECORD = LearnerStep(
    learner="default",
    step=1,
    input_run="main",
    uses=(),
    position=0,
    policy_version=1,
    params_digest="",
    trained_total=0,
    skipped_total=0,
    rules=NEWEST.to_record(),
)
Lengths = Callable[[np.random.Generator, int], np.ndarray]
DISTRIBUTIONS: dict[str, Lengths] = {
    "lognormal": lambda draw, rows: draw.lognormal(math.log(500), 0.8, rows),
    "most are cut at the limit": lambda draw, rows: np.where(
        draw.random(rows) < 0.6, 2048, draw.integers(64, 2048, rows)
    ),
    "short, and a few long": lambda draw, rows: np.where(draw.random(rows) < 0.05, 1900, draw.integers(20, 200, rows)),
}


def batches_of(lengths: Lengths, batches: int, rows: int) -> list[TrainingBatch]:
    """Batches of rollouts of these lengths."""
    draw, collected = np.random.default_rng(0), []
    for number in range(batches):
        answers = np.clip(lengths(draw, rows), 8, 2048).astype(int)
        row = random_batch(number, rows=rows)
        splits = np.concatenate([[0], np.cumsum(answers)]).astype("<i8")
        total = int(splits[-1])
        collected.append(
            replace(
                row,
                splits=splits,
                tokens=draw.integers(2, 98, total).astype("<i4"),
                loss_mask=np.ones(total, bool),
                logprobs=np.full(total, -1, "<f4"),
                advantages=np.ones(total, "<f4"),
            )
        )
    return collected


def plan_of(batches: Sequence[TrainingBatch], rules: StepRules = NEWEST) -> StepPlan:
    """A step that trains on all rows of these batches."""
    trained = tuple(IndexedBatch(BatchIndexEntry.of(batch, at), at) for at, batch in enumerate(batches))
    return StepPlan(uses=(), trained=trained, lags=(0,) * len(trained), position=len(trained), wait_s=0.0, rules=rules)


def packed_by(process: int, processes: int, plan: StepPlan, batches: Sequence[TrainingBatch]) -> PackedStep:
    """One process's packing of a step, from the batches that it fetches."""
    own = plan.trained if plan.rules.sharing == "rows" else share_of(plan.trained, process, processes)
    fetched = {read.index_offset: batches[read.index_offset] for read in own}
    return packed_step(replace(CONFIG, processes=processes), plan, fetched)[0]


def useful(steps: Sequence[PackedStep], plan: StepPlan) -> float:
    """Share of the computed positions that hold a token; all processes of a team run equally many microbatches."""
    rows = rows_by_length(CONFIG)
    counts = [
        max(sum(batch.tokens.shape[1] == length for batch in step.microbatches) for step in steps) for length in rows
    ]
    positions = sum(count * rows[length] * length for count, length in zip(counts, rows, strict=True))
    return sum(read.entry.tokens for read in plan.trained) / positions


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_useful_positions_are_those_of_one_process_at_any_number_of_processes(name: str) -> None:
    batches = batches_of(DISTRIBUTIONS[name], 4, 64)
    by_rows, by_batches = plan_of(batches), plan_of(batches, StepRules(sharing="batches"))
    alone = useful([packed_by(0, 1, by_rows, batches)], by_rows)
    for processes in PROCESSES:
        # The first and the last process suffice: the next test checks that all processes have the same layout.
        some = [packed_by(process, processes, by_rows, batches) for process in {0, processes - 1}]
        shares = useful(some, by_rows)
        print(f"{name}, {processes} processes: {shares:.3f} useful, one process {alone:.3f}")
        assert shares >= 0.95 * alone
    before = useful([packed_by(process, 16, by_batches, batches) for process in range(16)], by_batches)
    print(f"{name}, 16 processes by batches: {before:.3f} useful")
    assert before < 0.5 * alone


def test_every_process_lays_out_the_same_arrays_and_left_out_rows_are_nobodys() -> None:
    batches = batches_of(DISTRIBUTIONS["lognormal"], 2, 16)
    batches[1].logprobs.setflags(write=True)
    batches[1].logprobs[batches[1].splits[3] + 1] = np.nan
    first, second = (packed_by(process, 2, plan_of(batches), batches) for process in range(2))
    assert first.tokens == second.tokens == sum(len(b.tokens) for b in batches) - int(np.diff(batches[1].splits)[3])
    for ours, theirs in zip(first.microbatches, second.microbatches, strict=True):
        for key, value in ours.arrays().items():
            np.testing.assert_array_equal(value, theirs.arrays()[key])


def test_a_step_of_an_earlier_release_is_shared_by_batches() -> None:
    rules = rules_of(replace(RECORD, rules={}))
    assert rules != rules_of(RECORD) == rules_of(None) == NEWEST
    batches = batches_of(DISTRIBUTIONS["lognormal"], 2, 16)
    plan = plan_of(batches, rules)
    shares = [packed_by(process, 2, plan, batches) for process in range(2)]
    assert not any(share.whole for share in shares)
    assert sorted(share.tokens for share in shares) == sorted(len(batch.tokens) for batch in batches)
    assert {batch.tokens.shape[0] for share in shares for batch in share.microbatches} <= {32, 64, 128}


def test_rules_of_a_later_release_are_refused_by_name() -> None:
    with pytest.raises(StateRefused, match=r"\(sharing=tokens, moon=full\)"):
        StepRules.recorded({"sharing": "tokens", "moon": "full"})
