"""The losses `ce` and `dpo` are those of TRL's SFTTrainer and DPOTrainer on the same tokens, with their gradients."""

import json
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rollstream.consumers.files import safetensors_files
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.objective import LossConfig
from rollstream.consumers.learner.training.loss import log_probs, policy_loss
from rollstream.consumers.learner.training.packing import TrainingSequence, pack_for
from rollstream.consumers.models import huggingface
from rollstream.consumers.models.config import ComputeSettings
from tests.support.checkpoints import SPECIAL_TOKENS, random_parameters
from tests.support.paths import ROOT
from tests.support.recipe import write_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
PYTHON = ROOT / ".venv" / "trl" / "bin" / "python"
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
BETA = 0.4
COMPUTE = ComputeSettings(dtype="float32")


def sequence(prompt: list[int], answer: list[int], advantage: float) -> TrainingSequence:
    tokens = np.array(prompt + answer, np.int32)
    return TrainingSequence(
        tokens=tokens,
        loss_mask=np.arange(len(tokens)) >= len(prompt),
        advantages=np.array([advantage], np.float32),
        generator_log_probs=np.zeros(len(tokens), np.float32),
    )


def test_ce_and_dpo_have_the_loss_and_the_gradient_of_trl(tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.fail("TRL is not installed: run make .venv/trl/.installed", pytrace=False)
    draw = np.random.default_rng(7)
    model = write_model(tmp_path / "model", **SMALL)
    tokens = {"eos_token": SPECIAL_TOKENS[-1], "pad_token": SPECIAL_TOKENS[0], "tokenizer_class": "Qwen2TokenizerFast"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(tokens))
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / huggingface.CONFIG).write_text((tmp_path / "model" / huggingface.CONFIG).read_text())
    params = {name: np.float32(array) for name, array in huggingface.load(tmp_path / "model", model).items()}
    frozen = {
        name: (array + 0.02 * draw.normal(size=array.shape) * random_parameters(model)[name]).astype(np.float32)
        for name, array in params.items()
    }
    safetensors_files.write(tmp_path / "reference" / huggingface.SINGLE, frozen)
    pairs = [[draw.integers(3, 380, draw.integers(3, 9)).tolist() for _ in range(3)] for _ in range(6)]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    subprocess.run(
        [str(PYTHON), "-P", str(ROOT / "tests" / "engines" / "trl_losses.py"), str(tmp_path), str(BETA)],
        check=True,
        timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    theirs = json.loads((tmp_path / "losses.json").read_text())
    sequences: dict[str, list[TrainingSequence]] = {
        "ce": [sequence(prompt, chosen, 1.0) for prompt, chosen, _rejected in pairs],
        "dpo": [each for p, c, r in pairs for each in (sequence(p, r, -1.0), sequence(p, c, 1.0))],
    }
    for name, rollouts in sequences.items():
        config = LearnerConfig(
            model=model,
            loss=LossConfig(name=name, beta=BETA),
            reference="initial",
            microbatch_rows=1,
            sequence_length=40,
        )
        step = pack_for(config, rollouts)
        assert len(step.microbatches) > 1
        counts = {"tokens": step.trained_tokens, "sequences": step.trained_sequences}
        denominators = {key: np.float32(count) for key, count in counts.items()}
        function = partial(policy_loss, model=model, compute=COMPUTE, config=config.loss)
        loss, gradient = 0.0, {key: np.zeros(array.shape) for key, array in params.items()}
        for microbatch in step.microbatches:
            batch: dict[str, Any] = dict(microbatch.arrays())
            batch["reference_log_probs"] = log_probs(frozen, model, COMPUTE, batch)
            (part, _metrics), of_part = jax.value_and_grad(function, has_aux=True)(
                dict(params), batch=batch, denominators=denominators
            )
            loss += float(part)
            gradient = {key: gradient[key] + np.asarray(of_part[key]) for key in gradient}
        assert loss == pytest.approx(theirs[name], rel=1e-5)
        (tmp_path / name / huggingface.CONFIG).write_text((tmp_path / "model" / huggingface.CONFIG).read_text())
        expected = huggingface.load(tmp_path / name, model)
        assert set(expected) == set(gradient)
        for key, array in expected.items():
            np.testing.assert_allclose(gradient[key], array, rtol=2e-3, atol=1e-5, err_msg=f"{name}: {key}")
