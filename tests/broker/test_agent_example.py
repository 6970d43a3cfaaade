"""The example of an agent, in a run as a user starts it: by its base URL alone it becomes better at its task."""

import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from rollstream.infra.broker.ports import free_port
from rollstream.pipeline.audit.ledger import ledger
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import Rollout
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode
from tests.broker.test_demo import environment
from tests.support.paths import ROOT
from tests.support.waiting import eventually

STEPS = 50
LIMIT_S = 3600
AGENT = ROOT / "examples" / "tool_agent.py"


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 600)
def test_an_agent_that_changes_its_base_url_learns_its_task(
    compiled: Path, tmp_path: Path, broker: str, run_name: str
) -> None:
    assert not re.search(r"^(import|from) rollstream", AGENT.read_text(), re.MULTILINE)
    port = free_port("127.0.0.1")
    settings = (
        *(f"gateway.port={port}", "supervisor.workers=0", f"data_dir={tmp_path}"),
        f"learner.max_steps={STEPS}",
    )
    recipe = ROOT / "recipes" / "tools" / "run.toml"
    command = ["rollstream", "run", "--config", str(recipe), "--run", run_name, *(f"--set={each}" for each in settings)]
    report = tmp_path / "run.log"
    with (
        report.open("w") as log,
        subprocess.Popen(
            [sys.executable, "-P", "-m", *command],
            env=environment(compiled, KAFKA_BOOTSTRAP_SERVERS=broker),
            cwd=tmp_path,
            stdout=log,
            stderr=log,
        ) as run,
    ):
        try:
            eventually(lambda: "processes are ready" in report.read_text() or run.poll() is not None, 1200, "a run")
            agent = subprocess.run(
                [sys.executable, "-P", AGENT, f"http://127.0.0.1:{port}"],
                stderr=subprocess.PIPE,
                text=True,
                timeout=LIMIT_S,
            )
            run.wait(300)
        finally:
            run.kill()
    assert run.returncode == 0, report.read_text()[-3000:]
    assert agent.returncode == 0, agent.stderr[-3000:]

    kafka = KafkaConfig(bootstrap_servers=broker)
    messages = sorted(read_to_end(kafka, topic_name(run_name, "rollouts")), key=lambda message: message.timestamp_ms)
    rollouts = [record for message in messages if isinstance(record := decode(message.value), Rollout)]
    exact = [rollout.reward_components["exact"] for rollout in rollouts]
    assert len(exact) >= 64 * STEPS
    assert mean(exact[-500:]) - mean(exact[:500]) >= 0.2
    book = ledger(kafka, run_name)
    assert book.balanced, book.problems
    assert book.calls["in_rollouts"] > 1.5 * len(rollouts)
