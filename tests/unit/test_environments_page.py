"""The page on environments, followed as a new user would: its files written, its commands run, its mixture loaded."""

import re
import shlex
from pathlib import Path

import pytest

from rollstream.pipeline.command_line.cli import main
from rollstream.pipeline.config import load
from rollstream.pipeline.run.run_environments import environments_of
from rollstream.producers.config import WorkerConfig
from rollstream.producers.environments.chat import tool_of
from rollstream.producers.tasks.environment_loading import with_settings
from tests.support.pages import page

PAGE = page("environments").partition("\n## Rewards\n")[0]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def block(language: str, holding: str) -> str:
    return next(body for kind, body in BLOCKS if kind == language and holding in body)


def test_the_page_leads_from_questions_to_a_game_and_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("capitals.jsonl").write_text(block("text", "Paris"), encoding="utf-8")
    Path("run.toml").write_text(block("toml", "capitals.jsonl"), encoding="utf-8")
    Path("shop.py").write_text(block("python", "class Shop"), encoding="utf-8")
    Path("sums.py").write_text(block("python", "class Sums"), encoding="utf-8")
    played = []
    for line in (line for language, body in BLOCKS if language == "sh" for line in body.splitlines()):
        program, *words = shlex.split(line)
        if program != "rollstream" or words[0] != "env":
            continue  # a broker, a model, or another program's command
        # The machine of the tests may have a server at the default address.
        assert main([*words, "--random"] if words[1] == "check" else words) == 0, capsys.readouterr().err
        played.append(capsys.readouterr().out.split("\n")[0])
    assert [line.partition(":")[0] for line in played] == [
        "environment capitals",
        "environment sums",
        "wrote my_game.py and test_my_game.py; try",
        "environment my_game",
        "environment shop",
    ]
    names: dict[str, object] = {}
    for holding in ("class MyGame", "class Shop", "class TaughtShop", "class Guess", "ScriptedPolicy("):
        exec(compile(block("python", holding), f"docs/environments.md, {holding}", "exec"), names)
    taught = with_settings(names["TaughtShop"](), WorkerConfig())  # type: ignore[operator]
    [shown] = taught.warm_start_conversations(0, 1)
    assert shown.tools == [tool_of(names["price"]).schema]  # type: ignore[arg-type]
    Path("mixture.toml").write_text(block("toml", "large-sums"), encoding="utf-8")
    config = load(Path("mixture.toml"), flags=["environments.2.weight=1"])
    environments = environments_of(config)
    assert [environment.name for environment in environments] == ["sums", "large-sums", "my_game"]
    assert environments[2].entry.weight == 1.0
    assert len(environments[1].prompts("train")) == 5000
