"""The documentation agrees with the code: generated parts, links, commands, settings, messages and tables."""

import argparse
import ast
import contextlib
import functools
import importlib
import importlib.util
import io
import itertools
import json
import posixpath
import re
import shlex
import tomllib
from collections.abc import Iterator
from typing import get_args, get_type_hints

from docs.build import rendered
from rollstream.consumers.grouping.core.estimators import ESTIMATORS
from rollstream.consumers.grouping.core.plug_ins import MAKERS
from rollstream.consumers.learner.objective import PAIR_ACCURACY, RECIPES, LossConfig, policy_metrics, reported
from rollstream.pipeline.command_line.cli import build_parser
from rollstream.pipeline.command_line.commands import COMMANDS
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.settings import check_variables, known_keys
from rollstream.topics.errors import RollstreamError
from rollstream.topics.records.fates import DROP_REASONS
from rollstream.topics.wire.codec import schemas
from tests.house.repository import Repository, Violation
from tests.support.pages import section
from tests.support.paths import ROOT

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)]+)\)")
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


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _blocks(text: str, language: str) -> Iterator[tuple[int, str]]:
    """First line and text of each block in a language."""
    for block in _BLOCK.finditer(text):
        if block[1] == language:
            yield _line(text, block.start(2)), block[2]


def _prose(text: str) -> str:
    """The page with empty lines in place of its blocks."""
    return _BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)


def _section(text: str, title: str) -> tuple[int, str]:
    """Line of the heading and text of a section; of none, line 1 and no text."""
    part = section(text, title)
    return (_line(text, text.index(part)) - 1 if part else 1), part


def _first_cells(text: str) -> list[str]:
    cells = re.findall(r"^\| (.+?) \|", text, re.MULTILINE)
    return [cell for cell in cells if not cell.startswith("---")]


def generated_parts(repository: Repository) -> Iterator[Violation]:
    """What is generated says what the code says."""
    for path, text in repository.pages.items():
        fresh = rendered(text)
        if fresh != text:
            pairs = zip(fresh.splitlines(), text.splitlines(), strict=False)
            line = next((number for number, (new, old) in enumerate(pairs, 1) if new != old), 1)
            yield Violation(path, line, "a generated table is stale; run: make docs")


def fences(repository: Repository) -> Iterator[Violation]:
    """Every fence stands alone and every block is closed: readers would misread the blocks that follow."""
    for path, text in repository.pages.items():
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if "```" in line]
        for (number, opening), (_, closing) in itertools.zip_longest(lines[::2], lines[1::2], fillvalue=(0, "")):
            if not re.fullmatch(r"```(sh|python|text|toml|json)", opening):
                yield Violation(
                    path, number, f"{opening!r} opens no block; write ``` and sh, python, text, toml or json"
                )
            elif closing != "```":
                yield Violation(path, number, "the block is not closed; write ``` alone on a line after it")


def data_blocks(repository: Repository) -> Iterator[Violation]:
    """Blocks of TOML and JSON parse."""
    for path, text in repository.pages.items():
        for language, parse in (("toml", tomllib.loads), ("json", json.loads)):
            for line, block in _blocks(text, language):
                try:
                    parse(block)
                except ValueError as error:
                    yield Violation(path, line, f"the block is no {language}: {error}; mend it")


def links(repository: Repository) -> Iterator[Violation]:
    """Every relative link leads to a file, and to a heading of it."""
    for path, text in repository.pages.items():
        prose = _prose(text)
        for link in _LINK.finditer(prose):
            name, _, anchor = link[1].partition("#")
            if "://" in link[1]:
                continue
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), name)) if name else path
            remedy = f"links to {link[1]}, which is not there; name a file and a heading that exist"
            if target not in repository.texts and not (ROOT / target).exists():
                yield Violation(path, _line(prose, link.start()), remedy)
            elif anchor:
                headings = re.findall(r"^#+ (.+)$", repository.texts[target], re.MULTILINE)
                if anchor not in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}:
                    yield Violation(path, _line(prose, link.start()), remedy)


