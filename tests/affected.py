"""Test files that a change may break, nearest first: `python -m tests.affected [--since COMMIT]`, one path a line.

A test file is affected by the modules that it imports, directly or through others, also lazily. It also depends on the
modules of commands that it names as words of a command line, on plug-ins it names by import path, and on the conftest
files above it. Other files (settings, schemas, scripts of the page) affect the tests that name them.

What a change at the root affects is nearly everything, so a selection ends when its recorded seconds reach a budget,
and says how many files further away are left to `make test`.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from rollstream.pipeline.command_line.commands import COMMANDS, GROUPS
from tests.support.paths import ROOT

PACKAGES = ("topics", "producers", "consumers", "pipeline", "infra")
IMPORT_PATH = re.compile(r"(?:rollstream|tests)(?:\.\w+)+(?=$|:\w)")
COMMAND_MODULES = {
    name: f"rollstream.pipeline.{module}"
    for commands in (COMMANDS, *GROUPS.values())
    for name, (module, _) in commands.items()
    if module
}
LAYERS = {"unit": 60.0, "real": 120.0}
"""Worker seconds of a selection, for tests without a broker and with one."""
SECONDS = {"unit": 2.0, "real": 12.0}


def name_of(path: str) -> str:
    """Import name of a file, as `rollstream.topics.wire.codec` or `tests.support.runs`."""
    dotted = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"rollstream.{dotted}" if path.split("/")[0] in PACKAGES else dotted


def named(tree: ast.Module, *, commands: bool, conftest: bool) -> Iterator[str]:
    """Modules that a file imports or names; of a conftest, those that it imports itself, for what a fixture imports is
    of the tests that ask for it."""
    for node in tree.body if conftest else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if path := IMPORT_PATH.match(node.value):
                yield path[0]
            elif commands and node.value in COMMAND_MODULES:
                yield COMMAND_MODULES[node.value]


def dependencies(paths: list[str]) -> Mapping[str, set[str]]:
    """Files that each file depends on directly."""
    files = {name_of(path): path for path in paths}
    found: dict[str, set[str]] = {}
    for path in paths:
        own = found.setdefault(path, set())
        tests = path.startswith("tests/")
        tree, conftest = ast.parse((ROOT / path).read_bytes()), path.endswith("conftest.py")
        for name in named(tree, commands=tests and not path.startswith("tests/unit"), conftest=conftest):
            # `from a.b import c` names the module a.b.c, or the name c of the module a.b.
            module = next((n for n in (name, name.rpartition(".")[0]) if n in files), None)
            if module is not None and files[module] != path:
                own.add(files[module])
        if tests:
            folders = Path(path).parents
            own.update(str(f / "conftest.py") for f in folders if f"{f}/conftest.py" in files.values())
            own.discard(path)
    return found


def affected(changed: set[str], depends_on: Mapping[str, set[str]]) -> dict[str, int]:
    """Distance in imports of each test file that a change may break, nearest first."""
    dependents: dict[str, set[str]] = {}
    for path, others in depends_on.items():
        for other in others:
            dependents.setdefault(other, set()).add(path)
    distance = dict.fromkeys(sorted(changed), 0)
    queue = deque(distance)
    while queue:
        path = queue.popleft()
        for dependent in sorted(dependents.get(path, ())):
            if dependent not in distance:
                distance[dependent] = distance[path] + 1
                queue.append(dependent)
    return {path: steps for path, steps in distance.items() if is_test(path) and path in depends_on}


def is_test(path: str) -> bool:
    return path.startswith("tests/") and Path(path).name.startswith("test_") and path.endswith(".py")


def git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def changed_since(commit: str) -> list[str]:
    """Files that differ from the last commit that we share with another, and new ones."""
    base = git("merge-base", commit, "HEAD")[0]
    return [*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")]


def naming(name: str, paths: list[str]) -> Iterator[str]:
    """Python files that name a file which is no Python, such as a schema or a script of the page."""
    yield from (path for path in paths if name.encode() in (ROOT / path).read_bytes())


def selection(changed: list[str]) -> tuple[list[str], list[str]]:
    """Test files to run now, nearest first, and those further away that the budget leaves out."""
    paths = [path for path in git("ls-files", "-co", "--exclude-standard", "*.py") if (ROOT / path).exists()]
    touched = {path for path in changed if path.endswith(".py")}
    for path in changed:
        if not path.endswith((".py", ".md")):
            touched.update(naming(Path(path).name, paths))
    chosen, left = [], []
    seconds = dict.fromkeys(LAYERS, 0.0)
    for path in affected(touched, dependencies(paths)):
        layer = "unit" if path.startswith(("tests/unit/", "tests/model/")) else "real"
        seconds[layer] += SECONDS[layer]
        (chosen if seconds[layer] <= LAYERS[layer] else left).append(path)
    return chosen, left


def _upstream() -> str:
    """Return the branch that this one follows, or HEAD if there is none."""
    words = ["git", "rev-parse", "--abbrev-ref", "@{upstream}"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "HEAD"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--since", help="compare with what HEAD shares with this commit (default: its upstream, or HEAD)"
    )
    since = parser.parse_args().since or _upstream()
    chosen, left = selection(changed_since(since))
    print(*chosen, sep="\n")
    print(f"{len(chosen)} test files for what changed since {since}", file=sys.stderr)
    if left:
        print(f"{len(left)} more are affected from further away; make test runs them", file=sys.stderr)


if __name__ == "__main__":
    main()
