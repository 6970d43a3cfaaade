"""Renders the Helm templates that our charts are made of without helm: the few forms they use, and no other."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

_ACTION = re.compile(r"\{\{-? (.*?) \}\}")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()|]|[^\s()|]+')


LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C, where there is one: charts have thousands of lines."""


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a file overridden by those of a later one, as helm merges them."""
    both = {key: merged(base[key], over[key]) for key in base.keys() & over.keys() if isinstance(over[key], Mapping)}
    return {**base, **over, **both}


def chart_values(chart: Path, *files: str, over: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The values of a chart, overridden by further files and by `over`."""
    values: dict[str, Any] = {}
    for name in ("values.yaml", *files):
        values = merged(values, yaml.load((chart / name).read_text(), LOADER))
    return merged(values, over or {})


def rendered_documents(chart: Path, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The objects of a chart under these values, in the order of its templates."""
    documents: list[dict[str, Any]] = []
    for template in sorted(chart.glob("templates/*.yaml")):
        text = render(template.read_text(), chart, values)
        documents += [document for document in yaml.load_all(text, LOADER) if document]
    return documents


def render(text: str, chart: Path, values: Mapping[str, Any]) -> str:
    """Return the rendered text of a template."""
    lines = iter(text.splitlines())
    return "\n".join(_block(lines, chart, values, None)) + "\n"


def _block(lines: Iterator[str], chart: Path, values: Mapping[str, Any], item: Any) -> list[str]:
    done: list[str] = []
    for line in lines:
        control = re.fullmatch(r"\s*\{\{- (if|range|end)(?: (.*))? \}\}", line)
        if not control:
            done.append(_ACTION.sub(lambda action: str(_evaluated(action[1], chart, values, item)), line))
        elif control[1] == "end":
            break
        else:
            inner = list(_until_end(lines))
            condition = _evaluated(control[2], chart, values, item)
            for each in condition if control[1] == "range" else [item] if condition else []:
                done += _block(iter(inner), chart, values, each)
    return done


def _until_end(lines: Iterator[str]) -> Iterator[str]:
    depth = 1
    for line in lines:
        depth += len(re.findall(r"\{\{- (?:if|range) ", line)) - line.count("{{- end }}")
        if not depth:
            return
        yield line
    raise AssertionError("a block has no end")


def _evaluated(expression: str, chart: Path, values: Mapping[str, Any], item: Any) -> Any:
    tokens = _TOKEN.findall(expression)
    result = _pipeline(tokens, chart, values, item)
    assert not tokens, f"{expression}: {tokens} is left"
    return result


def _pipeline(tokens: list[str], chart: Path, values: Mapping[str, Any], item: Any) -> Any:
    given: list[Any] = []
    while True:
        words: list[Any] = []
        while tokens and tokens[0] not in "|)":
            words.append(_operand(tokens, chart, values, item))
        given = [_applied([*words, *given], chart)]
        if not tokens or tokens[0] == ")":
            return given[0]
        tokens.pop(0)


def _operand(tokens: list[str], chart: Path, values: Mapping[str, Any], item: Any) -> Any:
    token = tokens.pop(0)
    if token == "(":
        inner = _pipeline(tokens, chart, values, item)
        assert tokens.pop(0) == ")"
        return inner
    if token == ".":
        return item
    if token.startswith('"'):
        return json.loads(token)
    if token.isdecimal():
        return int(token)
    if token.startswith(".Values."):
        actual: Any = values
        for part in token.removeprefix(".Values.").split("."):
            actual = actual[part]  # a KeyError if a template names a value that does not exist
        return actual
    return _FUNCTIONS[token]


def _applied(words: list[Any], chart: Path) -> Any:
    first, *rest = words
    if first is _file:
        return _file(chart, rest[0])
    return first(*rest) if callable(first) else first


def _json(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # Go's encoder escapes these.
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _file(chart: Path, name: str) -> str:
    return (chart / name).read_text()


_FUNCTIONS: Mapping[str, Any] = {
    ".Files.Get": _file,
    "toJson": _json,
    "fromJson": json.loads,
    "default": lambda other, value: value or other,
    "ternary": lambda yes, no, condition: yes if condition else no,
    "splitList": lambda separator, text: text.split(separator),
    "last": lambda items: items[-1],
    "int": int,
    "list": lambda *items: list(items),
    "sha256sum": lambda text: hashlib.sha256(text.encode()).hexdigest(),
    "trunc": lambda length, text: text[:length],
    "not": lambda value: not value,
    "and": lambda *values: all(values),
}