def lonely_pages(repository: Repository) -> Iterator[Violation]:
    """Every page but README.md is linked from another."""
    linked = {
        posixpath.normpath(posixpath.join(posixpath.dirname(path), target.partition("#")[0]))
        for path, text in repository.pages.items()
        for target in _LINK.findall(text)
    }
    for path in repository.pages.keys() - linked - {"README.md"}:
        yield Violation(path, 1, "no page links here; link it from one")


def wide_commands(repository: Repository) -> Iterator[Violation]:
    """No command of a page is wider than a terminal."""
    for path, text in repository.pages.items():
        for language in ("sh", "text"):
            for first, block in _blocks(text, language):
                for number, line in enumerate(block.splitlines(), first):
                    if len(line) > 80 and (language == "sh" or line.startswith("$ ")):
                        yield Violation(path, number, f"a command of {len(line)} columns; continue it after 80")


@functools.cache
def _whole_parser() -> argparse.ArgumentParser:
    return build_parser(load=COMMANDS)


def shell_commands(repository: Repository) -> Iterator[Violation]:
    """Every command in a shell block parses, and every target of make and test it names exists."""
    targets = set(re.findall(r"^([a-z-]+):", repository.texts.get("Makefile", ""), re.MULTILINE))
    for path, text in repository.pages.items():
        for first, block in _blocks(text, "sh"):
            # A command that continues over several lines is one line; the number is that of its block's first.
            for line in block.replace("\\\n", "").splitlines():
                if line.strip():
                    wrong = _wrong_command(repository, targets, line)
                    if wrong:
                        yield Violation(path, first, f"{line.strip()}: {wrong}")


def _wrong_command(repository: Repository, targets: set[str], line: str) -> str:
    words = shlex.split(line, comments=True)
    if words[0] == "rollstream":
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                _whole_parser().parse_args(words[1:])
        except SystemExit as ended:
            return f"{said.getvalue().strip()}; write it as it parses" if ended.code else ""
    elif words[0] == "make":
        unknown = {word for word in words[1:] if "=" not in word} - targets
        if unknown:
            return f"make has no target {', '.join(unknown)}; see `make help`"
        for chosen in re.findall(r"-k (\w+)", line):
            if not any(chosen in test for test in _tests_with_a_broker(repository)):
                return f"-k {chosen} runs no test; name one of those with a broker"
    elif words[0] not in _OTHER_PROGRAMS:
        return f"{words[0]} is no program we know; add it to tests/house/documents.py"
    else:
        for word in words[1:]:
            if word.endswith(".py") and word not in repository.texts:
                return f"{word} is not there; name a file that exists"
    return ""


def _tests_with_a_broker(repository: Repository) -> Iterator[str]:
    for path, text in repository.texts.items():
        if re.fullmatch(r"tests/(?!unit)[^/]+/test_\w+\.py", path):
            yield from (f"{path}::{test}" for test in re.findall(r"^def (test_\w+)", text, re.MULTILINE))


def commands_in_prose(repository: Repository) -> Iterator[Violation]:
    """Every command and flag named in prose exists."""
    for path, text in repository.pages.items():
        prose = _prose(text)
        for quoted in re.finditer(r"`rollstream ([^`]+)`", prose):
            unknown = _unknown_word(quoted[1].split())
            if unknown:
                remedy = f"{quoted[0]}: there is no {unknown}; see `rollstream --help`"
                yield Violation(path, _line(prose, quoted.start()), remedy)


def _unknown_word(words: list[str]) -> str:
    parser = _whole_parser()
    for previous, word in zip(["", *words], words, strict=False):
        if previous in ("--help-settings", "--help-metrics"):
            continue  # the value of the flag
        if word.startswith("-"):
            if word not in {flag for action in parser._actions for flag in action.option_strings}:
                return word
        elif word.isalpha() and word.islower():
            choices = [action.choices for action in parser._actions if action.choices and not action.option_strings]
            if not any(word in choice for choice in choices):
                return word
            parser = next((c[word] for c in choices if isinstance(c, dict) and word in c), parser)
    return ""


