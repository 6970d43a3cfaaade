"""A policy version taken off the log as a Hugging Face checkpoint: the newest, whole, with its tokenizer."""

import json
from dataclasses import asdict
from pathlib import Path

import ml_dtypes
import numpy as np

from rollstream.consumers.models import huggingface
from rollstream.consumers.models.tokenizer_file import load_tokenizer
from rollstream.consumers.step_log import StepLog
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.publisher import WeightsPublisher
from rollstream.topics.kafka import provisioning
from tests.support.checkpoints import random_parameters
from tests.support.recipe import write_model
from tests.support.runs import RealRun

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


def test_the_newest_version_is_exported_with_its_tokenizer_and_no_model_is_overwritten(real_run: RealRun) -> None:
    run, directory = real_run, real_run.directory
    provisioning.apply(run.kafka, run.topics, run.name)
    model = write_model(directory / "model", **SMALL)
    settings = {"learner__pretrained": directory / "model"}

    nothing = run.start("export", str(directory / "out"), **settings)
    assert nothing.wait(300) == 2
    assert "has no policy version yet" in run.log_of(nothing)

    log = StepLog(run.kafka, run.name, "default")
    publisher = WeightsPublisher(run.kafka, run.name, "default", json.dumps(asdict(model)), WeightsConfig())
    newest = random_parameters(model)
    for step, scale in enumerate((0.5, 1.0)):
        manifest = publisher.stage(step, {name: np.float32(scale) * array for name, array in newest.items()})
        log.commit([publisher.record(manifest)])
        publisher.committed(manifest)
    log.close()

    process = run.start("export", str(directory / "out"), "--dtype", "bfloat16", "--json", **settings)
    assert process.wait(300) == 0
    assert json.loads(run.log_of(process).splitlines()[-1])["policy_version"] == 1
    assert huggingface.load_config(directory / "out") == model
    for name, array in huggingface.load(directory / "out").items():
        np.testing.assert_array_equal(array, newest[name].astype(ml_dtypes.bfloat16))
    text = "Which number is 7?<|im_end|>"
    assert load_tokenizer(directory / "out").encode(text) == load_tokenizer(directory / "model").encode(text)

    again = run.start("export", str(directory / "out"), **settings)
    assert again.wait(300) == 2
    assert "already holds a model" in run.log_of(again)
    assert not list(Path(directory / "out").glob(".*"))
