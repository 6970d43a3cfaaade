"""For tests of agents that are programs of npm: where they are, a policy with a script for them, and a supervised
gateway to kill."""

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollstream.infra.broker.ports import free_port
from rollstream.pipeline.run.supervised_role import RoleSpec
from rollstream.pipeline.run.supervisor import Supervisor
from rollstream.topics.config import KafkaConfig
from tests.support.gateways import post
from tests.support.paths import PYTHON_PATH, ROOT
from tests.support.producing import SortedRow
from tests.support.recorded_engine import RecordedEngine
from tests.support.runs import RealRun
from tests.support.waiting import eventually

MODULES = ROOT / ".venv" / "npm" / "node_modules"
NODE = MODULES / "node" / "bin" / "node"
AGENT = ROOT / "tests" / "engines" / "agents" / "agent.mjs"
QUESTION = "How much is 20+22? Ask the shell."
ANSWER = "It is 42, says the shell."


def need_npm() -> None:
    """Fail with the remedy unless the agents are installed."""
    if not NODE.exists():
        pytest.fail("the agents are not installed: run make .venv/npm/.installed (npm, 2 GB)", pytrace=False)


class ByteTokenizer:
    """A token for each byte after the padding and the end: agents write any character."""

    pad_id, eos_id, eos_ids, vocab_size = 0, 1, (1,), 258

    def encode(self, text: str) -> list[int]:
        return [byte + 2 for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token - 2 for token in ids if token >= 2).decode(errors="replace")


class AgentPolicy(RecordedEngine):
    """Calls a tool, then answers what it said; it waits in the middle of its first answer to that until `go_on`."""

    max_model_len = 1 << 20
    tokenizer: Any = ByteTokenizer()

    def __init__(self, tool: str, **arguments: Any) -> None:
        super().__init__()
        call = json.dumps({"name": tool, "arguments": arguments})
        self.script = [f"I look.\n<tool_call>{call}</tool_call>", ANSWER]
        self.tokens_at_once = 4
        self.paused, self.go_on = threading.Event(), threading.Event()
        self._until_pause = 0

    def answer(self, text: str, seed: int, temperature: float) -> str:
        turn = min(text.count("\ntool\n"), 1)
        if turn and not self.paused.is_set():
            self._until_pause = 3
        return self.script[turn]

    def decode(self) -> list[SortedRow]:
        if self._until_pause:
            self._until_pause -= 1
            if not self._until_pause:
                self.paused.set()
                assert self.go_on.wait(300)
        return super().decode()


@dataclass(frozen=True)
class SupervisedGateway:
    """A gateway whose supervisor starts it again, and keeps its port open meanwhile."""

    supervisor: Supervisor
    url: str

    def until(self, check: Callable[[], Any], what: str) -> Any:
        """Wait for a condition while the supervisor does its work."""

        def step() -> Any:
            self.supervisor.poll(0.05)
            return check()

        return eventually(step, 240, what)


@contextmanager
def supervised_gateway(kafka: KafkaConfig, run: str, inference_url: str, folder: Path) -> Iterator[SupervisedGateway]:
    """A gateway of a run without other processes, in front of a server."""
    port = free_port("127.0.0.1")
    settings = {"worker__inference_urls": json.dumps([inference_url]), "gateway__port": port}
    command = RealRun(kafka, run, folder).command("role", "gateway", **settings)[1:]
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    with Supervisor(folder / "logs", environment=environment) as supervisor:
        supervisor.start(RoleSpec(name="gateway-0", arguments=tuple(command), address=("127.0.0.1", port)))
        supervisor.wait_ready(["gateway-0"])
        yield SupervisedGateway(supervisor, f"http://127.0.0.1:{port}")


def start_agent(name: str, form: str, session: dict[str, Any], folder: Path) -> "subprocess.Popen[str]":
    """Start an agent in a session of a gateway. It reaches nothing but this machine."""
    home, work = folder / "home", folder / "work"
    for directory in (home, work):
        directory.mkdir()
    base_url, key = session["base_url"], session["api_key"]
    environment = {
        "PATH": f"{NODE.parent}:{os.environ['PATH']}",
        "HOME": str(home),
        # Nobody listens on the port discard.
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "NO_PROXY": "127.0.0.1",
    }
    match name:
        case "claude":
            environment |= {"ANTHROPIC_BASE_URL": base_url, "ANTHROPIC_API_KEY": key}
            environment |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
            command = [str(MODULES / ".bin" / "claude"), "-p", QUESTION, "--allowedTools", "Bash"]
        case "codex":
            environment |= {"CODEX_HOME": str(home), "GATEWAY_KEY": key}
            (home / "config.toml").write_text(CODEX_CONFIG.format(base_url=base_url))
            flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
            command = [str(MODULES / ".bin" / "codex"), "exec", *flags, QUESTION]
        case _:
            environment |= {"BASE_URL": base_url, "API_KEY": key}
            # Node looks for packages beside the program.
            program = MODULES.parent / AGENT.name
            program.write_bytes(AGENT.read_bytes())
            command = [str(NODE), str(program), name, form]
    return subprocess.Popen(
        command,
        env=environment,
        cwd=work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


CODEX_CONFIG = """
model = "policy"
model_provider = "gateway"
check_for_update_on_startup = false
features.plugins = false
analytics.enabled = false

[model_providers.gateway]
name = "gateway"
base_url = "{base_url}"
env_key = "GATEWAY_KEY"
wire_api = "responses"
"""


def start_session(gateway: SupervisedGateway) -> dict[str, Any]:
    """Start a session of a group of one."""
    body = {"task_id": "sum", "environment": "sums"}
    answer: dict[str, Any] = gateway.until(
        lambda: (a := post(f"{gateway.url}/rl/start_session", body)[1]).get("session_id") and a, "a session"
    )
    return answer
