"""`import rollstream` is the API: every public name is there, found at first use, and nothing heavy comes with it."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rollstream
from tests.support.paths import ROOT

PACKAGES = ("topics", "producers", "consumers", "consumers.grouping", "consumers.buffers", "consumers.weights", "infra")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.py"))]


@pytest.mark.parametrize("name", ["", *PACKAGES])
def test_every_public_name_of_a_package_is_there(name: str) -> None:
    package = importlib.import_module(f"rollstream.{name}".rstrip("."))
    assert package.__all__ == sorted(package.__all__)
    for public in package.__all__:
        assert getattr(package, public) is not None


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        rollstream.no_such_name  # noqa: B018


def test_the_version_is_that_of_the_distribution() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "rollstream", "--version"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.split() == ["rollstream", rollstream.__version__]


def test_importing_rollstream_imports_none_of_its_parts_and_no_array_library() -> None:
    code = "import rollstream, sys; heavy = {'numpy', 'jax', 'pyarrow', 'confluent_kafka', 'rollstream'};"
    code += "print(*sorted(name for name in sys.modules if name.split('.')[0] in heavy))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == ["rollstream"]


def test_public_names_are_found_without_jax() -> None:
    code = (
        "import rollstream, sys; [getattr(rollstream, n) for n in rollstream.__all__]; sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).returncode == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_and_examples_import_public_names_from_rollstream_alone(page: Path) -> None:
    imports = re.findall(r"^\s*(?:from|import) (rollstream\.[\w.]+)", page.read_text(), re.MULTILINE)
    assert imports == []


@pytest.mark.long
def test_nobody_imports_the_folders_by_their_own_names() -> None:
    folders = {"topics", "producers", "consumers", "pipeline", "infra"}
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for file in files.split():
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not folders & {name.partition(".")[0] for name in names}, f"{file}:{getattr(node, 'lineno', 0)}"
