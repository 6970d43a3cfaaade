"""Evaluations of a run, by requested version. They are not part of the ledger of `rollouts`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.topic_tail import TopicTail
from rollstream.producers.worker.evaluation_figures import Answer, means, prompts_named
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError
from rollstream.topics.records import Rollout
from rollstream.topics.wire.validation import problems

Kind = tuple[str, str, str, int]
"""Environment, split, phase and requested version of an evaluation."""


class Scored(NamedTuple):
    """The values of one rollout that an evaluation needs."""

    example: str
    branch: int
    episode: str
    lowest_version: int
    highest_version: int
    prompts: int | None
    """Number of prompts of the whole evaluation; None if the rollout does not name it."""
    samples: int
    reward: float
    success: bool

    @classmethod
    def of(cls, rollout: Rollout) -> "Scored":
        """Return the values of a rollout."""
        return cls(
            rollout.example_id,
            rollout.branch,
            rollout.episode_uid or rollout.uid,
            rollout.lowest_version,
            rollout.highest_version,
            prompts_named(rollout),
            rollout.group_size,
            rollout.reward,
            rollout.success,
        )


class Evaluations:
    """The evaluations of a run that have been read; of an environment's rollouts with equal uids, the newest counts."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        self.tail = TopicTail(kafka, run, "evals")
        self._rollouts: dict[Kind, dict[str, Scored]] = {}
        self._kinds: dict[tuple[str, str], Kind] = {}
        """Kind by environment and uid: environments evaluated at one version may give their rollouts the same uids."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kinds": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._kinds = {(kind[0], uid): kind for kind, rollouts in self._rollouts.items() for uid in rollouts}

    def read(self, result: Ledger) -> set[str]:
        """Read new records, add all evaluations to the ledger, and return the uids of their rollouts.

        Rollouts that grouping would reject as invalid are skipped and named.
        """
        for message, rollout in self.tail.skipped.records(Rollout, self.tail.messages()):
            with self.tail.skipped.passing(message):
                check(rollout)
                self._add(rollout)
        for kind in sorted(self._rollouts):
            result.evaluations.append(summary(*kind, [*self._rollouts[kind].values()]))
        result.evals = len(self._kinds)
        return {uid for _environment, uid in self._kinds}

    def _add(self, rollout: Rollout) -> None:
        extra = rollout.extra
        kind = rollout.environment, extra.get("split", ""), extra.get("phase", ""), rollout.policy_version
        key = rollout.environment, rollout.uid
        before = self._kinds.get(key)
        if before is not None:
            del self._rollouts[before][rollout.uid]
            if not self._rollouts[before]:
                del self._rollouts[before]
        self._kinds[key] = kind
        self._rollouts.setdefault(kind, {})[rollout.uid] = Scored.of(rollout)


def check(rollout: Rollout) -> None:
    """Raise RecordError for a rollout that is invalid for an evaluation."""
    errors = problems(rollout)
    if "prompts" in rollout.extra and prompts_named(rollout) is None:
        errors.append(f"prompts is {rollout.extra['prompts'][:40]!r}, which is not a number of prompts")
    if errors:
        raise RecordError(f"rollout {rollout.uid[:100]} of evals: {'; '.join(errors[:3])}")


def evaluation(environment: str, split: str, phase: str, version: int, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Summarize one evaluation; the result does not depend on the order in which partitions were read."""
    return summary(environment, split, phase, version, [*map(Scored.of, rollouts)])


def summary(environment: str, split: str, phase: str, version: int, rollouts: Sequence[Scored]) -> dict[str, Any]:
    """Summarize one evaluation from the values of its rollouts."""
    # Branches of an episode have the same score.
    scored = [r for r in rollouts if r.branch == 0] or rollouts
    return {
        "environment": environment,
        "split": split,
        "phase": phase,
        "version": version,
        "lowest_version": min(r.lowest_version for r in rollouts),
        "highest_version": max(r.highest_version for r in rollouts),
        "rollouts": len(rollouts),
        "episodes": len({r.episode for r in rollouts}),
        "prompts": max(len(rollouts) if r.prompts is None else r.prompts for r in rollouts),
        "samples": max(r.samples for r in rollouts),
        **means(Answer(r.example, r.reward, r.success) for r in scored),
    }
