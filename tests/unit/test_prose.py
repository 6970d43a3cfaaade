"""Docstrings and comments are plain technical English: what can be checked by rule is checked here."""

import re
import subprocess

import pytest

from tests.support.paths import ROOT
from tests.support.prose import sentences

FOLDERS = ("topics", "producers", "consumers", "pipeline", "infra", "src", "examples", "docs", "tests")
BARE = re.compile(r"(What|Of|Who|Whoever|Whose|Which|Where|Wherever|Whatever) (?!.*\?$)")
"""A sentence that begins so has no subject in its place; a question may."""


def files(folder: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", f"{folder}/*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.split()


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_sentence_begins_with_a_bare_clause(folder: str) -> None:
    bare = [
        f"{file}:{sentence.line}: {sentence.text}"
        for file in files(folder)
        for sentence in sentences(ROOT / file)
        if BARE.match(sentence.text)
    ]
    assert bare == []
