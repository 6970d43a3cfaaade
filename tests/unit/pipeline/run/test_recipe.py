"""The GSM8K recipe without Kafka and in small: its settings, its model's configuration, one sample, one step."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from rollstream.consumers.learner.pretrained import resolved, tokenizer_of
from rollstream.consumers.learner.training.packing import TrainingSequence, pack_for
from rollstream.consumers.learner.training.train_step import TrainStep
from rollstream.consumers.models import huggingface
from rollstream.consumers.models.parameters import shapes
from rollstream.consumers.models.slots import Row, SlotDecoder
from rollstream.pipeline.config import RunConfig, load
from rollstream.producers.tasks import create_task
from tests.support.paths import ROOT
from tests.support.recipe import PUBLISHED, write_model, write_problems

RECIPE = ROOT / "recipes" / "gsm8k" / "run.toml"


@pytest.fixture
def small(tmp_path: Path) -> RunConfig:
    """The recipe with one layer of the model, and few, short rows."""
    write_model(tmp_path / "model", num_hidden_layers=1)
    write_problems(tmp_path / "problems.jsonl", range(40))
    changes = {
        "tasks.gsm8k.train_file": f"{tmp_path}/problems.jsonl",
        "tasks.gsm8k.heldout_file": "",
        "tasks.gsm8k.max_tokens": "12",
        "learner.pretrained": f"{tmp_path}/model",
        "learner.sequence_length": "128",
        "learner.length_buckets": "[]",
        "learner.microbatch_rows": "4",
        "learner.vocabulary_chunk": "100",
        "learner.optimizer.warmup_updates": "0",
        "learner.mesh.data": "1",
    }
    return load(RECIPE, flags=[f"{key}={value}" for key, value in changes.items()])


def test_the_published_configuration_is_the_model_of_half_a_billion_parameters(tmp_path: Path) -> None:
    huggingface.write_json(tmp_path / huggingface.CONFIG, PUBLISHED)
    config = huggingface.load_config(tmp_path)
    assert sum(int(np.prod(shape)) for shape in shapes(config).values()) == 494_032_768


@pytest.mark.long
def test_a_step_on_what_the_model_itself_sampled_changes_it_and_starts_from_its_checkpoint(small: RunConfig) -> None:
    learner, tokenizer = resolved(small.learner), tokenizer_of(small.learner)
    task = create_task(small.task, small.tasks)
    train_step = TrainStep(learner)
    state = train_step.initial_state()
    before = jax.device_get(state.params)
    stored = huggingface.load(learner.pretrained)
    for name, array in before.items():
        np.testing.assert_array_equal(array, stored[name].astype(np.float32), strict=True)

    prompts = task.prompts("train")[:4]
    texts = [tokenizer.encode(prompt.text) for prompt in prompts]
    sampler = SlotDecoder(learner.model, slots=4, max_model_len=max(map(len, texts)) + task.max_tokens)
    rows = [
        Row(prompt=text, seed=seed, max_tokens=task.max_tokens, stop_ids=tokenizer.eos_ids)
        for seed, text in enumerate(texts)
    ]
    message = sampler.sample(sampler.place(before), rows)
    scores = [
        task.score(prompt, tokenizer.decode(row.tokens), row.finish_reason == "length")
        for prompt, row in zip(prompts, message, strict=True)
    ]
    assert all(score.reward == 0.0 for score in scores), "a random model does not count"

    sequences = [
        TrainingSequence(
            tokens=np.asarray([*text, *row.tokens], np.int32),
            loss_mask=np.arange(len(text) + len(row.tokens)) >= len(text),
            advantages=np.full(len(text) + len(row.tokens), (-1.0) ** member, np.float32),
            generator_log_probs=np.asarray([0.0] * len(text) + row.logprobs, np.float32),
        )
        for member, (text, row) in enumerate(zip(texts, message, strict=True))
    ]
    state, metrics = train_step.train(state, pack_for(learner, sequences))
    # The sampler computes in float32 and the learner in bfloat16: what the same model says differs by rounding.
    assert 0 < metrics["mismatch_kl/mean"] < 1e-3
    assert metrics["optim/grad_norm"] > 0
    after = jax.device_get(state.params)
    unchanged = [name for name in before if np.array_equal(before[name], after[name])]
    assert unchanged == []
    assert dataclasses.asdict(learner.model)["num_hidden_layers"] == 1
