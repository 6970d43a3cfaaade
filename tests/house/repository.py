"""The files of the repository that the rules read, each parsed once, and what a rule says of them."""

import ast
import re
import subprocess
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import PurePosixPath
from typing import NamedTuple

from tests.support.paths import ROOT

PACKAGES = ("topics", "producers", "consumers", "pipeline", "infra")


class Violation(NamedTuple):
    """A place that breaks a rule, what is wrong there, and the remedy."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


class Import(NamedTuple):
    """A name that a module imports; `from a import b` gives `a` and `a.b`."""

    name: str
    line: int
    decides: bool
    """Not the package in `from rollstream.topics import logs`, of which the module decides."""


class Module:
    """A Python file with its nodes."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.tree = ast.parse(text, path)
        self.nodes = tuple(_walk(self.tree))

    @property
    def name(self) -> str:
        """The name that the file has as a module of ours, e.g. rollstream.topics.logs."""
        return ".".join(("rollstream", *PurePosixPath(self.path).with_suffix("").parts)).removesuffix(".__init__")

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Everything imported anywhere in the file, also within functions."""
        return tuple(
            imported
            for node in self.nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for imported in imports_of(node)
        )


class Repository:
    """Files by path, with `/`. Links may lead to any file below the repository's root."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts
        self._modules: dict[str, Module] = {}

    @classmethod
    def read(cls) -> "Repository":
        """Return the files that git tracks or would track."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py", "*.md", "Makefile"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        paths = (path for path in sorted({*listed.stdout.split("\0")} - {""}) if (ROOT / path).is_file())
        return cls({path: (ROOT / path).read_text(encoding="utf-8") for path in paths})

    def module(self, path: str) -> Module:
        """Parse a file, once."""
        if path not in self._modules:
            self._modules[path] = Module(path, self.texts[path])
        return self._modules[path]

    def modules(self, *folders: str) -> Iterator[Module]:
        """Python files below these folders, or all."""
        for path in self.texts:
            if path.endswith(".py") and (not folders or path.split("/")[0] in folders):
                yield self.module(path)

    @cached_property
    def packages(self) -> tuple[Module, ...]:
        """The modules that are shipped."""
        return tuple(self.modules(*PACKAGES))

    @cached_property
    def pages(self) -> dict[str, str]:
        """Text of each page of the documentation."""
        place = re.compile(r"(docs/(decisions/)?|recipes/([^/]+/)?)?[^/]+\.md")
        return {path: text for path, text in self.texts.items() if place.fullmatch(path)}


def imports_of(node: ast.Import | ast.ImportFrom) -> Iterator[Import]:
    """Names that a statement imports."""
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, True) for alias in node.names)
        return
    module = f"{'.' * node.level}{node.module or ''}"
    yield Import(module, node.lineno, module.count(".") != 1)
    yield from (Import(f"{module}.{alias.name}", node.lineno, module.count(".") <= 1) for alias in node.names)


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    """`ast.walk`, in a third of its time."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for value in node.__dict__.values():
            if isinstance(value, ast.AST):
                waiting.append(value)
            elif isinstance(value, list):
                waiting += [item for item in value if isinstance(item, ast.AST)]
