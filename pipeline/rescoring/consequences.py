"""Finds the consequences of wrong advantages: steps that trained on them, later versions, and the last clean step.

Pure. A step is clean if all rollouts that it and the steps before it trained on are known to have had correct
advantages.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.pipeline.rescoring.corrected_fold import CorrectedBatch, TakenRows
from rollstream.topics.records import BatchUse, LearnerStep, PolicyManifest


@dataclass(frozen=True, kw_only=True)
class AdvantageErrors:
    """Errors in the advantages of a batch's or a step's rollouts."""

    rollouts: int
    wrong: int
    unknown: int
    """Rollouts whose advantage could not be computed again; they count as right."""
    sampled_tokens: int
    wrong_tokens: int
    """Sampled tokens of the rollouts with wrong advantages."""
    sign_flips: int
    """Rollouts that were reinforced and should have been discouraged, or the other way round."""
    largest: float
    """Largest absolute error."""
    relative: float
    """Sum of absolute errors over the sum of absolute advantages on record, both weighted by sampled tokens."""

    @property
    def token_share(self) -> float:
        """Share of the sampled tokens with a wrong advantage."""
        return self.wrong_tokens / max(self.sampled_tokens, 1)

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return {**self.__dict__, "token_share": self.token_share}


def errors_of(parts: Iterable[tuple[CorrectedBatch, Sequence[int]]]) -> AdvantageErrors:
    """Return the errors of rows of batches; an empty sequence stands for all rows of a batch."""
    chosen = [(batch, np.array(rows or range(len(batch.before)), int)) for batch, rows in parts]
    before, after = (_joined(chosen, name, "<f8") for name in ("before", "after"))
    wrong, known, flipped = (_joined(chosen, name, "|b1") for name in ("wrong", "known", "flipped"))
    sampled = _joined(chosen, "sampled", "<i8")
    error = np.where(wrong, np.abs(after - before), 0.0)
    total = float((np.abs(before) * sampled).sum())
    return AdvantageErrors(
        rollouts=len(before),
        wrong=int(wrong.sum()),
        unknown=int((~known).sum()),
        sampled_tokens=int(sampled.sum()),
        wrong_tokens=int(sampled[wrong].sum()),
        sign_flips=int(flipped.sum()),
        largest=float(error.max(initial=0.0)),
        relative=float((error * sampled).sum()) / total if total else 0.0,
    )


def _joined(chosen: Iterable[tuple[CorrectedBatch, NDArray[np.int64]]], column: str, dtype: str) -> NDArray[Any]:
    parts = [getattr(batch, column)[rows] for batch, rows in chosen]
    return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)


@dataclass(frozen=True, kw_only=True)
class WrongStep:
    """A step that trained on wrong advantages."""

    step: int
    policy_version: int | None
    """Policy version that it published; None if it published none."""
    batches: tuple[str, ...]
    """Its batches with wrong advantages."""
    errors: AdvantageErrors

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return {
            "step": self.step,
            "policy_version": self.policy_version,
            "batches": self.batches,
            **self.errors.as_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class LearnerConsequences:
    """Consequences of wrong advantages for one learner."""

    learner: str
    steps: int
    """Number of steps on record that trained on batches of the run."""
    wrong: tuple[WrongStep, ...] = ()
    unknown_steps: int = 0
    """Number of steps that trained on rollouts whose advantages could not be computed again."""
    unknown_rollouts: int = 0
    """Number of these rollouts."""
    first_unknown_step: int | None = None
    last_clean_step: int | None
    """The last step before the first wrong or unknown step; None if the first step on record is such a step."""
    last_clean_version: int | None
    """The newest policy version published after the last clean step or an earlier step; None if there is none."""
    touched_versions: tuple[int, ...] = ()
    """Policy versions published after the first wrong step or a later step, in order; all of them contain the errors.
    A rollback has the parameters of an earlier version, and counts as published after the step of that version."""

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return {**self.__dict__, "wrong": [step.as_dict() for step in self.wrong]}


def consequences(
    steps: Iterable[LearnerStep],
    manifests: Iterable[PolicyManifest],
    run: str,
    corrected: Mapping[str, CorrectedBatch],
) -> list[LearnerConsequences]:
    """Return the consequences for each learner on record that trained on batches of `run`.

    `manifests` are those of the run to which the steps belong.
    """
    by_learner: dict[str, list[LearnerStep]] = {}
    for step in steps:
        if step.input_run == run:
            by_learner.setdefault(step.learner, []).append(step)
    # The manifest of a version may be unreadable, and no step names the version of a rollback.
    published = {
        name: {s.policy_version: s.step for s in own if s.policy_version >= 0} for name, own in by_learner.items()
    }
    for manifest in manifests:
        if manifest.learner in published:
            published[manifest.learner][manifest.version] = manifest.step
    return [
        _of_learner(name, sorted(own, key=_number), published[name], corrected)
        for name, own in sorted(by_learner.items())
    ]


def _of_learner(
    learner: str, steps: Sequence[LearnerStep], published: Mapping[int, int], corrected: Mapping[str, CorrectedBatch]
) -> LearnerConsequences:
    """Return the consequences for a learner; `published` has the step of each of its policy versions."""
    wrong = tuple(step for step in (_wrong_step(step, corrected) for step in steps) if step is not None)
    unknown = {step.step: rollouts for step in steps if (rollouts := _unknown_rollouts(step, corrected))}
    first = wrong[0].step if wrong else None
    not_clean = min((*unknown, *(() if first is None else (first,))), default=None)
    clean = [step for step in steps if not_clean is None or step.step < not_clean]
    last_clean = clean[-1].step if clean else None
    return LearnerConsequences(
        learner=learner,
        steps=sum(any(use.use == "trained" for use in step.uses) for step in steps),
        wrong=wrong,
        unknown_steps=len(unknown),
        unknown_rollouts=sum(unknown.values()),
        first_unknown_step=min(unknown, default=None),
        last_clean_step=last_clean,
        last_clean_version=max(
            (version for version, step in published.items() if last_clean is not None and step <= last_clean),
            default=None,
        ),
        touched_versions=tuple(
            version for version, step in sorted(published.items()) if first is not None and step >= first
        ),
    )


def _wrong_step(step: LearnerStep, corrected: Mapping[str, CorrectedBatch]) -> WrongStep | None:
    trained = [use for use in step.uses if use.use == "trained" and use.batch_id in corrected]
    errors = errors_of((corrected[use.batch_id], use.row_numbers) for use in trained)
    if not errors.wrong:
        return None
    return WrongStep(
        step=step.step,
        policy_version=step.policy_version if step.policy_version >= 0 else None,
        batches=tuple(dict.fromkeys(use.batch_id for use in trained if _touches(use, corrected[use.batch_id]))),
        errors=errors,
    )


def _unknown_rollouts(step: LearnerStep, corrected: Mapping[str, CorrectedBatch]) -> int:
    """Return the number of rollouts that a step trained on and whose advantages could not be computed again."""
    trained = [use for use in step.uses if use.use == "trained"]
    gone = sum(use.rows for use in trained if use.batch_id not in corrected)
    known = ((corrected[use.batch_id], use.row_numbers) for use in trained if use.batch_id in corrected)
    return gone + errors_of(known).unknown


def _touches(use: BatchUse, batch: CorrectedBatch) -> bool:
    return bool((batch.wrong[list(use.row_numbers)] if use.row_numbers else batch.wrong).any())


def taken_until(steps: Iterable[LearnerStep], run: str, learner: str, last: int) -> TakenRows:
    """Return the rows of batches that a learner trained on or skipped up to step `last`."""
    taken: dict[str, set[int]] = {}
    whole: set[str] = set()
    for step in steps:
        if step.learner == learner and step.input_run == run and step.step <= last:
            for use in step.uses:
                taken.setdefault(use.batch_id, set()).update(use.row_numbers)
                if not use.row_numbers:
                    whole.add(use.batch_id)
    return {name: () if name in whole else tuple(sorted(rows)) for name, rows in taken.items()}


def _number(step: LearnerStep) -> int:
    return step.step
