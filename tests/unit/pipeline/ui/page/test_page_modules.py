"""The modules of the page: they agree with their types, import existing files, and write no HTML."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rollstream.pipeline.control.steering import COMMANDS, SCALED
from rollstream.pipeline.ui.irreversible_actions import CHANGES
from tests.support.paths import ROOT

PAGE = ROOT / "pipeline" / "ui" / "page"
TYPESCRIPT = "typescript@5.9.3"
MODULES = sorted(path for path in PAGE.rglob("*.js") if path.parent.name != "vendor")
LONGEST = 500


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.relative_to(PAGE).as_posix())
def test_a_module_is_plain(module: Path) -> None:
    """It imports files by name without a build step, treats text as text, and can be read in one sitting."""
    text = module.read_text()
    for name in re.findall(r'^import .* from "(.*)";$|^import "(.*)";$', text, re.MULTILINE):
        target = module.parent / (name[0] or name[1])
        assert target.is_file(), f"{module.name} imports {name}"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    assert 'style="' not in text, "an attribute that the policy of the page refuses"
    assert text.startswith("// "), "its first line says what it is"
    assert text.count("\n") < LONGEST


def test_the_document_has_neither_scripts_nor_styles_of_its_own() -> None:
    document = (PAGE / "index.html").read_text()
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*src=)", document)
    for name in re.findall(r'(?:src|href)="([^"]+)"', document):
        assert (PAGE / name).is_file()


def test_every_file_of_others_is_listed_with_version_and_licence() -> None:
    notes = (PAGE / "vendor" / "README.md").read_text()
    ours = {"README.md", "preact-htm.d.ts"}
    for path in (PAGE / "vendor").iterdir():
        if path.name not in ours:
            assert path.name in notes, path.name
    version = re.search(r"uPlot \(v([\d.]+)\)", (PAGE / "vendor" / "uplot.js").read_text())
    assert version is not None
    assert f"| {version[1]} |" in notes


def test_the_page_offers_every_command_that_a_run_takes() -> None:
    forms = (PAGE / "parts" / "command_forms.js").read_text()
    assert set(re.findall(r'^    name: "(.*)",$', forms, re.MULTILINE)) == {*COMMANDS, *CHANGES}


def test_the_page_scales_every_role_that_can_be_scaled() -> None:
    forms = (PAGE / "parts" / "command_forms.js").read_text()
    roles = re.search(r'name: "role", label: "Role", choices: \[(.*)\]', forms)
    assert roles is not None
    assert tuple(re.findall(r'"(.*?)"', roles[1])) == SCALED


@pytest.mark.long
def test_the_modules_agree_with_their_types(tmp_path: Path) -> None:
    """npx provides TypeScript, and also finds an installed one."""
    if shutil.which("npx") is None:
        pytest.fail("there is no npx: install Node.js (Debian: apt-get install npm), or deselect this test")
    # Run in an empty folder, so that npm does not take a file of the checkout for its project.
    command = ["npx", "--yes", "--package", TYPESCRIPT, "tsc", "--project", str(PAGE)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout[-5000:]}{done.stderr[-2000:]}"
