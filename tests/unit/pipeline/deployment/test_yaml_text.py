"""YAML that is written is read back as it was."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rollstream.pipeline.deployment.yaml_text import MERGE, Enclosed, Raw, render_yaml

KEYS = st.from_regex(r"[A-Za-z][A-Za-z0-9_-]{0,8}x", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(
    [
        "no",
        "Yes",
        "on",
        "null",
        "~",
        "1",
        "1.5",
        "12:30",
        "0o7",
        "",
        "- a",
        "a: b",
        "#",
        "'\"",
        'a\\b"c',
        "{}",
        "<<",
        "=",
    ]
)
SCALARS = TEXTS | st.integers() | st.booleans() | st.none()


@given(
    st.dictionaries(
        KEYS,
        st.recursive(SCALARS | st.lists(SCALARS, max_size=4), lambda inner: st.dictionaries(KEYS, inner, max_size=3)),
        min_size=1,
        max_size=5,
    )
)
def test_plain_values_are_read_back_equal(table: dict[str, Any]) -> None:
    assert yaml.safe_load(render_yaml(table)) == table


def test_a_part_is_merged_into_others_by_its_name() -> None:
    text = render_yaml({"x-a": {"b": 1, "c": [2]}, "d": {MERGE: "base", "c": [3]}}, {"x-a": "base"})
    assert yaml.safe_load(text)["d"] == {"b": 1, "c": [3]}


def test_tables_in_lists_are_read_back_equal() -> None:
    table = {"a": [{"b": 1, "c": {"d": ["no", 2]}}, "plain", {"e": [{"f": None}, {"g": {}}]}], "h": []}
    assert yaml.safe_load(render_yaml(table)) == table


def test_lists_in_lists_are_refused() -> None:
    with pytest.raises(TypeError, match="a list holds"):
        render_yaml({"a": [["b", 1]]})


def test_a_template_has_scalars_without_quotes_and_lines_around_what_may_be_left_out() -> None:
    table = {"a": Raw("{{ x }}"), "b": Enclosed("{{- if y }}", {"c": 1}, "{{- end }}")}
    table["d"] = [{"e": 1}, Enclosed("{{- range z }}", [Raw("{{ . }}"), {"f": [2], "g": {}}], "{{- end }}")]
    assert render_yaml(table).splitlines() == [
        "a: {{ x }}",
        "{{- if y }}",
        "b:",
        "  c: 1",
        "{{- end }}",
        "d:",
        "  - e: 1",
        "  {{- range z }}",
        "  - {{ . }}",
        "  - f: [2]",
        "    g: {}",
        "  {{- end }}",
    ]
