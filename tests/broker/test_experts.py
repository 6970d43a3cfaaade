"""A model with experts in a run on default settings: sampled, trained, executed again to the bit, and exported."""

import json

import pytest

from rollstream.consumers.models import huggingface
from rollstream.consumers.models.config import decoder_config
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.consumers.weights.step_log import read_steps
from rollstream.pipeline.audit.ledger import ledger
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import Rollout
from rollstream.topics.wire.codec import decode
from rollstream.topics.wire.rl_examples import ROUTED_EXPERTS
from rollstream.topics.wire.validation import is_masked
from tests.support.runs import RealRun

SETTINGS = {
    "learner__model__num_experts": 4,
    "learner__model__num_experts_per_tok": 2,
    "learner__model__moe_intermediate_size": 64,
    "learner__model__norm_topk_prob": "true",
    "learner__max_steps": 2,
    # Both what the sampler kept and which experts it used must reach the learner.
    "worker__top_p": 0.95,
}


@pytest.mark.long
def test_a_model_with_experts_is_sampled_trained_executed_again_and_exported(real_run: RealRun) -> None:
    run = real_run
    process = run.start("run", **SETTINGS)
    assert process.wait(1200) == 0, run.log_of(process)[-3000:]
    steps = read_steps(run.kafka, run.name, "default")
    assert sorted(steps) == [0, 1, 2]
    # Sampler and learner use the same experts and the same part of the vocabulary; versions are rounded to bfloat16.
    assert abs(steps[1].metrics["mismatch_kl/mean"]) < 1e-5
    records = (decode(message.value) for message in read_to_end(run.kafka, run.topic("rollouts")))
    rollouts = [record for record in records if isinstance(record, Rollout)]
    assert rollouts
    for rollout in rollouts:
        assert rollout.token_arrays[ROUTED_EXPERTS].shape == (len(rollout.tokens), 2, 2)
        assert is_masked(rollout.loss_mask, rollout.logprobs_mode, rollout.token_arrays)
    verified = run.start("verify", "--json", **SETTINGS)
    assert verified.wait(600) == 0, run.log_of(verified)[-3000:]
    book = ledger(run.kafka, run.name)
    assert book.balanced, book.problems
    again = run.start("retrain", "--from-step", "0", "--json", **SETTINGS)
    assert again.wait(600) == 0, run.log_of(again)[-3000:]
    assert json.loads(run.log_of(again).splitlines()[-1])["same"]
    exported = run.start("weights", "export", "-o", str(run.directory / "exported"), **SETTINGS)
    assert exported.wait(300) == 0, run.log_of(exported)[-3000:]
    model = huggingface.load_config(run.directory / "exported")
    assert model == decoder_config(read_manifests(run.kafka, run.name)[2].model)
    assert len(huggingface.load(run.directory / "exported")) == 2 + 2 * (8 + 1 + 4 * 3)
