"""Shipped files: a wheel of the packages and their data alone, a lock with hashes, a Makefile with help."""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGES = ("topics", "producers", "consumers", "pipeline", "infra")


def tracked(*patterns: str) -> set[str]:
    answer = subprocess.run(["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(answer.stdout.split())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = target.glob("rollstream-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(built: Path) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(built) as opened:
        yield opened


def test_the_wheel_holds_every_file_of_the_packages(wheel: zipfile.ZipFile) -> None:
    # pipeline/recipes is a link to the gallery.
    files = {*tracked(*PACKAGES), *(f"pipeline/{recipe}" for recipe in tracked("recipes"))} - {"pipeline/recipes"}
    assert {f"rollstream/{name}" for name in files} <= set(wheel.namelist())


def test_the_wheel_holds_the_data_files_that_code_reads(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    data = ("broker/pom.xml", "broker/log4j2.xml", "chart/Chart.yaml", "chart/templates/_helpers.tpl")
    assert {f"rollstream/infra/{name}" for name in data} <= names
    assert any(name.startswith("rollstream/topics/schemas/") and name.endswith(".avsc") for name in names)
    assert "rollstream/py.typed" in names


def test_the_wheel_holds_one_package_and_its_own_record(wheel: zipfile.ZipFile) -> None:
    assert {name.split("/")[0] for name in wheel.namelist()} == {"rollstream", "rollstream-0.1.0.dist-info"}


def test_the_wheel_names_addresses_that_somebody_answers_at(wheel: zipfile.ZipFile) -> None:
    [name] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    lines = wheel.read(name).decode().split("\n\n")[0].splitlines()
    urls = [line.rpartition(", ")[2] for line in lines if line.startswith("Project-URL: ")]
    assert urls
    for url in urls:
        assert re.fullmatch(r"https://(?!.*example)[a-z0-9.-]+\.[a-z]+/.*", url), url


def start_with_pip() -> list[list[str]]:
    """The commands that README gives to people who use pip."""
    section = (ROOT / "README.md").read_text().split("\n## With pip\n")[1].split("\n## ")[0]
    return [shlex.split(line) for line in section.split("```sh\n")[1].split("```")[0].splitlines()]


def run_in(home: Path, *words: str) -> str:
    own = {k: v for k, v in os.environ.items() if not k.startswith(("ROLLSTREAM", "KAFKA_B", "PYTHONPATH"))}
    command = [home / "env" / "bin" / words[0], *words[1:]]
    done = subprocess.run(command, cwd=home, env=own, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def installation(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `env` is an empty environment with the wheel installed by pip.

    Dependencies are those of the tests' own interpreter, as there may be no network; an editable rollstream is not
    found there, because a path file names a folder and does not process the path files in it.
    """
    home = tmp_path_factory.mktemp("installation")
    # An environment's own pip would take longer to install than our wheel.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "env"], check=True)
    [packages] = (home / "env" / "lib").glob("python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", home / "env" / "bin" / "python"]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", "--no-compile", built], check=True)
    assert set(os.listdir(packages)) == {"rollstream", "rollstream-0.1.0.dist-info"}
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return home


def test_the_wheel_installs_with_pip_into_an_empty_environment_and_answers(installation: Path) -> None:
    install, *commands = start_with_pip()
    assert install[:4] == ["python", "-m", "pip", "install"]
    extras = set(install[4].removeprefix(".[").removesuffix("]").split(","))
    assert extras <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for command in commands:
        answer = run_in(installation, *command, *(["--help"] if command[1:2] == ["demo"] else []))
        assert answer.startswith(("rollstream 0.1.0", f"usage: {' '.join(command)}"))


def test_the_readme_lists_every_extra_that_a_page_names_and_all_are_those_above() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    cells = re.findall(r"^\| ((?:`[\w-]+`(?:, )?)+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    listed = [name.strip("`") for cell in cells for name in cell.split(", ")]
    assert set(extras) - set(listed) == {"dev", "peers"}, "what only work on rollstream itself needs"
    named = {
        name
        for page in tracked("*.md")
        for group in re.findall(r"rollstream\[([\w,-]+)\]", (ROOT / page).read_text())
        for name in group.split(",")
    }
    assert "verifiers" in named
    assert named <= set(listed)
    [together] = re.findall(r"\[(.+)\]", *extras["all"])
    assert set(together.split(",")) == set(listed[: listed.index("all")]) - {"tpu"}


@pytest.mark.long
def test_users_own_files_of_our_folders_names_do_not_matter(installation: Path, tmp_path: Path) -> None:
    for name in ("infra", "consumers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong package was imported')\n")
    for name in ("pipeline", "topics", "producers"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong file was imported')\n")
    for command in (["rollstream"], ["python", "-m", "rollstream"]):
        for words in (["--version"], ["ledger", "--help"], ["topics", "plan", "--help"]):
            done = subprocess.run(
                [installation / "env" / "bin" / command[0], *command[1:], *words],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(tmp_path)},
                capture_output=True,
                text=True,
            )
            assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_pip_installs_the_wheel_with_all_it_needs_and_it_does_what_readme_says(built: Path, tmp_path: Path) -> None:
    install, *commands = start_with_pip()
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    run_in(tmp_path, *install[:4], f"{built}{install[4][1:]}")
    run_in(tmp_path, "python", "-m", "pip", "check")
    assert ["rollstream", "demo"] in commands
    for command in commands:
        # The demo with a broker of its own, until a twentieth of the answers is right.
        sooner = ["--set=demo.target=0.1", "--set=demo.gain=0.05"] if command[1:2] == ["demo"] else []
        answer = run_in(tmp_path, *command, *sooner)
    assert "every record is in exactly one place" in answer
    assert (tmp_path / ".rollstream" / "demo").is_dir()


def locked(name: str) -> list[str]:
    """The requirements of a lock file, each with its hashes on one line."""
    lines = (ROOT / name).read_text().replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.lstrip().startswith("#")]


def locked_versions(name: str) -> dict[str, set[str]]:
    """Versions by package: there may be several, for different interpreters."""
    collected: dict[str, set[str]] = {}
    for package, version in (line.split()[0].split("==") for line in locked(name)):
        collected.setdefault(package, set()).add(version)
    return collected


@pytest.mark.parametrize(
    "name",
    [
        "requirements.txt",
        "requirements-uv.txt",
        "requirements-long.txt",
        "requirements-vllm.txt",
        "requirements-verifiers.txt",
        "requirements-openenv.txt",
        "requirements-harbor.txt",
        "requirements-trl.txt",
        "requirements-transferqueue.txt",
    ],
)
def test_the_locked_requirements_pin_every_package_with_a_hash_and_name_no_registry(name: str) -> None:
    assert "://" not in (ROOT / name).read_text()
    blocks = locked(name)
    assert len(blocks) > 50 or (name == "requirements-uv.txt" and len(blocks) == 1)
    for block in blocks:
        assert "==" in block
        assert "--hash=sha256:" in block


def test_the_long_requirements_agree_with_those_that_setup_installs_and_only_they_are_gigabytes() -> None:
    always, long = locked_versions("requirements.txt"), locked_versions("requirements-long.txt")
    assert {name: actual for name, actual in long.items() if name in always and not actual <= always[name]} == {}
    assert {"torch", "transformers", "libtpu"} <= long.keys() - always.keys()


def test_nothing_is_installed_without_a_digest() -> None:
    """`make` and the image install from the locks alone; when they install the project, no dependency is missing."""
    for name in ("Makefile", "Dockerfile"):
        text = (ROOT / name).read_text().replace("\\\n", " ")
        for variable, value in re.findall(r"^(\w+) = (.*\bpip install\b.*)$", text, re.MULTILINE):
            text = text.replace(f"{variable} = {value}\n", "").replace(f"$({variable})", value)
        commands = [line for line in text.splitlines() if re.search(r"\bpip install\b", line)]
        assert commands
        for command in commands:
            bound = (
                "--require-hashes" in command
                or "--no-deps -e ." in command
                or "--constraint requirements.txt" in command
            )
            assert bound, f"{name}: {command.strip()}"


def test_make_help_explains_every_target() -> None:
    environment = {**os.environ, "MAKEFLAGS": ""}
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, env=environment)
    for target in ("setup", "demo", "test", "test-all", "bench", "lint", "help"):
        assert f"  make {target} " in listed.stdout


def test_make_with_a_python_too_old_says_so_in_one_line(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && { echo Python 3.9.2; exit 0; }\nexit 1\n')
    old.chmod(0o755)
    made = subprocess.run(
        ["make", "--silent", "setup", f"PYTHON={old}", f"VENV={tmp_path}/venv"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "MAKEFLAGS": ""},
    )
    assert made.returncode != 0
    assert "rollstream needs Python 3.11 or newer" in made.stderr
    assert "found: Python 3.9.2" in made.stderr
    assert not (tmp_path / "venv").exists()
