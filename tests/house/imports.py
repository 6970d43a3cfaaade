"""Imports point one way, and JAX and the Kafka client stay where they belong; a lazy import counts too."""

import ast
import graphlib
import re
from collections.abc import Iterable, Iterator

from tests.house.repository import PACKAGES, Module, Repository, Violation

ALLOWED = {
    "topics": {"rollstream.topics"},
    "producers": {"rollstream.producers", "rollstream.topics"},
    "consumers": {"rollstream.consumers", "rollstream.topics"},
    "pipeline": {f"rollstream.{name}" for name in PACKAGES},
    "infra": {
        "rollstream.infra",
        "rollstream.topics.errors",
        "rollstream.topics.logs",
        "rollstream.topics.metrics.catalogue",
        "rollstream.topics.secrets",
    },
}
KAFKA = "rollstream.topics.kafka"
GROUPING = "rollstream.consumers.grouping"
JAX = {"jax", "jaxlib", "optax", "orbax", "flax"}
MAY_IMPORT_JAX = {"rollstream.consumers.models", "rollstream.consumers.learner"}
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
ROOMS = {
    "topics": ("", "records", "wire", "files", "kafka", "control", "metrics", "traces"),
    "producers": ("", "environments", "tasks", "episodes", "flow", "inference", "trajectories", "gateway", "worker"),
    "pipeline": (
        *("", "process", "command_line", "deployment", "control", "audit", "doctor", "run", "rescoring", "index"),
        *("report", "tools", "ui", "roles", "launch"),
    ),
    "consumers": (
        *("", "files", "archive", "weights", "models", "labeling", "buffers", "trackers", "learner", "trainers"),
        "serving",
    ),
    "infra": ("config", "broker", ""),
    "consumers.learner": (
        *("objective", "checkpoint_paths", "config", "user_objectives", "pretrained", "reproducibility", "parallel"),
        *("training", "records", "input", "startup", "learner", "retraining"),
    ),
}
"""Folders, and modules, of a package from the bottom up; where "" stands for its own modules, those are below them all.
Folders that are not listed are free."""
OF_A_MESSAGE = {"error", "value", "key", "offset", "partition", "timestamp", "headers"}


