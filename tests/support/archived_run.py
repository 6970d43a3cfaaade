"""A small run whose log lies in an archive alone: rollouts, batches, steps and metrics of a learner, made by hand."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rollstream.consumers.archive.tables import ArchivedRecord
from rollstream.consumers.archive.writer import ArchiveWriter
from rollstream.topics.files.stores import open_store
from rollstream.topics.records import (
    BatchIndexEntry,
    BatchUse,
    InferenceMetadata,
    LearnerStep,
    Metrics,
    PolicyManifest,
    Rollout,
    Turn,
)
from rollstream.topics.wire.codec import encode
from tests.support.batches import random_batch
from tests.support.runs import rollout

ROWS = 8
"""Rollouts of a batch; each step trains on one batch."""
STEP_MS = 10_000
LEARNER = "default"
"""The learner's name, as settings that name none have it."""


def rollout_of(number: int, text: str = "") -> Rollout:
    answer = Turn(
        role="assistant",
        text=text or f"answer {number}",
        start=3,
        stop=6,
        has_logprobs=True,
        inference=InferenceMetadata(model_version=number // ROWS, inference_time_s=0.25),
    )
    return rollout(
        f"x{number // ROWS}",
        number % ROWS,
        policy_version=number // ROWS,
        reward=float(number % 2),
        reward_components={"exact": float(number % 2)},
        turns=(Turn(role="user", text=f"question {number}"), answer),
    )


def evaluated(version: int, environment: str, successes: Sequence[int], *, samples: int, prompts: int) -> list[Rollout]:
    """Answers of an evaluation: `samples` to each prompt, of which so many are right; both environments are a suite."""
    extra = {"split": "heldout", "phase": "periodic", "prompts": str(prompts), "suites": '["both"]'}
    return [
        rollout(
            f"{environment}{version}{prompt}",
            member,
            group_size=samples,
            environment=environment,
            policy_version=version,
            reward=float(member < right),
            extra=extra,
        )
        for prompt, right in enumerate(successes)
        for member in range(samples)
    ]


def step_of(number: int, learner: str = LEARNER, loss: float | None = None) -> LearnerStep:
    """Step `number`, from 0, which trained on the batch of that number and published the next version."""
    return LearnerStep(
        learner=learner,
        step=number,
        input_run="main",
        uses=(BatchUse(batch_id=f"0-{number}", index_offset=number, rows=ROWS, use="trained"),),
        position=number + 1,
        policy_version=number + 1,
        params_digest="d",
        trained_total=ROWS * (number + 1),
        skipped_total=0,
        metrics={"loss": 1.0 / (number + 1) if loss is None else loss, "trained/reward": 0.5},
        timestamp=(number + 1) * STEP_MS / 1000,
    )


def archive_run(
    root: Path,
    steps: int,
    extra_steps: Sequence[LearnerStep] = (),
    *,
    run: str = "main",
    policies: Sequence[PolicyManifest] = (),
    evals: Sequence[Rollout] = (),
) -> None:
    """Archive what the run has appended since the last call, up to so many steps of its learner."""
    batches = []
    for number in range(steps):
        rows = slice(number * ROWS, (number + 1) * ROWS)
        batch = random_batch(number, rows=ROWS, version=number)
        uids = tuple(rollout_of(n).uid for n in range(rows.start, rows.stop))
        batches.append(replace(batch, uids=uids, rewards=np.arange(ROWS) % 2 * 1.0))
    infer = [
        Metrics(component="infer-0", timestamp=n * 3.0, values={"tokens_per_s": float(n)}, labels={}) for n in range(40)
    ]
    topics: dict[str, list[tuple[int, Any]]] = {
        "rollouts": [(n * STEP_MS // ROWS, rollout_of(n)) for n in range(steps * ROWS)],
        "batches": [(n * STEP_MS, batch) for n, batch in enumerate(batches)],
        "batch-index": [(n * STEP_MS, BatchIndexEntry.of(batch, n)) for n, batch in enumerate(batches)],
        "steps": [(n * STEP_MS + 9000, step_of(n)) for n in range(steps)],
        "metrics": [(3000 * n, record) for n, record in enumerate(infer) if 3000 * n < steps * STEP_MS],
    }
    if policies:
        topics["policies"] = [(manifest.version * STEP_MS, manifest) for manifest in policies]
    if evals:
        topics["evals"] = [(each.policy_version * STEP_MS, each) for each in evals]
    topics["steps"] += [(steps * STEP_MS, step) for step in extra_steps]
    writer = ArchiveWriter(open_store(str(root)), run)
    for topic, records in topics.items():
        position = writer.begin(topic, f"{topic} of {run}", {0: 0})[0]
        for offset, (time_ms, record) in enumerate(records):
            if offset >= position:
                writer.add(ArchivedRecord(topic, 0, offset, time_ms, b"key", encode(record)))
    writer.commit({(topic, 0): len(records) for topic, records in topics.items()})
    writer.close()
