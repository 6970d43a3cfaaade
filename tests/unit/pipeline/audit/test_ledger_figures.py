"""The ledger's figures of evaluations do not depend on the order of reading; a ledger counts its own run's letters."""

import itertools
import json
from collections.abc import Iterator

import pytest

from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.dead_letters import of_rollouts
from rollstream.pipeline.audit.ledger.evaluations import Evaluations, evaluation
from rollstream.pipeline.audit.ledger.live import restored, saved
from rollstream.pipeline.audit.ledger.topic_tail import TopicTail
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import Rollout
from rollstream.topics.wire.codec import encode
from tests.support.runs import rollout


def test_an_evaluation_does_not_depend_on_the_order_of_reading() -> None:
    rewards = (0.1, 0.2, 0.3, 0.7)
    read = [rollout("x", n, reward=r, reward_components={"exact": 2 * r}) for n, r in enumerate(rewards)]
    assert len({sum(order) for order in itertools.permutations(rewards)}) > 1
    actual = [evaluation("env", "heldout", "last", 3, order) for order in itertools.permutations(read)]
    assert all(observed == actual[0] for observed in actual)
    assert actual[0]["reward"] == pytest.approx(0.325)
    assert (actual[0]["success"], actual[0]["pass@4"]) == (0.25, 1.0)


class Evals:
    """The records of `evals`, each read once."""

    def __init__(self, *rollouts: Rollout) -> None:
        self.skipped = SkippedRecords("ledger", logged=False)
        self._records = [KafkaRecord("run.evals", 0, n, value=encode(each)) for n, each in enumerate(rollouts)]

    def messages(self) -> Iterator[KafkaRecord]:
        while self._records:
            yield self._records.pop(0)


def evaluations_of(*rollouts: Rollout) -> Evaluations:
    evaluations = Evaluations(KafkaConfig(), "run")
    evaluations.tail = Evals(*rollouts)  # type: ignore[assignment]
    return evaluations


def test_environments_whose_evaluations_have_the_same_uids_are_both_counted() -> None:
    def scored(environment: str, reward: float) -> Rollout:
        extra = {"split": "heldout", "phase": "periodic", "prompts": "1"}
        return rollout("7", environment=environment, reward=reward, extra=extra)

    def rewards(evaluations: Evaluations) -> dict[str, float]:
        result = Ledger()
        assert evaluations.read(result) == {"7-0"}
        assert result.evals == len(result.evaluations)
        return {each["environment"]: each["reward"] for each in result.evaluations}

    # The evaluation of env a is repeated, so its newer answer counts.
    read = evaluations_of(scored("a", 0.0), scored("b", 0.25), scored("a", 0.5))
    assert rewards(read) == {"a": 0.5, "b": 0.25}
    read.tail = TopicTail(KafkaConfig(), "run", "evals")
    again = restored(json.loads(json.dumps(saved(read))), KafkaConfig())
    again.tail = Evals(scored("b", 1.0))
    assert rewards(again) == {"a": 0.5, "b": 1.0}


@pytest.mark.parametrize(
    ("topic", "counted"),
    [
        (b"main.rollouts", True),
        (b"a.run.with.dots.rollouts", True),
        (b"main.unlabelled", False),
        (b"\xff.unlabelled", False),
        (None, True),
    ],
)
def test_letters_of_rollouts_are_counted_those_of_trajectories_are_not(topic: bytes | None, counted: bool) -> None:
    """A restored run has letters that name the run they were written in."""
    assert of_rollouts({"__streams.errors.topic": topic}) is counted
    assert of_rollouts({}) is True
