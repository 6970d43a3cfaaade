"""`rollstream deploy`: writes a run as a compose file, Helm chart or Slurm job, and a dashboard and alert rules."""

import argparse
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from rollstream.pipeline.command_line.command_parser import add_command, set_handler, wait_seconds
from rollstream.pipeline.config import RunConfig, secret_variables
from rollstream.pipeline.deployment.description import ROLES
from rollstream.pipeline.settings import is_setting_variable, variable_of
from rollstream.pipeline.tools import fit
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.secrets import is_secret, reference


def register(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `rollstream deploy`."""
    from rollstream.pipeline.deployment.compose import ComposeOptions
    from rollstream.pipeline.deployment.slurm import SlurmOptions

    default = ComposeOptions()
    commands = parser.add_subparsers(dest="deploy_command", metavar="COMMAND", required=True)
    compose = add_command(commands, "compose", "write a compose file: brokers, topics and every role of the run")
    set_handler(compose, write_compose, example="rollstream deploy compose run.toml -o compose.yaml")
    compose.add_argument("file", type=Path, nargs="?", metavar="run.toml", help="the same as --config")
    compose.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write (default: stdout)")
    compose.add_argument(
        "--brokers",
        type=int,
        choices=(0, 1, 3),
        default=default.brokers,
        help="number of brokers in the file; 0: use kafka.bootstrap_servers (default: %(default)s)",
    )
    compose.add_argument(
        "--code", type=Path, metavar="DIR", help="directory of your own code; roles run in it, and cannot write to it"
    )
    compose.add_argument(
        "--gpus",
        action="append",
        default=[],
        type=gpus_of_role,
        metavar="ROLE=IDS",
        help="GPUs of this machine for a role, such as learn=0,1 or infer=2; repeatable",
    )
    for flag, value, what in (
        ("--image", default.image, "image of the roles"),
        ("--worker-image", default.worker_image, "image of the workers, if different"),
        ("--kafka-image", default.kafka_image, "image of the brokers"),
        ("--prometheus-image", default.prometheus_image, "image of Prometheus"),
        ("--grafana-image", default.grafana_image, "image of Grafana"),
    ):
        shown = " (default: %(default)s)" if value else ""
        compose.add_argument(flag, default=value, metavar="IMAGE", help=f"{what}{shown}")

    chart = add_command(commands, "chart", "write a Helm chart: brokers, topics and every role of the run")
    set_handler(chart, write_chart, example="rollstream deploy chart run.toml -o chart")
    chart.add_argument("file", type=Path, nargs="?", metavar="run.toml", help="the same as --config")
    chart.add_argument("-o", "--output", type=Path, metavar="DIR", required=True, help="directory of the chart")
    for flag, what in (("--image", "image of the roles"), ("--worker-image", "image of the workers, if different")):
        shown = default.image if flag == "--image" else ""
        chart.add_argument(flag, default=shown, metavar="IMAGE", help=f"{what}; also a value of the chart")

    job = SlurmOptions()
    slurm = add_command(commands, "slurm", "write a batch script for Slurm: a broker and every role of the run")
    set_handler(slurm, write_slurm, example="rollstream deploy slurm run.toml -o run.sbatch")
    slurm.add_argument("file", type=Path, nargs="?", metavar="run.toml", help="the same as --config")
    slurm.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write (default: stdout)")
    slurm.add_argument(
        "--brokers",
        type=int,
        choices=(0, 1),
        default=job.brokers,
        help="1: a broker in the job; 0: use kafka.bootstrap_servers (default: %(default)s)",
    )
    slurm.add_argument(
        "--port", type=int, default=job.port, help="port of the broker on its node (default: %(default)s)"
    )
    for flag, value, what in (
        ("--broker-options", job.broker_options, "broker's"),
        ("--roles-options", job.roles_options, "roles'"),
    ):
        what = f"options of sbatch for the {what} part of the job (default: %(default)s)"
        slurm.add_argument(flag, default=value, metavar="OPTIONS", help=what)

    wait = add_command(commands, "wait", "wait until a role may start, for clusters that start all roles at once")
    set_handler(wait, wait_to_start, example="rollstream deploy wait env --ready main-group:8081")
    wait.add_argument("role", choices=[role.name for role in ROLES], metavar="ROLE", help="command of the role")
    wait.add_argument(
        "--ready",
        action="append",
        default=[],
        type=service_address,
        metavar="HOST:PORT",
        help="service port of a role that must be ready; repeatable",
    )
    wait.add_argument(
        "--wait", type=wait_seconds, default=600, metavar="S", help="seconds to wait at most (default: %(default)s)"
    )

    fit.register(add_command(commands, "fit", "compile the training step for TPUs, without having any"))

    monitoring = add_command(commands, "monitoring", "write a dashboard for Grafana and alert rules for Prometheus")
    monitoring.add_argument(
        "directory", type=Path, metavar="DIR", help="directory to write to; created if it does not exist"
    )
    monitoring.add_argument(
        "--docs", default="", metavar="URL", help="URL of the built documentation, to which alerts then link"
    )
    monitoring.set_defaults(run=_write_monitoring)


def _write_monitoring(args: argparse.Namespace) -> int:
    """Write the dashboard and the alert rules, which are the same for every run; print their paths."""
    from rollstream.infra.monitoring.alerts import alert_rules
    from rollstream.infra.monitoring.dashboard import dashboard

    directory: Path = args.directory
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in (("rollstream-dashboard.json", dashboard()), ("rollstream-alerts.yml", alert_rules(args.docs))):
        (directory / name).write_text(text, encoding="utf-8")
        print(directory / name)
    return 0


def write_compose(config: RunConfig, args: argparse.Namespace) -> int:
    """Write the compose file of a run to a file or stdout."""
    from rollstream.pipeline.deployment.compose import ComposeOptions, render_compose

    folder = args.output.parent if args.output else Path()
    file = args.config or args.file
    options = ComposeOptions(
        brokers=args.brokers,
        image=args.image,
        worker_image=args.worker_image,
        kafka_image=args.kafka_image,
        prometheus_image=args.prometheus_image,
        grafana_image=args.grafana_image,
        config_file=_beside(file, folder) if file else "",
        code=_beside(args.code, folder) if args.code else "",
        gpus=dict(args.gpus),
        variables=given_variables(config, args, os.environ),
    )
    return _written(render_compose(config, options), config, args, f"docker compose -f {args.output} up --detach")


def write_slurm(config: RunConfig, args: argparse.Namespace) -> int:
    """Write the batch script of a run to a file or stdout."""
    from rollstream.pipeline.deployment.slurm import SlurmOptions, render_slurm

    options = SlurmOptions(
        brokers=args.brokers,
        broker_options=args.broker_options,
        roles_options=args.roles_options,
        port=args.port,
        file=args.config or args.file,
        variables=given_variables(config, args, os.environ),
    )
    return _written(render_slurm(config, options), config, args, f"sbatch {args.output}")


def _written(text: str, config: RunConfig, args: argparse.Namespace, start: str) -> int:
    if args.output is None:
        sys.stdout.write(text)
    else:
        args.output.write_text(text, encoding="utf-8")
        print(f"{args.output}: run {config.run}; start it with {start}")
    return 0


def write_chart(config: RunConfig, args: argparse.Namespace) -> int:
    """Write the chart of a run to a directory, and delete templates of ours that the chart no longer has."""
    from rollstream.pipeline.deployment.chart import MARK, ChartOptions, chart_files, cluster_name

    file = args.config or args.file
    options = ChartOptions(
        image=args.image,
        worker_image=args.worker_image,
        config_text=file.read_text(encoding="utf-8") if file else "",
        variables=given_variables(config, args, os.environ),
    )
    files, directory = chart_files(config, options), args.output
    for old in directory.glob("templates/*.yaml"):
        if f"templates/{old.name}" not in files and old.read_text(encoding="utf-8").startswith(MARK):
            old.unlink()
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"{directory}: run {config.run}; install it with helm install {cluster_name(config)} {directory}")
    return 0


def wait_to_start(config: RunConfig, args: argparse.Namespace) -> int:
    """Wait until a role may start."""
    from rollstream.pipeline.deployment.start_order import await_start

    await_start(config, args.role, args.ready, args.wait)
    return 0


def service_address(text: str) -> str:
    """Return a text of the form host:port unchanged. Raises ArgumentTypeError for anything else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an address; give host:port, such as main-group:8081")
    return text


def gpus_of_role(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the role and the ids of a text of the form ROLE=ID,ID. Raises ArgumentTypeError for anything else."""
    role, _, ids = text.partition("=")
    if not role or not all(ids.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} names no GPUs of a role; give ROLE=IDS, such as learn=0,1")
    return role, tuple(ids.split(","))


def _beside(path: Path, folder: Path) -> str:
    """Return a path relative to the folder of the compose file, beginning with a dot."""
    relative = os.path.relpath(path, folder)
    return relative if relative.startswith(".") else f"./{relative}"


def given_variables(config: RunConfig, args: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """Return, as variables, the settings given by variables and flags, not by the file; variables that hold a secret
    itself are left out.

    Raises ConfigurationError for a key that no variable can name.
    """
    secrets = secret_variables(config)
    given = {
        # A variable of Kafka's own keys has two forms. Only one is written, so that a flag replaces it.
        variable_of(_key_of(name)): value
        for name, value in sorted(environment.items())
        if name.startswith("ROLLSTREAM_") and is_setting_variable(RunConfig, name) and name not in secrets
        # A secret that a flag overrides is not among those of the configuration.
        if not _holds_secret(name, value)
    }
    named = [f"{key}{getattr(args, key)}" for key in getattr(args, "options", {})]
    for flag in (*named, *args.set, *(f"kafka.client.{client}" for client in args.client)):
        key, _, value = flag.partition("=")
        if key != key.lower():
            raise ConfigurationError(
                f"{key} has upper-case letters, which a variable cannot express; set it in the configuration file"
            )
        # A flag holds a reference in place of a secret.
        given[variable_of(re.sub(r"[^\w.]", "_", key.strip()))] = value
    return given


def _holds_secret(variable: str, value: str) -> bool:
    """Whether a variable holds a secret itself, not a reference to one. Its underscores may stand for dots."""
    key = _key_of(variable)
    return any(map(is_secret, (key, key.replace("_", ".")))) and reference(value) is None


def _key_of(variable: str) -> str:
    return variable.removeprefix("ROLLSTREAM_").lower().replace("__", ".")
