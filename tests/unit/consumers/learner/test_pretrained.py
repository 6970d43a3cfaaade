"""The parameters that a run starts from are those of the checkpoint, wherever their devices are."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.pretrained import initial_params, model_of
from rollstream.consumers.models import decoder, huggingface
from rollstream.consumers.models.config import DecoderConfig
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
