"""Objects of users' own code are named by module or by file."""

import sys
from pathlib import Path

import pytest

from rollstream.topics.errors import ConfigurationError
from rollstream.topics.user_code import load_object

KIND = "a maker is named package.module:Class"


def load(name: str) -> object:
    return load_object(name, "grouper.makers names", KIND)


def test_a_module_and_an_attribute_of_it_are_imported() -> None:
    assert load("pathlib:Path") is Path


def test_a_file_is_executed_once_and_imports_modules_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scoring_of_mine.py").write_text("SCALE = 3\n")
    (tmp_path / "envs.py").write_text(
        "from dataclasses import dataclass\n"
        "from scoring_of_mine import SCALE\n"
        "@dataclass\n"
        "class Env:\n"
        "    scale: int = SCALE\n"
    )
    env = load("envs.py:Env")
    assert env().scale == 3  # type: ignore[operator]
    assert load(f"{tmp_path}/envs.py:Env") is env


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "env.py").write_text(f"NAME = {folder!r}\n")
    assert [load(f"{tmp_path}/{folder}/env.py:NAME") for folder in ("a", "b")] == ["a", "b"]


def test_a_file_beside_users_code_does_not_replace_an_installed_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    (tmp_path / "wave.py").write_text("raise RuntimeError('the wrong file was imported')\n")
    (tmp_path / "env.py").write_text("import wave\nNAME = wave.__name__\n")
    assert load(f"{tmp_path}/env.py:NAME") == "wave"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Maker", "grouper.makers names 'Maker'; a maker is named package.module:Class or path/to/file.py:Name"),
        ("my:", "grouper.makers names 'my:'"),
        ("./file:Maker", "names './file:Maker'; a maker is named package.module:Class or path/to/file.py:Name"),
        ("..pkg:Maker", "names '..pkg:Maker'; a maker is named package.module:Class or path/to/file.py:Name"),
        ("makers/mine:Maker", "names 'makers/mine:Maker'; a maker is named .* path/to/file.py:Name"),
        ("no_such_module:Maker", "No module named 'no_such_module'; install its package .* path/to/file.py:Name"),
        ("pathlib:Nothing", r"names 'pathlib:Nothing', but pathlib has no attribute 'Nothing'$"),
        ("pathlib:Pth", "has no attribute 'Pth'; did you mean 'Path'"),
        ("no_such_file.py:Maker", "No such file or directory"),
    ],
)
def test_a_name_that_leads_nowhere_is_an_error_with_the_remedy(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load(name)


def test_whatever_error_a_file_raises_is_one_line_with_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "env.py"
    file.write_text("NAME = 1\nraise RuntimeError('no\\ngood')\n")
    with pytest.raises(ConfigurationError, match=r"cannot be imported: RuntimeError: no good \(env\.py, line 2\)$"):
        load(f"{file}:NAME")
    file.write_text("from pathlib import Pth\n")
    with pytest.raises(ConfigurationError, match=r"ImportError: cannot import name 'Pth' .* \(env\.py, line 1\)$"):
        load(f"{file}:NAME")


def test_a_file_that_raises_while_it_is_imported_can_be_mended_and_named_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "env.py"
    file.write_text("def f(:\n")
    with pytest.raises(ConfigurationError, match="invalid syntax"):
        load(f"{file}:NAME")
    file.write_text("NAME = 1\n")
    assert load(f"{file}:NAME") == 1


def test_a_file_is_imported_without_the_block_that_runs_it_as_a_script(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text('value = 1\nif __name__ == "__main__":\n    raise SystemExit("it ran as a script")\n')
    assert load_object(f"{path}:value", "the value is", "a value is named package.module:value") == 1
