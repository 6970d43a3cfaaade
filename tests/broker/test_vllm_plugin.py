"""The plug-in for vLLM on a real broker: versions go from the log into the engine, never a damaged one."""

import json
import signal
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from rollstream.consumers.trainers.step_writer import StepWriter, publish_version
from rollstream.consumers.weights.config import WeightsConfig
from tests.model.test_vllm_plugin import CHANGING, parameters
from tests.support.damaged_weights import damaged_delta
from tests.support.producing import serving_http
from tests.support.runs import RealRun
from tests.support.serving_engines import (
    MODEL_JSON,
    EngineStandIn,
    VllmPluginStandIn,
    VllmStandIn,
    values_digest,
)
from tests.support.waiting import eventually

QUICK = {"serving__retry_s": 0.2, "serving__metrics_interval_s": 0.2, "serving__attempts": 2}


@pytest.fixture
def trainer(run: RealRun) -> Iterator[StepWriter]:
    with StepWriter(run.kafka, run.name, model=MODEL_JSON, config=WeightsConfig(anchor_every=100)) as writer:
        yield writer


def serves(engine: EngineStandIn, version: int, digest_of: int | None = None) -> bool:
    digest = values_digest(parameters(version if digest_of is None else digest_of))
    return not engine.paused and (engine.reported, engine.digest) == (str(version), digest)


def events(log: str, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == name]


def test_engines_that_fetch_themselves_follow_a_run_and_are_paused_for_no_damaged_version(
    run: RealRun, trainer: StepWriter
) -> None:
    with closing(VllmPluginStandIn()) as engine, serving_http(engine.answer) as url:
        trainer.publish_version(parameters(0))
        process = run.start("serve-weights", "--engine", "vllm-plugin", "--url", url, **QUICK)
        eventually(lambda: serves(engine, 0), 300, "the engine has version 0")
        # A serve-weights process that was killed has left this update open.
        engine.updating = True
        trainer.publish_version(parameters(1))
        eventually(lambda: serves(engine, 1), 300, "the engine has version 1")

        damaged_delta(run, 2)
        failed = eventually(lambda: events(run.log_of(process), "replica_update_failed")[1:], 300, "two attempts")
        message = (
            f"tensor {CHANGING} of policy version 2 differs from its manifest; its changes since version 1 are in "
        )
        assert failed[0]["error"].startswith(f"{message}chunk 0 (offset ")
        assert serves(engine, 1)
        once = ["pause", "load 0", "resume", "pause", "load 1", "resume"]
        assert engine.calls == once, "it was not even paused"
        # A full version heals it. Its load fails once: the version before is loaded again, whole, before it resumes.
        engine.refuses["load 3"] = 1
        assert publish_version(run.kafka, run.name, parameters(4), model=MODEL_JSON) == 3
        eventually(lambda: serves(engine, 3, digest_of=4), 300, "the engine has version 3")
        assert engine.calls[6:] == ["pause", "load 3", "load 1", "resume", "pause", "load 3", "resume"]

        engine.restart()
        eventually(lambda: serves(engine, 3, digest_of=4), 300, "the engine, started again, has version 3")
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0, run.log_of(process)
    assert not engine.sampled_torn
    assert not list((run.directory / "runs" / run.name).glob("serving/*")), "no file is written"


def test_a_vllm_without_the_plug_in_is_named_as_such(run: RealRun, trainer: StepWriter) -> None:
    trainer.publish_version(parameters(0))
    with serving_http(VllmStandIn().answer) as url:
        process = run.start("serve-weights", "--engine", "vllm-plugin", "--url", url, **QUICK)
        unreachable = eventually(lambda: events(run.log_of(process), "replica_unreachable"), 300, "the reason")
        assert "/init_weight_transfer_engine answered 404" in unreachable[0]["error"]