def python_blocks(repository: Repository) -> Iterator[Violation]:
    """Blocks of Python compile and import what exists."""
    for path, text in repository.pages.items():
        for line, block in _blocks(text, "python"):
            try:
                for node in ast.walk(ast.parse(block)):
                    if isinstance(node, ast.ImportFrom) and node.module:
                        _import(node)
            except (SyntaxError, ImportError) as error:
                yield Violation(path, line, f"{type(error).__name__}: {error}; write what runs")


def _import(node: ast.ImportFrom) -> None:
    module = importlib.import_module(node.module or "")
    for alias in node.names:
        if not hasattr(module, alias.name):
            importlib.import_module(f"{node.module}.{alias.name}")


def settings_in_prose(repository: Repository) -> Iterator[Violation]:
    """Settings named in prose exist."""
    keys = set(known_keys(RunConfig))
    sections = {key.rpartition(".")[0] for key in keys}
    for path, text in repository.pages.items():
        prose = _prose(text)
        for named in re.finditer(r"`([a-z_]+(?:\.[a-z_]+)+)(?: = [^`]+)?`", prose):
            key = named[1]
            if key.rpartition(".")[0] not in sections or key.endswith((".json", ".toml", ".py")):
                continue
            if key not in keys | sections and f"{key}.*" not in keys and not _is_module(key):
                yield Violation(path, _line(prose, named.start()), f"no setting is named {key}; name one that is")


def _is_module(name: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):  # a package of the name is not there either
        return importlib.util.find_spec(name) is not None
    return False


def paths_of_a_machine(repository: Repository) -> Iterator[Violation]:
    """No page names a path of someone's machine."""
    for path, text in repository.pages.items():
        for match in re.finditer(r"(?<![\w.])/(home|root|tmp|work|Users|mnt|opt)/", text):
            yield Violation(path, _line(text, match.start()), f"names a path below {match[0]}; name one of any machine")


def numbers_of_decisions(repository: Repository) -> Iterator[Violation]:
    """Every decision has a number of its own."""
    first: dict[str, str] = {}
    for path in repository.pages:
        number = path.split("/")[-1][:4]
        if "/decisions/" in path and first.setdefault(number, path) != path:
            yield Violation(path, 1, f"{first[number]} has the number {number} already; take the next")


def pages_named_in_code(repository: Repository) -> Iterator[Violation]:
    """Every page that code refers to exists."""
    for module in repository.packages:
        text = repository.texts[module.path]
        for match in re.finditer(r"docs/[\w/.-]+\.md", text):
            if match[0] not in repository.texts:
                yield Violation(module.path, _line(text, match.start()), f"no page is {match[0]}; name one that exists")


def variables_in_code(repository: Repository) -> Iterator[Violation]:
    """Every variable of ours in the code is a setting or known to be none."""
    for module in repository.modules():
        if module.path.endswith(("pipeline/settings.py", "test_setting_names.py", "test_house.py")):
            continue
        text = repository.texts[module.path]
        for match in re.finditer(r"[\"'](ROLLSTREAM_[A-Z]\w*)", text):
            try:
                check_variables(RunConfig, {match[1]: ""})
            except RollstreamError as error:
                yield Violation(module.path, _line(text, match.start()), str(error))


