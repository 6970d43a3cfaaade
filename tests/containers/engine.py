"""A Docker engine for tests, and an image of Kafka in it: found, or started and built, and ended afterwards.

No test is skipped if no engine can be had: the test that asked for it fails with the remedy.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rollstream.infra.broker.child_keeper
from rollstream.infra.config import BrokerConfig
from rollstream.topics.errors import BrokerUnavailable
from tests.support.debian import install_program
from tests.support.image.build import TAG, build_kafka
from tests.support.waiting import eventually

_DESELECT = 'deselect these tests by name: make test ARGS="--ignore=tests/containers"'
REMEDY = (
    "install Docker and start it (or run the tests as root on Linux, then they do), name an engine in DOCKER_HOST, or "
    f"{_DESELECT}"
)
_PULL_TIMEOUT_S = 300
_OWN_MOUNTS = ("unshare", "--mount", "--propagation", "slave", "--")
"""Mounts of the engine, such as that of its network's namespace, end with it, also if these tests are killed. Otherwise
they would hold the folder, which pytest removes at a later run."""
_STARTS = 3
"""On a busy machine the engine gives up waiting for its containerd, after 15 s."""


def answers(host: str | None = None) -> bool:
    """Whether an engine answers at DOCKER_HOST, or at `host`."""
    if shutil.which("docker") is None:
        return False
    environment = {**os.environ, "DOCKER_HOST": host} if host else None
    command = ["docker", "info", "--format", "{{.ServerVersion}}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, env=environment)
    except subprocess.TimeoutExpired:
        return False
    return answer.returncode == 0 and bool(answer.stdout.strip())


@contextmanager
def docker_engine(folder: Path) -> Iterator[None]:
    """An engine at DOCKER_HOST: the one that answers, or a new one with its data in `folder`, ended on leaving."""
    if answers():
        yield
        return
    if os.geteuid() != 0:
        pytest.fail(f"no Docker engine answers, and only root could start one: {REMEDY}", pytrace=False)
    if shutil.which("dockerd") is None or shutil.which("docker") is None:
        _install()
        if answers():  # The package started it.
            yield
            return
    host = f"unix://{folder}/docker.sock"
    command = ["dockerd", "--host", host, "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"]
    task = {
        "command": [*_OWN_MOUNTS, *command, "--pidfile", f"{folder}/dockerd.pid"],
        "kill_command": [],
        "log": f"{folder}/dockerd.log",
        "cwd": str(folder),
        "stop_timeout_s": 120,
    }
    engine = _started(task, host)
    before = os.environ.get("DOCKER_HOST")
    try:
        os.environ["DOCKER_HOST"] = host
        yield
    finally:
        if before is None:
            os.environ.pop("DOCKER_HOST", None)
        else:
            os.environ["DOCKER_HOST"] = before
        assert engine.stdin is not None
        engine.stdin.close()
        engine.wait(300)
        shutil.rmtree(folder, ignore_errors=True)


def _started(task: dict[str, Any], host: str) -> "subprocess.Popen[bytes]":
    """An engine that answers, under a keeper, as brokers are: it ends with these tests, however they end."""
    for _ in range(_STARTS):
        engine = subprocess.Popen(
            [sys.executable, "-I", "-S", rollstream.infra.broker.child_keeper.__file__, json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        eventually(partial(_decided, engine, host), 60, "the Docker engine answers", every_s=0.2)
        if engine.poll() is None:
            return engine
    last = Path(task["log"]).read_text(errors="replace").strip().splitlines()[-1:]
    pytest.fail(f"the Docker engine does not start ({' '.join(last)}): {REMEDY}", pytrace=False)


def _decided(engine: "subprocess.Popen[bytes]", host: str) -> bool:
    return engine.poll() is not None or answers(host)


def kafka_image() -> str:
    """An image with the official contract: ROLLSTREAM_KAFKA_IMAGE, the official one if the engine has it, or ours,
    which needs no registry; if that cannot be built, the official one is pulled.
    """
    given = os.environ.get("ROLLSTREAM_KAFKA_IMAGE")
    if given:
        return given
    official = BrokerConfig().image
    if subprocess.run(["docker", "image", "inspect", official], capture_output=True, timeout=300).returncode == 0:
        return official
    install_program("busybox", "busybox-static")  # Our image needs busybox; the build names it if it is missing.
    try:
        build_kafka()
    except BrokerUnavailable as error:
        pull = ["docker", "pull", "--quiet", official]
        answer = subprocess.run(pull, capture_output=True, text=True, timeout=_PULL_TIMEOUT_S)
        if answer.returncode != 0:
            pytest.fail(f"{error}; and {' '.join(pull)}: {answer.stderr.strip()}; {REMEDY}", pytrace=False)
        return official
    return TAG


def docker_compose() -> list[str]:
    """The command of compose: docker-compose, found or installed by apt, or else the plug-in of docker."""
    if not install_program("docker-compose", "docker-compose"):
        return ["docker-compose"]
    plugin = shutil.which("docker") and subprocess.run(
        ["docker", "compose", "version"], capture_output=True, check=False
    )
    if not plugin or plugin.returncode:
        pytest.fail(f"there is no docker-compose: install it, or {_DESELECT}", pytrace=False)
    return ["docker", "compose"]


def _install() -> None:
    """Install Docker by apt, or fail the test."""
    if shutil.which("apt-get") is None:
        pytest.fail(f"Docker is not installed: {REMEDY}", pytrace=False)
    # Newer releases of Debian package its command line separately.
    for program, package in (("dockerd", "docker.io"), ("docker", "docker-cli")):
        problem = install_program(program, package)
        if problem:
            pytest.fail(f"apt-get does not install Docker ({problem}): {REMEDY}", pytrace=False)
