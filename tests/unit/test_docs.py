"""The documentation agrees with the code: generated parts, links, commands, settings, messages and figures."""

import argparse
import ast
import functools
import importlib.util
import itertools
import json
import re
import shlex
import statistics
import tomllib
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from docs.build import pages, rendered
from rollstream.consumers.grouping.core.estimators import ESTIMATORS, Outcomes, rloo, rloo_normalized
from rollstream.consumers.grouping.makers.registry import MAKERS
from rollstream.consumers.learner.training.objective import RECIPES, LossConfig, policy_metrics, reported
from rollstream.pipeline.cli import build_parser
from rollstream.pipeline.commands import COMMANDS
from rollstream.pipeline.config import RunConfig, load
from rollstream.pipeline.settings import known_keys
from rollstream.topics.codec import schemas
from rollstream.topics.errors import RollstreamError
from rollstream.topics.fates import DROP_REASONS
from tests.support.paths import ROOT

PACKAGES = ("topics", "producers", "consumers", "pipeline", "infra")
PAGES = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in pages()}
every_page = pytest.mark.parametrize("name", PAGES)
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OTHER_PROGRAMS = {
    "export",
    "kafka-console-consumer.sh",
    "kafka-consumer-groups.sh",
    "kafka-get-offsets.sh",
    "kafka-reassign-partitions.sh",
    "kafka-topics.sh",
    "kafka-transactions.sh",
    "pip",
    "python",
}


def blocks(name: str, language: str) -> list[str]:
    return [body for kind, body in _BLOCK.findall(PAGES[name]) if kind == language]


def prose(name: str) -> str:
    return _BLOCK.sub("", PAGES[name])


def section(name: str, title: str) -> str:
    return PAGES[name].split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_cells(text: str) -> list[str]:
    rows = re.findall(r"^\| (.+?) \|", text, re.MULTILINE)
    return [cell for cell in rows if not cell.startswith("---")]


@every_page
def test_what_is_generated_says_what_the_code_says(name: str) -> None:
    assert rendered(PAGES[name]) == PAGES[name], "stale; run: make docs"


@every_page
def test_every_fence_stands_alone_and_every_block_is_closed(name: str) -> None:
    """Otherwise readers and these tests would misread the blocks that follow."""
    fences = [line for line in PAGES[name].splitlines() if "```" in line]
    for opening, closing in itertools.zip_longest(fences[::2], fences[1::2]):
        assert re.fullmatch(r"```(sh|python|text|toml|json)", opening), opening
        assert closing == "```", f"after {opening}"


@every_page
def test_data_blocks_parse(name: str) -> None:
    for language, parse in (("toml", tomllib.loads), ("json", json.loads)):
        for block in blocks(name, language):
            parse(block)


@every_page
def test_every_relative_link_leads_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", prose(name)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        page = (ROOT / name).parent / path if path else ROOT / name
        assert page.exists(), f"{name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{name} links to {target}"


def test_every_page_is_linked_from_another() -> None:
    linked = {
        ((ROOT / name).parent / target.partition("#")[0]).resolve()
        for name, text in PAGES.items()
        for target in re.findall(r"\]\(([^)]+)\)", text)
        if "://" not in target
    }
    lonely = {name for name in PAGES if (ROOT / name).resolve() not in linked}
    assert lonely == {"README.md"}


def joined(block: str) -> list[str]:
    """The commands of a block; a command that continues over several lines becomes one line."""
    return block.replace("\\\n", "").splitlines()


@every_page
def test_no_command_of_a_page_is_wider_than_a_terminal(name: str) -> None:
    shown = [line for block in blocks(name, "sh") for line in block.splitlines()]
    shown += [line for block in blocks(name, "text") for line in block.splitlines() if line.startswith("$ ")]
    assert [line for line in shown if len(line) > 80] == []


