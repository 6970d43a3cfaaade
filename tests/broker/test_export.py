"""A policy version taken off the log as a Hugging Face checkpoint: the newest, whole, with its tokenizer."""

import json
import os
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rollstream.consumers.models import huggingface
from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.models.tokenizer import CharacterTokenizer
from rollstream.consumers.models.tokenizer_file import load_tokenizer
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.publisher import WeightsPublisher
from rollstream.consumers.weights.step_log import StepLog
from rollstream.topics.kafka import provisioning
from rollstream.topics.wire.params_digest import params_digest
from tests.support.checkpoints import LARGE, random_parameters
from tests.support.recipe import write_model
from tests.support.runs import RealRun

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


def test_the_newest_version_is_exported_with_its_tokenizer_and_no_model_is_overwritten(real_run: RealRun) -> None:
    run, directory = real_run, real_run.directory
    provisioning.apply(run.kafka, run.topics, run.name)
    model = write_model(directory / "model", **SMALL)
    settings = {"learner__pretrained": directory / "model"}

    nothing = run.start("weights", "export", "-o", str(directory / "out"), **settings)
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

    process = run.start("weights", "export", "-o", str(directory / "out"), "--dtype", "bfloat16", "--json", **settings)
    assert process.wait(300) == 0
    assert json.loads(run.log_of(process).splitlines()[-1])["policy_version"] == 1
    assert huggingface.load_config(directory / "out") == model
    for name, array in huggingface.load(directory / "out").items():
        np.testing.assert_array_equal(array, newest[name].astype(ml_dtypes.bfloat16))
    text = "Which number is 7?<|im_end|>"
    assert load_tokenizer(directory / "out").encode(text) == load_tokenizer(directory / "model").encode(text)

    again = run.start("weights", "export", "-o", str(directory / "out"), **settings)
    assert again.wait(300) == 2
    assert "already holds a model" in run.log_of(again)
    assert not list(Path(directory / "out").glob(".*"))


def test_the_small_model_is_exported_with_the_tokenizer_that_the_run_used(real_run: RealRun) -> None:
    run, tokenizer = real_run, CharacterTokenizer()
    model = replace(LARGE, vocab_size=tokenizer.vocab_size, hidden_size=16, head_dim=4, intermediate_size=16)
    publish(run, model, random_parameters(model))
    process = run.start("weights", "export", "-o", str(run.directory / "out"))
    assert process.wait(300) == 0, run.log_of(process)
    assert load_tokenizer(run.directory / "out").encode("3 + a\n") == tokenizer.encode("3 + a\n")


SHARE = 0.7
"""Memory that an export takes more for this model than for a small one, as a share of its parameters."""


def publish(run: RealRun, model: DecoderConfig, *versions: dict[str, np.ndarray]) -> list[str]:
    """Publish parameters, and return the kinds of the versions."""
    provisioning.apply(run.kafka, run.topics, run.name)
    log = StepLog(run.kafka, run.name, "default")
    publisher = WeightsPublisher(run.kafka, run.name, "default", json.dumps(asdict(model)), WeightsConfig())
    manifests = []
    for step, params in enumerate(versions):
        manifests.append(publisher.stage(step, params))
        log.commit([publisher.record(manifests[-1])])
        publisher.committed(manifests[-1])
    publisher.close()
    log.close()
    return [manifest.kind for manifest in manifests]


def peak_bytes(run: RealRun, process: subprocess.Popen[bytes]) -> int:
    """Peak memory of a process, which must end with exit code 0."""
    _pid, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, run.log_of(process)
    return usage.ru_maxrss * 1024


@pytest.mark.long
def test_an_export_never_holds_the_whole_model(real_run: RealRun) -> None:
    run, small = real_run, real_run.beside("s")
    tiny = replace(LARGE, vocab_size=16, hidden_size=16, head_dim=4, intermediate_size=16)
    assert publish(small, tiny, random_parameters(tiny)) == ["full"]
    before = random_parameters(LARGE)
    newest = {name: array.copy() for name, array in before.items()}
    for array in newest.values():
        array.reshape(-1)[::50] += 1
    assert publish(run, LARGE, before, newest) == ["full", "delta"]
    del before
    least = peak_bytes(small, small.start("weights", "export", "-o", str(small.directory / "out"), forked=False))
    most = peak_bytes(run, run.start("weights", "export", "-o", str(run.directory / "out"), forked=False))
    whole = sum(array.nbytes for array in newest.values())
    assert most - least < SHARE * whole, f"{most - least} bytes for a model of {whole}"
    assert params_digest(huggingface.load(run.directory / "out")) == params_digest(newest)
