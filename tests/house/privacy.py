"""Tests look at public names only: what no public name shows, no user depends on."""

import ast
from collections.abc import Iterable, Iterator

from tests.house.repository import Module, Repository, Violation

PUBLIC = {"_asdict", "_fields", "_make", "_replace"}
"""Public methods of named tuples."""
MAY_LOOK_INSIDE = {
    ("tests/bench/grouping_process.py", "_publish_as"): "a subclass times each transaction of the process it measures",
    ("tests/bench/trajectory_row.py", "_save_executor"): "RLinf's buffer has no other way to wait for its files",
    ("tests/broker/conftest.py", "_compile_once"): "a fixture that is used by being there",
    ("tests/model/conftest.py", "_compile_once"): "a fixture that is used by being there",
    (
        "tests/simulation/scheduler.py",
        "_get_running_loop",
    ): "actors share a thread, and each has its loop",
    (
        "tests/simulation/scheduler.py",
        "_set_running_loop",
    ): "actors share a thread, and each has its loop",
    ("tests/simulation/threads.py", "_PySimpleQueue"): "the library's queue that waits with the locks it is given",
    ("tests/simulation/installation.py", "_built"): "the one place where clients are built, for the model to take",
    **{
        ("tests/simulation/mutants.py", name): "a mutant breaks the publisher within"
        for name in ("_last_journal", "_ownership_lost", "_publish", "_publish_as", "_renew", "_send", "_write")
    },
    ("tests/house/documents.py", "_actions"): "argparse lists a parser's flags nowhere else",
    ("tests/support/hanging.py", "_async_get_leader_for_partitions"): "kafka-python has no call for these requests",
    ("tests/support/hanging.py", "_manager"): "kafka-python has no call for these requests",
    ("tests/support/object_store.py", "_join"): "fsspec's file systems override it, and are their own public form",
    ("tests/unit/consumers/buffers/trajectories/test_files.py", "_total_samples"): "an attribute of RLinf's buffer",
    (
        "tests/unit/consumers/buffers/trajectories/test_files.py",
        "_trajectory_counter",
    ): "an attribute of RLinf's buffer",
    ("tests/unit/consumers/models/test_slots.py", "_cache_size"): "JAX counts compilations nowhere else",
    ("tests/unit/consumers/models/test_slot_devices.py", "_cache_size"): "JAX counts compilations nowhere else",
    ("tests/unit/test_house.py", "_y"): "an example",
}
"""Private names that a file may use, each with the reason."""


def private_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Private members of other objects, private imports, and private names that are patched by their text."""
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            # The client's own error codes begin with an underscore, and so does os._exit.
            if owner not in ("self", "cls", "KafkaError", "os"):
                names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "attr" in node.func.attr:
            texts = [word.value for word in node.args[:2] if isinstance(word, ast.Constant)]
            names = [text.rpartition(".")[2] for text in texts if isinstance(text, str)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" in node.value:
            yield from ((name, node.lineno) for name, _ in _of_a_script(node.value))
        for name in names:
            if name.startswith("_") and not name.startswith("__") and name not in PUBLIC:
                yield name, getattr(node, "lineno", 1)


def _of_a_script(text: str) -> Iterator[tuple[str, int]]:
    """Private names in a text that a test runs as a program."""
    try:
        yield from private_names(Module("a script", text).nodes)
    except SyntaxError:
        return


def private_members(repository: Repository) -> Iterator[Violation]:
    """Tests touch no private member."""
    used = set()
    for module in repository.modules("tests"):
        for name, line in private_names(module.nodes):
            used.add((module.path, name))
            if (module.path, name) not in MAY_LOOK_INSIDE:
                yield Violation(module.path, line, f"touches {name}; show it by a public name, or make the name public")
    for path, name in MAY_LOOK_INSIDE.keys() - used:
        if path in repository.texts:
            yield Violation(path, 1, f"no longer touches {name}; remove it from the list in tests/house/privacy.py")


RULES = (private_members,)
