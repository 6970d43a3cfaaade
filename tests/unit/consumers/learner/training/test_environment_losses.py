"""Losses by environment: one step over a mixed batch has the gradient of every loss over its own rollouts."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.input.row_checks import replayed_arrays
from rollstream.consumers.learner.objective import MISMATCH_METRICS, LossConfig, OptimizerConfig
from rollstream.consumers.learner.reproducibility import fingerprint
from rollstream.consumers.learner.training import packing
from rollstream.consumers.learner.training.loss import policy_loss
from rollstream.consumers.learner.training.packing import TrainingSequence, pack_for
from rollstream.consumers.learner.training.step_figures import mismatch_warning
from rollstream.consumers.learner.training.train_step import TrainStep
from rollstream.consumers.learner.user_objectives import code_of
from rollstream.consumers.models.config import ComputeSettings, DecoderConfig
from rollstream.topics.errors import ConfigurationError
from tests.support.batches import random_batch

SEED, ROLLOUTS = 5, 32
ENVIRONMENTS = ("chats", "tools", "mine", "sums")
CONFIG = LearnerConfig(
    model=DecoderConfig(num_hidden_layers=1),
    microbatch_rows=2,
    sequence_length=48,
    # The change of a parameter is its gradient.
    optimizer=OptimizerConfig(name="sgd", schedule="constant", learning_rate=1.0, beta1=0.0, max_grad_norm=0.0),
)


@pytest.fixture
def own(tmp_path: Path) -> str:
    """A user's loss by its file."""
    code = "def doubled(tokens, recipe):\n    return -2 * tokens.advantages * tokens.log_probs\n"
    (tmp_path / "my_losses.py").write_text(code)
    return f"{tmp_path / 'my_losses.py'}:doubled"


def rollouts(*, masks: bool = True) -> list[TrainingSequence]:
    """Rollouts of the environments in turn, some truncated; those of chats have no log-probabilities."""
    print(f"seed {SEED}")
    draw = np.random.default_rng(SEED)
    batch = random_batch(0, rows=ROLLOUTS, seed=SEED, answers=(2, 12))
    batch = replace(
        batch,
        groups=tuple(replace(batch.groups[0], environment=environment) for environment in ENVIRONMENTS),
        group_index=np.arange(ROLLOUTS, dtype="<i4") % len(ENVIRONMENTS),
        truncated=draw.random(ROLLOUTS) < 0.25,
    )
    sequences = packing.sequences_of(batch)
    for place, sequence in enumerate(sequences):
        others = draw.integers(0, 98, (len(sequence.tokens), 20))
        kept = np.where(np.arange(20) == 0, sequence.tokens[:, None], others)[sequence.loss_mask]
        sequences[place] = sequence._replace(
            kept_tokens=kept.ravel(),
            kept_counts=20 * sequence.loss_mask if masks else None,
            generator_log_probs=sequence.generator_log_probs * (sequence.environment != "chats"),
        )
    assert {(s.environment, s.truncated) for s in sequences} >= {("chats", True), ("tools", True), ("tools", False)}
    return sequences


def part(loss: LossConfig, params: Any, sequences: Sequence[TrainingSequence], divisors: Any) -> Any:
    """Gradient, metrics and trained tokens of rollouts that one loss trains on alone, with given denominators."""
    if loss.name == "ce":
        sequences = [sequence._replace(kept_counts=None) for sequence in sequences]
    (update,) = pack_for(replace(CONFIG, loss=loss), sequences).updates
    function = partial(policy_loss, model=CONFIG.model, compute=ComputeSettings(), config=loss, denominators=divisors)
    gradient_of = jax.jit(jax.grad(lambda params, batch: function(params, batch=batch), has_aux=True))
    each = [gradient_of(params, batch.arrays()) for batch in update.microbatches]
    return *jax.tree.map(lambda *values: sum(map(np.asarray, values)), *each), update.trained_tokens


