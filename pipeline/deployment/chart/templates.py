"""Text of Helm templates: YAML documents with values that helm fills in, and parts that a value turns on.

Values are written as JSON, which is YAML in one line, so that no template depends on indentation. Only a few forms are
used, which tests evaluate without helm: values with a default, files, digests, `if`, and `range` over a list.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.pipeline.deployment.yaml_text import Enclosed, Raw, render_yaml

_END = "{{- end }}"
Document = Mapping[str, Any]


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
    return f"---\n{render_yaml(document)}"


def json_text(values: Any) -> str:
    """Return JSON for people to read."""
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"
