"""Traces of rollouts: messages, metadata and spans in the common form of agent trackers. Pure functions."""

from typing import Any, NamedTuple

from rollstream.consumers.trackers.tracker import RolloutTrace
from rollstream.topics.records import LearnerStep, Rollout, TrainingBatch, Turn


class BatchedRollout(NamedTuple):
    """A rollout with its row in a batch."""

    rollout: Rollout
    batch: TrainingBatch
    row: int
    place: str
    """PARTITION:OFFSET on `rollouts`, an argument of `rollstream show`."""
    appended_ms: int

    @property
    def advantage(self) -> float:
        """Advantage of the first sampled token; most estimators give the same advantage to all tokens of a rollout."""
        span = slice(int(self.batch.splits[self.row]), int(self.batch.splits[self.row + 1]))
        sampled = self.batch.advantages[span][self.batch.loss_mask[span]]
        return float(sampled[0]) if len(sampled) else 0.0


def trace_of(batched: BatchedRollout, step: LearnerStep, run: str) -> RolloutTrace:
    """Return the trace of a rollout that a step trained on."""
    rollout = batched.rollout
    return RolloutTrace(
        messages=[{"role": turn.role or "unknown", "content": turn.text} for turn in rollout.turns],
        metadata={
            "run": run,
            "learner": step.learner,
            "step": step.step,
            "place": batched.place,
            "uid": rollout.uid,
            "environment": rollout.environment,
            "example": rollout.example_id,
            "reward": rollout.reward,
            "reward_components": dict(rollout.reward_components),
            "advantage": batched.advantage,
            "policy_version": rollout.policy_version,
            "lowest_version": rollout.lowest_version,
            "highest_version": rollout.highest_version,
            "trained_at_version": step.policy_version,
            "fate": "trained",
            "batch": batched.batch.batch_id,
            "tokens": len(rollout.tokens),
            "sampled": int(rollout.loss_mask.sum()),
            "truncated": rollout.truncated,
            "worker": rollout.metadata.worker_id,
            "appended_ms": batched.appended_ms,
            "status": "truncated" if rollout.truncated else "ok",
        },
        spans=[_span(rollout, number, turn) for number, turn in enumerate(rollout.turns) if turn.has_logprobs],
    )


def _span(rollout: Rollout, number: int, turn: Turn) -> dict[str, Any]:
    """Return the span of one turn that the policy generated."""
    inference = turn.inference
    return {
        "id": f"{rollout.uid}/{number}",
        "name": f"turn {number}",
        "kind": "generation",
        "duration_ms": inference.inference_time_s * 1000,
        "model": f"version {inference.model_version}",
        "output": turn.text,
        "usage": {"input_tokens": turn.start, "output_tokens": turn.stop - turn.start},
    }
