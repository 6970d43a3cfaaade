"""Equal verifiers make one rescoring, a different verifier makes another; rewards are summed by environment."""

import math
from pathlib import Path

import pytest

from rollstream.pipeline.rescoring.consequences import LearnerConsequences
from rollstream.pipeline.rescoring.corrected_fold import CorrectedPartition, RewardChanges
from rollstream.pipeline.rescoring.rescorer import Rescoring, rescoring_of
from rollstream.pipeline.tools.rescore import RescoringReport, rescoring_text
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import RescoredRollout
from rollstream.topics.wire.codec import decode, encode

JUDGE = """
class Strict:
    version = "7"

    def __call__(self, rollout):
        return 0.0

notes = "no verifier"
"""


def judge(directory: Path, text: str = JUDGE) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "judge.py").write_text(text)
    return f"{directory / 'judge.py'}:Strict"


def test_a_rescoring_is_known_by_the_code_of_its_verifier_and_by_its_environments(tmp_path: Path) -> None:
    first = rescoring_of(judge(tmp_path / "a"))
    assert (first.version, len(first.digest), len(first.id)) == ("7", 16, 12)
    assert rescoring_of(judge(tmp_path / "b")).id == first.id, "the same file elsewhere"
    assert rescoring_of(judge(tmp_path / "c", JUDGE.replace("0.0", "1.0"))).id != first.id
    assert rescoring_of(first.verifier, ("sums",)).id not in ("", first.id)
    assert rescoring_of(first.verifier, ("a", "b")).id == rescoring_of(first.verifier, ("b", "a")).id


def test_only_the_environments_that_are_named_are_scored_again() -> None:
    assert Rescoring("j:J", "d").includes("sums")
    assert not Rescoring("j:J", "d", environments=("essays",)).includes("sums")


def test_what_cannot_be_called_is_no_verifier(tmp_path: Path) -> None:
    name = judge(tmp_path).replace("Strict", "notes")
    with pytest.raises(ConfigurationError, match="which cannot be called; a verifier is a function of a rollout"):
        rescoring_of(name)


def rescored(offset: int, before: float, after: float, environment: str = "sums", failure: str = "") -> RescoredRollout:
    return RescoredRollout(
        rescoring="r",
        verifier="judge.py:Strict",
        verifier_digest="d",
        partition=1,
        offset=offset,
        uid=f"u{offset}",
        environment=environment,
        reward_before=before,
        reward=after,
        failure=failure,
    )


def test_a_failure_keeps_the_reward_and_is_named_with_its_reason() -> None:
    records = [
        rescored(0, 1.0, 0.0),
        rescored(1, 0.5, 0.5),
        rescored(2, 1.0, math.nan, failure="it hung"),
        rescored(3, 0.0, 2.0, "essays"),
    ]
    changes, other = RewardChanges(), RewardChanges()
    for record in records[:2]:
        changes.add(decode(encode(record)))
    for record in records[2:]:
        other.add(decode(encode(record)))
    changes.merge(other)
    report = changes.as_dict()
    assert (report["rescored"], report["changed"], report["failed"], report["largest_difference"]) == (4, 2, 1, 2.0)
    assert report["environments"]["sums"] == {
        "rescored": 3,
        "changed": 1,
        "failed": 1,
        "mean_before": 0.75,
        "mean_after": 0.25,
        "largest_difference": 1.0,
    }
    assert report["rollouts"] == [
        {"uid": "u0", "at": "1:0", "before": 1.0, "after": 0.0},
        {"uid": "u3", "at": "1:3", "before": 0.0, "after": 2.0},
    ]
    assert report["failures"] == [{"uid": "u2", "at": "1:2", "reason": "it hung"}]


@pytest.mark.parametrize("unknown", [0, 1])
def test_the_name_of_a_learner_in_the_report_is_not_obeyed_by_a_terminal(unknown: int) -> None:
    learner = LearnerConsequences(
        learner="a\x1b[2J", steps=3, unknown_steps=unknown, last_clean_step=3, last_clean_version=3
    )
    text = rescoring_text(RescoringReport(Rescoring("m:f", ""), 0, CorrectedPartition(), [learner]), "main")
    assert r"learner a\u001b[2J: no step of 3" in text
