"""Writes the parts of docs/ that repeat what code says: `python -m tests.documentation` after a change of it.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`; tests/unit/test_docs.py compares it.
"""

import argparse
import ast
import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rollstream.pipeline.capacity import measured_rates
from rollstream.pipeline.capacity.plan import Machines, Workload, plan
from rollstream.pipeline.cli import build_parser
from rollstream.pipeline.commands import COMMANDS
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.access_rules import EVERYONE, USERS, access_rules
from rollstream.pipeline.deployment.description import ROLES, RoleDescription
from rollstream.pipeline.settings import entry_type
from rollstream.pipeline.tools.plan import number, text_of, workload
from rollstream.topics.catalogue import CATALOGUE, TopicSpec
from rollstream.topics.metric_catalogue import CATALOGUE_OF_METRICS, SERVING_ROLES, MetricSpec, of_role
from tests.support.paths import ROOT

_BLOCK = re.compile(r"(<!-- generated: (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """Every Markdown file of the project."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def rendered(text: str) -> str:
    """A page with its generated parts as the code says now. Raises KeyError for a part nobody generates."""
    return _BLOCK.sub(lambda match: f"{match[1]}{GENERATED[match['name']]()}\n{match[3]}", text)


def main() -> None:
    """Bring every page up to date and say which changed."""
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = rendered(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"{page.relative_to(ROOT)} brought up to date")


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


# ------------------------------------------------------------------ topics


def topics_table() -> str:
    """The catalogue as a table."""

    def row(spec: TopicSpec) -> tuple[str, ...]:
        time = "; times by the broker" if spec.append_time else ""
        return (
            f"`{spec.name}`",
            spec.key,
            ", ".join(spec.values) or "bytes",
            spec.partitions,
            spec.cleanup,
            ", ".join(spec.writers),
            ", ".join(spec.readers),
            spec.doc.rstrip(".") + time,
        )

    header = ("topic", "key", "value", "partitions", "cleanup", "written by", "read by", "what it holds")
    return table(header, [row(spec) for spec in CATALOGUE])


# ------------------------------------------------------------------ roles


def roles_table() -> str:
    """The description of a run's roles as a table: what each does, and what decides how many there are."""

    def row(role: RoleDescription) -> tuple[str, ...]:
        return (
            f"`{' '.join(('rollstream', *role.command, *role.flags))}`",
            role.does,
            _names(role.counted_by) or "none",
            _names(role.number_flag),
            _names(*role.ports) + (" plus the number" if role.port_of_number else ""),
            _names(*role.extras),
            _names(role.keeps),
            "yes" if role.finishes else "",
            _names(*role.after),
        )

    header = (
        "command",
        "it",
        "how many",
        "number",
        "port",
        "extra",
        "keeps files in",
        "ends by itself",
        "starts after",
    )
    return table(header, [row(role) for role in ROLES])


def roles_on_kafka_table() -> str:
    """Topics, groups and transactional ids of each role, as a table."""

    def row(role: RoleDescription) -> tuple[str, ...]:
        reads = "as tools" if role.is_tool else _names(*role.reads)
        return (
            f"`{role.name}`",
            reads,
            *(_names(*used) for used in (role.writes, role.groups, role.transactional_ids)),
        )

    header = ("role", "reads", "writes", "commits offsets of the groups", "transactional ids")
    return table(header, [row(role) for role in ROLES])


def permissions_table() -> str:
    """Access rules of each user of a run, as a table; names are those within the run."""
    run = "RUN"
    config = RunConfig(run=run)
    shown = {"Create": "CREATE", "DescribeConfigs": "DESCRIBE_CONFIGS", "AlterConfigs": "ALTER_CONFIGS"}

    def row(user: str) -> tuple[str, ...]:
        may: dict[tuple[str, str], list[str]] = {}
        for rule in access_rules(config, user):
            if rule not in EVERYONE:
                for operation in rule.operations:
                    name = rule.name.removeprefix(f"{run}.") if rule.resource == "topic" else rule.name
                    name = name.replace(run, "{run}") + "*" * rule.prefix
                    may.setdefault((rule.resource, shown.get(operation, operation.upper())), []).append(name)
        topics = [f"{operation} {_topics(names)}" for (kind, operation), names in may.items() if kind == "topic"]
        others = [
            "; ".join(f"{operation} {_names(*names)}" for (kind, operation), names in may.items() if kind == resource)
            for resource in ("group", "transactionalId")
        ]
        return (f"`{user}`", "; ".join(topics), *others)

    return table(("user", "topics", "groups", "transactional ids"), [row(user) for user in USERS])


def _topics(names: list[str]) -> str:
    return "all" if len(names) == len(CATALOGUE) else _names(*names)


def _names(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names if name)


# ------------------------------------------------------------------ configuration


def configuration_tables() -> str:
    """Every key of the configuration, a table for each dataclass of the tree."""
    return "\n\n".join(_sections(RunConfig, ()))


def _sections(cls: type, path: tuple[str, ...]) -> Iterator[str]:
    hints, documented = typing.get_type_hints(cls), attribute_docstrings(cls)
    plain, nested = [], []
    for field in dataclasses.fields(cls):
        here = (*path, field.name)
        if entry := entry_type(hints[field.name]):
            plain.append((f"`{'.'.join(here)}`", "`[]`", documented[field.name]))
            nested.append((entry, (*here, "0")))
        elif dataclasses.is_dataclass(hints[field.name]):
            nested.append((hints[field.name], here))
        elif field.init and not (field.default is None and _has_table(hints[field.name])):
            plain.append((f"`{'.'.join(here)}`", f"`{_default(field)}`", documented[field.name]))
    title = f"`[{'.'.join(path)}]`" if path else "The run"
    if path and path[-1].isdecimal():
        title = f"`[[{'.'.join(path[:-1])}]]`"
    about = " ".join(inspect.cleandoc(cls.__doc__ or "").split())
    yield f"### {title}\n\n{about}\n\n{table(('key', 'default', 'meaning'), plain)}"
    for kind, here in nested:
        yield from _sections(kind, here)


def _has_table(hint: Any) -> bool:
    """Whether a field may hold a dataclass; one that is None by default cannot be set in a file."""
    return any(dataclasses.is_dataclass(kind) for kind in typing.get_args(hint))


def attribute_docstrings(cls: type) -> dict[str, str]:
    """The string below each field of a dataclass, by its name; a field without one is missing."""
    [body] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    collected = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            value = getattr(following, "value", None)
            if isinstance(following, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                collected[statement.target.id] = " ".join(value.value.split())
    return collected


def _default(field: "dataclasses.Field[Any]") -> str:
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return _toml(value)


def _toml(value: Any) -> str:
    if value is None:  # TOML has no None
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return "{}"
    return f'"{value}"' if isinstance(value, str | Path) else repr(value)


# ------------------------------------------------------------------ commands


def commands() -> dict[str, argparse.ArgumentParser]:
    """Every command that does something, e.g. `topics apply`, with its parser."""
    return dict(_leaves(build_parser(load=COMMANDS), ()))


def _leaves(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not below or parser.get_default("run"):
        yield " ".join(path), parser
    for action in below:
        for name, child in action.choices.items():
            yield from _leaves(child, (*path, name))


def _is_common(parser: argparse.ArgumentParser, action: argparse.Action) -> bool:
    return any(g.title == "configuration" and action in g._group_actions for g in parser._action_groups)


def _summaries(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                yield " ".join((*path, choice.dest)), choice.help or ""
            for name, child in action.choices.items():
                yield from _summaries(child, (*path, name))


def _flag(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str]:
    meant = f" {action.metavar}" if action.metavar and action.option_strings and action.nargs != 0 else ""
    if action.choices and action.option_strings:
        meant = f" {{{','.join(map(str, action.choices))}}}"
    if action.option_strings and not meant and action.nargs != 0:
        meant = f" {action.dest.upper()}"
    positional = "|".join(map(str, action.choices)) if action.choices else str(action.metavar or action.dest)
    shown = ", ".join(action.option_strings) + meant if action.option_strings else positional
    return f"`{shown}`", parser._get_formatter()._expand_help(action)


def _shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [a for a in parser._actions if a.help != argparse.SUPPRESS and not isinstance(a, argparse._HelpAction)]


def command_reference() -> str:
    """The flags that all commands share, then each command with its own."""
    leaves, summaries = commands(), dict(_summaries(build_parser(load=COMMANDS)))
    shared = {_flag(p, a): None for p in leaves.values() for a in _shown(p) if _is_common(p, a)}
    parts = [
        "### Flags of every command that takes a configuration\n\n" + table(("flag", "meaning"), list(shared)),
    ]
    for name, parser in leaves.items():
        own = [_flag(parser, a) for a in _shown(parser) if not _is_common(parser, a)]
        takes = any(_is_common(parser, a) for a in parser._actions)
        configured = "" if takes else " Takes no configuration."
        summary = summaries[name][0].upper() + summaries[name][1:]
        parts.append(f"### `rollstream {name}`\n\n{summary}.{configured}")
        if own:
            parts[-1] += "\n\n" + table(("argument", "meaning"), own)
    return "\n\n".join(parts)


# ------------------------------------------------------------------ metrics


def metrics_tables() -> str:
    """The catalogue of metrics, a table for each role; those of several roles come first."""
    several = [spec for spec in CATALOGUE_OF_METRICS if len(spec.roles) > 1]
    parts = [("Several roles", several)]
    parts += [(f"`{role}`", [spec for spec in of_role(role) if len(spec.roles) == 1]) for role in SERVING_ROLES]
    return "\n\n".join(f"### {title}\n\n{_metrics_table(specs)}" for title, specs in parts if specs)


def _metrics_table(specs: list[MetricSpec]) -> str:
    rows = []
    for spec in specs:
        roles = f" Served by {', '.join(spec.roles)}." if 1 < len(spec.roles) < len(SERVING_ROLES) else ""
        when = f" Served when {spec.when}." if spec.when else ""
        rows.append((f"`{spec.name}`", spec.kind, spec.unit, ", ".join(spec.labels), f"{spec.help}{roles}{when}"))
    return table(("metric", "kind", "unit", "labels", "meaning"), rows)


# ------------------------------------------------------------------ plans


_PLANNED = (("1B", 1_000), ("1B", 1_000_000), ("8B", 10_000), ("70B", 100_000), ("400B", 100_000), ("1T", 1_000_000))
"""Models and numbers of environments."""


def plan_table() -> str:
    """Plans for models from 1 to 1,000 billion parameters and 1,000 to a million environments."""

    def row(model: str, environments: int) -> tuple[str, ...]:
        parameters, tokens = number(model), 4096
        load = Workload(
            parameters=parameters,
            environments=environments,
            tokens=tokens,
            rollouts_per_s=environments * 50 / tokens,
            weights_in_files=parameters >= 70e9,
        )
        result = plan(load, Machines(), measured_rates.shipped())
        numbers = (
            load.rollouts_per_s,
            result.partitions,
            result.grouping_processes,
            result.brokers,
            result.learner_processes,
            result.publishers,
        )
        met = f"{result.first.resource}, {result.first.name}"
        return (model, f"{environments:,}", *(f"{value:,.0f}" for value in numbers), met)

    header = (
        "model",
        "environments",
        "rollouts/s",
        "partitions",
        "grouping",
        "brokers",
        "learner processes",
        "publishers",
        "met first",
    )
    return table(header, [row(*planned) for planned in _PLANNED])


def plan_output() -> str:
    """One plan as the command prints it."""
    words = ["plan", *("--parameters", "70B"), *("--environments", "100k"), *("--tokens", "4096")]
    load = workload(build_parser().parse_args(words))
    rates = measured_rates.shipped()
    return f"```text\n$ rollstream {' '.join(words)}\n{text_of(plan(load, Machines(), rates), load, rates)}\n```"


GENERATED: dict[str, Callable[[], str]] = {
    "topics": topics_table,
    "roles": roles_table,
    "roles-on-kafka": roles_on_kafka_table,
    "permissions": permissions_table,
    "configuration": configuration_tables,
    "commands": command_reference,
    "metrics": metrics_tables,
    "plan-output": plan_output,
    "plan-table": plan_table,
}

if __name__ == "__main__":
    main()
