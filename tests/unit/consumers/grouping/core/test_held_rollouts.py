"""Examples of held rollouts are what makers know: arrays when they are asked for, and the advantage a maker gives."""

from dataclasses import fields, replace
from typing import Any

import numpy as np

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.held_rollouts import HeldExample, HeldRollout, advantage_bytes, with_advantage
from rollstream.consumers.grouping.makers.batch_maker import BatchMaker
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.topics.records import NamedArray, RolloutMetadata, SamplingParams
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.rl_examples import REFERENCE, RLExample, Source, batch_digest

TIMED = RolloutMetadata(timestamp=3.0, weight_step=7)
ROLLOUT = example_rollout(
    "a",
    metadata=TIMED,
    token_arrays={REFERENCE: NamedArray.of(-np.ones(4, "<f8")), "x": NamedArray.of(np.ones((4, 2), "|u1"))},
)
SOURCE = Source(0, 5, "a")


def held() -> HeldExample:
    return HeldExample.of(HeldRollout.of(ROLLOUT).trimmed({"x"}), SOURCE, 0.5)


def plain() -> RLExample:
    return RLExample(
        tokens=ROLLOUT.tokens,
        loss_mask=ROLLOUT.loss_mask,
        advantage=np.full(4, 0.5, "<f4"),
        generator_log_probs=ROLLOUT.logprobs,
        segment_ids=np.ones(4, "<i4"),
        source=SOURCE,
        reference_log_probs=-np.ones(4, "<f4"),
        weight_step=7,
        timestamp=3.0,
        token_arrays={"x": np.ones((4, 2), "|u1")},
    )


def contents(example: RLExample) -> dict[str, Any]:
    def of(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.tobytes()
        return {name: of(array) for name, array in value.items()} if isinstance(value, dict) else value

    return {field.name: of(getattr(example, field.name)) for field in fields(RLExample)}


def test_an_example_has_every_field_of_the_plain_dataclass() -> None:
    assert contents(held()) == contents(plain())
    assert contents(replace(held(), advantage=np.zeros(4, "<f4"))) == contents(
        replace(plain(), advantage=np.zeros(4, "<f4"))
    )
    assert held().length == plain().length == replace(held()).length == 4


def test_an_array_is_made_once_and_shares_the_bytes_of_the_record() -> None:
    example = held()
    assert "tokens" not in vars(example)
    assert example.tokens is example.tokens
    assert np.shares_memory(example.tokens, example.loss_mask.base) or not example.tokens.flags.owndata


def test_another_advantage_changes_nothing_else() -> None:
    asked = held()
    assert asked.advantage.tolist() == [0.5] * 4
    for example in (held(), asked, replace(held()), plain()):
        other = with_advantage(example, -2.0)
        assert contents(other) == contents(replace(plain(), advantage=np.full(4, -2.0, "<f4")))
        assert advantage_bytes(other) == np.full(4, -2.0, "<f4").tobytes()


class Altering(BatchMaker):
    """Delivers what waits, after `alter`."""

    def alter(self, example: RLExample) -> RLExample:
        return replace(example, advantage=example.advantage * np.float32(2))

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        if self.held < batch_size:
            return None
        return [self.alter(example) for example in self.pop_waiting(list(self.waiting.values()))]

    def get_batch_metadata(self, batch: Any) -> dict[str, Any]:
        return {"sum": float(sum(example.advantage.sum() for example in batch))}


class AlteringInPlace(Altering):
    def alter(self, example: RLExample) -> RLExample:
        example.advantage[:] *= 2
        return example


class Rebuilding(Altering):
    def alter(self, example: RLExample) -> RLExample:
        values = {field.name: getattr(example, field.name) for field in fields(example)}
        return RLExample(**{**values, "advantage": example.advantage * np.float32(2)})


def test_a_batch_has_the_advantages_that_a_maker_gives() -> None:
    for maker in (Altering, AlteringInPlace, Rebuilding):
        driver = GroupingTestDriver(GroupingConfig(maker="mine:Maker", batch_rollouts=2), makers={"mine:Maker": maker})
        driver.pipe(example_rollout("a", 1.0))
        driver.pipe(example_rollout("b", 0.0))
        [batch] = driver.batches
        assert batch.advantages.tolist() == [2.0] * 4 + [-2.0] * 4
        assert batch.digest == batch_digest(batch)


def test_a_batch_is_the_record_that_the_encoder_writes() -> None:
    driver = GroupingTestDriver(GroupingConfig(batch_rollouts=4, token_arrays=("x",)), policy_version=3)
    for number, uid in enumerate("abcd"):
        arrays = ROLLOUT.token_arrays if uid in "ad" else {}
        rollout = example_rollout(
            uid,
            number / 3,
            metadata=TIMED,
            token_arrays=arrays,
            group_size=4,
            truncated=uid == "b",
            logprobs_mode="raw" if uid == "c" else "processed",
            sampling=SamplingParams(temperature=number / 2),
            policy_version=3,
            lowest_version=number,
            highest_version=number + 5,
        )
        driver.pipe(rollout)
    [encoded] = driver.fold.prepare_commit().encoded
    assert encoded.frame == encode(encoded.batch)
    assert encoded.digest == encoded.batch.digest == batch_digest(encoded.batch)
    batch = encoded.batch
    assert batch.truncated.tolist() == [False, True, False, False]
    assert batch.logprobs_processed.tolist() == [True, True, False, True]
    assert batch.temperatures.tolist() == [0.0, 0.5, 1.0, 1.5]
    assert batch.rewards.tolist() == [0.0, 1 / 3, 2 / 3, 1.0]
    assert (batch.lowest_versions.tolist(), batch.highest_versions.tolist()) == ([0, 1, 2, 3], [5, 6, 7, 8])
    assert (batch.weight_steps.tolist(), batch.splits.tolist()) == ([7] * 4, [0, 4, 8, 12, 16])
    assert np.isnan(batch.reference_logprobs[4:12]).all()
    assert [(entry.name, entry.rows.tolist()) for entry in batch.token_arrays] == [("x", [0, 3])]
    entry = type(encoded.entry).of(batch, -1)
    assert encoded.entry == entry
    assert (encoded.source_offsets, encoded.timestamps) == ([0, 1, 2, 3], [3.0] * 4)
