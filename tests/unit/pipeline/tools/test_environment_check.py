"""`rollstream env new` and `env check`: a new environment passes as written, and a check shows what it saw."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollstream.pipeline.command_line.cli import main
from rollstream.pipeline.tools import environment_check
from tests.support.paths import ROOT
from tests.support.producing import ScriptedGenerator, SortingGenerator, serving
from tests.support.waiting import eventually

SLOW = """
import time

from rollstream import Prompt, Score, SingleTurn


class Slow(SingleTurn):
    name = "slow"
    max_tokens = 1

    def __init__(self, fail=False):
        self.fail = fail

    def prompts(self, split):
        return [Prompt(example_id="same", text="line\\nbreak")]

    def score(self, prompt, response_text, truncated):
        if self.fail:
            raise KeyError("verdict")
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass
        return Score(reward=0.5)
"""

LAZY = """
from rollstream import Prompt, Score, SingleTurn


class Numbers:
    def __init__(self, split):
        self.split = split

    def __len__(self):
        return 3

    def __getitem__(self, index):
        assert 0 <= index < 3
        return Prompt(example_id=f"{self.split}/{index}", text="go")


class Lazy(SingleTurn):
    name, max_tokens = "lazy", 1

    def prompts(self, split):
        return Numbers(split)

    def score(self, prompt, response_text, truncated):
        return Score(reward=float(len(response_text)))
"""

ODD = """
import numpy as np

from rollstream import Episode, Message, Prompt, Score


class Odd:
    name, max_tokens, stop = "odd", 1, ()

    def __init__(self, kind):
        self.kind = kind

    def prompts(self, split):
        return [Prompt(example_id=split, text="go")]

    async def run(self, prompt, generate):
        reply = await generate(prompt.text)
        if self.kind == "exit":
            exit()
        message = {
            "no role": Message(role=None, text="go"),
            "surrogate": Message(role="user", text="\\udc80"),
            "huge": Message(role="user", text="go" * 4_200_000),
        }.get(self.kind, Message(role="user", text="go"))
        half = np.float32(0.5)
        score = {
            "no number": Score(reward=float("nan")),
            "nan component": Score(reward=1.0, components={"exact": float("nan")}),
            "large": Score(reward=1e31),
            "int name": Score(reward=1.0, components={3: 1.0, "exact": 1.0}),
            "numpy": Score(reward=half, components={"exact": half}),
            "array": Score(reward=np.array(half), components={"exact": np.array(half)}),
        }.get(self.kind, Score(reward=1.0))
        return Episode(turns=(message, reply), score=score)


class OddAgent:
    name, max_tokens = "odd-agent", 8

    def __init__(self, kind):
        self.kind = kind

    def prompts(self, split):
        return [Prompt(example_id=split, text="1+1?")]

    async def play(self, prompt, endpoint):
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            await client.completions.create(model=endpoint.model, prompt=prompt.text, max_tokens=8)
        half = np.float32(0.5)
        return {
            "no number": Score(reward=float("nan")),
            "array": Score(reward=np.array(half), components={"exact": half}),
        }[self.kind]
"""

AGENT = """
from openai import AsyncOpenAI

from rollstream import Prompt, Score


class Agent:
    name = "agent"
    max_tokens = 8

    def prompts(self, split):
        return [Prompt(example_id=f"{split}/1", text="1+1?")]

    async def play(self, prompt, endpoint):
        said = []
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            messages = [{"role": "user", "content": prompt.text}]
            for question in ("so?", "sure?"):
                answer = await client.chat.completions.create(model=endpoint.model, messages=messages, max_tokens=8)
                said.append(answer.choices[0].message.content)
                messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": question}]
        if "no" in said:
            raise ValueError("it gave up")
        return Score(reward=float(said[-1] == "42"))
"""


CHAT = """
from rollstream import ChatEnvironment, Prompt, Score


def add(a: int, b: int) -> int:
    '''Add numbers.'''
    return a + b


