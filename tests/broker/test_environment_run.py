"""An environment of several turns that lies outside the packages, under `rollstream run` on its default settings."""

import json
import subprocess
from collections import Counter
from typing import Any

import pytest

from rollstream.pipeline.config import load
from rollstream.pipeline.deployment.description import counts
from rollstream.topics.config import KafkaConfig
from rollstream.topics.records import Rollout
from rollstream.topics.wire.validation import problems
from tests.support.described import undescribed
from tests.support.runs import RealRun

GAME = '''
"""Three turns: the more letters a reply has, the better; each is answered with their number."""

from rollstream import Episode, Message, Prompt, Score


class Letters:
    max_tokens = 5

    def __init__(self, name="letters", turns=3):
        self.name = name
        self.turns = turns

    def prompts(self, split):
        return [Prompt(example_id=f"{split}-{n}", text=f"round {n}:") for n in range(40)]

    async def run(self, prompt, generate):
        text, turns, letters = prompt.text, [], 0
        for _ in range(self.turns):
            reply = await generate(text)
            turns += [Message(role="user", text=text), reply]
            letters += sum(character.isalpha() for character in reply.text)
            text = f" {letters} so far:"
        return Episode(turns=tuple(turns), score=Score(reward=letters / (5 * self.turns)))
'''


@pytest.mark.long
def test_an_environment_of_several_turns_outside_the_packages_is_trained_on_with_default_settings(
    broker: str, run_name: str, tmp_path: Any
) -> None:
    (tmp_path / "game.py").write_text(GAME, encoding="utf-8")
    (tmp_path / "run.toml").write_text(
        '[[environments]]\nuse = "game.py:Letters"\n\n'
        '[[environments]]\nname = "duel"\nuse = "game.py:Letters"\nweight = 0.5\nevaluate = false\n'
        "options = { turns = 2 }\n",
        encoding="utf-8",
    )
    run = RealRun(KafkaConfig(bootstrap_servers=broker), run_name, tmp_path)
    flags = ["--run", run_name, "-b", broker, f"--set=data_dir={tmp_path}"]
    running = subprocess.run(
        [
            *run.command()[:4],
            "run",
            "run.toml",
            *flags,
            "--set=learner.max_steps=1",
            "--set=evaluation.every_versions=1",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert running.returncode == 0, running.stdout + running.stderr
    rollouts = [record for record in run.read("rollouts") if isinstance(record, Rollout)]
    turns = {"letters": 3, "duel": 2}
    played = Counter(rollout.environment for rollout in rollouts)
    assert set(played) == set(turns)
    # Groups are started two to one; those in flight at the end blur it.
    assert 1.2 < played["letters"] / played["duel"] < 3.5
    for rollout in rollouts:
        assert problems(rollout) == []
        roles = [turn.role for turn in rollout.turns]
        assert roles == ["user", "assistant"] * turns[rollout.environment]
        replies = [turn for turn in rollout.turns if turn.role == "assistant"]
        assert rollout.loss_mask.sum() == sum(turn.stop - turn.start for turn in replies)
        for turn in replies:
            assert rollout.loss_mask[turn.start : turn.stop].all()
    evaluated = [record for record in run.read("evals") if isinstance(record, Rollout)]
    assert {rollout.environment for rollout in evaluated} == {"letters"}
    ledger = subprocess.run(
        [*run.command()[:4], "ledger", "--json", *flags], capture_output=True, text=True, timeout=300, check=False
    )
    assert ledger.returncode == 0, ledger.stdout + ledger.stderr
    book = json.loads(ledger.stdout)
    assert book["balanced"]
    assert book["batched"] >= 256
    named = [f"run={run_name}", f"kafka.bootstrap_servers={broker}", "evaluation.every_versions=1"]
    config = load(tmp_path / "run.toml", flags=named)
    started = counts(config)
    assert started == {"learn": 1, "infer": 1, "group": 2, "env": 2, "eval": 1}
    assert undescribed(config, started) == set()
