"""The text of a rescoring's report."""

import pytest

from rollstream.pipeline.rescoring.consequences import LearnerConsequences, WrongStep, errors_of
from rollstream.pipeline.rescoring.corrected_fold import CorrectedPartition
from rollstream.pipeline.rescoring.rescorer import Rescoring
from rollstream.pipeline.tools.rescore import RescoringReport, rescoring_text


@pytest.mark.parametrize(
    ("touched", "text"),
    [((3,), "3"), ((3, 4, 5), "3 to 5"), ((3, 4, 6, 7), "3 to 4, 6 to 7"), ((3, 5), "3, 5")],
)
def test_a_rollback_to_a_clean_version_is_not_among_those_trained_on_wrong_advantages(
    touched: tuple[int, ...], text: str
) -> None:
    wrong = WrongStep(step=3, policy_version=3, batches=("0-1",), errors=errors_of([]))
    learner = LearnerConsequences(
        learner="default", steps=5, wrong=(wrong,), last_clean_step=2, last_clean_version=2, touched_versions=touched
    )
    report = RescoringReport(Rescoring("judge.py:judge", ""), 0, CorrectedPartition(), [learner])
    lines = rescoring_text(report, "main").splitlines()
    assert f"policy versions trained on wrong advantages: {text}" in lines