class Sums(ChatEnvironment):
    name, max_tokens, system, tools = "sums", 8, "Add.", (add,)

    def prompts(self, split):
        return [Prompt(example_id=split, text="1+2?")]

    def score(self, prompt, response_text, truncated):
        return Score(reward=float(len(response_text)))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    capsys.readouterr()
    code = main(["env", "check", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_new_environment_passes_its_own_test_and_can_be_checked(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "new", "my_game"]) == 0
    assert "rollstream env check my_game.py:MyGame" in capsys.readouterr().out
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_game.py"],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert "3 passed" in result.stdout
    style = subprocess.run(
        [
            sys.executable,
            "-m",
            "ruff",
            "check",
            "--config",
            str(ROOT / "pyproject.toml"),
            "--ignore=S101",
            "my_game.py",
        ],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    assert style.returncode == 0, style.stdout
    assert main(["env", "check", "my_game.py:MyGame", "--random", "--prompts", "1"]) == 0
    shown = capsys.readouterr().out
    assert "environment my_game: 16 prompts to train on, 5 held out" in shown
    assert "\n  0-20?" in shown
    assert "\n       ^" in shown


def test_a_name_that_is_taken_or_no_module_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "test_game.py").write_text("")
    assert main(["env", "new", "game"]) == 2
    assert "test_game.py exists already" in capsys.readouterr().err
    assert not (here / "game.py").exists()
    assert main(["env", "new", "my-game"]) == 2
    assert "cannot be a module's name" in capsys.readouterr().err


def test_a_check_asks_the_servers_that_are_named(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    with serving(SortingGenerator(versions=(3,))) as server:
        url = f'--set=worker.inference_urls=["{server.base_url}"]'
        code, report = checked(capsys, "dsort3", url, "--members", "8")
    assert (code, report["replies"], report["times"]["episodes"]) == (0, server.base_url, 16)
    for group in report["groups"]:
        rewards = {member["reward"] for member in group["members"]}
        assert 1.0 in rewards
        for member in group["members"]:
            # The answer and its end, after the question.
            assert member["loss_mask"] == [0] * 4 + [1] * 4
            assert [turn["role"] for turn in member["turns"]] == ["user", "assistant"]
    assert main(["env", "check", "dsort3", url]) == 2, "a server that was named and is gone is an error"


def test_a_check_names_what_is_wrong_with_an_environment(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "slow.py").write_text(SLOW, encoding="utf-8")
    code, report = checked(capsys, "slow.py:Slow", "--random")
    warnings = "; ".join(report["warnings"])
    assert code == 0
    assert "1 prompts are both trained on and held out, e.g. same" in warnings
    assert "all members of each group have the same reward" in warnings
    assert re.search(r"blocked everything else for \d", warnings)
    entry = ("use=slow.py:Slow", "name=broken", "options.fail=true")
    code, report = checked(capsys, "broken", "--random", *(f"--set=environments.0.{setting}" for setting in entry))
    assert code == 1
    assert all("KeyError('verdict') at " in error for error in report["groups"][0]["errors"])


def test_a_prompt_that_leaves_no_room_for_an_answer_is_named_with_the_setting(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    (here / "slow.py").write_text(SLOW, encoding="utf-8")
    for length, warned in ((10, True), (11, False)):  # the prompt has ten characters
        setting = f"--set=inference.max_model_len={length}"
        _code, report = checked(capsys, "slow.py:Slow", "--random", "--members=1", "--prompts=1", setting)
        message = "1 prompts of split train can never be answered: with 10 tokens the longest leaves no room"
        assert (message in "; ".join(report["warnings"])) == warned


def odd(kind: str, use: str = "Odd") -> list[str]:
    """The flags of a check of an environment of ODD."""
    return ["odd", *(f"--set=environments.0.{s}" for s in (f"use=odd.py:{use}", "name=odd", f"options.kind={kind}"))]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("no number", "the rollout cannot be recorded: reward is nan"),
        ("nan component", "the rollout cannot be recorded: reward component exact is nan"),
        ("large", "the rollout cannot be recorded: reward is 1e+31"),
        ("int name", "a Rollout does not fit its schema"),
        ("no role", "a Rollout does not fit its schema: must be string on field role"),
        ("surrogate", "surrogates not allowed"),
        ("huge", "bytes, but main.rollouts accepts 8387584; set kafka.arrays.url for large token_arrays, shorten the"),
        ("exit", "odd failed on train: SystemExit("),
    ],
)
def test_an_episode_that_no_worker_could_record_fails_the_check(
    capsys: pytest.CaptureFixture[str], here: Path, kind: str, reason: str
) -> None:
    (here / "odd.py").write_text(ODD, encoding="utf-8")
    code, report = checked(capsys, *odd(kind), "--random", "--members=2")
    [group] = report["groups"]
    assert (code, group["members"], len(group["errors"])) == (1, [], 2)
    assert all(reason in error for error in group["errors"]), group["errors"]
    assert main(["env", "check", *odd(kind), "--random", "--members=1"]) == 1
    assert "failed: " in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["numpy", "array"])
