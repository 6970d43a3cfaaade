"""YAML that is written is read back as it was."""

import pytest
import yaml

from rollstream.pipeline.deployment.yaml_text import render_yaml


@pytest.mark.parametrize(
    "text",
    ["no", "Yes", "y", "N", "null", "~", "1", "1e-05", "12:30", "0o7", "-1", ".inf", "- a", "a: b", "#", ""],
)
def test_texts_that_a_reader_could_take_for_another_value_are_quoted(text: str) -> None:
    rendered = render_yaml({"aa": text, "bb": [text]})
    assert rendered.splitlines()[0] in (f"aa: '{text}'", f'aa: "{text}"')
    assert yaml.safe_load(rendered) == {"aa": text, "bb": [text]}


def test_short_lists_are_in_one_line_and_long_texts_are_blocks() -> None:
    table = {"aa": ("bb", 1), "cc": ["d" * 100], "ee": [{"ff": [2], "gg": {}}], "hh": None, "ii": "j\n\nk\n"}
    lines = [
        "aa: [bb, 1]",
        "cc:",
        "- " + "d" * 100,
        "ee:",
        "- ff: [2]",
        "  gg: {}",
        "hh: null",
        "ii: |",
        "  j",
        "",
        "  k",
    ]
    assert render_yaml(table).splitlines() == lines
