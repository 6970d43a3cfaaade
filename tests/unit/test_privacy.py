"""Tests look at public names only: what no public name shows, no user depends on."""

import ast
import subprocess

from tests.support.paths import ROOT

PUBLIC = {"_asdict", "_fields", "_make", "_replace"}
"""Public methods of named tuples."""
MAY_LOOK_INSIDE = {
    ("tests/bench/grouping_process.py", "_publish_as"): "a subclass times each transaction of the process it measures",
    ("tests/bench/trajectory_row.py", "_save_executor"): "RLinf's buffer has no other way to wait for its files",
    ("tests/simulation/installation.py", "_built"): "the one place where clients are built, for the model to take",
    **{
        ("tests/simulation/mutants.py", name): "a mutant breaks the publisher within"
        for name in ("_last_journal", "_ownership_lost", "_publish", "_publish_as", "_renew", "_send", "_write")
    },
    ("tests/unit/test_docs.py", "_actions"): "argparse lists a parser's flags nowhere else",
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
    ("tests/unit/test_privacy.py", "_y"): "an example",
}
"""Private names that a file may use, each with the reason."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def private_names(tree: ast.Module) -> set[str]:
    """Private members of other objects, private imports, and private names that are patched by their text."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            # The client's own error codes begin with an underscore, and so does os._exit.
            if owner not in ("self", "cls", "KafkaError", "os"):
                names.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "attr" in node.func.attr:
            texts = [word.value for word in node.args[:2] if isinstance(word, ast.Constant)]
            names.update(text.rpartition(".")[2] for text in texts if isinstance(text, str))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" in node.value:
            names |= of_a_script(node.value)
    return {name for name in names if is_private(name)}


def of_a_script(text: str) -> set[str]:
    """Private names in a text that a test runs as a program."""
    try:
        return private_names(ast.parse(text))
    except SyntaxError:
        return set()


def test_tests_touch_no_private_member() -> None:
    listed = subprocess.run(["git", "ls-files", "tests/*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    used = {
        (name, private)
        for name in listed.stdout.split()
        for private in private_names(ast.parse((ROOT / name).read_text(encoding="utf-8")))
    }
    assert sorted(used - MAY_LOOK_INSIDE.keys()) == [], "show it by a public name, or make the name public"
    assert sorted(MAY_LOOK_INSIDE.keys() - used) == [], "nobody looks inside there any more"


def test_every_way_to_a_private_name_is_seen() -> None:
    ways = (
        "x._y",
        "from x import _y",
        "patch.setattr(x, '_y', 1)",
        "patch.setattr('a.x._y', 1)",
        "run('import x; x._y')",
    )
    assert [private_names(ast.parse(way)) for way in ways] == [{"_y"}] * len(ways)
    assert private_names(ast.parse("self._y, x._replace(a=1), x.__dict__, os._exit(1)")) == set()
