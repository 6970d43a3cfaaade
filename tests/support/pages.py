"""Pages of the documentation and their sections, for tests that carry out what a page shows."""

import re

from tests.support.paths import ROOT


def page(name: str) -> str:
    """Return the text of docs/NAME.md."""
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """Return the section of this title with its subsections, without its heading; empty if there is none."""
    begin, level, fenced = None, 0, False
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        fenced ^= line.startswith("```")
        heading = None if fenced else re.match(r"(#+) (.+)$", line)
        if heading and begin is None and heading[2] == title:
            begin, level = number + 1, len(heading[1])
        elif heading and begin is not None and len(heading[1]) <= level:
            return "".join(lines[begin:number])
    return "" if begin is None else "".join(lines[begin:])


def blocks(text: str, language: str) -> list[str]:
    """Return the blocks of a language, as they stand."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
