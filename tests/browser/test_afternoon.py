"""A researcher's afternoon: from pip to a served checkpoint, with the commands, files and pages that a user has.

What was installed comes from an index, the broker and all roles are processes, and the page is looked at in a browser. A
table at the end says how long each step took.
"""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.chromium import PATIENCE_MS, Visit, visit
from tests.support.paths import ROOT
from tests.support.waiting import eventually

GAME = '''
"""A game of two turns: sell a good through a tool, then say goodbye. The reward is the price."""

import json
import random

from rollstream import Chat, ChatEnvironment, Conversation, Prompt, Score

PRICES = {"a": 2, "b": 5, "c": 7, "d": 10}


def sell(good: str) -> int:
    """Sell a good."""
    return PRICES[good]


class Market(ChatEnvironment):
    name = "market"
    max_tokens = 72
    tools = (sell,)

    def prompts(self, split: str) -> list[Prompt]:
        days = range(8) if split == "train" else range(8, 10)
        return [Prompt(example_id=str(day), text=f"day {day}") for day in days]

    async def run(self, prompt: Prompt, chat: Chat) -> Score:
        reply = await chat(prompt.text)
        answers = await chat.answers(reply)
        if len(answers) != 1 or not answers[0]["content"].isdecimal():
            return Score(reward=0.0, components={"exact": 0.0})
        price, last = int(answers[0]["content"]), await chat(answers[0])
        reward = price / 10 if last.text.strip() == "bye" else 0.0
        return Score(reward=reward, components={"exact": float(reward == 1.0)})

    def warm_start_conversations(self, seed: int, n: int) -> list[Conversation]:
        """Show the form of a call and the goodbye; which good to sell, only rewards tell."""
        draw, examples = random.Random(seed), []
        for number in range(n):
            good = draw.choice("abcd")
            call = {"name": "sell", "arguments": json.dumps({"good": good})}
            turn = '<tool_call>{"name": "sell", "arguments": %s}</tool_call>' % call["arguments"]
            messages = [{"role": "user", "content": f"day {draw.randrange(8)}"}]
            if number % 2:
                calls = [{"id": "call-0", "type": "function", "function": call}]
                messages += [{"role": "assistant", "content": "", "tool_calls": calls}]
                messages += [{"role": "tool", "tool_call_id": "call-0", "content": str(PRICES[good])}]
                turn = "bye"
            examples.append(Conversation(messages=messages, tools=self.tools, turn=turn))
        return examples
'''
SETTINGS = """
run = "first"
data_dir = "data"

[[environments]]
use = "market.py:Market"

[topics]
partitions = 2

[worker]
group_size = 8

[grouping]
batch_rollouts = 16

[learner]
max_steps = 12
rollouts_per_step = 64
sequence_length = 288
microbatch_rows = 32
threads = 1

[learner.checkpoint]
every_steps = 4

[learner.optimizer]
learning_rate = 1.5e-3
warmup_updates = 2

[learner.warm_start]
learning_rate = 3e-3
steps = 70
sequences_per_step = 16
"""