def tables(repository: Repository) -> Iterator[Violation]:
    """Tables that people write have each name of the code once, in its order where there is one."""
    [kind] = [field for field in schemas()["Mark"][-1].source["fields"] if field["name"] == "kind"]
    bounds = (0.5, 2.0)
    every_mask = LossConfig(
        name="rloo", sequence_mask_limit=1.0, reject_token=bounds, reject_sequence=bounds, reject_geometric=bounds
    )
    metrics = {
        *reported(dict.fromkeys(policy_metrics(every_mask, reference=True, teacher=True), 1.0)),
        *(PAIR_ACCURACY, "optim/grad_norm", "optim/lr", "optim/skipped"),
    }
    hints = get_type_hints(LossConfig)
    sampling, level = (get_args(get_args(hints[f"importance_{part}"])[0]) for part in ("sampling", "level"))
    in_any_order = (
        ("docs/grouping.md", "Drops", DROP_REASONS),
        ("docs/grouping.md", "The fold", kind["type"]["symbols"]),
        ("docs/losses.md", "Metrics", metrics),
    )
    in_this_order = (
        ("docs/grouping.md", "Advantages", ESTIMATORS),
        ("docs/grouping.md", "Batch makers", MAKERS),
        ("docs/losses.md", "Which loss", RECIPES),
        ("docs/losses.md", "Reductions", get_args(get_args(hints["reduction"])[0])),
        ("docs/losses.md", "Importance sampling", (*sampling, *level)),
        ("docs/losses.md", "Divergence and entropy", get_args(hints["kl_estimator"])),
    )
    for path, title, names in (*in_any_order, *in_this_order):
        if path not in repository.pages:
            continue
        text = repository.pages[path]
        line, part = _section(text, title)
        ordered = (path, title, names) in in_this_order
        cells = (
            re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE)
            if ordered
            else [name.strip("`") for cell in _first_cells(part)[1:] for name in cell.split(", ")]
        )
        if cells != list(names) if ordered else sorted(cells) != sorted(names):
            yield Violation(path, line, f"the table has {', '.join(cells)}; write {', '.join(names)}")


def figures_of_losses(repository: Repository) -> Iterator[Violation]:
    """The rows of the losses have what each recipe takes."""
    if "docs/losses.md" not in repository.pages:
        return
    first, part = _section(repository.pages["docs/losses.md"], "Which loss")
    for row in re.finditer(r"^\| `(\w+)` \| (.+) \|$", part, re.MULTILINE):
        recipe, text = RECIPES.get(row[1]), row[2]
        if recipe is None:
            continue
        clips = re.search(r"clip ([\d.]+) and ([\d.]+)", text)
        said = (
            (float(clips[1]), float(clips[2])) if clips else (recipe.clip_low, recipe.clip_high),
            "token mean" in text,
            "truncated rollouts masked" in text,
            "importance sampling" in text,
        )
        actual = (
            (recipe.clip_low, recipe.clip_high),
            recipe.reduction == "token_mean",
            not recipe.train_truncated,
            recipe.importance_sampling != "none",
        )
        if said != actual:
            line = first + _line(part, row.start())
            remedy = (
                f"{row[1]} has (clip, token mean, truncated masked, importance sampling) {actual}; the row says {said}"
            )
            yield Violation("docs/losses.md", line, remedy)


def exit_codes(repository: Repository) -> Iterator[Violation]:
    """The table of exit codes has the code of every error."""
    if "docs/commands.md" not in repository.pages:
        return
    codes = set(_first_cells(_section(repository.pages["docs/commands.md"], "Exit codes")[1]))
    for module in repository.packages:
        text = repository.texts[module.path]
        for match in re.finditer(r"^    exit_code = (\d+)$", text, re.MULTILINE):
            if match[1] not in codes:
                remedy = f"docs/commands.md has no exit code {match[1]}; describe it there"
                yield Violation(module.path, _line(text, match.start()), remedy)


def messages(repository: Repository) -> Iterator[Violation]:
    """Every message in troubleshooting is one that the code can say."""
    page = "docs/runbook.md"
    if page not in repository.pages:
        return
    said = "\n".join(
        "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in parts)
        for module in repository.packages
        for node in module.nodes
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        for parts in [node.values if isinstance(node, ast.JoinedStr) else [node]]
    )
    text = repository.pages[page]
    for message in _first_cells(_section(text, "Troubleshooting")[1])[1:]:
        words = re.split(r"\.\.\.|\b[NM]\b", message.strip("`"))
        if not re.search("[^\n]*".join(re.escape(word.strip()) for word in words), said):
            line = _line(text, text.index(f"| {message} |"))
            yield Violation(page, line, f"nothing says: {message}; write what the code says")


RULES = (
    generated_parts,
    fences,
    data_blocks,
    links,
    lonely_pages,
    wide_commands,
    shell_commands,
    commands_in_prose,
    python_blocks,
    settings_in_prose,
    paths_of_a_machine,
    numbers_of_decisions,
    pages_named_in_code,
    variables_in_code,
    tables,
    figures_of_losses,
    exit_codes,
    messages,
)