def test_numbers_of_numpy_are_shown_as_numbers(capsys: pytest.CaptureFixture[str], here: Path, kind: str) -> None:
    (here / "odd.py").write_text(ODD, encoding="utf-8")
    code, report = checked(capsys, *odd(kind), "--random", "--members=1")
    [member] = report["groups"][0]["members"]
    assert (code, member["reward"], member["components"]) == (0, 0.5, {"exact": 0.5})
    assert main(["env", "check", *odd(kind), "--random", "--members=1"]) == 0
    assert "exact=0.5" in capsys.readouterr().out


def test_an_agent_is_checked_as_a_worker_would_record_it(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "odd.py").write_text(ODD, encoding="utf-8")
    with serving(ScriptedGenerator(["42"], versions=(3,)), conversation_cache_tokens=0) as server:
        eventually(lambda: server.version == 3, 60, "weights are loaded")
        flags = (f'--set=worker.inference_urls=["{server.base_url}"]', "--members=1")
        code, report = checked(capsys, *odd("no number", "OddAgent"), *flags)
        [group] = report["groups"]
        assert (code, group["members"]) == (1, [])
        assert group["errors"] == ["reward is nan; it must be a number between -1e+30 and 1e+30"]
        code, report = checked(capsys, *odd("array", "OddAgent"), *flags)
        [member] = report["groups"][0]["members"]
        assert (code, member["reward"], member["components"]) == (0, 0.5, {"exact": 0.5})


