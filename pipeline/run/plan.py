"""Plans the processes of a run: the configuration that they share, and the command line of each.

The processes read one file that their supervisor writes. They do not inherit variables of the supervisor that would
override the file.

The supervisor has service.port, its processes have the ports after it; a list of them for Prometheus (file_sd_configs)
is among the files of the run.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from rollstream.infra.broker.ports import free_port, free_port_row
from rollstream.pipeline.config import RunConfig, inference_urls, load, secret_variables, to_toml
from rollstream.pipeline.deployment.container_settings import withheld_variables
from rollstream.pipeline.deployment.description import (
    ENGINE,
    ENV,
    GATEWAY,
    GROUP,
    INFER,
    LABEL,
    LEARN,
    RoleDescription,
    counts,
    process_name,
    role_of,
)
from rollstream.pipeline.run.supervised_role import RoleSpec
from rollstream.pipeline.settings import is_setting_variable
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)

_SERVERS_TO_COME = 16
_HERE = "127.0.0.1"
_SHARING = (ENV, GROUP, INFER, LABEL, GATEWAY)
"""Roles in which the remaining processes take over the work of a process that ends."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Names the GPUs that a process sees, for CUDA and for ROCm."""
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_MEMORY = (PREALLOCATE, "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR")
"""Variables by which users say themselves how JAX takes the memory of a GPU."""
_ROLES = (LEARN, INFER, ENGINE)
"""Roles that use GPUs."""


@dataclass(frozen=True)
class RunPlan:
    """The processes of a run, by role, in the order in which they start."""

    roles: Mapping[str, tuple[RoleSpec, ...]]

    def of(self, *names: str) -> tuple[RoleSpec, ...]:
        """Return the processes of these roles; a role that the run does not have contributes none."""
        return tuple(spec for name in names for spec in self.roles.get(name, ()))

    @property
    def consumers(self) -> tuple[RoleSpec, ...]:
        """Processes that must be ready before a rollout or a trajectory is produced."""
        return self.of(*(name for name in self.roles if not role_of(name).after))

    @property
    def producers(self) -> tuple[RoleSpec, ...]:
        """Processes that start once the consumers are ready."""
        return self.of(*(name for name in self.roles if role_of(name).after))


def check_labeler(config: RunConfig) -> None:
    """Raise ConfigurationError if an environment waits for a labeler, and none is named."""
    if config.awaits_labels and not config.labeling.labeler:
        raise ConfigurationError(
            "the rewards of an environment come from a labeler, and none is named; set labeling.labeler to judge, or "
            "to package.module:function"
        )


def digest(config: RunConfig) -> str:
    """Return a digest of what the processes of a run depend on: its configuration and the release of rollstream."""
    return hashlib.sha256(f"{version('rollstream')}\n{to_toml(config)}".encode()).hexdigest()


def settled(config: RunConfig) -> tuple[RunConfig, Path]:
    """Complete a configuration with `settle` and write it; return it with its path."""
    config = settle(config)
    return config, write(config)


def settled_again(config: RunConfig) -> tuple[RunConfig, Path]:
    """Return the configuration that a previous supervisor wrote for the processes that still run, with its path."""
    path = _path(config)
    return load(path), path


def settle(config: RunConfig) -> RunConfig:
    """Return the configuration with all values on which processes must agree filled in, such as free ports."""
    config = with_coordinator(config)
    if config.serving.python:
        config = _with_engine(config)
    if config.inference.port or not config.inference.replicas:
        return config
    # Leave room for servers that `rollstream steer scale` adds.
    port = free_port_row(config.inference.host, max(config.inference.replicas, _SERVERS_TO_COME))
    inference = replace(config.inference, port=port)
    return replace(config, inference=inference, worker=replace(config.worker, inference_urls=inference_urls(inference)))


def with_coordinator(config: RunConfig) -> RunConfig:
    """Return the configuration with a coordinator on this machine if a learner of several processes has none."""
    if config.learner.processes == 1 or config.learner.coordinator:
        return config
    coordinator = f"{_HERE}:{free_port(_HERE)}"
    return replace(config, learner=replace(config.learner, coordinator=coordinator))


def is_of_this_machine(coordinator: str) -> bool:
    """Whether all processes of a learner run on this machine: no coordinator is set, or `with_coordinator` chose it."""
    return not coordinator or coordinator.startswith(f"{_HERE}:")


def _with_engine(config: RunConfig) -> RunConfig:
    """Return the configuration with the address of the run's vLLM server, the only server that workers use."""
    urls = config.serving.urls or (f"http://{_HERE}:{free_port(_HERE)}",)
    return replace(
        config,
        serving=replace(config.serving, urls=urls),
        inference=replace(config.inference, replicas=0),
        worker=replace(config.worker, inference_urls=tuple(f"{url.removesuffix('/v1')}/v1" for url in urls)),
    )


