"""The parameters that a run starts from are those of the checkpoint, wherever their devices are."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from rollstream.consumers.learner.config import CheckpointConfig, LearnerConfig
from rollstream.consumers.learner.pretrained import initial_params, model_of
from rollstream.consumers.learner.records.checkpoints import Checkpoints
from rollstream.consumers.learner.startup import load_reference
from rollstream.consumers.learner.training.train_step import TrainStep
from rollstream.consumers.models import decoder, huggingface
from rollstream.consumers.models.config import DecoderConfig
from rollstream.topics.errors import ConfigurationError
from tests.support.checkpoints import random_parameters

SMALL = DecoderConfig(vocab_size=12, hidden_size=8, num_hidden_layers=1, head_dim=4, intermediate_size=12)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    huggingface.save(tmp_path / "model", SMALL, random_parameters(SMALL), dtype="bfloat16")
    return str(tmp_path / "model")


def test_the_model_is_that_of_the_checkpoint_where_there_is_one(directory: str) -> None:
    assert model_of(LearnerConfig(pretrained=directory)) == SMALL
    assert model_of(LearnerConfig(model=SMALL)) == SMALL


def test_parameters_are_float32_and_split_as_asked(directory: str) -> None:
    stored = huggingface.load(directory)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"))
    shardings = {name: NamedSharding(mesh, spec) for name, spec in decoder.pspecs(stored, mesh.shape).items()}
    for actual in (initial_params(directory, SMALL), initial_params(directory, SMALL, shardings)):
        assert list(actual) == list(decoder.shapes(SMALL))
        for name, array in actual.items():
            np.testing.assert_array_equal(array, stored[name].astype(np.float32), strict=True)
    assert all(initial_params(directory, SMALL, shardings)[name].sharding == shardings[name] for name in shardings)


def test_a_reference_of_another_model_with_the_same_shapes_is_refused(directory: str, tmp_path: Path) -> None:
    """The policy's program computes its log-probabilities, with the policy's rotary frequencies."""
    other = replace(SMALL, rope_theta=1e6, tie_word_embeddings=False)
    huggingface.save(tmp_path / "other", other, random_parameters(other), dtype="float32")
    saved = CheckpointConfig(directory=str(tmp_path / "checkpoints"))

    def reference(place: str) -> object:
        step = TrainStep(LearnerConfig(model=SMALL, reference=place))
        return load_reference(step, Checkpoints(saved, "main", "default"))

    assert reference(directory)
    differing = "rope_theta 1000000.0 instead of 10000.0, tie_word_embeddings False instead of True"
    with pytest.raises(ConfigurationError, match=differing):
        reference(str(tmp_path / "other"))
