"""Evaluations of a run, told by what was asked of which version. They are apart from the ledger of `rollouts`."""

import math
from collections.abc import Sequence
from typing import Any

from pipeline.ledger.book import Ledger
from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import RecordError
from topics.records import Rollout
from topics.skipped import SkippedRecords
from topics.validation import REWARD_LIMIT, problems

_MOST_DIGITS = 9


def read_evals(kafka: KafkaConfig, run: str, result: Ledger) -> set[str]:
    """What was made for evaluation, told by evaluation; its uids. Where one was sent again, the newer counts.

    What is no sound rollout, as grouping judges them, counts for nothing and is named.
    """
    newest: dict[str, Rollout] = {}
    skipped = SkippedRecords("ledger", logged=False)
    for message, rollout in skipped.records(Rollout, clients.read_to_end(kafka, topic_name(run, "evals"))):
        with skipped.passing(message):
            check(rollout)
            newest[rollout.uid] = rollout
    result.note_skipped(skipped)
    told: dict[tuple[str, str, str, int], list[Rollout]] = {}
    for rollout in newest.values():
        of = (rollout.environment, rollout.extra.get("split", ""), rollout.extra.get("phase", ""))
        told.setdefault((*of, rollout.policy_version), []).append(rollout)
    result.evaluations += [evaluation(*of, told[of]) for of in sorted(told)]
    result.evals = len(newest)
    return set(newest)


def check(rollout: Rollout) -> None:
    """Raise RecordError for a rollout that no evaluation can be told by."""
    found = problems(rollout)
    prompts = rollout.extra.get("prompts", "0")
    if not (prompts.isascii() and prompts.isdecimal() and len(prompts) <= _MOST_DIGITS):
        found.append(f"prompts is {prompts[:40]!r}, which is no number of prompts")
    exact = rollout.reward_components.get("exact", 0.0)
    if not abs(exact) <= REWARD_LIMIT:
        found.append(f"its exact match is {exact:g}")
    if found:
        raise RecordError(f"rollout {rollout.uid[:100]} of evals: {'; '.join(found[:3])}")


def evaluation(environment: str, split: str, phase: str, version: int, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Figures of one evaluation: the same to the last bit, whichever of its partitions was read first."""
    exact = [r.reward_components["exact"] for r in rollouts if "exact" in r.reward_components]
    return {
        "environment": environment,
        "split": split,
        "phase": phase,
        "version": version,
        "lowest_version": min(r.lowest_version for r in rollouts),
        "highest_version": max(r.highest_version for r in rollouts),
        "rollouts": len(rollouts),
        "prompts": max(int(r.extra.get("prompts", len(rollouts))) for r in rollouts),
        "reward": math.fsum(r.reward for r in rollouts) / len(rollouts),
        "exact": math.fsum(exact) / len(exact) if exact else None,
    }
