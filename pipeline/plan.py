"""Which processes a run consists of: the settled configuration they share and the command line of each.

Processes read one file written by their supervisor, and nothing of its environment that would override it.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pipeline.config import RunConfig, inference_url, secret_variables, to_toml
from pipeline.settings import BOOTSTRAP_VARIABLE, ENVIRONMENT_PREFIX
from pipeline.supervisor import RoleSpec

LEARN = "learn"
INFER = "infer"


@dataclass(frozen=True)
class RunPlan:
    """The roles of a run, in the order they start."""

    learn: RoleSpec
    infer: RoleSpec
    groupers: tuple[RoleSpec, ...]
    workers: tuple[RoleSpec, ...]
    evaluators: tuple[RoleSpec, ...] = ()
    """One, where versions are to be evaluated."""
    followers: tuple[RoleSpec, ...] = ()
    """The other processes of a learner that has several."""

    @property
    def consumers(self) -> tuple[RoleSpec, ...]:
        """Everything that must be ready before a rollout is produced."""
        return (self.learn, *self.followers, self.infer, *self.groupers)


@dataclass(frozen=True)
class ControlPlan:
    """The roles of a run of a control task, in the order they start."""

    fillers: tuple[RoleSpec, ...]
    """One, where a buffer is to be filled."""
    labellers: tuple[RoleSpec, ...]
    collectors: tuple[RoleSpec, ...]

    @property
    def consumers(self) -> tuple[RoleSpec, ...]:
        """Everything that must be ready before a trajectory is produced."""
        return (*self.fillers, *self.labellers)


def settle(config: RunConfig) -> RunConfig:
    """The configuration with every choice made that processes must agree on: ports of this machine."""
    if config.learner.processes > 1 and not config.learner.coordinator:
        coordinator = f"127.0.0.1:{_free_port('127.0.0.1')}"
        config = replace(config, learner=replace(config.learner, coordinator=coordinator))
    if config.inference.port:
        return config
    inference = replace(config.inference, port=_free_port(config.inference.host))
    return replace(
        config, inference=inference, worker=replace(config.worker, inference_urls=(inference_url(inference),))
    )


def write(config: RunConfig) -> Path:
    """Write the configuration for the processes of a run, and for whoever asks about it later: the same user only."""
    path = config.run_dir / "run.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(0o600)
    path.chmod(0o600)  # one that was there may be open to all
    path.write_text(to_toml(config), encoding="utf-8")
    return path


def plan(config: RunConfig, path: Path) -> RunPlan:
    """The roles of a run whose configuration lies at `path`."""
    spec = partial(_spec, config, path)

    return RunPlan(
        learn=spec(LEARN, "learn", finishes=True),
        followers=tuple(
            spec(f"{LEARN}-{n}", "learn", "--process", str(n), finishes=True)
            for n in range(1, config.learner.processes)
        ),
        infer=spec(INFER, "infer"),
        groupers=tuple(spec(f"group-{n}", "group", "--ordinal", str(n)) for n in range(config.grouper.processes)),
        workers=tuple(spec(f"env-{n}", "env", "--ordinal", str(n)) for n in range(config.supervisor.workers)),
        evaluators=(spec("eval", "eval"),) if config.evaluation.every_versions else (),
    )


def control_plan(config: RunConfig, path: Path) -> ControlPlan:
    """The roles of a run of a control task whose configuration lies at `path`."""
    spec = partial(_spec, config, path)
    return ControlPlan(
        fillers=(spec("fill", "fill"),) if config.fill.directory else (),
        labellers=tuple(spec(f"label-{n}", "label", "--ordinal", str(n)) for n in range(config.labelling.processes)),
        collectors=tuple(
            spec(f"collect-{n}", "collect", "--ordinal", str(n), finishes=True) for n in range(config.collect.processes)
        ),
    )


def _spec(config: RunConfig, path: Path, name: str, command: str, *flags: str, finishes: bool = False) -> RoleSpec:
    return RoleSpec(
        name=name,
        arguments=("-P", "-m", "pipeline", command, "--config", str(path), *flags),
        finishes=finishes,
        ready_timeout_s=config.supervisor.ready_timeout_s,
        stop_timeout_s=config.supervisor.stop_timeout_s,
        restarts=config.supervisor.restarts,
        backoff_s=config.supervisor.backoff_s,
    )


def child_environment(config: RunConfig, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without what would override the configuration file, but with the secrets that it refers to."""
    kept = secret_variables(config)
    return {
        name: value
        for name, value in environment.items()
        if name in kept or (not name.startswith(ENVIRONMENT_PREFIX) and name != BOOTSTRAP_VARIABLE)
    }


def _free_port(host: str) -> int:
    with socket.socket() as trial:
        trial.bind((host, 0))
        port: int = trial.getsockname()[1]
    return port
