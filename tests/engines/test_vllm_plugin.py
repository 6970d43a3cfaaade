"""A real vLLM whose workers fetch policy versions from the log: full ones and deltas, and never a damaged one."""

import json
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.models.huggingface import load_config
from rollstream.consumers.trainers.step_writer import StepWriter, publish_version
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.producers.inference.client import Completion
from rollstream.topics.config import TopicsConfig
from rollstream.topics.kafka import provisioning
from tests.engines.conftest import Vllm
from tests.engines.vllm_answers import LongRequest, assert_sampled_by, few_changed, original, sample
from tests.support.batches import patient
from tests.support.damaged_weights import damaged_delta
from tests.support.runs import RealRun
from tests.support.vllm_server import ENVIRONMENT
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
QUICK = {"serving__retry_s": 1.0, "serving__attempts": 1}


@pytest.fixture
def model(vllm: Vllm) -> str:
    return json.dumps(asdict(load_config(vllm.directory)))


@pytest.fixture
def trainer(run: RealRun, model: str) -> Iterator[StepWriter]:
    provisioning.apply(run.kafka, TopicsConfig(partitions=1, weights_partitions=2), run.name)
    with StepWriter(patient(run.kafka), run.name, model=model, config=WeightsConfig(anchor_every=100)) as writer:
        yield writer


def sampled_with(vllm: Vllm, version: int) -> Completion:
    """A greedy answer of one version, once the engine gives one."""
    completion = eventually(
        lambda: answer if (answer := sample(vllm)).lowest_version == version else None, 600, f"version {version}"
    )
    assert set(completion.versions.tolist()) == {version}
    return completion


def events(log: str, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == name]


def test_vllm_fetches_full_versions_and_deltas_itself_and_is_healed_after_a_damaged_one(
    run: RealRun, trainer: StepWriter, served: Vllm, model: str
) -> None:
    config, parameters = load_config(served.directory), original(served)
    trainer.publish_version(few_changed(parameters, 0))
    process = run.start("serve-weights", "--engine", "vllm-plugin", "--url", served.url, **QUICK)
    answers = []
    for version in range(3):
        if version:
            trainer.publish_version(few_changed(parameters, version))
        completion = sampled_with(served, version)
        assert_sampled_by(completion, config, few_changed(parameters, version))
        answers.append(tuple(completion.tokens.tolist()))
    assert len(set(answers)) == 3, "every version answers otherwise"

    request = LongRequest(served)
    request.start()
    eventually(request.in_flight, 300, "a request in flight")
    trainer.publish_version(few_changed(parameters, 3))
    request.assert_changed(config, few_changed(parameters, 2), few_changed(parameters, 3))
    manifests = read_manifests(run.kafka, run.name)
    assert "".join(manifests[version].kind[0] for version in sorted(manifests)) == "fddd"
    sizes = [sum(chunk.size_bytes for chunk in manifests[version].chunks) for version in sorted(manifests)]
    assert max(sizes[1:]) < sizes[0] / 50

    damaged_delta(run, 4)
    [failed] = eventually(lambda: events(run.log_of(process), "replica_update_failed"), 300, "the update to fail")
    assert "of policy version 4" in failed["error"]
    assert "differs from its manifest" in failed["error"]
    assert_sampled_by(sampled_with(served, 3), config, few_changed(parameters, 3))

    # A full version, here of another publisher, heals it.
    assert publish_version(run.kafka, run.name, few_changed(parameters, 5), model=model) == 5
    assert read_manifests(run.kafka, run.name)[5].kind == "full"
    assert_sampled_by(sampled_with(served, 5), config, few_changed(parameters, 5))

    # Parameters of another model fail while they are loaded: the last good version is loaded again, whole.
    lacking = {name: array for name, array in few_changed(parameters, 6).items() if name != "model.norm.weight"}
    assert publish_version(run.kafka, run.name, lacking, model=model) == 6
    eventually(lambda: events(run.log_of(process), "replica_restored"), 300, "the version before")
    assert_sampled_by(sampled_with(served, 5), config, few_changed(parameters, 5))
    assert publish_version(run.kafka, run.name, few_changed(parameters, 7), model=model) == 7
    assert_sampled_by(sampled_with(served, 7), config, few_changed(parameters, 7))
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 0, run.log_of(process)


IN_PLACE = """
import json, sys, time, types
import torch
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from rollstream.consumers.serving.vllm_plugin.transfer_engine import LogTransferEngine

class Model(torch.nn.Module):
    def __init__(self, shapes):
        super().__init__()
        self.names = list(shapes)
        self.values = torch.nn.ParameterList(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes.values())

    def load_weights(self, weights):
        loaded = set()
        for name, tensor in weights:
            parameter = self.values[self.names.index(name)]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
            loaded.add(f"values.{self.names.index(name)}")
        return loaded

kafka, run, shapes, versions = (json.loads(argument) for argument in sys.argv[1:])
model, model_config = Model(shapes), types.SimpleNamespace(quantization=None, dtype=torch.bfloat16)
engine = LogTransferEngine(None, types.SimpleNamespace(model_config=model_config), torch.device("cpu"), model)
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
record_metadata_for_reloading(model)
info = {"run": run, "kafka": {"bootstrap_servers": kafka}, "in_place": True}
engine.init_transfer_engine(engine.parse_init_info(info))
onto, fetched = -1, set()
for version in versions:
    # The version before the last is loaded again without a fetch, as if another worker had failed at the last.
    if version not in fetched:
        engine.fetch(version)
        fetched.add(version)
    while not engine.holds(version):
        assert not engine.status().error, engine.status()
        time.sleep(0.05)
    engine.update_weights({"version": version, "onto": onto})
    onto = version
    values = {name: value.float().sum(dtype=torch.float64).item() for name, value in zip(model.names, model.values)}
    weighted = {name: (value.double().reshape(-1) * torch.arange(value.numel())).sum().item()
                for name, value in zip(model.names, model.values)}
    print(json.dumps({"version": version, "sums": values, "weighted": weighted, "updates": dict(engine.updates)}))
engine.shutdown()
"""


def test_deltas_are_written_in_place_by_vllm_where_parameters_are_as_in_a_checkpoint(
    run: RealRun, trainer: StepWriter, checkpoint: Path
) -> None:
    parameters = original(Vllm("", "", checkpoint))
    for version in range(3):
        trainer.publish_version(few_changed(parameters, version))
    shapes = {name: list(array.shape) for name, array in parameters.items()}
    done = subprocess.run(
        [
            *(ENVIRONMENT / "bin" / "python", "-c", IN_PLACE),
            *map(json.dumps, (run.kafka.bootstrap_servers, run.name, shapes, [0, 1, 2, 1])),
        ],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["updates"] for line in lines] == [
        {"whole": 1},
        {"whole": 1, "in place": 1},
        {"whole": 1, "in place": 2},
        {"whole": 1, "in place": 3},
    ]
    for line in lines:
        version = line["version"]
        for name, array in few_changed(parameters, version).items():
            exact = array.astype(np.float64).reshape(-1)
            assert line["sums"][name] == pytest.approx(exact.sum(), rel=1e-9, abs=1e-6), (version, name)
            assert line["weighted"][name] == pytest.approx(exact @ np.arange(exact.size), rel=1e-9, abs=1e-3)
