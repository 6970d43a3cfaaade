"""`rollstream report` of an archive: values as the commands show them, and texts of rollouts that stay inert."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rollstream.pipeline.config import load, to_toml
from rollstream.pipeline.report.document import document
from rollstream.pipeline.report.run_facts import facts_of
from rollstream.topics.records import LearnerStep, PolicyManifest, Tensor
from tests.support import archived_run
from tests.support.archived_run import ROWS, archive_run, evaluated
from tests.support.command_line import answer_of

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[2J\N{RIGHT-TO-LEFT OVERRIDE}"


class Page(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def report(directory: Path) -> str:
    done = answer_of(directory, "report", "--run", "main", "--archive", "archive", "-o", "page.html")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "page.html"
    return (directory / "page.html").read_text(encoding="utf-8")


def test_the_values_of_a_report_are_those_of_the_commands(tmp_path: Path) -> None:
    archive_run(tmp_path / "archive", 5)
    page = report(tmp_path)
    query = "select metrics['loss'] as loss from latest_steps order by step desc limit 1"
    answer = answer_of(tmp_path, "sql", query, "--archive", "archive", "--json")
    loss = json.loads(answer.stdout)[0]["loss"]
    assert f'data-value="{loss!r}"' in page
    answer = answer_of(
        tmp_path,
        "sql",
        "select avg(reward) as r from rollouts where policy_version = 4",
        "--archive",
        "archive",
        "--json",
    )
    [row] = json.loads(answer.stdout)
    for name in ("reward/produced", "reward/env"):
        assert re.search(rf"{name}</th>.*?data-value=\"{row['r']}\"", page)
    assert "Evaluations" not in page, "there is none"
    assert "length/env</th>" in page
    assert "truncated/env</th>" in page
    assert f'<td data-name="trained">{5 * ROWS}</td>' in page
    for words in ("Learner", "default", "Environments", "env", "Reward", "Loss", "Groups of zero variance"):
        assert words in Page(page).text


def test_the_settings_of_a_run_that_were_changed_are_in_its_report(tmp_path: Path) -> None:
    archive_run(tmp_path / "archive", 2)
    assert "Settings that were changed" not in Page(report(tmp_path)).text
    config = load(flags=["run=main", f"data_dir={tmp_path / '.rollstream'}", "learner.optimizer.learning_rate=0.004"])
    config.run_dir.mkdir(parents=True, exist_ok=True)
    (config.run_dir / "run.toml").write_text(to_toml(config))
    page = report(tmp_path)
    assert "<code>learner.optimizer.learning_rate</code></th><td>0.004</td><td>0.002</td>" in page
    assert page.count("<code>learner.") == 1


def test_rollouts_that_a_learner_skipped_are_no_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = archived_run.step_of

    def skipping(number: int, *args: Any, **names: Any) -> LearnerStep:
        step = original(number, *args, **names)
        [use] = step.uses
        return replace(step, uses=(replace(use, use="skipped", reason="too old", code="stale_version"),))

    monkeypatch.setattr(archived_run, "step_of", skipping)
    archive_run(tmp_path / "archive", 2)
    page = report(tmp_path)
    assert f'<td data-name="skipped">{2 * ROWS}</td>' in page
    assert "No rollout was dropped." in Page(page).text


def test_hostile_texts_are_shown_and_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = archived_run.rollout_of
    monkeypatch.setattr(archived_run, "rollout_of", lambda number, _text="": original(number, HOSTILE))
    archive_run(tmp_path / "archive", 2)
    raw = report(tmp_path)
    page = Page(raw)
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>\\u001b[2J\\u202e" in page.text
    assert not {"script", "img", "iframe", "object", "link", "form"} & set(page.tags)
    assert not [name for name, _value in page.attributes if name.startswith("on") or name in ("style", "href", "src")]
    [policy] = [value for name, value in page.attributes if value.startswith("default-src")]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "\x1b" not in raw
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in raw


@pytest.mark.parametrize(
    ("model", "shape"),
    [('{"layers": 2}', "; layers 2"), ("", ""), ("my-net-v2", ""), ("[1]", ""), ("null", ""), ("[" * 100_000, "")],
)
def test_a_model_described_by_any_text_has_a_report(tmp_path: Path, model: str, shape: str) -> None:
    tensor = Tensor(name="kernel", dtype="<f4", shape=(2, 3), start=0, size_bytes=24, digest="")
    manifest = PolicyManifest(
        version=1, learner="default", step=0, epoch="", tensors=(tensor,), chunks=(), digest="", model=model
    )
    archive_run(tmp_path / "archive", 2, policies=[manifest])
    facts = facts_of(load(flags=["run=main", f"data_dir={tmp_path}"]), str(tmp_path / "archive"))
    assert f"<dd>6 parameters{shape}</dd>" in document(facts)


def test_a_page_needs_nothing_from_elsewhere_and_names_what_verifies_it(tmp_path: Path) -> None:
    archive_run(tmp_path / "archive", 1)
    raw = report(tmp_path)
    assert not re.search(r"https?://", raw)
    assert "url(" not in raw
    assert "@import" not in raw
    for command in re.findall(r"<code>(rollstream [^<]*)</code>", raw):
        words = command.split()
        assert answer_of(tmp_path, words[1], "--help").returncode == 0, command
    assert "rollstream archive archive --run main --check" in raw


def test_evaluations_are_listed_by_version_environment_and_suite_with_intervals(tmp_path: Path) -> None:
    evals = [
        *evaluated(0, "add", [0, 0], samples=1, prompts=2),
        *evaluated(2, "add", [1, 4, 0, 4], samples=4, prompts=5),
        *evaluated(2, "sort", [4, 4], samples=4, prompts=2),
    ]
    archive_run(tmp_path / "archive", 2, evals=evals)
    page = report(tmp_path)
    table = page[page.index("<h2>Evaluations</h2>") :]
    rows = [re.sub(r"<[^>]+>", " ", row).split() for row in re.findall(r"<tr>(.*?)</tr>", table)[1:5]]
    assert [row[:3] for row in rows] == [["2", "2", "add"], ["2", "2", "sort"], ["2", "2", "suite"], ["0", "0", "add"]]
    assert "16 of 20, 4 a prompt" in table
    assert "24 of 28, 4 a prompt" in table
    # The third prompt has no success; the first has one, in half of the pairs.
    means = {name: row[row.index("prompt") + 1 :: 4] for name, row in zip(("add", "sort", "both"), rows, strict=False)}
    assert means["sort"] == ["1", "1", "1", "1"]
    assert means["add"] == ["0.562", "0.562", "0.625", "0.750"]
    assert means["both"] == ["0.781", "0.781", "0.812", "0.875"]
