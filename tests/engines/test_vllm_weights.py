"""A real vLLM follows the policy versions of a run: it samples as their parameters say, and no request is lost."""

import asyncio
import json
import signal
from dataclasses import asdict
from pathlib import Path

import pytest

from rollstream.consumers.models.huggingface import SINGLE, load_config
from rollstream.consumers.serving.checkpoints import CheckpointDirectory
from rollstream.consumers.serving.config import ServingConfig
from rollstream.consumers.serving.engines import EngineHttp, VllmEngine
from rollstream.consumers.serving.replica_updater import ReplicaState, ReplicaUpdater
from rollstream.consumers.trainers.step_writer import StepWriter
from rollstream.topics.config import TopicsConfig
from rollstream.topics.kafka import provisioning
from rollstream.topics.records import PolicyManifest
from tests.engines.conftest import Vllm
from tests.engines.vllm_answers import LongRequest, assert_sampled_by, original, sample, version_of
from tests.support.batches import patient
from tests.support.runs import RealRun
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def test_vllm_samples_with_each_version_and_a_request_in_flight_survives(run: RealRun, served: Vllm) -> None:
    config, parameters = load_config(served.directory), original(served)
    provisioning.apply(run.kafka, TopicsConfig(partitions=1, weights_partitions=2), run.name)
    with StepWriter(patient(run.kafka), run.name, model=json.dumps(asdict(config))) as trainer:
        trainer.publish_version(version_of(parameters, 0))
        process = run.start("serve-weights", "--url", served.url, serving__dtype="float32")
        answers = []
        for version in range(3):
            if version:
                trainer.publish_version(version_of(parameters, version))
            completion = eventually(
                lambda v=version: answer if (answer := sample(served)).lowest_version == v else None,
                600,
                f"vLLM to sample with version {version}",
            )
            assert set(completion.versions.tolist()) == {version}
            assert_sampled_by(completion, config, version_of(parameters, version))
            answers.append(tuple(completion.tokens.tolist()))
        assert len(set(answers)) == 3, "every version answers otherwise"

        request = LongRequest(served)
        request.start()
        eventually(request.in_flight, 300, "a request in flight")
        trainer.publish_version(version_of(parameters, 3))
        request.assert_changed(config, version_of(parameters, 2), version_of(parameters, 3))
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0, run.log_of(process)


class DamagedEngine(VllmEngine):
    """A vLLM whose disk loses the end of version 5."""

    async def load(self, directory: Path, label: str) -> None:
        if label == "5":
            data = (directory / SINGLE).read_bytes()
            (directory / SINGLE).write_bytes(data[: len(data) // 2])
        await super().load(directory, label)


def test_vllm_gets_the_last_good_version_back_before_it_samples_again(served: Vllm, tmp_path: Path) -> None:
    config, parameters = load_config(served.directory), original(served)

    def manifest(version: int) -> PolicyManifest:
        return PolicyManifest(
            version=version,
            learner="l",
            step=version,
            epoch="e",
            tensors=(),
            chunks=(),
            digest="",
            model=json.dumps(asdict(config)),
        )

    async def until(updater: ReplicaUpdater, version: int, failures: int) -> None:
        async with asyncio.timeout(600):
            while (updater.state, updater.version, updater.failures) != (ReplicaState.SERVING, version, failures):
                await asyncio.sleep(0.05)

    async def main() -> None:
        settings = ServingConfig(attempts=1, retry_s=0.2)
        with CheckpointDirectory(tmp_path / "good", keep_versions=2) as checkpoints:
            async with EngineHttp(served.url, settings) as http:
                updater = ReplicaUpdater(http.url, DamagedEngine(http), checkpoints, settings)
                running = asyncio.create_task(updater.run())
                await checkpoints.add(manifest(4), version_of(parameters, 4))
                await until(updater, 4, 0)
                await checkpoints.add(manifest(5), version_of(parameters, 5))
                await until(updater, 4, 1)
                # An update in progress is finished, so the engine resumes.
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())
    completion = sample(served)
    assert set(completion.versions.tolist()) == {4}
    assert_sampled_by(completion, config, version_of(parameters, 4))
