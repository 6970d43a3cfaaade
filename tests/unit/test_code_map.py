"""The questions at the top of the code map name functions and tables that the linked modules define."""

import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "code-map.md").read_text(encoding="utf-8").split("<!-- generated")[0]
LINK = re.compile(r"\]\(\.\./([^)#]+)\)")
SAME = re.compile(r"the same (\S+\.py)")
NAME = re.compile(r"`([A-Za-z_]\w*)`")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| a") and NAME.search(line)]


def modules_of(row: str) -> list[Path]:
    """Modules that a row links, and those that it calls the same as an earlier row does."""
    linked = [ROOT / link for link in LINK.findall(row)]
    return linked + [ROOT / link for end in SAME.findall(row) for link in LINK.findall(PAGE) if link.endswith(end)]


def defines(module: Path, name: str) -> bool:
    """Whether a module defines a function, method, class or table of that name."""
    defined = rf"^\s*(?:(?:async )?def|class) {name}\b|^{name}\b[^=\n]*="
    return module.is_file() and re.search(defined, module.read_text(encoding="utf-8"), re.MULTILINE) is not None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_a_row_names_only_what_its_modules_define(row: str) -> None:
    modules = modules_of(row)

    assert [name for name in NAME.findall(row) if not any(defines(module, name) for module in modules)] == []


def test_a_name_that_no_module_defines_is_noticed() -> None:
    row = ROWS[0]

    assert not any(defines(module, "no_such_function") for module in modules_of(row))
    assert len(ROWS) >= 6