@dataclass
class Desk:
    """A user's folder with an environment of Python, and how long each step took."""

    home: Path
    variables: dict[str, str]
    seconds: list[tuple[str, float]] = field(default_factory=list)

    def command(self, *words: str) -> list[str]:
        return [str(self.home / "env" / "bin" / words[0]), *words[1:]]

    def run(self, *words: str, code: int = 0) -> str:
        """Run a command to its end; return what it prints."""
        done = subprocess.run(
            self.command(*words), cwd=self.home, env=self.variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, f"{words}: {done.stdout}{done.stderr[-4000:]}"
        return done.stdout

    def rollstream(self, command: str, *words: str) -> str:
        return self.run("rollstream", *command.split(), "--config", "run.toml", *words)

    @contextmanager
    def started(self, name: str, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
        """A process of its own group, whose output goes to a file of this name; nothing of it is left on leaving."""
        with (self.home / name).open("wb") as output:
            process = subprocess.Popen(
                self.command("rollstream", *words),
                cwd=self.home,
                env=self.variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(120)

    def printed(self, name: str, pattern: str, process: "subprocess.Popen[bytes]") -> str:
        """Wait for a line in the output of a started process; return its first group."""

        def match() -> "re.Match[str] | None":
            text = (self.home / name).read_text()
            assert process.poll() in (None, 0), text[-4000:]
            return re.search(pattern, text, re.MULTILINE)

        return eventually(match, 1500, f"{pattern} in {name}")[1]  # type: ignore[index]

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds.append((name, time.monotonic() - began))
        print(f"{self.seconds[-1][1]:8.1f} s  {name}", flush=True)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """An empty folder, without the settings and caches of the tests."""
    own = ("ROLLSTREAM", "KAFKA", "PYTHONPATH", "JAX_", "JDK_")
    desk = Desk(tmp_path, {k: v for k, v in os.environ.items() if not k.startswith(own)} | {"JAX_PLATFORMS": "cpu"})
    try:
        yield desk
    finally:
        if (tmp_path / ".rollstream").exists():
            desk.run("rollstream", "broker", "stop")
        total = sum(seconds for _name, seconds in desk.seconds)
        print("\n   seconds  step", *(f"{s:10.1f}  {n}" for n, s in [*desk.seconds, ("together", total)]), sep="\n")


def looked_at(browser: Browser, url: str, route: str, pictures: Path) -> Visit:
    """Open a view by day, by night and on a phone, with a picture of each; return the first, which stays open."""
    first = None
    for name, how in {"light": {}, "dark": {"dark": True}, "phone": {"phone": True}}.items():
        seen = visit(browser, url, **how)
        seen.open(route)
        assert seen.overflow <= 0
        pictures.mkdir(exist_ok=True)
        view = re.sub(r"\W+", "-", route.partition("?")[0]).strip("-")
        seen.page.screenshot(path=pictures / f"{view}-{name}.png")
        assert seen.errors == []
        if first is None:
            first = seen
        else:
            seen.page.context.close()
    assert first is not None
    return first


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_an_afternoon_leads_from_pip_to_a_served_checkpoint_of_an_own_game(desk: Desk, browser: Browser) -> None:
    with desk.step("pip install into an empty environment"):
        install(desk)
    with desk.step("own game of two turns, env check"):
        (desk.home / "market.py").write_text(GAME.lstrip())
        (desk.home / "run.toml").write_text(SETTINGS.lstrip())
        checked = desk.rollstream("env check", "market.py:Market")
        assert '{"name":"sell","description":"Sell a good' in checked
        assert "failed" not in checked
    with desk.step("12 steps on a local broker, curve in terminal and page"):
        address = re.search(r"export (\w+)=(\S+)", desk.run("rollstream", "broker", "start", "--port", "0"))
        assert address
        desk.variables[address[1]] = address[2]
        train_and_watch(desk, browser)


def install(desk: Desk) -> None:
    """Build a wheel of the checkout, and install it as README says, with the queries of the tutorial."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(desk.home / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = (desk.home / "dist").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", desk.home / "env"], check=True)
    desk.run("python", "-m", "pip", "install", "--quiet", f"{wheel}[learner,jre,sql]")
    assert desk.run("rollstream", "--version").startswith("rollstream ")


def train_and_watch(desk: Desk, browser: Browser) -> None:
    """Train; the page follows the run, and the terminal has the same numbers."""
    pictures = desk.home / "pages"
    with desk.started("first.log", "run", "run.toml", "--set", "ui.port=0") as run:
        url = desk.printed("first.log", r"(http://127\.0\.0\.1:\d+/)", run)
        desk.printed("first.log", r"step ([1-9]\d*)  version", run)
        seen = looked_at(browser, url, "#/first/run", pictures)
        expect(seen.page.locator(".state")).to_have_text("Live", timeout=PATIENCE_MS)
        expect(seen.page.locator(".chart", has_text="Reward").first).to_be_visible(timeout=PATIENCE_MS)
        seen.page.context.close()
        desk.printed("first.log", r"(the learner has made its last step)", run)
        assert run.wait(300) == 0
    top = json.loads(desk.rollstream("top", "--json"))
    assert top["step"] == 12
    assert "success" in desk.rollstream("top", "--once")
