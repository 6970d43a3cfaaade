"""One word, one meaning: names of modules, classes and variables."""

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.support.paths import ROOT

VAGUE_MODULES = {
    "account", "beginning", "changes", "decisions", "figures", "flow", "helpers", "intake", "judging", "memory", "misc",
    "parts", "questions", "recorded", "runs", "shell", "sources", "supply", "util", "utils",
}  # fmt: skip
"""Names that say nothing of what is in a module."""
NAMED_FOR_COMMANDS = {"pipeline/tools/runs.py"}
VAGUE_VARIABLES = {"found", "of", "said", "told", "asked"}
GENERIC_CLASSES = {"Counts", "Data", "Entry", "Info", "Item", "Journal", "Manager", "Part", "Progress", "Source"}
"""Names that stood for several things; a class has a name of its own, such as IndexEntry or LearnerPosition."""
MAY_BE_CALLED_SO = {"Source"}
"""Public names: they are in users' code, and in the documents that the buffers follow."""

CLASSES_OF_WORDS = {
    "Environment": ["producers/environment.py"],
    "Episode": ["producers/environment.py"],
    "Group": ["consumers/grouping/core/groups.py"],
    "Mark": ["topics/records/rollouts.py"],
    "Rollout": ["topics/records/rollouts.py"],
    "Trajectory": ["topics/trajectories.py"],
}
"""Classes that are called by a word of the glossary alone: no other class is."""


PACKAGES = ("topics", "producers", "consumers", "pipeline", "infra")


def trees(folders: Iterable[str] = PACKAGES) -> dict[str, ast.Module]:
    listed = subprocess.run(
        ["git", "ls-files", *(f"{folder}/*.py" for folder in folders)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {name: ast.parse((ROOT / name).read_text()) for name in listed.stdout.split()}


def test_a_module_is_a_noun_its_field_knows() -> None:
    names = {name: Path(name).stem for name in trees()}
    assert [name for name, stem in names.items() if stem in VAGUE_MODULES] == [*NAMED_FOR_COMMANDS]


def test_no_two_public_classes_share_a_name() -> None:
    places = defaultdict(list)
    for name, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
    assert sorted((GENERIC_CLASSES & places.keys()) - MAY_BE_CALLED_SO) == []


def glossary() -> dict[str, str]:
    """The words of the overview with their meanings."""
    words = (ROOT / "docs" / "overview.md").read_text().split("## Words\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| ([a-z ]+) \| (.+) \|$", words, re.MULTILINE))


def test_words_of_the_glossary_name_one_class_each_and_nothing_else() -> None:
    words = glossary().keys() - {"word"}
    assert {"rollout", "group", "batch", "step", "policy version", "mark", "run"} <= words
    reserved = {"".join(part.capitalize() for part in word.split()) for word in words}
    places = defaultdict(list)
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name in reserved:
                places[node.name].append(name)
    assert places == CLASSES_OF_WORDS


def test_variables_say_what_they_hold() -> None:
    vague = [
        f"{name}:{node.lineno}: {node.arg if isinstance(node, ast.arg) else node.id}"
        for name, tree in trees([*PACKAGES, "tests", "examples"]).items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE_VARIABLES)
        or (isinstance(node, ast.arg) and node.arg in VAGUE_VARIABLES)
    ]
    assert vague == []
