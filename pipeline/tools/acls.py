"""`rollstream topics acls plan|apply`: compares the access rules of a run's users with those on the brokers.

The rules are those of docs/security.md. The user of the command needs Describe on the cluster, and Alter to apply.
"""

import argparse
import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict

from rollstream.pipeline.command_line.command_parser import add_command, set_handler
from rollstream.pipeline.command_line.text_tables import table
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.access_rules import USERS, AccessPlan, compare, users_of
from rollstream.topics.kafka import access_control
from rollstream.topics.kafka.access_control import AccessEntry


def register(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `rollstream topics acls`."""
    actions = parser.add_subparsers(dest="acls_command", metavar="COMMAND", required=True)
    for name, handler, summary in (
        ("plan", plan, "show missing and surplus access rules of the run's users, and other rules"),
        ("apply", apply, "add access rules that are missing, and remove surplus ones; safe to repeat"),
    ):
        action = add_command(actions, name, summary)
        set_handler(action, handler, json=True, example=f"rollstream topics acls {name} --run main --role env")
        action.add_argument(
            "--role",
            action="append",
            choices=USERS,
            metavar="ROLE",
            help="only the rules of this role, or of topics, audit or operate; repeatable (default: all of the run)",
        )


def plan(config: RunConfig, args: argparse.Namespace) -> int:
    """Show the differences."""
    _show(_compared(config, args), args, ("add", "remove"))
    return 0


def apply(config: RunConfig, args: argparse.Namespace) -> int:
    """Add missing rules, remove surplus rules, and show both."""
    differences = _compared(config, args)
    # Rules are added first, so that a role keeps its access while a rule is replaced by a narrower one.
    access_control.add(config.kafka, differences.missing)
    access_control.remove(config.kafka, differences.surplus)
    _show(differences, args, ("added", "removed"))
    return 0


def _compared(config: RunConfig, args: argparse.Namespace) -> AccessPlan:
    return compare(config, args.role or users_of(config), access_control.entries(config.kafka))


def _show(plan: AccessPlan, args: argparse.Namespace, words: tuple[str, str]) -> None:
    add, remove = words
    if args.json:
        parts = {"missing": plan.missing, "surplus": plan.surplus, "present": plan.present, "others": plan.others}
        print(json.dumps({name: [asdict(entry) for entry in entries] for name, entries in parts.items()}))
        return
    rows = [(add, *row) for row in _rows(plan.missing)] + [(remove, *row) for row in _rows(plan.surplus)]
    if rows:
        print(table(("action", "principal", "resource", "name", "operations"), rows))
    print(f"{len(plan.present)} rules correct, {len(plan.missing)} to add, {len(plan.surplus)} surplus")
    if plan.others:
        print("\nother rules, left as they are:")
        print(table(("principal", "resource", "name", "operations"), _rows(plan.others)))


def _rows(entries: Iterable[AccessEntry]) -> list[tuple[str, str, str, str]]:
    """Return a row for each resource of each principal, with its operations."""

    def resource(entry: AccessEntry) -> tuple[str, str, str]:
        return entry.principal, entry.resource, f"{entry.name}*" if entry.prefix else entry.name

    return [
        (*key, ", ".join(f"{'' if e.allow else 'not '}{e.operation}" for e in group))
        for key, group in itertools.groupby(sorted(entries), resource)
    ]
