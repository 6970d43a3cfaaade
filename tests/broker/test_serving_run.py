"""`rollstream run` with engines of others: they follow its learner; one that fails is named, and all else goes on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.consumers.weights.manifests import read_manifests
from rollstream.pipeline.audit.ledger import ledger
from rollstream.topics.config import KafkaConfig
from tests.support.paths import ROOT
from tests.support.producing import serving_http
from tests.support.serving_engines import VllmStandIn
from tests.support.waiting import eventually

SMALL = (
    "learner.model.num_hidden_layers=1",
    "inference.max_rows=64",
    "worker.group_size=4",
    "grouping.batch_rollouts=8",
    "learner.rollouts_per_step=32",
    "learner.microbatch_rows=4",
    "supervisor.ready_timeout_s=600",
    "serving.retry_s=0.2",
)


@pytest.mark.long
def test_a_run_keeps_engines_of_others_on_the_versions_of_its_learner(
    broker: str, run_name: str, compiled: Path, tmp_path: Path
) -> None:
    healthy, broken = VllmStandIn(), VllmStandIn()
    broken.refuses.update({f"load {version}": 1000 for version in range(1, 1000)})
    with serving_http(healthy.answer) as url, serving_http(broken.answer) as other, (tmp_path / "log").open("w") as log:
        urls = json.dumps([url.removesuffix("/v1"), other.removesuffix("/v1")])
        settings = (f"data_dir={tmp_path}", f"serving.urls={urls}", "learner.max_steps=12", *SMALL)
        run = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "rollstream", "run", str(ROOT / "recipes" / "dsort3" / "run.toml")),
                *("--run", run_name, *(f"--set={setting}" for setting in settings)),
            ],
            env={**os.environ, "JAX_COMPILATION_CACHE_DIR": str(compiled), "KAFKA_BOOTSTRAP_SERVERS": broker},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            text = tmp_path / "log"
            eventually(
                lambda: healthy.reported == "12" or run.poll() is not None, 900, "the last version in the engine"
            )
            assert run.poll() in (None, 0), text.read_text()[-3000:]
            assert run.wait(300) == 0, text.read_text()[-3000:]
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
    kafka = KafkaConfig(bootstrap_servers=broker)
    assert max(read_manifests(kafka, run_name)) == 12
    assert healthy.loads >= 3
    assert not healthy.paused
    assert not healthy.sampled_torn
    assert not broken.sampled_torn
    lines = (tmp_path / "runs" / run_name / "logs" / "serve-weights.log").read_text().splitlines()
    failed = [json.loads(line) for line in lines if '"replica_update_failed"' in line]
    assert {line["url"] for line in failed} == {other.removesuffix("/v1")}
    assert ledger(kafka, run_name).balanced