def write(config: RunConfig) -> Path:
    """Write the configuration for the processes of a run, readable by the same user only; return its path."""
    path = _path(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.touch(0o600)
    partial.chmod(0o600)  # an earlier file may be readable by everybody
    partial.write_text(to_toml(config), encoding="utf-8")
    partial.replace(path)  # a process that starts at this moment reads the old or the new file, never half a file
    return path


def _path(config: RunConfig) -> Path:
    return config.run_dir / "run.toml"


def plan(config: RunConfig, path: Path) -> RunPlan:
    """Return the processes of a run whose configuration is at `path`."""
    return RunPlan(
        {
            name: tuple(process_spec(config, path, role_of(name), number) for number in range(count))
            for name, count in counts(config).items()
        }
    )


def process_spec(
    config: RunConfig, path: Path, role: RoleDescription, number: int, *, expendable: bool = False
) -> RoleSpec:
    """Return process `number` of a role. `expendable` marks a process that is added after the run began."""
    flags = ["--config", str(path)]
    address = None
    if role.name == GATEWAY:
        address = (config.gateway.host, config.gateway.port + number)
        flags += ["--set", f"gateway.port={config.gateway.port + number}"] if number else []
    supervisor = config.supervisor
    return RoleSpec(
        name=process_name(role, number),
        arguments=("-P", "-m", "rollstream", *role.arguments(number), *flags),
        environment={
            # An empty value removes a variable.
            **dict.fromkeys(withheld_variables(config, role.secrets), ""),
            **device_variables(config, role.name, number, os.environ),
        },
        finishes=role.finishes,
        ready_timeout_s=supervisor.ready_timeout_s,
        stop_timeout_s=supervisor.stop_timeout_s,
        restarts=supervisor.restarts,
        window_s=supervisor.restart_window_s,
        backoff_s=supervisor.backoff_s,
        expendable=expendable or role.expendable,
        shares_work=role.name in _SHARING,
        address=address,
    )


def child_environment(config: RunConfig, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment without variables that override the configuration file, except secrets that it names."""
    kept = secret_variables(config)
    return {
        name: value for name, value in environment.items() if name in kept or not is_setting_variable(RunConfig, name)
    }


def device_variables(config: RunConfig, role: str, number: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that process `number` of a role gets in addition to `environment`.

    By default the first process that uses JAX reserves three quarters of a GPU's memory, and leaves too little to the
    next one for the workspaces of its matrix products. So the learners and servers of a run with several of them, which
    `rollstream steer scale` may add to, take memory as they need it, unless `environment` says how they take it.
    """
    gpus = config.supervisor.learner_gpus if role == LEARN else config.supervisor.inference_gpus
    variables = {VISIBLE: gpus[number % len(gpus)]} if gpus and role in _ROLES else {}
    shared = sum(counts(config).get(name, 0) for name in _ROLES) > 1
    if role in (LEARN, INFER) and shared and not any(environment.get(name) for name in _MEMORY):
        variables[PREALLOCATE] = "false"
    return variables


class ServicePorts:
    """Gives every process its own port, in the order in which they first start; no ports if service.port is 0."""

    def __init__(self, config: RunConfig, *, resumed: bool = False) -> None:
        """`resumed` tells whether processes of a previous supervisor go on: each of them keeps its port."""
        self._service, self._run, self._supervisor = config.service, config.run, config.service.port
        self.path: Path = config.run_dir / "targets.json"
        self._ports = _listed(self.path) if resumed else {}
        self._retired = set(self._ports)

    def place(self, spec: RoleSpec) -> RoleSpec:
        """Return the process with its port in its arguments, the same port at every start. An optional process, such as
        the page, gets none."""
        if not self._service.port or spec.optional:
            return spec
        port = self._ports.setdefault(spec.name, 1 + max(self._ports.values(), default=self._service.port))
        self._retired.discard(spec.name)
        self._write()
        return replace(spec, arguments=(*spec.arguments, "--set", f"service.port={port}"))

    def retire(self, name: str) -> None:
        """Remove a process that is no longer wanted from the list; its port stays reserved for it."""
        if self._service.port:
            self._retired.add(name)
            self._write()

    def _write(self) -> None:
        listed = {name: port for name, port in self._ports.items() if name not in self._retired}
        processes = {"supervisor": self._supervisor, **listed}
        targets = [
            {
                "targets": [f"{self._service.host}:{port}"],
                # Prometheus drops labels with this prefix, but each sample names its run and process.
                "labels": {"__meta_run": self._run, "__meta_process": name},
            }
            for name, port in processes.items()
        ]
        partial = self.path.with_suffix(".partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(targets, indent=2) + "\n")
            partial.replace(self.path)
        except OSError as error:  # the run goes on, and Prometheus has the earlier list
            event(logger, "targets_not_written", level=logging.WARNING, path=str(self.path), error=str(error))


def _listed(path: Path) -> dict[str, int]:
    """Return the ports in the list of a previous supervisor, by process name; none if the list cannot be read."""
    try:
        entries = json.loads(path.read_text())
        ports = {e["labels"]["__meta_process"]: int(e["targets"][0].rpartition(":")[2]) for e in entries}
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return {}
    ports.pop("supervisor", None)
    return ports