@pytest.mark.parametrize("common", ["ppo_clip", "gspo"])
def test_a_mixed_step_is_the_sum_of_each_loss_over_its_own_rollouts(common: str, own: str) -> None:
    config = replace(CONFIG, loss=LossConfig(name=common), losses=("chats=ce", "tools=dapo", f"mine={own}"))
    step, packed = TrainStep(config), pack_for(config, rollouts())
    assert len(packed.microbatches) > 2
    state = step.initial_state()
    before = jax.device_get(state.params)
    state, metrics = step.train(state, packed)

    divisors = {"tokens": np.float32(packed.trained_tokens), "sequences": np.float32(packed.trained_sequences)}
    parts = {
        environment: part(
            LossConfig(name=name, reduction=config.loss.recipe.reduction),
            before,
            [sequence for sequence in rollouts() if sequence.environment == environment],
            divisors,
        )
        for environment, name in zip(ENVIRONMENTS, ("ce", "dapo", own, common), strict=True)
    }
    for name, value in state.params.items():
        expected = sum(gradient[name] for gradient, _, _ in parts.values())
        np.testing.assert_allclose(before[name] - np.asarray(value), expected, rtol=1e-4, atol=2e-6, err_msg=name)

    shares = {environment: tokens / packed.trained_tokens for environment, (_, _, tokens) in parts.items()}
    assert sum(shares.values()) == pytest.approx(1)
    total = {name: sum(figures[name] for _, figures, _ in parts.values()) for name in parts["chats"][1]}
    expected = {name: total[name] for name in ("loss", "entropy/mean", "clip_ratio/low_mean", "clip_ratio/high_mean")}
    for name in MISMATCH_METRICS:
        expected[name] = (total[name] - parts["chats"][1][name]) / (1 - shares["chats"])
    if common == "gspo":
        figures, others = parts["sums"][1], 1 - shares["sums"]
        expected["importance/weight_mean"] = figures["importance/weight_mean"] + others
        expected["importance/limited_mean"] = figures["importance/limited_mean"]
        mean, square = (figures[f"importance/kept_{moment}_mean"] + others for moment in ("weight", "square"))
        expected["importance/effective_sample_fraction"] = mean**2 / square
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert metrics["clip_ratio/low_mean"] > 0
    assert ("importance/weight_mean" in metrics) == (common == "gspo")


def test_the_whole_step_is_compiled_beforehand_and_compares_the_sampler_before_its_first_update() -> None:
    mismatches = []
    for epochs in (1, 2):
        config = replace(CONFIG, losses=("chats=ce", "tools=rloo"), epochs=epochs, reference="initial")
        step = TrainStep(config)
        state = step.initial_state()
        step.warm_up(state)
        compiled = step.compilations
        _, metrics = step.train(state, pack_for(config, rollouts(masks=False)), step.frozen(state.params))
        assert step.compilations == compiled
        mismatches.append([metrics[name] for name in MISMATCH_METRICS])
    assert mismatches[0] == pytest.approx(mismatches[1], rel=1e-5)


def test_ratios_to_their_sampler_do_not_bound_supervised_rollouts() -> None:
    config = replace(CONFIG, loss=LossConfig(reject_token=(0.5, 2.0), sequence_mask_limit=0.1), losses=("chats=ce",))
    supervised = config.loss_of["chats"]
    assert (supervised.rejections, supervised.sequence_mask_limit) == ({}, 0.0)
    assert config.loss_of[""].rejections == config.loss.rejections
    assert mismatch_warning({"mismatch_kl/mean": 1.0}, supervised) is None
    assert mismatch_warning({"mismatch_kl/mean": 1.0}, supervised, config.loss) is not None
    assert replayed_arrays(config) == ("sampling_mask",)
    assert replayed_arrays(replace(config, loss=LossConfig(name="ce"))) == ()


def test_a_step_on_record_names_the_losses(own: str) -> None:
    config = replace(CONFIG, losses=(f"mine={own}", "chats=ce"))
    assert {setting: name.rpartition(" ")[0] for setting, name in code_of(config).items()} == {
        "learner.losses.mine": own
    }
    assert "'losses': ('mine=" in fingerprint(config)["configuration"]
    assert replace(CONFIG, losses=("chats=ppo_clip",)).every_loss == (CONFIG.loss,)
    with pytest.raises(ConfigurationError, match=r"learner.losses names .* has no attribute 'absent'"):
        code_of(replace(CONFIG, losses=(f"mine={own.replace('doubled', 'absent')}",)))


@pytest.mark.parametrize(
    ("losses", "settings", "words"),
    [
        *(
            ((text,), {}, "names no environment and its loss; write ENVIRONMENT=LOSS")
            for text in ("ce", "=ce", "a=", "")
        ),
        (("a=grop",), {}, "^there is no loss 'grop'; use ppo_clip, grpo"),
        (("a=dpo",), {"reference": "initial"}, r"^learner.losses \['a=dpo'\] mixes \"dpo\" .* in a run of its own"),
        (("a=ce",), {"reference": "initial", "loss": LossConfig(name="dpo")}, r"mixes \"dpo\" with other losses"),
    ],
)
def test_what_is_no_loss_of_an_environment_is_refused(losses: tuple[str, ...], settings: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        LearnerConfig(losses=losses, **settings)
