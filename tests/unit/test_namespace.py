"""`import rollstream` is the API: every public name is there, found at first use, and nothing heavy comes with it."""

import importlib
import subprocess
import sys

import pytest

import rollstream

PACKAGES = ("topics", "producers", "consumers", "consumers.grouping", "consumers.buffers", "consumers.weights", "infra")


@pytest.mark.parametrize("name", ["", *PACKAGES])
def test_every_public_name_of_a_package_is_there(name: str) -> None:
    package = importlib.import_module(f"rollstream.{name}".rstrip("."))
    assert package.__all__ == sorted(package.__all__)
    for public in package.__all__:
        assert getattr(package, public) is not None


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        rollstream.no_such_name  # noqa: B018


def test_the_version_is_that_of_the_distribution() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "rollstream", "--version"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.split() == ["rollstream", rollstream.__version__]


def test_importing_rollstream_imports_none_of_its_parts_and_no_array_library() -> None:
    code = "import rollstream, sys; heavy = {'numpy', 'jax', 'pyarrow', 'confluent_kafka', 'rollstream'};"
    code += "print(*sorted(name for name in sys.modules if name.split('.')[0] in heavy))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == ["rollstream"]


def test_public_names_are_found_without_jax() -> None:
    code = (
        "import rollstream, sys; [getattr(rollstream, n) for n in rollstream.__all__]; sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).returncode == 0
