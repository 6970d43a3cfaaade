"""Docstrings and comments are plain technical English: what can be checked by rule is checked here."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.prose import page_sentences, sentences

FOLDERS = ("topics", "producers", "consumers", "pipeline", "infra", "src", "examples", "docs", "tests")
BARE = re.compile(r"(What|Of|Who|Whoever|Whose|Which|Where|Wherever|Whatever) (?!.*\?$)")
"""A sentence that begins so has no subject in its place; a question may."""


def files(folder: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", f"{folder}/*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.split()


def prose(folder: str) -> list[tuple[str, str]]:
    """Return each sentence of a folder's code, first with its place and then alone."""
    return [(f"{file}:{s.line}: {s.text}", s.text) for file in files(folder) for s in sentences(ROOT / file)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_sentence_begins_with_a_bare_clause(folder: str) -> None:
    assert [text for text, sentence in prose(folder) if BARE.match(sentence)] == []


MISUSED = re.compile(r"(?<!-)\b([Bb]eside)\b(?!-)|\b(how many that|else than|tells? of)\b")
"""Words that stood for `besides`, `in parallel with` and `next to` alike, and turns of phrase that are no English."""


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder not in ("docs", "tests")])
def test_no_sentence_has_a_misused_word(folder: str) -> None:
    assert [text for text, sentence in prose(folder) if MISUSED.search(sentence)] == []


PAGES = sorted((*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")))
WITHOUT_SUBJECT = re.compile(r"(What|Whatever|Who|Whoever|Of) (?!.*\?$)")
"""A page may begin a sentence with the place where something holds."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_of_a_page_begins_with_a_bare_clause(page: Path) -> None:
    bare = [f"{sentence.line}: {sentence.text}" for sentence in page_sentences(page)]
    assert [text for text in bare if WITHOUT_SUBJECT.match(text.partition(": ")[2])] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_of_a_page_has_a_misused_word(page: Path) -> None:
    assert [f"{s.line}: {s.text}" for s in page_sentences(page) if MISUSED.search(s.text)] == []


def test_sentences_of_a_page_are_those_of_its_prose(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# What this is\n\nOne begins here\nand ends. Two.\n\n- **What for.** Three\n  goes on.\n- Four.\n\n"
        "```sh\nWhat code\n```\n\n    What code\n\n| What a table |\n"
    )
    actual = [(sentence.line, sentence.text) for sentence in page_sentences(page)]
    assert [text for _line, text in actual] == ["One begins here and ends.", "Two.", "Three goes on.", "Four."]
    assert actual[0][0] <= 3 <= actual[2][0]
