"""Renders a run as a batch script of Slurm: a heterogeneous job of a broker and of `rollstream run`.

Slurm may kill and requeue the job at any time: the broker starts again on its data, on whichever node it gets, and the
roles continue from the log.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.container_settings import check_broker_secrets, check_brokers, is_secured
from rollstream.topics.errors import ConfigurationError

_ADDRESS = "KAFKA_BOOTSTRAP_SERVERS"


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """Options of a batch script in addition to the settings of the run."""

    brokers: int = 1
    """1 for a broker in the job, or 0 if kafka.bootstrap_servers names other brokers."""
    broker_options: str = "--cpus-per-task=2 --mem=4G"
    """Options of sbatch for the part of the broker."""
    roles_options: str = "--cpus-per-task=8 --mem=32G --gpus=1"
    """Options of sbatch for the part of the roles."""
    port: int = 9092
    """Port of the broker."""
    file: Path | None = None
    """The run's configuration file."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables for settings that are not given in the file."""


def render_slurm(config: RunConfig, options: SlurmOptions) -> str:
    """Return the batch script of a run. Raises ConfigurationError if a job cannot run it."""
    _check(config, options)
    name = f"rollstream-{config.run}"
    options_of = [options.broker_options, options.roles_options] if options.brokers else [options.roles_options]
    parts = "#SBATCH hetjob\n".join(f"#SBATCH --nodes=1 --ntasks=1 {of_part}\n" for of_part in options_of)
    words = ["rollstream", "run", *([str(options.file.resolve())] if options.file else ["--run", config.run])]
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(options.variables.items()))
    return (
        "#!/bin/bash\n"
        f"# Run {config.run}, from {options.file or 'the defaults'}. Written by `rollstream deploy slurm`: change the "
        "settings, and write it again.\n"
        f"#SBATCH --job-name={name} --output={name}-%j.log --open-mode=append --requeue\n"
        f"{parts}set -eu\n{exports}"
        + (_with_broker(config, options) if options.brokers else "")
        # In the background, because bash handles signals only between commands in the foreground.
        + f"srun{' --het-group=1' if options.brokers else ''} {shlex.join(words)} &\nwait $!\n"
    )


def _with_broker(config: RunConfig, options: SlurmOptions) -> str:
    data = shlex.quote(str(config.broker.data_dir.resolve()))
    return (
        f"unset {_ADDRESS}\n"
        f'rollstream broker start --data {data} --host "$(hostname)" --port {options.port}\n'
        f"trap 'rollstream broker stop --data {data}' EXIT\n"
        "trap 'exit 143' TERM\n"
        f'export {_ADDRESS}="$(hostname):{options.port}"\n'
    )


def _check(config: RunConfig, options: SlurmOptions) -> None:
    if not options.brokers:
        check_brokers(config)
    elif is_secured(config):
        raise ConfigurationError(
            "kafka.client sets security.protocol, but the broker of the job is plaintext: remove the key, or use your "
            "own brokers with --brokers 0"
        )
    elif config.topics.replication_factor > 1:
        raise ConfigurationError(
            f"topics.replication_factor is {config.topics.replication_factor}, but the job has one broker; set it to "
            "1, or use your own brokers with --brokers 0"
        )
    else:
        check_broker_secrets(config)
