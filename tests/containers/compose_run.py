"""A run in containers, written and started by docker-compose as users do it, and what its containers say.

Containers are asked at their own addresses, so the Docker engine must be one of this machine.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rollstream.pipeline.deployment.compose import CONFIG
from rollstream.pipeline.deployment.container_settings import SERVICE_PORT
from rollstream.pipeline.deployment.description import ARCHIVE
from tests.containers.engine import docker_compose
from tests.support.command_line import answer_of
from tests.support.paths import ROOT
from tests.support.probes import probe, scrape
from tests.support.waiting import eventually

SMALLER = (
    *("--set=supervisor.workers=1", "--set=topics.partitions=2", "--set=worker.group_size=8"),
    *("--set=grouping.batch_rollouts=16", "--set=learner.rollouts_per_step=32"),
)
"""Flags for a run of the demo's settings that a machine with two cores trains beside tests."""
TERMINATED = 143
"""Exit code after SIGTERM of Java, of a tool of rollstream that has no end, such as the archive, and of a learner that
has steps to make."""
KILLED = 137
"""Exit code after SIGKILL, with which an engine ends a container after its grace period."""


@dataclass(frozen=True)
class ContainedRun:
    """A run whose compose file is in a folder; its name is that of the project."""

    folder: Path
    name: str
    services: tuple[str, ...]
    """Services that `up` starts."""
    overrides: tuple[Path, ...] = ()

    @property
    def brokers(self) -> tuple[str, ...]:
        return tuple(name for name in self.services if name.startswith("broker"))

    @property
    def roles(self) -> tuple[str, ...]:
        """Services that run until they are stopped or their work is done."""
        return tuple(name for name in self.services if name not in (*self.brokers, "topics"))

    def compose(self, *words: str, timeout_s: float = 1800.0) -> str:
        """Output of a command of docker-compose, which must succeed."""
        answer = self._compose(words, timeout_s)
        assert answer.returncode == 0, f"{words}: {answer.stdout[-2000:]}\n{answer.stderr[-6000:]}"
        return answer.stdout

    def tool(self, *words: str) -> str:
        """Output of a command of rollstream in the container for tools, as a page shows it to users."""
        return self.compose("run", "--rm", "-T", "tools", *words, "--config", CONFIG)

    def evidence(self) -> dict[str, Any]:
        """The findings of the independent auditor, made within the containers' network; see contained_audit."""
        owner = ROOT.stat()
        code = ("--volume", f"{ROOT}:/source:ro", "--workdir", "/source", "-e", "PYTHONPATH=/source")
        user = ("--user", f"{owner.st_uid}:{owner.st_gid}")
        module = ("-m", "tests.containers.contained_audit", self.name, ",".join(f"{b}:9092" for b in self.brokers))
        once = ("run", "--rm", "-T", "--no-deps", "--entrypoint", "python")
        decoded = json.loads(self.compose(*once, *code, *user, "tools", *module).splitlines()[-1])
        assert isinstance(decoded, dict)
        return decoded

    def inspect(self, service: str) -> dict[str, Any]:
        """State of a service's container, running or not, as the engine reports it."""
        labels = {"project": self.name, "service": service, "oneoff": "False"}
        filters = [f"--filter=label=com.docker.compose.{key}={value}" for key, value in labels.items()]
        [container] = docker("ps", "--all", "--quiet", "--no-trunc", *filters).split()
        [state] = json.loads(docker("inspect", container))
        assert isinstance(state, dict)
        return state

    def ended(self, service: str) -> int | None:
        """Exit code of a container that has ended, None for one that runs."""
        state = self.inspect(service)["State"]
        return None if state["Running"] or state["Restarting"] else int(state["ExitCode"])

    def address(self, service: str) -> str:
        [network] = self.inspect(service)["NetworkSettings"]["Networks"].values()
        return str(network["IPAddress"])

    def await_all(self) -> None:
        """Wait until every role takes work."""
        for name in self.roles:
            eventually(lambda name=name: self._is_ready(name), 600, f"{name} to be ready", every_s=1.0)

    def _is_ready(self, service: str) -> bool:
        if service == ARCHIVE:  # A tool has no service port.
            return self.ended(service) is None
        return probe(f"http://{self.address(service)}:{SERVICE_PORT}/readyz")[0] == 200

    def step(self) -> float:
        """Newest step of the learner. Raises OSError or KeyError while none is known."""
        series, _places = scrape(f"http://{self.address('learn')}:{SERVICE_PORT}")
        return series["rollstream_learner_step"][()]

    def await_steps(self, more: int, what: str) -> None:
        """Wait until the learner has made so many more steps than are known now."""
        first = eventually(lambda: (self.step(),), 600, f"{what}: a step of the learner", every_s=1.0)[0]
        eventually(lambda: self.step() >= first + more, 600, f"{what}: {more} steps more than {first}", every_s=1.0)

    def stop(self, *services: str) -> None:
        """Stop services, which must end by themselves within their grace periods."""
        self.compose("stop", *services)
        ended = {name: self.ended(name) for name in services}
        without_end = (*self.brokers, ARCHIVE, "learn")
        # In a cluster that stops, the node that ends last has lost its quorum, and may wait for it until it is killed.
        late = [name for name in self.brokers if len(self.brokers) > 1 and ended.get(name) == KILLED]
        assert len(late) <= 1
        assert ended == {
            name: KILLED if name in late else TERMINATED if name in without_end else 0 for name in services
        }

    def troubles(self) -> dict[str, str]:
        """Containers that were killed for memory or started again by the engine, with what is known of them."""
        collected = {}
        for name in self.services:
            state = self.inspect(name)
            if state["State"]["OOMKilled"] or state["RestartCount"]:
                collected[name] = f"restarts {state['RestartCount']}, for memory: {state['State']['OOMKilled']}"
        return collected

    def log(self, service: str) -> str:
        """The log of a container so far, over all its starts."""
        return self._compose(("logs", "--no-color", service), 120.0).stdout

    def show(self) -> None:
        """Print the end of every log, and its last errors, for a test that fails."""
        for name in self.services:
            log = self.log(name)
            print(f"--- {name}", log[-3000:], sep="\n")
            # A container that was started again since has its reasons further up.
            errors = [line for line in log.splitlines() if "rollstream: " in line or '"level": "error"' in line]
            print(f"--- errors of {name}", *errors[-10:], sep="\n")

    def _compose(self, words: Sequence[str], timeout_s: float) -> "subprocess.CompletedProcess[str]":
        files = [f"--file={file}" for file in (self.folder / "compose.yaml", *self.overrides)]
        command = [*docker_compose(), *files, "--project-name", self.name, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=self.folder)


