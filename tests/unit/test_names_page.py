"""The page of public names: its blocks run, and every public name but errors has an example in the documentation."""

import re
from pathlib import Path

import pytest

import rollstream
from docs.build import pages
from tests.support.pages import blocks, page
from tests.support.paths import ROOT

WITHOUT_EXAMPLE = {
    "AgentEnvironment",
    "BatchGroup",
    "LearnerStep",
    "PolicyManifest",
    "ReadBatch",
    "TrainingBatch",
    "TrajectoryCache",
}
"""A protocol that nobody imports, records that readers get, and a part of a buffer."""


def test_the_blocks_of_the_page_run_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    names: dict[str, object] = {}
    for number, body in enumerate(blocks(page("names"), "python")):
        exec(compile(body, f"docs/names.md, block {number}", "exec"), names)


def test_every_public_name_has_an_example() -> None:
    texts = [body for path in pages() for body in blocks(path.read_text(encoding="utf-8"), "python")]
    texts += [
        path.read_text(encoding="utf-8") for place in ("docs", "examples") for path in ROOT.glob(f"{place}/**/*.py")
    ]
    shown = set(re.findall(r"\w+", "\n".join(texts)))
    public = {name for name in rollstream.__all__ if not name.startswith("__")}
    errors = {n for n in public if isinstance(v := getattr(rollstream, n), type) and issubclass(v, Exception)}
    assert public - errors - shown == WITHOUT_EXAMPLE
