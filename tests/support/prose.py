"""Prose of the code: sentences of docstrings and comments, each with its place."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`])")
_CODE = re.compile(r"`[^`]*`")


class Sentence(NamedTuple):
    """One sentence and the line it begins at, or the first line of the docstring it is in."""

    path: Path
    line: int
    text: str


def sentences(path: Path) -> Iterator[Sentence]:
    """Sentences of a Python file's docstrings (of fields, too) and comments, without code in backquotes."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from _split(path, node.lineno, node.value.value)
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last + 1:
            yield from _split(path, start, " ".join(block))
            block, start = [], token.start[0]
        block.append(token.string.lstrip("#: "))
        last = token.start[0]
    yield from _split(path, start, " ".join(block))


def _split(path: Path, line: int, text: str) -> Iterator[Sentence]:
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in _SENTENCE_END.split(" ".join(paragraph.split())):
            if sentence:
                yield Sentence(path, line, _CODE.sub("`code`", sentence))


def page_sentences(path: Path) -> Iterator[Sentence]:
    """Sentences of a page, without code, tables, headings and the bold words that an item begins with."""
    lines: list[str] = []
    in_code = False
    for line in path.read_text(encoding="utf-8").splitlines():
        fence = line.lstrip().startswith("```")
        in_code ^= fence
        left_out = in_code or fence or line.startswith("    ") or re.match(r"\s*[|#<]", line)
        lines.append("" if left_out else re.sub(r"^\s*(?:[-*]|\d+\.)\s+(?:\*\*.*?[.:]\*\*)?", "\f", line))
    at = 1
    # An item begins a paragraph of its own.
    for paragraph in re.split(r"(\n\s*\n|\n(?=\f))", "\n".join(lines)):
        yield from _split(path, at, re.sub(r"\*\*.*?[.:]\*\*", "", paragraph.replace("\f", "")))
        at += paragraph.count("\n")