@every_page
def test_every_command_in_a_shell_block_parses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in (line for block in blocks(name, "sh") for line in joined(block) if line.strip()):
        words = shlex.split(line, comments=True)
        if words[0] == "rollstream":
            try:
                whole_parser().parse_args(words[1:])
            except SystemExit as ended:
                if ended.code:  # 0: it was asked for the version
                    pytest.fail(f"{name}: {line}: {capsys.readouterr().err}")
        elif words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= set(targets), line
            for chosen in re.findall(r"-k (\w+)", line):
                assert any(chosen in test for test in _tests_with_a_broker()), f"{line} runs nothing"
        else:
            assert words[0] in _OTHER_PROGRAMS, line
            for word in words[1:]:
                assert not word.endswith(".py") or (ROOT / word).exists(), line


def _tests_with_a_broker() -> list[str]:
    return [
        f"{path.stem}::{test}"
        for path in (ROOT / "tests").glob("[!u]*/test_*.py")
        for test in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]


@functools.cache
def whole_parser() -> argparse.ArgumentParser:
    return build_parser(load=COMMANDS)


@every_page
def test_every_command_named_in_prose_exists(name: str) -> None:
    for quoted in re.findall(r"`rollstream ([^`]+)`", prose(name)):
        parser = whole_parser()
        words = quoted.split()
        for before, word in zip(["", *words], words, strict=False):
            if before in ("--help-settings", "--help-metrics"):
                continue  # the value of the flag
            if word.startswith("-"):
                known = {flag for action in parser._actions for flag in action.option_strings}
                assert word in known, f"{name}: rollstream {quoted}"
            elif word.isalpha() and word.islower():
                choices = [action.choices for action in parser._actions if action.choices and not action.option_strings]
                assert any(word in choice for choice in choices), f"{name}: rollstream {quoted}"
                parser = next((c[word] for c in choices if isinstance(c, dict) and word in c), parser)


