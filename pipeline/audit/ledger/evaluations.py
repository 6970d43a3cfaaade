"""Evaluations of a run, by requested version. They are separate from the ledger of `rollouts`."""

import math
from collections.abc import Sequence
from typing import Any

from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import Rollout
from rollstream.topics.validation import REWARD_LIMIT, problems

_MOST_DIGITS = 9


def read_evals(kafka: KafkaConfig, run: str, result: Ledger) -> set[str]:
    """Add the run's evaluations to the ledger, and return the uids of their rollouts; of equal uids the newest counts.

    Rollouts that grouping would call invalid are skipped and named.
    """
    newest: dict[str, Rollout] = {}
    skipped = SkippedRecords("ledger", logged=False)
    for message, rollout in skipped.records(Rollout, read_to_end(kafka, topic_name(run, "evals"))):
        with skipped.passing(message):
            check(rollout)
            newest[rollout.uid] = rollout
    result.note_skipped(skipped)
    evaluations: dict[tuple[str, str, str, int], list[Rollout]] = {}
    for rollout in newest.values():
        kind = (rollout.environment, rollout.extra.get("split", ""), rollout.extra.get("phase", ""))
        evaluations.setdefault((*kind, rollout.policy_version), []).append(rollout)
    result.evaluations += [evaluation(*key, evaluations[key]) for key in sorted(evaluations)]
    result.evals = len(newest)
    return set(newest)


def check(rollout: Rollout) -> None:
    """Raise RecordError for a rollout that is invalid for an evaluation."""
    errors = problems(rollout)
    prompts = rollout.extra.get("prompts", "0")
    if not (prompts.isascii() and prompts.isdecimal() and len(prompts) <= _MOST_DIGITS):
        errors.append(f"prompts is {prompts[:40]!r}, which is no number of prompts")
    exact = rollout.reward_components.get("exact", 0.0)
    if not abs(exact) <= REWARD_LIMIT:
        errors.append(f"its exact match is {exact:g}")
    if errors:
        raise RecordError(f"rollout {rollout.uid[:100]} of evals: {'; '.join(errors[:3])}")


def evaluation(environment: str, split: str, phase: str, version: int, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Summarize one evaluation; the result does not depend on the order in which partitions were read."""
    # Branches of an episode have the same score.
    scored = [r for r in rollouts if r.branch == 0] or rollouts
    exact = [r.reward_components["exact"] for r in scored if "exact" in r.reward_components]
    return {
        "environment": environment,
        "split": split,
        "phase": phase,
        "version": version,
        "lowest_version": min(r.lowest_version for r in rollouts),
        "highest_version": max(r.highest_version for r in rollouts),
        "rollouts": len(rollouts),
        "episodes": len({r.episode_uid or r.uid for r in rollouts}),
        "prompts": max(int(r.extra.get("prompts", len(rollouts))) for r in rollouts),
        "reward": math.fsum(r.reward for r in scored) / len(scored),
        "exact": math.fsum(exact) / len(exact) if exact else None,
    }
