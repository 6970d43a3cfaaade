"""A module is read in one sitting: beyond a size it is split by subject."""

import subprocess

import pytest

from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("folders", "most"), [(("topics", "producers", "consumers", "pipeline", "infra"), 500), (("tests",), 600)]
)
def test_no_module_is_longer_than_one_reads_at_once(folders: tuple[str, ...], most: int) -> None:
    patterns = [f"{folder}/*.py" for folder in folders]
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = {name: (ROOT / name).read_text(encoding="utf-8").count("\n") for name in listed.stdout.split()}
    assert len(lines) > 50
    assert {name: count for name, count in lines.items() if count > most} == {}


# Tools of the tests themselves.
OWN = {"bench", "faults"}


def test_unit_tests_lie_in_folders_of_the_names_of_the_packages_that_they_test() -> None:
    folders = {
        path.parent.relative_to(ROOT / "tests" / "unit") for path in (ROOT / "tests" / "unit").rglob("test_*.py")
    }
    tested = {folder for folder in folders if folder.parts and folder.parts[0] not in OWN}
    assert tested
    assert [str(folder) for folder in sorted(tested) if not (ROOT / folder).is_dir()] == []
