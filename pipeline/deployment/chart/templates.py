"""Text of Helm templates: YAML documents with values that helm fills in, and parts that a value turns on.

Values are written as JSON, which is YAML in one line, so that no template depends on indentation. Only a few forms are
used, which tests evaluate without helm: values with a default, files, digests, `if`, and `range` over a list.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.pipeline.deployment.yaml_text import Line, render_yaml

_END = "{{- end }}"
_MARK = re.compile(r"template-(\d+)-")
_LINE = re.compile(r"^( *)(?:- )?line-(\d+)-(?:: null)?$", re.MULTILINE)
Document = Mapping[str, Any]


class Raw(str):
    """A scalar that helm fills in."""

    __slots__ = ()


@dataclass(frozen=True)
class Enclosed:
    """A value of a table, or items of a list, between two lines that are not YAML."""

    before: str
    value: Any
    """The value of its key or, within a list, the list of the enclosed items."""
    after: str


@dataclass(frozen=True)
class Template:
    """A file below templates/ of a chart."""

    about: str
    """Description of its documents, in one line."""
    documents: Sequence[Document | Enclosed]
    """The documents; the value of an Enclosed is a list of documents."""

    def text(self) -> str:
        """Return the text of the file."""
        return f"{MARK}\n# {self.about}\n" + "".join(_document(each) for each in self.documents)


MARK = "# Written by `rollstream deploy chart`: change the run's settings or the values, and write it again."


def value(path: str, default: str = "") -> Raw:
    """Return the expression for a value of the chart, or for the value `default` if the first is empty."""
    other = f" | default .Values.{default}" if default else ""
    return Raw(f"{{{{ .Values.{path}{other} | toJson }}}}")


def file_text(name: str) -> Raw:
    """Return the expression for the text of a file of the chart."""
    return Raw(f'{{{{ .Files.Get "{name}" | toJson }}}}')


def file_object(name: str) -> Raw:
    """Return the expression for the content of a JSON file of the chart."""
    return Raw(f'{{{{ .Files.Get "{name}" | fromJson | toJson }}}}')


def digest_of(settings: str, paths: Sequence[str]) -> str:
    """Return the expression for eight hexadecimal digits that change with the settings' digest or one of the values."""
    values = " ".join(f".Values.{path}" for path in paths)
    return f'{{{{ list "{settings}" {values} | toJson | sha256sum | trunc 8 }}}}'


def literal(text: str) -> Raw:
    """Return a text of the settings, escaped so that helm does not evaluate it."""
    return Raw(json.dumps(text, ensure_ascii=False).replace("{{", '{{ "{{" }}'))


def when(condition: str, then: Any) -> Enclosed:
    """Return an entry, items or documents that are present if a condition is true, e.g. `.Values.brokers.enabled`."""
    return Enclosed(f"{{{{- if {condition} }}}}", then, _END)


def each_of(path: str) -> Enclosed:
    """Return the items of a list among the values, as items of another list."""
    return Enclosed(f"{{{{- range .Values.{path} }}}}", [Raw("{{ . | toJson }}")], _END)


def tcp_of_addresses(path: str) -> Enclosed:
    """Return the ports of a value that is a list of host:port, as items of a network policy."""
    port = Raw('{{ . | splitList ":" | last | int }}')
    each = f'{{{{- range splitList "," .Values.{path} }}}}'
    return Enclosed(each, [{"protocol": "TCP", "port": port}], _END)


def _document(document: Document | Enclosed) -> str:
    if isinstance(document, Enclosed):
        return f"{document.before}\n" + "".join(map(_document, document.value)) + f"{document.after}\n"
    texts: list[str] = []
    text = _LINE.sub(lambda mark: mark[1] + texts[int(mark[2])], render_yaml(_marked(document, texts)))
    return "---\n" + _MARK.sub(lambda mark: texts[int(mark[1])], text)


def _marked(value: Any, texts: list[str]) -> Any:
    """Return a value with marks in place of what is not YAML, whose texts are added to `texts`."""

    def mark(kind: str, text: str) -> Line:
        texts.append(text)
        return Line(f"{kind}-{len(texts) - 1}-")

    if isinstance(value, Raw):
        return str(mark("template", value))
    if isinstance(value, Mapping):
        entries: dict[str, Any] = {}
        for key, item in value.items():
            if isinstance(item, Enclosed):
                entries |= {mark("line", item.before): None, key: _marked(item.value, texts)}
                entries[mark("line", item.after)] = None
            else:
                entries[key] = _marked(item, texts)
        return entries
    if isinstance(value, list | tuple):
        items: list[Any] = []
        for item in value:
            if isinstance(item, Enclosed):
                items += [mark("line", item.before), *_marked(item.value, texts), mark("line", item.after)]
            else:
                items.append(_marked(item, texts))
        return items
    return value


def json_text(values: Any) -> str:
    """Return JSON for people to read."""
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"
