"""The order of records, and not the clocks of hosts, decides which learner published last into a run."""

from collections.abc import Sequence

import pytest

from rollstream.consumers.step_log import in_order
from rollstream.topics.records import LearnerStep, PolicyManifest


def step(learner: str, version: int = -1, at: float = 0.0) -> LearnerStep:
    return LearnerStep(
        learner=learner,
        step=0,
        input_run="r",
        uses=(),
        position=0,
        policy_version=version,
        params_digest="d",
        trained_total=0,
        skipped_total=0,
        timestamp=at,
    )


def manifest(learner: str, version: int, at: float = 0.0) -> PolicyManifest:
    return PolicyManifest(
        version=version,
        learner=learner,
        step=0,
        epoch="e",
        tensors=(),
        chunks=(),
        digest="d",
        model="{}",
        created=at,
    )


STEPPED = (step("a", 0, at=9000), step("a", 1, at=9001))
PUBLISHED = (manifest("a", 0, at=9000), manifest("a", 1, at=9001))


@pytest.mark.parametrize(
    ("steps", "manifests", "last"),
    [
        ((*STEPPED, step("b", 2, at=50)), (*PUBLISHED, manifest("b", 2, at=50)), "b"),
        ((*STEPPED, step("b", at=50)), PUBLISHED, "b"),
        ((*STEPPED, step("b", 0, at=50)), PUBLISHED, "b"),
        (STEPPED, (*PUBLISHED, manifest("b", 2, at=50)), "b"),
        ((*STEPPED, step("b", 3, at=50)), (*PUBLISHED, manifest("c", 2), manifest("b", 3, at=50)), "b"),
        ((), (manifest("b", 1, at=50), manifest("a", 0, at=9000)), "b"),
        ((step("a", at=9000), step("b", at=50)), (), "b"),
    ],
    ids=["version", "no version yet", "step again", "version alone", "versions between", "only versions", "only steps"],
)
def test_the_learner_that_published_last_is_known_although_the_clock_of_an_earlier_one_is_ahead(
    steps: Sequence[LearnerStep], manifests: Sequence[PolicyManifest], last: str
) -> None:
    assert in_order(steps, manifests)[-1].learner == last


def test_publications_have_the_newest_version() -> None:
    assert in_order((*STEPPED, step("b")), PUBLISHED)[-1].version == 1
    assert in_order((), ()) == []
