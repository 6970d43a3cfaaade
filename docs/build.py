"""Writes what the documentation repeats of the code: `make docs`, or `python -m docs.build`.

Full lists of commands, settings, metrics and public names become pages in docs/reference, which git ignores. Small
tables stand within pages between `<!-- generated: NAME -->` and `<!-- end -->`; `python -m tests.house` compares them.
"""

import argparse
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import rollstream
from rollstream.pipeline.command_line.cli import build_parser
from rollstream.pipeline.command_line.commands import COMMANDS
from rollstream.pipeline.command_line.reference import Section, metric_meaning, metrics, sections
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.access_rules import EVERYONE, USERS, access_rules
from rollstream.pipeline.deployment.description import ROLES, RoleDescription
from rollstream.topics.metrics.catalogue import MetricSpec
from rollstream.topics.wire.catalogue import CATALOGUE, TopicSpec

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"(<!-- generated: (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """Every Markdown file of the project that is in git."""
    return sorted(
        page
        for place in ("*.md", "docs/*.md", "docs/decisions/*.md", "recipes/*.md", "recipes/*/*.md")
        for page in ROOT.glob(place)
    )


def rendered(text: str) -> str:
    """A page with its tables as the code says now. Raises KeyError for a table nobody generates."""
    return _BLOCK.sub(lambda match: f"{match[1]}{TABLES[match['name']]()}\n{match[3]}", text)


def write_reference(folder: Path) -> None:
    """Write the pages of full lists into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in REFERENCE.items():
        (folder / name).write_text(f"{page()}\n", encoding="utf-8")


def main() -> None:
    """Write the reference, and bring the tables within pages up to date."""
    write_reference(ROOT / "docs" / "reference")
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


# ------------------------------------------------------------------ settings


def settings_page() -> str:
    """Every key of the configuration, a table for each table of it."""

    def part(section: Section) -> str:
        rows = [(f"`{setting.key}`", f"`{setting.default}`", setting.meaning) for setting in section.settings]
        title = f"`{section.title}`" if section.title else "The run"
        return f"## {title}\n\n{section.about}\n\n{table(('key', 'default', 'meaning'), rows)}"

    return "\n\n".join(("# Settings", *(part(section) for section in sections() if section.settings)))


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


def commands_page() -> str:
    """The flags that all commands share, then each command with its own."""
    leaves, summaries = commands(), dict(_summaries(build_parser(load=COMMANDS)))
    shared = {_flag(p, a): None for p in leaves.values() for a in _shown(p) if _is_common(p, a)}
    parts = [
        "# All commands",
        "## Flags of every command that takes a configuration\n\n" + table(("flag", "meaning"), list(shared)),
    ]
    for name, parser in leaves.items():
        own = [_flag(parser, a) for a in _shown(parser) if not _is_common(parser, a)]
        takes = any(_is_common(parser, a) for a in parser._actions)
        configured = "" if takes else " Takes no configuration."
        summary = summaries[name][0].upper() + summaries[name][1:]
        parts.append(f"## `rollstream {name}`\n\n{summary}.{configured}")
        if own:
            parts[-1] += "\n\n" + table(("argument", "meaning"), own)
    return "\n\n".join(parts)


# ------------------------------------------------------------------ metrics


def metrics_page() -> str:
    """The catalogue of metrics, a table for each role; those of several roles come first."""

    def row(spec: MetricSpec) -> tuple[str, ...]:
        return (f"`{spec.name}`", spec.kind, spec.unit, ", ".join(spec.labels), metric_meaning(spec))

    header = ("metric", "kind", "unit", "labels", "meaning")
    titles = ((f"`{role}`" if role else "Several roles", specs) for role, specs in metrics())
    parts = (f"## {title}\n\n{table(header, [*map(row, specs)])}" for title, specs in titles)
    return "\n\n".join(("# All metrics", *parts))


# ------------------------------------------------------------------ public names


def names_page() -> str:
    """Every public name of `rollstream`, with its parameters, in a table for each module it comes from."""
    modules: dict[str, list[tuple[str, ...]]] = {}
    for name in rollstream.__all__:
        public = getattr(rollstream, name)
        if name.startswith("__"):
            continue
        signature = ""
        if not (isinstance(public, type) and issubclass(public, Exception)):
            given = [p for p in inspect.signature(public).parameters.values() if p.name != "self"]
            signature = f"`({', '.join(map(_parameter, given))})`"
        about = " ".join((inspect.getdoc(public) or "").split("\n\n")[0].split())
        modules.setdefault(public.__module__, []).append((f"`{name}`", signature, about))
    header = ("name", "parameters", "what it is")
    parts = (f"## {module}\n\n{table(header, modules[module])}" for module in sorted(modules))
    return "\n\n".join(("# Public names", *parts))


def _parameter(parameter: inspect.Parameter) -> str:
    star = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    return f"{star}{parameter.name}{'' if parameter.default is parameter.empty else '=...'}"


TABLES: dict[str, Callable[[], str]] = {
    "topics": topics_table,
    "roles": roles_table,
    "roles-on-kafka": roles_on_kafka_table,
    "permissions": permissions_table,
}
"""Tables within pages, which are in git."""
REFERENCE: dict[str, Callable[[], str]] = {
    "commands.md": commands_page,
    "settings.md": settings_page,
    "metrics.md": metrics_page,
    "names.md": names_page,
}
"""Pages below docs/reference, which are not."""

if __name__ == "__main__":
    main()
