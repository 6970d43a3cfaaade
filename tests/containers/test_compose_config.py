"""docker-compose of Debian 12, the oldest that is still installed, takes the compose file of a run."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.containers.engine import docker_compose
from tests.support.command_line import answer_of


@pytest.mark.long  # installs Debian's docker-compose
def test_compose_takes_the_file_of_a_run_with_all_its_services(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('task = "add"\n[gateway]\nport = 8100\n[inference]\nreplicas = 2\n')
    flags = ["--code", str(tmp_path), "--brokers", "3", "--set", "worker.model=a$b\"c'd"]
    file = tmp_path / "compose.yaml"
    written = answer_of(tmp_path, "deploy", "compose", "run.toml", *flags, "-o", str(file))
    assert written.returncode == 0, written.stdout + written.stderr
    command = [*docker_compose(), "--file", str(file), "--profile", "monitoring", "--profile", "tools"]
    taken = subprocess.run([*command, "config"], capture_output=True, text=True, timeout=300, check=False)
    assert taken.returncode == 0, taken.stderr
    listed = subprocess.run([*command, "config", "--services"], capture_output=True, text=True, timeout=300, check=True)
    roles = ["learn", "infer", "infer-1", "group-0", "group-1", "env-0", "env-1", "gateway"]
    others = ["broker-1", "broker-2", "broker-3", "topics", "archive", "tools", "prometheus", "grafana"]
    assert sorted(listed.stdout.split()) == sorted([*roles, *others])
    assert json.dumps("http://infer-1:8001/v1") in taken.stdout.replace('\\"', '"')
