"""Training of adapters: the model is frozen, adapters follow their gradient, versions between full ones are small."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from rollstream.consumers.learner.config import LearnerConfig, WarmStartConfig
from rollstream.consumers.learner.objective import LossConfig, OptimizerConfig
from rollstream.consumers.learner.pretrained import resolved
from rollstream.consumers.learner.startup import begin
from rollstream.consumers.learner.training.loss import policy_loss
from rollstream.consumers.learner.training.packing import pack_for, sequences_of
from rollstream.consumers.learner.training.snapshot import device_checksum
from rollstream.consumers.learner.training.train_step import TrainStep
from rollstream.consumers.models import decoder, huggingface
from rollstream.consumers.models.adapters import without_adapters
from rollstream.consumers.models.config import ComputeSettings, DecoderConfig, LoraConfig
from rollstream.consumers.models.parameters import is_adapter
from rollstream.consumers.weights.delta import delta_content
from rollstream.topics.wire.params_digest import tensor_digests
from tests.support.batches import random_batch

CONFIG = LearnerConfig(
    model=DecoderConfig(num_hidden_layers=1, lora=LoraConfig(rank=2)),
    microbatch_rows=4,
    sequence_length=32,
    max_steps=50,
    loss=LossConfig(entropy_coefficient=0.0),
    optimizer=OptimizerConfig(name="sgd", beta1=0.0, learning_rate=0.5, schedule="constant", max_grad_norm=0.0),
    warm_start=WarmStartConfig(steps=3, sequences_per_step=8, learning_rate=1e-2),
)
EXAMPLE = (np.array([5, 6, 7, 8, 9], np.int32), np.arange(5) > 1)


@pytest.fixture(scope="module")
def train_step() -> TrainStep:
    return TrainStep(CONFIG)


def packed(number: int = 0):
    return pack_for(CONFIG, sequences_of(random_batch(number, rows=64))[:32])


def arrays(params: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in params.items()}


@pytest.mark.long
def test_adapters_follow_their_gradient_and_everything_else_stays(train_step: TrainStep) -> None:
    state = train_step.initial_state()
    before = arrays(state.params)
    step = packed()
    batches = [batch.arrays() for batch in step.microbatches]
    ones = {"tokens": np.float32(step.trained_tokens), "sequences": np.float32(step.trained_sequences)}

    @jax.jit
    def whole_gradient(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
        def loss(params: dict[str, jax.Array]) -> jax.Array:
            losses = [
                policy_loss(params, CONFIG.model, ComputeSettings(), CONFIG.loss, batch, ones)[0] for batch in batches
            ]
            return sum(losses[1:], losses[0])

        return jax.grad(loss)(params)

    expected = whole_gradient(before)
    state, metrics = train_step.train(state, step)
    after = arrays(state.params)
    moved = 0.0
    for name, value in before.items():
        if is_adapter(name):
            np.testing.assert_allclose(after[name], value - 0.5 * expected[name], atol=1e-6)
            moved = max(moved, float(np.abs(after[name] - value).max()))
        else:
            np.testing.assert_array_equal(after[name], value)
    assert moved > 1e-4
    norm = np.sqrt(sum(np.square(expected[name]).sum() for name in before if is_adapter(name)))
    assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_the_optimizer_keeps_state_for_adapters_alone() -> None:
    step = TrainStep(replace(CONFIG, optimizer=OptimizerConfig()))
    kept = sum(leaf.size for leaf in jax.tree.leaves(step.abstract_state().optimizer))
    adapters = sum(leaf.size for name, leaf in step.abstract_state().params.items() if is_adapter(name))
    assert 2 * adapters <= kept < 2 * adapters + 10


def test_the_same_steps_have_the_same_digest_and_nothing_compiles_after_the_warm_up(train_step: TrainStep) -> None:
    train_step.warm_up(train_step.initial_state())
    compiled, digests = train_step.compilations, []
    for _ in range(2):
        state = train_step.initial_state()
        for number in range(2):
            state, _ = train_step.train(state, packed(number))
        digests.append(device_checksum(state.params))
    assert train_step.compilations == compiled
    assert digests[0] == digests[1]
    assert digests[0] != device_checksum(train_step.initial_state().params)


@pytest.mark.long
def test_a_random_model_is_taught_whole_before_its_adapters_are_trained(train_step: TrainStep) -> None:
    before = arrays(train_step.initial_state().params)
    state, _ = begin(train_step, [EXAMPLE])
    for name, value in state.params.items():
        assert is_adapter(name) == np.array_equal(before[name], value), name


@pytest.mark.long
def test_adapters_of_a_checkpoint_are_taught_by_its_warm_start(tmp_path: Path) -> None:
    model = without_adapters(CONFIG.model)
    stored = decoder.init(jax.random.key(5), model)
    huggingface.save(tmp_path, model, stored)
    config = resolved(replace(CONFIG, pretrained=str(tmp_path)))
    assert config.model == CONFIG.model
    state, _ = begin(TrainStep(config), [EXAMPLE])
    for name, value in stored.items():
        np.testing.assert_array_equal(state.params[name], value)
    assert float(np.abs(state.params["model.layers.0.self_attn.q_proj.lora_B.weight"]).max()) > 0


def test_between_full_versions_only_the_adapters_are_sent(train_step: TrainStep) -> None:
    state = train_step.initial_state()
    before = arrays(state.params)
    state, _ = train_step.train(state, packed())
    after = arrays(state.params)
    content = delta_content(before, after, tensor_digests(after))
    assert content is not None
    assert all(not tensor.size_bytes for tensor in content.tensors if not is_adapter(tensor.name))
    adapters = sum(value.nbytes for name, value in after.items() if is_adapter(name))
    assert 0 < content.size_bytes <= adapters < 0.1 * sum(value.nbytes for value in after.values())
