"""`rollstream doctor`: checks what a role can see and do on the brokers, as the user that the settings name.

Changes nothing, and names a remedy for each fault that it finds. Exit code 0 without faults, 1 with faults, 2 if no
broker accepts the client.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

from rollstream.pipeline.command_line.command_parser import configuration_flags, set_handler
from rollstream.pipeline.command_line.text_tables import printable
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.access_rules import USERS
from rollstream.pipeline.doctor import cluster
from rollstream.pipeline.doctor.clock import check_clock
from rollstream.pipeline.doctor.findings import Finding, Level
from rollstream.pipeline.doctor.permissions import check_permissions
from rollstream.pipeline.doctor.retention import check_retention
from rollstream.topics.errors import RollstreamError
from rollstream.topics.kafka import clients


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream doctor`."""
    set_handler(parser, examine, json=True, example="rollstream doctor --config run.toml --role env")
    parser.add_argument(
        "--role",
        choices=USERS,
        metavar="ROLE",
        help="compare this user's permissions with those of a role, or of topics, audit or operate",
    )


def examine(config: RunConfig, args: argparse.Namespace) -> int:
    """Show the findings."""
    began = time.monotonic()
    clients.check_broker(config.kafka)
    address = config.kafka.client.get("bootstrap.servers", config.kafka.bootstrap_servers)
    protocol = config.kafka.client.get("security.protocol", "PLAINTEXT")
    text = f"{address} answers by {protocol} within {time.monotonic() - began:.2f} s"
    findings = [Finding(check="brokers", level="ok", text=text)]
    flags = configuration_flags(args)
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("versions", lambda: cluster.check_versions(config)),
        ("settings", lambda: cluster.check_settings(config)),
        ("topics", lambda: cluster.check_topics(config, flags)),
        ("retention", lambda: check_retention(config, flags)),
        ("clock", lambda: check_clock(config)),
    ]
    if args.role:
        checks.insert(1, ("permissions", lambda: check_permissions(config, args.role, flags)))
    for name, check in checks:
        findings += _looked(name, check)
    _show(findings, args)
    return int(any(finding.level == "fault" for finding in findings))


def _looked(name: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """Return the findings of a check. A check that fails gives a note, or a fault if it is the check of permissions."""
    try:
        return list(check())
    except RollstreamError as error:
        level: Level = "fault" if name == "permissions" else "note"
        return [Finding(check=name, level=level, text=f"not checked: {error}")]


def _show(findings: list[Finding], args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings]))
        return
    for finding in findings:
        print(printable(f"{finding.level:5}  {finding.check:11}  {finding.text}"))
        if finding.remedy:
            print(printable(f"{'':20}-> {finding.remedy}"))
