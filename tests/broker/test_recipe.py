"""The loop from a Hugging Face checkpoint: its tokenizer, its end tokens, a chat prompt, and rewards that rise."""

import json
import random

import numpy as np
import pytest

from rollstream.consumers.models.tokenizer_file import load_tokenizer
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.consumers.weights.step_log import read_steps
from rollstream.pipeline.config import load
from rollstream.producers.tasks import create_task
from rollstream.topics.records import Rollout
from tests.support.paths import ROOT
from tests.support.recipe import write_model, write_problems
from tests.support.runs import RealRun

RECIPE = ROOT / "recipes" / "gsm8k" / "run.toml"
STEPS = 24
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
}


@pytest.mark.long
def test_a_checkpoint_learns_on_the_log_with_its_own_tokenizer(real_run: RealRun) -> None:
    run, directory = real_run, real_run.directory
    write_model(directory / "model", **SMALL)
    # Always answering 3 is right three times in four, a preference that a few steps can teach.
    write_problems(directory / "problems.jsonl", [3, 3, 1, 3] * 10)
    settings = {
        "tasks__gsm8k__train_file": directory / "problems.jsonl",
        "tasks__gsm8k__heldout_file": "",
        "tasks__gsm8k__max_tokens": 8,
        "supervisor__ready_timeout_s": 200,
        "supervisor__workers": 1,
        "inference__max_rows": 64,
        "worker__concurrency": 8,
        "grouping__batch_rollouts": 16,
        "evaluation__every_versions": STEPS,
        "learner__pretrained": directory / "model",
        "learner__rollouts_per_step": 64,
        "learner__max_steps": STEPS,
        "learner__sequence_length": 128,
        "learner__length_buckets": "[]",
        "learner__microbatch_rows": 16,
        "learner__compute_dtype": "float32",
        "learner__remat": "false",
        "learner__vocabulary_chunk": 100,
        "learner__threads": 1,
        "learner__optimizer__learning_rate": 2e-3,
        "learner__warm_start__steps": 150,
        "learner__warm_start__learning_rate": 2e-3,
        "learner__warm_start__sequences_per_step": 16,
        "learner__warm_start__file": directory / "warm-start.jsonl",
    }
    flags = [word.removeprefix("--set=") for word in run.command("run", **settings) if word.startswith("--set=")]
    config = load(RECIPE, flags=flags)
    prompts = create_task(config.task, config.tasks).prompts("train")
    # Random numbers in the right format teach how to answer, but not what.
    shuffled = random.Random(0)
    with (directory / "warm-start.jsonl").open("w") as file:
        for _ in range(256):
            example = {"prompt": shuffled.choice(prompts).text, "answer": f"#### {shuffled.randrange(5)}"}
            file.write(json.dumps(example) + "\n")

    process = run.start("run", "--config", str(RECIPE), **settings)
    assert process.wait(800) == 0, run.log_of(process)[-3000:]

    steps = read_steps(run.kafka, run.name, "default")
    assert sorted(steps) == list(range(STEPS + 1))
    model = json.loads(read_manifests(run.kafka, run.name)[0].model)
    assert (model["hidden_size"], model["qkv_bias"], model["vocab_size"]) == (64, True, 384)

    tokenizer = load_tokenizer(directory / "model")
    rollouts = [record for record in run.read("rollouts") if isinstance(record, Rollout)]
    for record in rollouts[:50]:
        tokens = record.tokens[record.loss_mask].tolist()
        assert record.turns[-1].text == tokenizer.decode(tokens)
        assert record.truncated != (tokens[-1] in tokenizer.eos_ids)
        assert tokenizer.decode(record.tokens[~record.loss_mask].tolist()).startswith("<|im_start|>system\n")
    share = len(rollouts) // 4
    # A reader may get one partition after the other.
    rollouts.sort(key=lambda record: record.policy_version)
    rewards = np.array([record.reward for record in rollouts])
    print(f"rewards: {rewards[:share].mean():.3f} of the first quarter, {rewards[-share:].mean():.3f} of the last")
    assert rewards[:share].mean() < rewards[-share:].mean() - 0.1
    assert {record.highest_version for record in run.read("evals")} >= {0}  # type: ignore[attr-defined]
