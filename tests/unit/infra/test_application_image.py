"""The image of every role holds what rollstream requires; its bytecode and its bill of materials are reproducible."""

import json
import os
import runpy
import sys
from importlib.metadata import version
from importlib.util import MAGIC_NUMBER
from pathlib import Path

import pytest

import rollstream
from rollstream.infra.image.application_contents import PROGRAM
from rollstream.infra.image.bill_of_materials import bill_of_materials
from rollstream.infra.image.bytecode import compiled
from rollstream.infra.image.distributions import installed_files, needed_distributions, own_files
from rollstream.infra.image.entries import ImageEntry
from rollstream.topics.errors import ConfigurationError


def names(extras: tuple[str, ...]) -> set[str]:
    return {part.metadata["Name"].lower() for part in needed_distributions(extras)}


def test_extras_bring_what_they_require_and_no_more() -> None:
    core, learner = names(()), names(("learner",))
    assert {"rollstream", "confluent-kafka", "fastavro", "numpy"} <= core
    assert not {"jax", "jaxlib", "pytest", "hypothesis"} & core
    assert core < learner
    assert {"jax", "jaxlib", "optax"} <= learner


def test_an_extra_that_is_none_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match=r"no extra learning; it has .*learner"):
        needed_distributions(("learning",))


def test_distributions_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "rollstream-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: rollstream\nVersion: 0\nProvides-Extra: fast\n"
        'Requires-Dist: no-such-thing\nRequires-Dist: nor-this; extra == "fast"\n'
        'Requires-Dist: never; python_version < "3"\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=r"not installed: no-such-thing, nor-this; install rollstream\[fast\]"):
        needed_distributions(("fast",))


def test_the_files_of_rollstream_are_those_of_a_wheel() -> None:
    (own,) = (part for part in needed_distributions(()) if part.metadata["Name"] == "rollstream")
    files = {str(path): source for path, source in own_files(Path(rollstream.__path__[0]), own)}
    assert files["rollstream/pipeline/cli.py"].read_text().startswith('"""The command `rollstream`')
    assert "rollstream/infra/kafka-jars.lock" in files
    assert any(path.endswith(".dist-info/METADATA") for path in files)
    left_out = ("__pycache__", ".pyc", "direct_url.json", "RECORD", "/.")
    assert not [path for path in files if any(part in path for part in left_out)]


def test_the_program_runs_where_it_is_started_and_not_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "rollstream"
    program.write_text(PROGRAM)
    monkeypatch.setattr(sys, "argv", [str(program), "--version"])
    # As multiprocessing reads it in the processes of `verify`.
    runpy.run_path(str(program), run_name="__mp_main__")
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out.startswith("rollstream ")


def test_files_of_a_distribution_lie_below_site_packages() -> None:
    (numpy,) = (part for part in needed_distributions(()) if part.metadata["Name"] == "numpy")
    files = dict(installed_files(numpy))
    assert "numpy/__init__.py" in {str(path) for path in files}
    assert not [path for path in files if ".." in path.parts or path.is_absolute()]


def test_bytecode_is_the_same_for_the_same_sources_whenever_they_were_written(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("NAMES = {'a', 'b', 'c', 'd'}\n\ndef f(x):\n    return x in {'one', 'two', 'three', 'four'}\n")
    broken = tmp_path / "template.py"
    broken.write_text("{{ not python }} (")
    entries = [
        ImageEntry("/opt/module.py", source=source, mode=0o644),
        ImageEntry("/opt/template.py", source=broken, mode=0o644),
        ImageEntry("/opt/data.txt", source=source, mode=0o644),
    ]
    (first,) = compiled(entries, tmp_path / "first")
    os.utime(source, (1, 1))
    (second,) = compiled(entries, tmp_path / "second")
    assert first.path == second.path
    assert first.path.startswith("/opt/__pycache__/module.cpython-")
    assert first.source is not None
    assert second.source is not None
    bytecode = first.source.read_bytes()
    assert bytecode == second.source.read_bytes()
    assert bytecode.startswith(MAGIC_NUMBER)
    # Flags 1 (PEP 552): the bytecode holds the digest of its source, and Python does not check it.
    assert bytecode[4:8] == b"\x01\x00\x00\x00"
    assert b"/opt/module.py" in bytecode
    assert os.fsencode(tmp_path) not in bytecode


def test_the_bill_names_every_distribution_with_its_version() -> None:
    parts = needed_distributions(("learner",))
    text = bill_of_materials(parts)
    assert text == bill_of_materials(list(reversed(parts)))
    bill = json.loads(text)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["version"] == version("rollstream")
    actual = {part["name"]: part["purl"] for part in bill["components"]}
    assert actual["jax"] == f"pkg:pypi/jax@{version('jax')}"
    assert len(actual) == len(parts)  # not rollstream itself, but Python
    licences = {part["name"]: part.get("licenses") for part in bill["components"]}
    assert licences["numpy"]