@every_page
def test_python_blocks_compile_and_import_what_exists(name: str) -> None:
    for block in blocks(name, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")


@every_page
def test_settings_named_in_prose_exist(name: str) -> None:
    keys = set(known_keys(RunConfig))
    sections = {key.rpartition(".")[0] for key in keys}
    for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?: = [^`]+)?`", prose(name)):
        owner = key.rpartition(".")[0]
        if owner in sections and not key.endswith((".json", ".toml", ".py")):
            assert key in keys | sections or f"{key}.*" in keys or importlib.util.find_spec(key), f"{name}: {key}"


@every_page
def test_no_page_names_a_path_of_someones_machine(name: str) -> None:
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users|mnt|opt)/", PAGES[name])


def test_every_decision_has_a_number_of_its_own() -> None:
    numbers = [int(name.split("/")[-1][:4]) for name in PAGES if "/decisions/" in name]
    assert len(set(numbers)) == len(numbers)


def test_every_decision_that_code_refers_to_exists() -> None:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for page in re.findall(r"docs/[\w/.-]+\.md", path.read_text()):
                assert (ROOT / page).exists(), f"{path.relative_to(ROOT)} refers to {page}"


def test_the_table_of_drops_has_every_reason_once() -> None:
    reasons = [cell.strip("`") for cell in first_cells(section("docs/grouping.md", "Drops"))[1:]]
    assert sorted(reasons) == sorted(DROP_REASONS)


def test_the_table_of_marks_has_every_kind_once() -> None:
    kinds = [cell.strip("`") for cell in first_cells(section("docs/grouping.md", "The fold"))[1:]]
    [kind] = [field for field in schemas()["Mark"][-1].source["fields"] if field["name"] == "kind"]
    assert sorted(kinds) == sorted(kind["type"]["symbols"])


def test_the_table_of_estimators_and_the_makers_named_are_those_that_exist() -> None:
    advantages = section("docs/grouping.md", "Advantages")
    assert [cell.strip("`") for cell in first_cells(advantages)[1:]] == list(ESTIMATORS)
    makers = PAGES["docs/batch-makers.md"].split("\n## ")[0]
    assert [cell.strip("`") for cell in first_cells(makers)[1:]] == list(MAKERS)


def test_the_tables_of_losses_have_what_can_be_chosen_and_the_figures_that_are_taken() -> None:
    def table(title: str) -> dict[str, str]:
        rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", section("docs/losses.md", title), re.MULTILINE)
        return dict(rows)

    losses = table("Which loss")
    assert list(losses) == list(RECIPES)
    for name, row in losses.items():
        recipe = RECIPES[name]
        clips = re.search(r"clip ([\d.]+) and ([\d.]+)", row)
        if clips:
            assert (float(clips[1]), float(clips[2])) == (recipe.clip_low, recipe.clip_high), name
        assert ("token mean" in row) == (recipe.reduction == "token_mean"), name
        assert ("truncated rollouts masked" in row) == (not recipe.train_truncated), name
        assert ("importance sampling" in row) == (recipe.importance_sampling != "none"), name
    hints = get_type_hints(LossConfig)
    assert list(table("Reductions")) == list(get_args(get_args(hints["reduction"])[0]))
    chosen = table("Importance sampling")
    of_modes, of_levels = (get_args(get_args(hints[f"importance_{part}"])[0]) for part in ("sampling", "level"))
    assert list(chosen) == [*of_modes, *of_levels]
    assert list(table("Divergence and entropy")) == list(get_args(hints["kl_estimator"]))


def test_the_table_of_the_losses_metrics_has_every_one() -> None:
    named = {name for cell in first_cells(section("docs/losses.md", "Metrics"))[1:] for name in cell.split(", ")}
    bounds = (0.5, 2.0)
    loss = LossConfig(
        name="rloo", sequence_mask_limit=1.0, reject_token=bounds, reject_sequence=bounds, reject_geometric=bounds
    )
    every = {
        *reported(dict.fromkeys(policy_metrics(loss, reference=True, teacher=True), 1.0)),
        "optim/grad_norm",
        "optim/lr",
        "optim/skipped",
    }
    assert {name.strip("`") for name in named} == every


def test_the_figures_of_the_trap_are_right() -> None:
    text = " ".join(section("docs/grouping.md", "Advantages").split())
    one, two = [1.0] + [0.0] * 7, [1.0] * 2 + [0.0] * 6
    of_others = statistics.pstdev(two[1:])
    alone, both = (Outcomes(rewards=tuple(rewards), lengths=(1,) * 8) for rewards in (one, two))
    assert statistics.pstdev(one[1:]) == 0
    assert rloo(alone)[0] == 1.0
    assert f"deviate by {of_others:.2f}, and each gets {rloo(both)[0] / of_others:.2f}" in text
    assert f"it is {rloo_normalized(alone)[0]:.2f} and {rloo_normalized(both)[0]:.2f}" in text


def test_the_table_of_exit_codes_has_the_code_of_every_error() -> None:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if "RollstreamError)" in path.read_text() and "models" not in path.parts:
                importlib.import_module(".".join(("rollstream", *path.relative_to(ROOT).with_suffix("").parts)))
    waiting: list[type[RollstreamError]] = [RollstreamError]
    codes = set()
    while waiting:
        error = waiting.pop()
        codes.add(str(error.exit_code))
        waiting += error.__subclasses__()
    assert codes <= set(first_cells(section("docs/commands.md", "Exit codes")))


@pytest.mark.parametrize(
    "path",
    [
        path
        for folder in ("examples", "pipeline")
        for path in sorted((ROOT / folder).rglob("*.toml"))
        if path.name != "control.toml"  # its script completes it
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_settings_files_are_valid_as_they_are(path: Path) -> None:
    # Also whether flow control lets a step begin is checked as the file is read.
    assert load(path) != RunConfig()


def test_every_message_in_troubleshooting_is_one_the_code_can_say() -> None:
    text = "\n".join(
        "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for parts in _texts(ast.parse(path.read_text()))
    )
    for message in first_cells(PAGES["docs/troubleshooting.md"])[1:]:
        words = re.split(r"\.\.\.|\b[NM]\b", message.strip("`"))
        pattern = "[^\n]*".join(re.escape(word.strip()) for word in words)
        assert re.search(pattern, text), f"nothing says: {message}"


def _texts(tree: ast.AST) -> list[list[ast.expr]]:
    return [
        list(node.values) if isinstance(node, ast.JoinedStr) else [node]
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    ]


def test_a_page_that_is_stale_is_noticed(tmp_path: Path) -> None:
    stale = PAGES["docs/topics.md"].replace("Every rollout produced", "Some rollouts")
    assert rendered(stale) == PAGES["docs/topics.md"]
    with pytest.raises(KeyError):
        rendered("<!-- generated: nothing -->\n<!-- end -->")
