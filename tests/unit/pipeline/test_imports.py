"""Imports point one way, and JAX stays where it belongs; read from the source, so that a lazy import counts too."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ALLOWED = {
    "topics": {"topics"},
    "producers": {"producers", "topics"},
    "consumers": {"consumers", "topics"},
    "pipeline": {"pipeline", "consumers", "producers", "topics", "infra"},
    "infra": {"infra", "topics.errors", "topics.logs"},
}
JAX = ("jax", "jaxlib", "optax", "orbax", "flax")
MAY_IMPORT_JAX = ("consumers.models", "consumers.learner")


MODULES = [path for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py"))]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write the whole name of what is imported"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, allowed: set[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    ours = [name for name in imports(path) if name.partition(".")[0] in ALLOWED]
    # `from topics import logs` names the package and the module; the module decides.
    bare = {name for name in ours if "." not in name and any(other.startswith(f"{name}.") for other in ours)}
    assert [name for name in ours if name not in bare and not within(name, ALLOWED[package])] == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_jax_is_imported_by_the_learner_and_the_models_alone(path: Path) -> None:
    if not within(name_of(path), set(MAY_IMPORT_JAX)):
        assert [name for name in imports(path) if name.partition(".")[0] in JAX] == []
