"""Pages name what a package exports by the package, not by the module below it where it lies."""

import re
from pathlib import Path

import pytest

import rollstream
from tests.support.paths import ROOT

PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
    # These pages list modules and the places of names.
    if path.name not in ("api.md", "code-map.md")
)
DEEP = re.compile(r"\brollstream\.\w+\.[\w.]*?\.?(\w+)\b(?![./])")


def deep_paths(text: str) -> list[str]:
    """Paths of public names that are longer than need be."""
    return [match[0] for match in DEEP.finditer(text) if match[1] in rollstream.__all__]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_what_is_public_by_its_shortest_path(page: Path) -> None:
    assert deep_paths(page.read_text(encoding="utf-8")) == []


def test_a_deep_path_is_found_and_a_short_one_or_a_module_is_not() -> None:
    assert deep_paths("`rollstream.topics.codec.encode` does") == ["rollstream.topics.codec.encode"]
    assert deep_paths("`rollstream.encode`, `rollstream.topics.codec` and topics/codec.py") == []
