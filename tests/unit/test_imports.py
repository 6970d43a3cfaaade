"""Imports point one way, and JAX stays where it belongs; read from the source, so that a lazy import counts too."""

import ast
import graphlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

ALLOWED = {
    "topics": {"rollstream.topics"},
    "producers": {"rollstream.producers", "rollstream.topics"},
    "consumers": {"rollstream.consumers", "rollstream.topics"},
    "pipeline": {f"rollstream.{name}" for name in ("pipeline", "consumers", "producers", "topics", "infra")},
    "infra": {
        "rollstream.infra",
        "rollstream.topics.errors",
        "rollstream.topics.logs",
        "rollstream.topics.metric_catalogue",
        "rollstream.topics.secrets",
    },
}
KAFKA = "rollstream.topics.kafka"
JAX = ("jax", "jaxlib", "optax", "orbax", "flax")
GROUPING = "rollstream.consumers.grouping"
IMPORTED_BY_THE_PIPELINE = {
    f"{GROUPING}.{name}"
    for name in (
        "config",
        "core.configuration_marks",
        "core.effects",
        "core.estimators",
        "core.fold",
        "core.plug_ins",
        "core.task_state",
        "process.bootstrap",
        "process.grouping_process",
        "process.mark_writer",
        "process.restoration",
        "process.skipped_offsets",
        "selection_bias",
    )
}
MAY_IMPORT_JAX = ("rollstream.consumers.models", "rollstream.consumers.learner")


MODULES = [path for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py"))]


def name_of(path: Path) -> str:
    return ".".join(("rollstream", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The imports and calls of a module: all that the rules ask about."""
    return tuple(node for node in ast.walk(tree(path)) if isinstance(node, ast.Import | ast.ImportFrom | ast.Call))


def imports(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write the whole name of what is imported"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, allowed: set[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)


def outside(allowed: set[str]) -> list[Path]:
    """Modules that are not within these packages."""
    return [path for path in MODULES if not within(name_of(path), allowed)]


def importing(paths: list[Path], packages: set[str]) -> list[tuple[str, str]]:
    """Each import of these packages in these modules."""
    return [(name_of(path), name) for path in paths for name in imports(path) if within(name, packages)]


def test_imports_point_one_way() -> None:
    assert importing(MODULES, set(ALLOWED)) == [], "import from rollstream"
    for path in MODULES:
        ours = [name for name in imports(path) if name.startswith("rollstream.")]
        # `from rollstream.topics import logs` names the package and the module; the module decides.
        bare = {name for name in ours if name.count(".") == 1 and any(other.startswith(f"{name}.") for other in ours)}
        allowed = ALLOWED[path.relative_to(ROOT).parts[0]]
        assert [name for name in ours if name not in bare and not within(name, allowed)] == [], name_of(path)


def test_jax_is_imported_by_the_learner_and_the_models_alone() -> None:
    assert importing(outside(set(MAY_IMPORT_JAX)), set(JAX)) == []


def at_import(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run when a module is imported: neither those within functions, nor those for type checkers."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node
    elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for child in ast.iter_child_nodes(node):
            yield from at_import(child)


def test_no_module_waits_for_its_own_import() -> None:
    modules = {name_of(path): path for path in MODULES}
    imported: dict[str, set[str]] = {}
    for name, path in modules.items():
        actual = imported.setdefault(name, set())
        for node in at_import(tree(path)):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    of_package = f"{node.module}.{alias.name}"
                    actual.add(of_package if of_package in modules else node.module or "")
        actual.discard(name)
    # A cycle raises CycleError, which names its modules.
    assert set(modules) <= set(graphlib.TopologicalSorter(imported).static_order())


def test_weights_are_published_and_followed_without_the_learner() -> None:
    weights = [path for path in MODULES if within(name_of(path), {"rollstream.consumers.weights"})]
    imported = {name for path in weights for name in imports(path)}
    assert imported
    assert [name for name in imported if within(name, {"rollstream.consumers.learner"})] == []


def test_the_core_of_grouping_and_its_makers_import_neither_kafka_nor_the_process() -> None:
    fold = [path for path in MODULES if within(name_of(path), {f"{GROUPING}.core", f"{GROUPING}.makers"})]
    assert fold
    assert importing(fold, {"confluent_kafka", KAFKA, f"{GROUPING}.process"}) == []


def test_the_pipeline_imports_few_modules_of_grouping() -> None:
    modules = {name_of(path) for path in MODULES if path.name != "__init__.py"}
    pipeline = [path for path in MODULES if within(name_of(path), {"rollstream.pipeline"})]
    imported = {name for path in pipeline for name in imports(path) if name in modules and within(name, {GROUPING})}
    assert imported == IMPORTED_BY_THE_PIPELINE


def test_the_kafka_client_is_imported_below_topics_kafka_alone() -> None:
    assert importing(outside({KAFKA}), {"confluent_kafka"}) == []


def test_no_module_outside_handles_the_messages_of_the_client() -> None:
    accessors = {f"message.{name}" for name in ("error", "value", "key", "offset", "partition", "timestamp", "headers")}
    for path in outside({KAFKA}):
        calls = {ast.unparse(node.func) for node in nodes(path) if isinstance(node, ast.Call)}
        assert calls & accessors == set(), name_of(path)
