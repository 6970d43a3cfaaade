"""One run of every part, recorded once for a session: whatever only reads a run asks this one.

It plays the demo's task, essays that a judge labels, and groups of an agent outside at the gateway; an evaluator looks
on. While it trains, its grouping process, its learner, its labeler, its overseer and its broker are killed with -9, an
environment is excluded, and at the end the weights are rolled back.
"""

import http.server
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from rollstream.infra.broker.broker import LocalBroker
from rollstream.infra.broker.ports import free_port
from rollstream.infra.config import BrokerConfig
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode
from tests.support.steered_run import SteeredRun
from tests.support.waiting import eventually

T = TypeVar("T")
ESSAYS = '''
from rollstream import Prompt, Score, SingleTurn


class Essays(SingleTurn):
    """Essays, which a labeler judges."""

    name = "essays"
    max_tokens = 8

    def prompts(self, split):
        return [Prompt(example_id=str(n), text=f"write {n}: ") for n in range(20 if split == "train" else 0)]

    def score(self, prompt, response_text, truncated):
        return Score(reward=-1.0, components={"length": len(response_text)})
'''

SETTINGS = """
[[environments]]
use = "dsort3"

[[environments]]
use = "essays.py:Essays"
rewards = "labeler"

[labeling]
labeler = "judge"

[labeling.judge]
url = "{judge}"
template = "judge:{{response}}"

[gateway]
port = {gateway}

[evaluation]
every_versions = 4
max_prompts = 8

[learner]
model = {{ num_hidden_layers = 1 }}
rollouts_per_step = 32
microbatch_rows = 4
max_steps = 100000
sequence_length = 96

[inference]
max_rows = 64

[supervisor]
workers = 1
adoption_s = 300

[worker]
group_size = 4
metrics_interval_s = 0.5

[grouping]
batch_rollouts = 8

[topics]
partitions = 2
"""


class Judge(http.server.BaseHTTPRequestHandler):
    """Its score is the number of distinct characters, or no number for one answer of eight."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = body["messages"][0]["content"].removeprefix("judge:")
        score = "no idea" if sum(map(ord, answer)) % 8 == 0 else len(set(answer))
        content = json.dumps({"choices": [{"message": {"role": "assistant", "content": f"Score: {score}"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_words: object) -> None:
        """Say nothing on stderr."""


@contextmanager
def judging() -> Iterator[str]:
    """URL of a judge, which answers while the block runs."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, name="judge").start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()


@dataclass
class OutsideAgent:
    """Plays groups of four sessions at a gateway, two turns each, and notes the reward of each that it ended."""

    url: str
    rewards: dict[str, float] = field(default_factory=dict)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def stop(self) -> None:
        self._stopped.set()

    def _ask(self, url: str, **body: object) -> Any:
        """The answer to a request, sent again while the gateway is away or asks to wait."""
        while not self._stopped.is_set():
            request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.load(answer)
            except OSError as error:
                if isinstance(error, urllib.error.HTTPError) and error.code not in (429, 502, 503, 504):
                    raise
                self._stopped.wait(0.2)
        raise InterruptedError

    def play(self) -> None:
        """Play until told to stop."""
        try:
            while True:
                group = self._ask(
                    f"{self.url}/rl/start_session",
                    task_id=f"t{len(self.rewards) // 4 % 8}",
                    environment="outside",
                    group_size=4,
                )
                for session in group["sessions"]:
                    self._play_session(session)
        except InterruptedError:
            return

    def _play_session(self, session: dict[str, str]) -> None:
        messages: list[Any] = []
        for question in ("20+22?", "sure?"):
            messages.append({"role": "user", "content": question})
            url = f"{session['base_url']}/chat/completions"
            answer = self._ask(url, model="any", messages=messages, max_tokens=8)
            messages.append(answer["choices"][0]["message"])
        reward, name = len(set(messages[-1]["content"])) / 8, session["session_id"]
        self._ask(f"{self.url}/rl/set_reward", session_id=name, reward=reward)
        self._ask(f"{self.url}/rl/end_session", session_id=name)
        self.rewards[name] = reward


@pytest.fixture(scope="session")
def museum(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Museum"]:
    """The run, ended, on a broker that still answers."""
    directory = tmp_path_factory.mktemp("museum")
    port = free_port("127.0.0.1")
    (directory / "essays.py").write_text(ESSAYS)
    with (
        LocalBroker.start(config=BrokerConfig(data_dir=directory / "broker"), bound_to_parent=True) as broker,
        judging() as judge,
        ThreadPoolExecutor() as pool,
    ):
        (directory / "run.toml").write_text(SETTINGS.format(judge=judge, gateway=port))
        run = SteeredRun(broker.bootstrap_servers, "museum", directory, directory / "run.toml", {})
        agent = OutsideAgent(f"http://127.0.0.1:{port}")
        try:
            run.start()
            playing = pool.submit(agent.play)
            history(run, broker, agent)
            agent.stop()
            playing.result(60)
            run.stop()
            museum = Museum(run, agent.rewards)
            good = museum.records("policies", PolicyManifest)[-2].version
            run.say("weights", "rollback", str(good), "--reason", "reward hacking", "--take-over")
            yield museum
        finally:
            agent.stop()
            run.close()


@dataclass(frozen=True)
class Museum:
    """What is asked about the run."""

    run: SteeredRun
    rewards: dict[str, float]
    """Reward of each session that the agent ended."""

    def records(self, topic: str, kind: type[T]) -> list[T]:
        """Committed records of a topic that are of a kind."""
        messages = read_to_end(self.run.kafka, topic_name(self.run.name, topic))
        return [record for record in (decode(message.value) for message in messages) if isinstance(record, kind)]

    def ask(self, *words: str) -> Any:
        """JSON that a command prints."""
        return json.loads(self.run.say(*words, "--json"))


def history(run: SteeredRun, broker: LocalBroker, agent: OutsideAgent) -> None:
    """What befalls the run."""
    run.await_steps(2)
    run.kill_role("group")
    run.await_steps(1)
    run.kill_role("learn")
    run.await_steps(1)
    run.kill_role("label")
    learners, reached = run.pids("learn"), run.top()["step"]
    run.kill()
    eventually(lambda: run.top()["step"] > reached, 120, "a step without an overseer")
    run.start()
    assert run.pids("learn") == learners, "it is adopted"
    run.await_steps(1)
    broker.kill()
    broker.restart()
    run.await_steps(1)
    played = len(agent.rewards)
    eventually(lambda: len(agent.rewards) >= max(8, played + 4), 120, "sessions of the agent")
    run.say("exclude", "--env", "essays")
    run.await_steps(2)