def within(name: str, packages: Iterable[str]) -> bool:
    """Whether a name is one of these packages, or in one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def importing(modules: Iterable[Module], packages: set[str], remedy: str) -> Iterator[Violation]:
    """Each import of these packages in these modules."""
    for module in modules:
        for name, line in {imported.name: imported.line for imported in module.imports}.items():
            if within(name, packages):
                yield Violation(module.path, line, f"imports {name}; {remedy}")


def relative_imports(repository: Repository) -> Iterator[Violation]:
    """A name is written whole."""
    for module in repository.packages:
        for name, line, _ in module.imports:
            if name.startswith("."):
                yield Violation(module.path, line, "imports relatively; write the whole name of what is imported")


def folders_by_their_own_names(repository: Repository) -> Iterator[Violation]:
    """Nobody imports `topics` in place of `rollstream.topics`."""
    return importing(repository.modules(), set(PACKAGES), "import it from rollstream")


def direction(repository: Repository) -> Iterator[Violation]:
    """Packages import those below them."""
    for module in repository.packages:
        folder = module.path.split("/")[0]
        for name, line, decides in module.imports:
            if decides and name.startswith("rollstream.") and not within(name, ALLOWED[folder]):
                yield Violation(module.path, line, f"{folder} may not import {name}; move what it needs below both")


def rooms(repository: Repository) -> Iterator[Violation]:
    """Folders of a package import those below them, so that a reader never climbs back."""
    for package, order in ROOMS.items():
        for module in repository.packages:
            room = _room(module.name, package)
            above = order[order.index(room) + 1 :] if room in order else ()
            for name, line, decides in module.imports:
                if decides and _room(name, package) in above:
                    remedy = f"move what it needs to {package}/{room} or below"
                    yield Violation(module.path, line, f"{room or package} may not import {name}; {remedy}")


def _room(name: str, package: str) -> str | None:
    """Return the folder or module of a package that a name is in; "" for an unlisted module, None for other folders."""
    first, *rest = name.removeprefix(f"rollstream.{package}").removeprefix(".").split(".")
    if not within(name, {f"rollstream.{package}"}):
        return None
    return first if first in ROOMS[package] else None if rest else ""


def jax(repository: Repository) -> Iterator[Violation]:
    """Everything but the learner and the models starts without JAX."""
    modules = [module for module in repository.packages if not within(module.name, MAY_IMPORT_JAX)]
    return importing(modules, JAX, "only the learner and the models import JAX")


def kafka_client(repository: Repository) -> Iterator[Violation]:
    """One place imports the Kafka client."""
    modules = [module for module in repository.packages if not within(module.name, {KAFKA})]
    return importing(modules, {"confluent_kafka"}, f"use {KAFKA}")


def kafka_messages(repository: Repository) -> Iterator[Violation]:
    """One place handles the messages of the Kafka client."""
    for module in repository.packages:
        if within(module.name, {KAFKA}):
            continue
        for node in module.nodes:
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "message"
                and node.func.attr in OF_A_MESSAGE
            ):
                yield Violation(module.path, node.lineno, f"calls message.{node.func.attr}(); take records of {KAFKA}")


def weights_without_learner(repository: Repository) -> Iterator[Violation]:
    """Weights are published and followed without the learner."""
    weights = [module for module in repository.packages if within(module.name, {"rollstream.consumers.weights"})]
    return importing(weights, {"rollstream.consumers.learner"}, "weights do without the learner")


def pure_fold(repository: Repository) -> Iterator[Violation]:
    """The core of grouping and its makers know neither Kafka nor the process."""
    fold = [module for module in repository.packages if within(module.name, {f"{GROUPING}.core", f"{GROUPING}.makers"})]
    return importing(fold, {"confluent_kafka", KAFKA, f"{GROUPING}.process"}, "the fold does no I/O")


def grouping_seen_by_the_pipeline(repository: Repository) -> Iterator[Violation]:
    """The pipeline imports few modules of grouping."""
    grouping = {module.name for module in repository.packages if within(module.name, {GROUPING})}
    grouping -= {module.name for module in repository.packages if module.path.endswith("__init__.py")}
    imported = {
        name: (module.path, line)
        for module in repository.packages
        if within(module.name, {"rollstream.pipeline"})
        for name, line, _ in module.imports
        if name in grouping
    }
    for name in imported.keys() - IMPORTED_BY_THE_PIPELINE:
        yield Violation(*imported[name], f"imports {name}; use {', '.join(sorted(IMPORTED_BY_THE_PIPELINE))}")
    for name in (IMPORTED_BY_THE_PIPELINE & grouping) - imported.keys():
        yield Violation("tests/house/imports.py", 1, f"the pipeline no longer imports {name}; remove it from the list")


def cycles(repository: Repository) -> Iterator[Violation]:
    """No module waits for its own import."""
    modules = {module.name: module for module in repository.packages}
    lines: dict[str, dict[str, int]] = {}
    for name, module in modules.items():
        lines[name] = {
            actual: node.lineno
            for node in _at_import(module.tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            for actual in [f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in modules else node.module]
            if actual in modules and actual != name
        }
    try:
        graphlib.TopologicalSorter(lines).prepare()
    except graphlib.CycleError as error:
        imported, importer, *_ = cycle = error.args[1]
        chain = " -> ".join(reversed(cycle))
        yield Violation(
            modules[importer].path, lines[importer][imported], f"waits for itself: {chain}; break the cycle"
        )


def _at_import(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run when a module is imported: neither those within functions, nor those for type checkers."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node
    elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
        for child in ast.iter_child_nodes(node):
            yield from _at_import(child)


def public_names(repository: Repository) -> Iterator[Violation]:
    """Pages and examples import public names, from rollstream alone, or a trainer's front, which needs its package."""
    for path, text in repository.texts.items():
        if path == "README.md" or re.fullmatch(r"docs/[^/]+\.md|recipes/.*\.md|examples/.*\.py", path):
            for match in re.finditer(
                r"^[^\S\n]*(?:from|import) (rollstream\.(?!consumers\.trainers\.)[\w.]+)", text, re.MULTILINE
            ):
                line = text.count("\n", 0, match.start()) + 1
                yield Violation(path, line, f"imports from {match[1]}; import public names from rollstream")


RULES = (
    relative_imports,
    folders_by_their_own_names,
    direction,
    rooms,
    jax,
    kafka_client,
    kafka_messages,
    weights_without_learner,
    pure_fold,
    grouping_seen_by_the_pipeline,
    cycles,
    public_names,
)
