"""An environment whose every group is dropped for equal rewards for many versions is flat, until one is batched."""

from rollstream.pipeline.run.flat_environments import FLAT_VERSIONS, FlatEnvironments
from rollstream.topics.records import FateCount


def counts(environment: str, **fates: int) -> list[FateCount]:
    return [
        FateCount(environment=environment, fate=fate.replace("__", ":"), rollouts=rollouts, tokens=0)
        for fate, rollouts in fates.items()
    ]


def test_an_environment_is_flat_from_the_last_version_on_and_until_a_rollout_is_batched() -> None:
    flat = FlatEnvironments()
    assert flat.look(counts("easy", dropped__zero_variance=40, batched=8), 5) == ()
    idle = counts("idle", batched=3, dropped__zero_variance=1)
    assert flat.look([*counts("easy", dropped__zero_variance=80, batched=8), *idle], 4 + FLAT_VERSIONS) == ()
    two = [
        *counts("easy", dropped__zero_variance=40, dropped__zero_advantage=1, batched=8),
        *counts("late", dropped__late=9),
    ]
    assert flat.look([*two, *idle], 5 + FLAT_VERSIONS) == ("easy",)
    assert flat.look([*two, *idle], 500) == ("easy",), "nothing of the others was dropped for equal rewards since"
    assert flat.look([*counts("easy", dropped__zero_variance=90, batched=12), *idle], 501) == ()
    assert flat.look(counts("easy", dropped__zero_variance=91, batched=12), 501 + FLAT_VERSIONS) == ("easy",)


def test_counts_of_all_partitions_are_one_environments() -> None:
    flat = FlatEnvironments()
    parts = [*counts("e", dropped__zero_variance=4), *counts("e", batched=4)]
    assert flat.look(parts, 0) == ()
    assert flat.look([*counts("e", dropped__zero_variance=8), *counts("e", batched=4)], FLAT_VERSIONS) == ("e",)
    assert flat.look([*counts("e", dropped__zero_variance=8), *counts("e", batched=8)], FLAT_VERSIONS) == ()
