"""An environment of OpenEnv and a task of Harbor, each with its real package, behind `rollstream env serve`."""

import asyncio
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from rollstream.infra.broker.ports import free_port
from rollstream.producers.config import EnvironmentConfig, WorkerConfig
from rollstream.producers.environments.environment import Endpoint, Score
from rollstream.producers.environments.scripted_policy import ScriptedPolicy
from rollstream.producers.tasks.environment_loading import LoadedEnvironment, load_environments
from tests.support.environment_servers import ServedEnvironment
from tests.support.paths import ROOT
from tests.support.producing import serving_http
from tests.support.role_server import role_environment

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def python_of(name: str) -> Path:
    python = ROOT / ".venv" / name / "bin" / "python"
    if not python.exists():
        pytest.fail(f"{name} is not installed: run make .venv/{name}/.installed", pytrace=False)
    return python


def loaded(there: ServedEnvironment) -> LoadedEnvironment:
    entry = EnvironmentConfig(use=there.url, options={"wait_s": 300})
    [environment] = load_environments([entry], WorkerConfig())
    return environment


# ---------------------------------------------------------------------- OpenEnv

ECHO = """
[[environments]]
use = "openenv"
name = "echo"
options = {{ url = "{url}", action = "message", observation = "echoed_message", turns = 3, tasks = 10, wait_s = 300 }}
"""


@contextmanager
def echoing(folder: Path) -> Iterator[str]:
    """URL of the environment that `openenv init` writes, served as its README says."""
    python, port = python_of("openenv"), free_port("127.0.0.1")
    subprocess.run([python.with_name("openenv"), "init", "echo_env"], cwd=folder, check=True, timeout=300)
    command = [python, "-m", "uvicorn", "server.app:app", "--port", str(port)]
    server = subprocess.Popen(command, cwd=folder / "echo_env", env=role_environment())
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait(300)


def test_an_environment_of_openenv_takes_replies_as_actions(tmp_path: Path) -> None:
    with echoing(tmp_path) as url:
        (tmp_path / "served.toml").write_text(ECHO.format(url=url))
        # With OpenEnv's own Python: rollstream's core is installed there, and nothing else of it.
        server = ServedEnvironment(tmp_path, "echo", "--config", "served.toml", python=python_of("openenv"))
        with server as there:
            environment = loaded(there)
            prompts = environment.prompts("train")

            async def play() -> list[Score]:
                """Six episodes at a server that has room for one session."""
                policies = [ScriptedPolicy("four", "a", "twelve letters") for _ in range(6)]
                episodes = await asyncio.gather(
                    *(environment.run(*each) for each in zip(prompts, policies, strict=False))
                )
                assert all(policy.texts == [policy.texts[0], "four", "a"] for policy in policies)
                assert "ready" in policies[0].texts[0]
                return [episode.score for episode in episodes]

            scores = asyncio.run(play())
    assert len(prompts) == 8
    expected = Score(reward=pytest.approx(0.4 + 0.1 + 1.0), components={"actions": 3.0, "invalid_action": 0.0})
    assert scores == [expected] * 6


# ---------------------------------------------------------------------- Harbor

TASK = """version = "1.0"

[verifier]
timeout_sec = 60.0

[agent]
timeout_sec = 60.0
"""
VERIFIER = """#!/bin/bash
mkdir -p /logs/verifier
[ "$(cat answer.txt)" = 42 ] && echo 1 > /logs/verifier/reward.txt || echo 0.25 > /logs/verifier/reward.txt
"""
TASKSET = '''
"""Harbor tasks of a folder, and a harness that writes the policy's answer to a file."""

from pathlib import Path

import openai
import verifiers.v1 as vf
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.tasksets.harbor import HarborTask, HarborTaskset
from verifiers.v1.tasksets.harbor.taskset import parse_task


class Local(HarborTaskset):
    def load(self):
        for number, folder in enumerate(sorted(Path("tasks").resolve().iterdir())):
            yield HarborTask(parse_task(folder, number, self.config), self.config.task)


class Ask(Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            messages = [{"role": "user", "content": data.prompt}]
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)
        await runtime.write("answer.txt", answer.choices[0].message.content.encode())
        return ProgramResult(0, "", "")


__all__ = ["Local", "Ask"]
'''
SERVED = """
[[environments]]
use = "verifiers"
name = "harbor"
options.env = { taskset = { id = "local_harbor" }, agent = { runtime = { type = "subprocess" } } }
"""
PLACES = (Path("/logs"), Path("/tests"))
"""Folders of a task's verifier, which are in its container otherwise."""
PRIVATE = "mkdir -p /logs /tests && mount -t tmpfs none /logs && mount -t tmpfs none /tests && exec $0 $@"


@pytest.fixture
def places() -> Iterator[None]:
    """Removes the folders, which are empty outside the namespace of the server."""
    absent = [place for place in PLACES if not place.exists()]
    yield
    for place in absent:
        place.rmdir()


@pytest.mark.usefixtures("places")
def test_a_task_of_harbor_is_scored_by_its_own_verifier(tmp_path: Path) -> None:
    for name, question in (("answer", "What is six times seven?"), ("again", "What is seven times six?")):
        folder = tmp_path / "tasks" / name
        (folder / "tests").mkdir(parents=True)
        (folder / "task.toml").write_text(TASK)
        (folder / "instruction.md").write_text(question)
        (folder / "tests" / "test.sh").write_text(VERIFIER)
    (tmp_path / "local_harbor.py").write_text(TASKSET)
    (tmp_path / "served.toml").write_text(SERVED)
    texts = ["42", "43"]

    async def policy(http: web.Request) -> web.Response:
        message = {"role": "assistant", "content": texts.pop(0)}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        fields = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return web.json_response({**fields, "usage": usage})

    words = ("harbor", "--config", "served.toml")
    before = ("unshare", "--mount", "sh", "-c", PRIVATE)
    with (
        serving_http(policy) as url,
        ServedEnvironment(tmp_path, *words, python=python_of("harbor"), before=before) as there,
    ):
        environment = loaded(there)
        [prompt], [other] = environment.prompts("heldout"), environment.prompts("train")
        assert {prompt.text, other.text} == {"What is six times seven?", "What is seven times six?"}
        agent = environment.agent
        assert agent is not None
        scores = asyncio.run(_play(agent, prompt, Endpoint(base_url=url, api_key="k", model="m"), 2))
    assert scores == [Score(reward=reward, components={"reward": reward}) for reward in (1.0, 0.25)]


async def _play(agent: object, prompt: object, endpoint: Endpoint, times: int) -> Sequence[Score]:
    return [await agent.play(prompt, endpoint) for _ in range(times)]  # type: ignore[attr-defined]
