"""The pods of a chart as processes of this machine: their commands, settings, users and access rules, in their order.

Only names change: of hosts, directories and ports, and the number of a pod, which is part of its host's name there.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rollstream.infra.broker.ports import free_ports
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.command_line.process_number import AUTO
from rollstream.pipeline.deployment.compose import CONFIG
from rollstream.pipeline.deployment.container_settings import HOME
from rollstream.topics.config import KafkaConfig
from tests.broker.test_serving_run import SMALL
from tests.support.charts import Object, Release, write_chart
from tests.support.paths import ROOT
from tests.support.secured_broker import SecuredBroker, secured_broker
from tests.support.waiting import eventually

FLAGS = (
    *SMALL,
    "learner.max_steps=3",
    "supervisor.workers=1",
    "evaluation.every_versions=1",
    "evaluation.max_prompts=2",
)


class Machine:
    """Runs containers of pods as processes."""

    def __init__(self, release: Release, broker: SecuredBroker, folder: Path, compiled: Path) -> None:
        self.release, self.broker, self.folder, self.compiled = release, broker, folder, compiled
        self.ports = dict(zip(release.pods(), free_ports("127.0.0.1", len(release.pods())), strict=True))
        self.inference, *_rest = free_ports("127.0.0.1", 1)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.passwords = {name: f"password of {name}" for name in release.of("KafkaUser")}
        rules = [
            (name, rule)
            for name, user in release.of("KafkaUser").items()
            for rule in user["spec"]["authorization"]["acls"]
        ]
        broker.admit(self.passwords, rules)

    def start(self, role: str, container: Object) -> subprocess.Popen[bytes]:
        """Start a container of the pod of a role."""
        variables = {**self._variables(role, container), "JAX_COMPILATION_CACHE_DIR": str(self.compiled)}
        command = [sys.executable, "-P", "-m", *container["command"], *map(self._here, container["args"])]
        command = ["0" if word == AUTO else word for word in command]
        with (self.folder / f"{role}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env={**os.environ, **variables}, stdout=log, stderr=log, cwd=self.folder
            )
        self.processes.append(process)
        return process

    def role(self, role: str) -> subprocess.Popen[bytes]:
        """Start the pod of a role: its init container, and once that is done, its container."""
        spec = self.release.pods()[role]["spec"]
        for container in spec.get("initContainers", ()):
            waiting = self.start(role, container)
            assert waiting.wait(600) == 0, self.log(role)
        return self.start(role, spec["containers"][0])

    def log(self, role: str) -> str:
        return (self.folder / f"{role}.log").read_text(errors="replace")[-3000:]

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(120)
            finally:
                process.kill()

    def _variables(self, role: str, container: Object) -> Mapping[str, str]:
        maps, collected = self.release.of("ConfigMap"), {}
        for source in container["envFrom"]:
            collected |= maps[source["configMapRef"]["name"]]["data"]
        for variable in container["env"]:
            reference = variable.get("valueFrom", {}).get("secretKeyRef", {})
            collected[variable["name"]] = self.passwords[reference["name"]] if reference else variable["value"]
        here = {name: self._here(text) for name, text in collected.items()}
        here["ROLLSTREAM_SERVICE__PORT"] = str(self.ports[role])
        here["ROLLSTREAM_INFERENCE__PORT"] = str(self.inference)
        return here

    def _here(self, text: str) -> str:
        """Translate a text of the chart for this machine."""
        for role, port in self.ports.items():
            text = re.sub(rf"\b{self.release.name}-{role}:8081\b", f"127.0.0.1:{port}", text)
        text = re.sub(r"[\w-]+-infer-0\.[\w-]+-infer:8000", f"127.0.0.1:{self.inference}", text)
        text = re.sub(r"[\w-]+-kafka-bootstrap:9093", self.broker.secured, text)
        text = text.replace("/etc/kafka-ca/ca.crt", str(self.broker.authority))
        text = text.replace(CONFIG, str(self.folder / "run.toml"))
        return text.replace(str(HOME), str(self.folder / "files"))


@pytest.fixture
def machine(tmp_path: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    for name in ("KAFKA_BOOTSTRAP_SERVERS", "ROLLSTREAM_RUN"):
        monkeypatch.delenv(name, raising=False)
    demo = (ROOT / "recipes" / "dsort3" / "run.toml").read_text()
    chart = write_chart(tmp_path, demo, "--run", "pods", *(f"--set={setting}" for setting in FLAGS))
    one: dict[str, Any] = {
        "brokers": {"replicationFactor": 1, "minInSyncReplicas": 1},
        "roles": {"prune": {"enabled": True}},
    }
    with secured_broker(tmp_path / "broker") as broker:
        machine = Machine(Release(chart, over=one), broker, tmp_path, compiled)
        try:
            yield machine
        finally:
            machine.stop()


@pytest.mark.long
def test_the_pods_of_a_run_work_with_the_access_that_the_chart_gives_them_and_no_more(machine: Machine) -> None:
    # In a cluster all pods start at once, so grouping may start before the topics exist. Here its init container starts
    # first; it must wait for the job that creates the topics.
    group = machine.release.pods()["group"]["spec"]
    waiting = machine.start("group", group["initContainers"][0])
    topics = machine.role("topics")
    assert topics.wait(300) == 0, machine.log("topics")
    assert waiting.wait(300) == 0, machine.log("group")
    machine.start("group", group["containers"][0])
    learner = machine.role("learn")
    for role in ("infer", "archive", "env", "eval"):
        machine.role(role)
    assert learner.wait(900) == 0, machine.log("learn")

    kafka = KafkaConfig(bootstrap_servers=machine.broker.open)
    eventually(lambda: any((machine.folder / "files").rglob("*.parquet")), 300, "the archive to have a file")
    assert machine.role("prune").wait(300) == 0, machine.log("prune")
    # An operator runs these with `kubectl exec` in the pod for commands.
    tools = {**machine.release.pods()["tools"]["spec"]["containers"][0], "command": ["rollstream"]}
    for words in (["ledger"], ["verify"], ["steer", "scale", "group=auto"]):
        command = machine.start("tools", {**tools, "args": [*words, "--config", CONFIG]})
        assert command.wait(300) == 0, machine.log("tools")
    machine.stop()
    assert ledger(kafka, "pods").problems == []
    assert machine.broker.denied == set()