def test_questions_of_two_files_are_not_held_out_and_trained_on_for_their_numbers(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    def warnings(*heldout: str) -> str:
        for name, answers in (("train", ("a", "b")), ("held", heldout)):
            lines = [json.dumps({"question": f"{answer}?", "answer": answer}) for answer in answers]
            (here / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        entry = ("use=jsonl", "name=q", "options.path=train.jsonl", "options.heldout=held.jsonl")
        flags = [f"--set=environments.0.{setting}" for setting in entry]
        return "; ".join(checked(capsys, "q", "--random", "--members=1", *flags)[1]["warnings"])

    assert "held out" not in warnings("c", "d")
    assert "1 prompts are both trained on and held out, e.g. 2" in warnings("c", "b")


def test_an_entry_without_a_name_has_the_name_of_its_class(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "slow.py").write_text(SLOW, encoding="utf-8")
    (here / "run.toml").write_text('environments = [{ use = "slow.py:Slow" }]', encoding="utf-8")
    assert main(["env", "check", "slow", "--config", "run.toml", "--random", "--prompts", "1", "--members", "1"]) == 0
    assert "slow" in capsys.readouterr().out
    assert main(["env", "check", "slowly", "--config", "run.toml", "--random"]) == 2
    assert "no environment is named 'slowly'" in capsys.readouterr().err


def test_an_agent_is_checked_at_an_endpoint_of_its_own(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "agent.py").write_text(AGENT, encoding="utf-8")
    with serving(ScriptedGenerator(["hm", "42"], versions=(3,)), conversation_cache_tokens=0) as server:
        eventually(lambda: server.version == 3, 60, "weights are loaded")
        flags = ("agent.py:Agent", f'--set=worker.inference_urls=["{server.base_url}"]', "--members", "2")
        code, report = checked(capsys, *flags)
        assert code == 0
        assert (report["environment"], report["replies"], report["prompts"]["train"]) == ("agent", server.base_url, 1)
        [group] = report["groups"]
        for member in group["members"]:
            assert [turn["text"] for turn in member["turns"]] == ["1+1?", "hm", "so?", "42"]
            sampled = [member["tokens"][t["start"] : t["stop"]] for t in member["turns"] if t["role"] == "assistant"]
            assert sum(member["loss_mask"]) == sum(map(len, sampled)) > 0
            assert member["reward"] == 1.0
        assert main(["env", "check", *flags]) == 0
        assert "member" in capsys.readouterr().out
        code, report = checked(capsys, *flags, "--set=gateway.max_calls=1")
        assert code == 1
        assert "has made 1 calls, the maximum (gateway.max_calls)" in report["groups"][0]["errors"][0]
    with serving(ScriptedGenerator(["no", "42"]), conversation_cache_tokens=0) as server:
        code, report = checked(capsys, flags[0], f'--set=worker.inference_urls=["{server.base_url}"]', "--members=1")
        assert code == 1
        assert "it gave up" in report["groups"][0]["errors"][0]
    code, report = checked(capsys, "agent.py:Agent", "--random", "--members=1")
    assert code == 0
    assert [turn["role"] for turn in report["groups"][0]["members"][0]["turns"]] == ["user", "assistant"] * 2


def test_the_time_for_which_other_programs_had_the_processor_is_not_the_environments(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_check, "SCHEDULING", here / "schedstat")
    assert environment_check.thread_times().waited_s == 0
    (here / "schedstat").write_text("7000000000 900000000000 3\n")
    assert environment_check.thread_times()[1:] == (7, 900)
    (here / "schedstat").write_text("0 0 0\n")
    assert environment_check.thread_times().ran_s > 0, "it is a divisor"
    idle = environment_check.ThreadTimes(10.0, 1.0, 0.0)
    assert environment_check.blocked_s(idle, idle._replace(at_s=10.75, ran_s=1.5)) == 0.75
    # Runs for 0.5 s, waits for 1 s, and sleeps for 2 s, of which a process that it starts waits for three quarters.
    busy = environment_check.ThreadTimes(10.0, 1.5, 5.0)
    assert environment_check.blocked_s(busy, environment_check.ThreadTimes(13.5, 2.0, 6.0)) == 0.5 + 2 / 4


def test_a_conversation_is_shown_as_the_chat_template_renders_it_with_the_tools(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    (here / "chat.py").write_text(CHAT, encoding="utf-8")
    (here / "short.jinja").write_text(
        "{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }};"
        "{% endfor %}{% if add_generation_prompt %}me:{% endif %}"
    )
    flags = ("chat.py:Sums", "--random", "--members=1", "--prompts=1", "--set=learner.sequence_length=512")
    for template, shown in {
        "plain": '{"name":"add","description":"Add numbers.",',
        "short.jinja": "[add]system:Add.;user:",
    }.items():
        assert main(["env", "check", *flags, f"--set=inference.chat_template={template}"]) == 0
        tokens = "".join(
            line[2:] for line in capsys.readouterr().out.splitlines() if line.startswith("  ") and "^" not in line
        )
        assert shown in tokens, template
    code, report = checked(capsys, *flags[:-1], "--set=learner.sequence_length=64")
    assert code == 1
    assert "raise inference.max_model_len" in report["groups"][0]["errors"][0]


def test_an_environment_whose_prompts_are_a_lazy_list_can_be_checked(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "lazy.py").write_text(LAZY, encoding="utf-8")
    code, report = checked(capsys, "lazy.py:Lazy", "--random", "--prompts", "2", "--members", "1")
    assert code == 0
    assert report["prompts"] == {"train": 3, "heldout": 3}
    assert [group["example_id"] for group in report["groups"]] == ["train/0", "train/1"]
