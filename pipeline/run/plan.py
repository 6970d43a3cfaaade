"""Plans the processes of a run: the settled configuration they share, and the command line of each.

Processes read one file written by their supervisor, and no variable of its environment that would override it.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rollstream.infra.ports import free_port, free_port_row
from rollstream.pipeline.config import RunConfig, inference_urls, secret_variables, to_toml
from rollstream.pipeline.run.supervisor import RoleSpec
from rollstream.pipeline.settings import BOOTSTRAP_VARIABLE, ENVIRONMENT_PREFIX
from rollstream.topics.errors import ConfigurationError

LEARN = "learn"
INFER = "infer"


@dataclass(frozen=True)
class RunPlan:
    """The roles of a run, in the order they start."""

    learn: RoleSpec
    servers: tuple[RoleSpec, ...]
    """Inference servers; none if the workers ask others."""
    groupers: tuple[RoleSpec, ...]
    workers: tuple[RoleSpec, ...]
    evaluators: tuple[RoleSpec, ...] = ()
    """One if versions are evaluated, else none."""
    engines: tuple[RoleSpec, ...] = ()
    """One if a vLLM is started, else none."""
    weight_servers: tuple[RoleSpec, ...] = ()
    """One if engines of others are kept on the newest version, else none."""
    gateways: tuple[RoleSpec, ...] = ()
    """One if gateway.port is set, else none."""
    labelers: tuple[RoleSpec, ...] = ()
    """Some if the rewards of an environment come from a labeler, else none."""
    followers: tuple[RoleSpec, ...] = ()
    """The further processes of a learner that has several."""

    @property
    def consumers(self) -> tuple[RoleSpec, ...]:
        """Roles that must be ready before a rollout is produced."""
        servers = (*self.servers, *self.engines, *self.weight_servers)
        return (self.learn, *self.followers, *servers, *self.groupers, *self.labelers)


@dataclass(frozen=True)
class ControlPlan:
    """The roles of a run of a control task, in the order they start."""

    fillers: tuple[RoleSpec, ...]
    """One if a buffer is filled, else none."""
    labelers: tuple[RoleSpec, ...]
    collectors: tuple[RoleSpec, ...]

    @property
    def consumers(self) -> tuple[RoleSpec, ...]:
        """Roles that must be ready before a trajectory is produced."""
        return (*self.fillers, *self.labelers)


def check_labeler(config: RunConfig) -> None:
    """Raise ConfigurationError if an environment waits for a labeler, and none is named."""
    if config.awaits_labels and not config.labeling.labeler:
        raise ConfigurationError(
            "the rewards of an environment come from a labeler, and none is named; set labeling.labeler to judge, or "
            "to package.module:function"
        )


def check_worker_python(config: RunConfig) -> None:
    """Raise ConfigurationError if the workers' Python is no program."""
    python = config.supervisor.worker_python
    if python and shutil.which(python) is None:
        raise ConfigurationError(
            f"supervisor.worker_python is {python!r}, which is no program here; name the python of a virtual "
            "environment in which rollstream is installed"
        )


def settle(config: RunConfig) -> RunConfig:
    """Return the configuration with all values on which processes must agree filled in: ports of this machine."""
    if config.learner.processes > 1 and not config.learner.coordinator:
        coordinator = f"127.0.0.1:{free_port('127.0.0.1')}"
        config = replace(config, learner=replace(config.learner, coordinator=coordinator))
    if config.serving.python:
        config = _with_engine(config)
    if config.inference.port or not config.inference.replicas:
        return config
    port = free_port_row(config.inference.host, config.inference.replicas)
    inference = replace(config.inference, port=port)
    return replace(config, inference=inference, worker=replace(config.worker, inference_urls=inference_urls(inference)))


def _with_engine(config: RunConfig) -> RunConfig:
    """Return the configuration with the place of the vLLM that is started, which alone answers the workers."""
    urls = config.serving.urls or (f"http://127.0.0.1:{free_port('127.0.0.1')}",)
    return replace(
        config,
        serving=replace(config.serving, urls=urls),
        inference=replace(config.inference, replicas=0),
        worker=replace(config.worker, inference_urls=tuple(f"{url.removesuffix('/v1')}/v1" for url in urls)),
    )


def write(config: RunConfig) -> Path:
    """Write the configuration for the processes of a run, readable by the same user only; return its path."""
    path = config.run_dir / "run.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(0o600)
    path.chmod(0o600)  # an older file may be readable by everybody
    path.write_text(to_toml(config), encoding="utf-8")
    return path


def plan(config: RunConfig, path: Path) -> RunPlan:
    """Return the roles of a run whose configuration lies at `path`."""
    spec = partial(_spec, config, path)

    return RunPlan(
        learn=spec(LEARN, "learn", finishes=True),
        followers=tuple(
            spec(f"{LEARN}-{n}", "learn", "--process", str(n), finishes=True)
            for n in range(1, config.learner.processes)
        ),
        servers=tuple(
            spec(f"{INFER}-{n}" if n else INFER, "infer", "--ordinal", str(n)) for n in range(config.inference.replicas)
        ),
        groupers=tuple(spec(f"group-{n}", "group", "--ordinal", str(n)) for n in range(config.grouper.processes)),
        labelers=_labelers(config, path),
        workers=tuple(
            replace(spec(f"env-{n}", "env", "--ordinal", str(n)), python=config.supervisor.worker_python)
            for n in range(config.supervisor.workers)
        ),
        engines=(spec("engine", "engine"),) if config.serving.python else (),
        weight_servers=(spec("serve-weights", "serve-weights"),) if config.serving.urls else (),
        gateways=(spec("gateway", "gateway"),) if config.gateway.port else (),
        evaluators=(spec("eval", "eval"),) if config.evaluation.every_versions else (),
    )


def control_plan(config: RunConfig, path: Path) -> ControlPlan:
    """Return the roles of a run of a control task whose configuration lies at `path`."""
    spec = partial(_spec, config, path)
    return ControlPlan(
        fillers=(spec("fill", "fill"),) if config.fill.directory else (),
        labelers=_labelers(config, path),
        collectors=tuple(
            spec(f"collect-{n}", "collect", "--ordinal", str(n), finishes=True) for n in range(config.collect.processes)
        ),
    )


def _labelers(config: RunConfig, path: Path) -> tuple[RoleSpec, ...]:
    return tuple(_spec(config, path, f"label-{n}", "label", "--ordinal", str(n)) for n in range(config.labelers))


def _spec(config: RunConfig, path: Path, name: str, command: str, *flags: str, finishes: bool = False) -> RoleSpec:
    return RoleSpec(
        name=name,
        arguments=("-P", "-m", "rollstream", command, "--config", str(path), *flags),
        finishes=finishes,
        ready_timeout_s=config.supervisor.ready_timeout_s,
        stop_timeout_s=config.supervisor.stop_timeout_s,
        restarts=config.supervisor.restarts,
        backoff_s=config.supervisor.backoff_s,
    )


def child_environment(config: RunConfig, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment without variables that override the configuration file, except secrets it refers to."""
    kept = secret_variables(config)
    return {
        name: value
        for name, value in environment.items()
        if name in kept or (not name.startswith(ENVIRONMENT_PREFIX) and name != BOOTSTRAP_VARIABLE)
    }
