"""`rollstream deploy`: writes down a run for what runs it elsewhere, and what watches it."""

import argparse
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from rollstream.pipeline.command_parser import add_command, set_handler
from rollstream.pipeline.config import RunConfig, secret_variables
from rollstream.pipeline.settings import is_setting_variable, variable_of
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.secrets import is_secret


def register(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `rollstream deploy`."""
    from rollstream.pipeline.deployment.compose import ComposeOptions

    default = ComposeOptions()
    commands = parser.add_subparsers(dest="deploy_command", metavar="COMMAND", required=True)
    compose = add_command(commands, "compose", "write a compose file: brokers, topics and every role of the run")
    set_handler(compose, write_compose, example="rollstream deploy compose run.toml -o compose.yaml")
    compose.add_argument("file", type=Path, nargs="?", metavar="run.toml", help="the same as --config")
    compose.add_argument("-o", "--output", type=Path, metavar="FILE", help="where it goes (default: stdout)")
    compose.add_argument(
        "--brokers",
        type=int,
        choices=(0, 1, 3),
        default=default.brokers,
        help="brokers in it; 0: those of kafka.bootstrap_servers (default: %(default)s)",
    )
    compose.add_argument(
        "--code", type=Path, metavar="DIR", help="directory of your own code; roles run in it and cannot write there"
    )
    for flag, value, what in (
        ("--image", default.image, "image of the roles"),
        ("--worker-image", default.worker_image, "image of the workers, if it is another"),
        ("--kafka-image", default.kafka_image, "image of the brokers"),
        ("--prometheus-image", default.prometheus_image, "image of Prometheus"),
        ("--grafana-image", default.grafana_image, "image of Grafana"),
    ):
        shown = " (default: %(default)s)" if value else ""
        compose.add_argument(flag, default=value, metavar="IMAGE", help=f"{what}{shown}")

    monitoring = add_command(commands, "monitoring", "write a dashboard for Grafana and alert rules for Prometheus")
    monitoring.add_argument("directory", type=Path, metavar="DIR", help="where to; created if it does not exist")
    monitoring.set_defaults(run=_write_monitoring)


def _write_monitoring(args: argparse.Namespace) -> int:
    """Write the dashboard and the alert rules, which are the same for every run; print their paths."""
    from rollstream.infra.monitoring.alerts import alert_rules
    from rollstream.infra.monitoring.dashboard import dashboard

    directory: Path = args.directory
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in (("rollstream-dashboard.json", dashboard()), ("rollstream-alerts.yml", alert_rules())):
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
        variables=given_variables(config, args, os.environ),
    )
    text = render_compose(config, options)
    if args.output is None:
        sys.stdout.write(text)
    else:
        args.output.write_text(text, encoding="utf-8")
        print(f"{args.output}: run {config.run}; start it with docker compose -f {args.output} up --detach")
    return 0


def _beside(path: Path, folder: Path) -> str:
    """Return a path as a compose file in the folder names it: relative to it, beginning with a dot."""
    relative = os.path.relpath(path, folder)
    return relative if relative.startswith(".") else f"./{relative}"


def given_variables(config: RunConfig, args: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that variables and flags set beside the file, as variables; no secrets.

    Raises ConfigurationError for a key that no variable can name.
    """
    secrets = secret_variables(config)
    given = {
        name: value
        for name, value in environment.items()
        if name.startswith("ROLLSTREAM_") and is_setting_variable(RunConfig, name) and name not in secrets
    }
    named = [f"{key}{getattr(args, key)}" for key in getattr(args, "options", {})]
    for flag in (*named, *args.set, *(f"kafka.client.{client}" for client in args.client)):
        key, _, value = flag.partition("=")
        if key != key.lower():
            raise ConfigurationError(f"{key} has capitals, which no variable can name; set it in the run's file")
        if not is_secret(key):
            given[variable_of(re.sub(r"[^\w.]", "_", key.strip()))] = value
    return given
