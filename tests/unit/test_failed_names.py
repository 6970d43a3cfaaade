"""The last line of every test run has the names of the failed tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

TESTS = """
import pytest

def test_sound():
    pass

@pytest.mark.parametrize("n", [1, 2])
def test_odd(n):
    assert n % 2

@pytest.fixture
def broken():
    raise OSError("no")

def test_that_cannot_begin(broken):
    pass
"""
OF_MAKE = ("ARGS", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS")
RUNS = {"UNIT": "test-unit", "REAL": "test-real"}


def made(folder: Path, goal: str, **commands: str) -> subprocess.CompletedProcess[str]:
    """Run `make` with other commands in place of our tests; everything else is unchanged."""
    # Leave out the variables of a make that may run these tests. With them this would be a nested make, whose last line
    # names the directory that it leaves.
    environment = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    variables = {"FAILED": str(folder / "failed"), **dict.fromkeys(RUNS, "true"), **commands}
    return subprocess.run(
        ["make", "-o", ".venv/.installed", goal, *(f"{name}={value}" for name, value in variables.items())],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def pytest_of(folder: Path) -> str:
    (folder / "test_planted.py").write_text(TESTS)
    return f"{sys.executable} -m pytest -c pyproject.toml --rootdir {folder} -p tests.conftest {folder}/test_planted.py"


@pytest.mark.parametrize(("run", "workers"), [("UNIT", " -n 2"), ("REAL", "")])
@pytest.mark.long
def test_make_ends_with_the_names_of_what_failed(tmp_path: Path, run: str, workers: str) -> None:
    done = made(tmp_path, RUNS[run], **{run: pytest_of(tmp_path) + workers})
    assert done.returncode == 2
    output = done.stdout.splitlines()
    names = "test_planted.py::test_odd[2], test_planted.py::test_that_cannot_begin"
    assert output[-1].endswith(f"*** FAILED {names}.  Stop."), done.stdout
    count = next(number for number, line in enumerate(output) if "1 failed, 2 passed, 1 error" in line)
    assert output[count + 1] == f"FAILED {names}", "pytest says it last, too"


def test_make_says_that_a_run_was_killed_before_it_could_name_anything(tmp_path: Path) -> None:
    done = made(tmp_path, "test", UNIT="sh -c 'kill -9 $$$$' --")
    assert done.returncode == 2
    assert "*** FAILED a run of tests that ended without a name" in done.stdout.splitlines()[-1]


def test_make_succeeds_where_all_passed_or_args_chose_nothing(tmp_path: Path) -> None:
    (tmp_path / "failed").write_text("left by an earlier run\n")
    for goal, commands in (("test", {}), ("test-unit", {"UNIT": "sh -c 'exit 5' --", "ARGS": "-k nothing"})):
        done = made(tmp_path, goal, **commands)
        assert done.returncode == 0, done.stdout
    assert made(tmp_path, "test-unit", UNIT="sh -c 'exit 5' --").returncode == 2, "no tests at all"


def test_a_file_that_cannot_be_collected_is_named(tmp_path: Path) -> None:
    run = pytest_of(tmp_path)
    (tmp_path / "test_planted.py").write_text("import nothing_of_this_name\n")
    last = made(tmp_path, "test-real", REAL=run).stdout.splitlines()[-1]
    assert "*** FAILED test_planted.py." in last
