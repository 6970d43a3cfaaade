"""From wrong advantages to the steps that trained on them, the versions after, and the last clean step."""

from dataclasses import replace

import numpy as np
import pytest

from rollstream.pipeline.rescoring.consequences import consequences, errors_of, taken_until
from rollstream.pipeline.rescoring.corrected_fold import CorrectedBatch
from rollstream.topics.records import BatchUse, Chunk, LearnerStep
from tests.support.manifests import one_chunk_manifest


def batch(before: list[float], after: list[float], known: list[bool] | None = None) -> CorrectedBatch:
    return CorrectedBatch(
        np.array(before, "<f4"),
        np.array(after, "<f4"),
        np.array([True] * len(before) if known is None else known, bool),
        np.arange(1, len(before) + 1, dtype="<i8"),
    )


BATCHES = {
    "0-0": batch([1.0, -1.0], [1.0, -1.0]),
    "0-1": batch([1.0, -1.0, 0.5, -0.5], [-1.0, 1.0, 0.5, -0.5]),
    "0-2": batch([1.0, -1.0], [0.0, 0.0], [False, False]),
}
CHUNK = Chunk(index=0, partition=0, offset=0, size_bytes=1, digest="")


def use(name: str, rows: tuple[int, ...] = (), kind: str = "trained") -> BatchUse:
    count = len(rows) or len(BATCHES[name].before)
    return BatchUse(batch_id=name, index_offset=0, rows=count, use=kind, row_numbers=rows)  # type: ignore[arg-type]


def step(number: int, *uses: BatchUse, version: int = -1, learner: str = "default", run: str = "main") -> LearnerStep:
    return LearnerStep(
        learner=learner,
        step=number,
        input_run=run,
        uses=uses,
        position=0,
        policy_version=version,
        params_digest="d",
        trained_total=0,
        skipped_total=0,
    )


def test_errors_are_counted_by_rollouts_and_by_sampled_tokens() -> None:
    errors = errors_of((corrected, ()) for corrected in BATCHES.values())
    assert (errors.rollouts, errors.wrong, errors.unknown, errors.sign_flips) == (8, 2, 2, 2)
    assert (errors.sampled_tokens, errors.wrong_tokens, errors.largest) == (16, 3, 2.0)
    # Errors 2 on 1 and on 2 tokens; advantages 1 on 3 tokens of each batch, and 0.5 on 7 of the second.
    assert errors.relative == pytest.approx(6 / (9 + 3.5))
    assert errors_of([]).as_dict()["token_share"] == 0.0


def test_rests_of_rounding_are_no_errors_and_have_no_sign() -> None:
    errors = errors_of([(batch([1e-17, 0.5, -1e-17, 0.5], [-1e-17, 0.5, 0.25, 0.5 + 6e-8]), ())])
    assert (errors.wrong, errors.sign_flips, errors.largest) == (1, 0, 0.25)


def test_the_last_clean_step_is_the_one_before_the_first_that_trained_on_wrong_rows() -> None:
    steps = [
        step(0, version=0),
        step(1, use("0-0"), version=1),
        # Rows of a batch with errors, but not the wrong rows.
        step(2, use("0-1", (2, 3))),
        step(3, use("0-1", (0, 1), "skipped"), use("0-0"), version=2),
        step(4, use("0-1", (0,)), use("0-0"), version=3),
        step(5, use("0-0")),
        step(6, use("0-0"), version=4),
        step(1, use("0-1"), version=9, learner="other", run="elsewhere"),
    ]
    [consequence] = consequences(steps, [], "main", BATCHES)
    assert (consequence.learner, consequence.steps) == ("default", 6)
    assert (consequence.last_clean_step, consequence.last_clean_version, consequence.touched_versions) == (3, 2, (3, 4))
    [wrong] = consequence.wrong
    assert (wrong.step, wrong.policy_version, wrong.batches) == (4, 3, ("0-1",))
    assert (wrong.errors.rollouts, wrong.errors.wrong) == (3, 1)


def test_a_step_whose_advantages_cannot_be_computed_again_is_not_clean() -> None:
    gone = BatchUse(batch_id="0-9", index_offset=0, rows=5, use="trained")
    steps = [step(1, use("0-0"), version=0), step(2, use("0-2"), version=1), step(3, gone), step(4, use("0-1"))]
    [consequence] = consequences(steps, [], "main", BATCHES)
    assert [wrong.step for wrong in consequence.wrong] == [4]
    assert (consequence.last_clean_step, consequence.last_clean_version) == (1, 0)
    assert (consequence.unknown_steps, consequence.unknown_rollouts, consequence.first_unknown_step) == (2, 7, 2)
    [pruned] = consequences(steps[2:3], [], "main", BATCHES)
    assert (pruned.wrong, pruned.last_clean_step, pruned.unknown_rollouts) == ((), None, 5)


def test_without_wrong_steps_every_step_is_clean_and_with_wrong_ones_only_none_is() -> None:
    [clean] = consequences([step(1, use("0-0"), version=0)], [], "main", BATCHES)
    assert (clean.wrong, clean.last_clean_step, clean.last_clean_version, clean.touched_versions) == ((), 1, 0, ())
    [dirty] = consequences([step(1, use("0-1"), version=0)], [], "main", BATCHES)
    assert (dirty.last_clean_step, dirty.last_clean_version, dirty.touched_versions) == (None, None, (0,))
    assert consequences([], [], "main", BATCHES) == []


def test_a_rollback_has_the_errors_of_the_version_whose_parameters_it_repeats() -> None:
    steps = [step(number, use("0-1" if number == 2 else "0-0"), version=number) for number in (1, 2, 3)]
    other = replace(one_chunk_manifest(9, CHUNK, learner="other"), step=3)

    def versions(rollback_to: int) -> tuple[int | None, tuple[int, ...]]:
        log = [*(one_chunk_manifest(number, CHUNK) for number in (1, 2, 3)), other]
        log.append(replace(one_chunk_manifest(4, CHUNK), step=rollback_to))
        [consequence] = consequences(steps, log, "main", BATCHES)
        return consequence.last_clean_version, consequence.touched_versions

    assert versions(2) == (1, (2, 3, 4))
    assert versions(1) == (4, (2, 3))


def test_what_a_learner_used_or_skipped_up_to_a_step_is_taken() -> None:
    steps = [step(1, use("0-1", (0,)), use("0-0")), step(2, use("0-1", (3,), "skipped")), step(3, use("0-2"))]
    assert taken_until(steps, "main", "default", 2) == {"0-1": (0, 3), "0-0": ()}
    assert taken_until(steps, "main", "other", 2) == {}