def docker(*words: str, timeout_s: float = 600.0) -> str:
    """Output of a command of the engine, which must succeed."""
    answer = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=timeout_s)
    assert answer.returncode == 0, f"{words}: {answer.stderr}"
    return answer.stdout


@contextmanager
def contained_run(
    folder: Path, name: str, *flags: str, override: Mapping[str, Any] | None = None
) -> Iterator[ContainedRun]:
    """A run of the demo's settings that is up, with its first policy version; nothing of it is left afterwards.

    `override` is the content of a compose file that overrides the one of the run.
    """
    shutil.copy(ROOT / "recipes" / "dsort3" / "run.toml", folder / "run.toml")
    (folder / "run.toml").chmod(0o644)
    written = answer_of(folder, "deploy", "compose", "run.toml", "-o", "compose.yaml", f"--run={name}", *flags)
    assert written.returncode == 0, written.stderr
    overrides = ()
    if override:
        (folder / "override.yaml").write_text(json.dumps(override))
        overrides = (folder / "override.yaml",)
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    run = ContainedRun(folder, name, tuple(s for s in services if "profiles" not in services[s]), overrides)
    try:
        run.compose("up", "--detach")
        yield run
    except BaseException:
        run.show()
        raise
    finally:
        run.compose("down", "--volumes", "--timeout", "1")
