"""Writes plain values as YAML for people: keys in their order, short lists in one line, long texts as blocks."""

import re
from collections.abc import Mapping
from typing import Any

import yaml

_PLAIN = re.compile(r"[A-Za-z/{\[].|--?[A-Za-z]")
"""Beginnings of texts that every reader of YAML reads as PyYAML does; others take 1e-05, 0o7 or y for no texts."""
_WIDTH = 90
"""Most characters of a list that is written in one line."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = "|" if "\n" in data else None if _PLAIN.match(data) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)

    def represent_list(self, data: Any) -> yaml.SequenceNode:
        in_line = not any(isinstance(item, dict | list) for item in data) and len(str(data)) < _WIDTH
        return self.represent_sequence("tag:yaml.org,2002:seq", data, in_line)


_Dumper.add_representer(str, _Dumper.represent_str)
_Dumper.add_representer(list, _Dumper.represent_list)
_Dumper.add_representer(tuple, _Dumper.represent_list)


def render_yaml(table: Mapping[str, Any]) -> str:
    """Return a table of texts, numbers, booleans, None, lists and tables as YAML."""
    return str(yaml.dump(table, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf")))
