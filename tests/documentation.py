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

from pipeline.cli import build_parser
from pipeline.config import RunConfig
from topics.catalogue import CATALOGUE, TopicSpec

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"(<!-- generated: (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """Every Markdown file of the project."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def rendered(text: str) -> str:
    """A page with its generated parts as the code says now. Raises KeyError for a part nobody generates."""
    return _BLOCK.sub(lambda found: f"{found[1]}{GENERATED[found['name']]()}\n{found[3]}", text)


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


# ------------------------------------------------------------------ configuration


def configuration_tables() -> str:
    """Every key of the configuration, a table for each dataclass of the tree."""
    return "\n\n".join(_sections(RunConfig, ()))


def _sections(cls: type, path: tuple[str, ...]) -> Iterator[str]:
    hints, documented = typing.get_type_hints(cls), attribute_docstrings(cls)
    plain, nested = [], []
    for field in dataclasses.fields(cls):
        here = (*path, field.name)
        if dataclasses.is_dataclass(hints[field.name]):
            nested.append((hints[field.name], here))
        elif field.init and not (field.default is None and _has_table(hints[field.name])):
            plain.append((f"`{'.'.join(here)}`", f"`{_default(field)}`", documented[field.name]))
    title = f"`[{'.'.join(path)}]`" if path else "The run"
    about = " ".join(inspect.cleandoc(cls.__doc__ or "").split())
    yield f"### {title}\n\n{about}\n\n{table(('key', 'default', 'meaning'), plain)}"
    for kind, here in nested:
        yield from _sections(kind, here)


def _has_table(hint: Any) -> bool:
    """Whether a dataclass may stand there: with no default of its own such a field is not for files."""
    return any(dataclasses.is_dataclass(kind) for kind in typing.get_args(hint))


def attribute_docstrings(cls: type) -> dict[str, str]:
    """The string below each field of a dataclass. Raises KeyError on use where one has none."""
    [body] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            value = getattr(following, "value", None)
            if isinstance(following, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[statement.target.id] = " ".join(value.value.split())
    return found


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
    return dict(_leaves(build_parser(), ()))


def _leaves(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not below:
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
    """Flags all commands share, then each command with its own."""
    leaves, summaries = commands(), dict(_summaries(build_parser()))
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


GENERATED: dict[str, Callable[[], str]] = {
    "topics": topics_table,
    "configuration": configuration_tables,
    "commands": command_reference,
}

if __name__ == "__main__":
    main()
