"""An agent outside, which knows one address, in a run as a user starts it: what it plays is trained on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.infra.broker.ports import free_port
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import LearnerStep, ModelCall, Rollout
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode
from tests.broker.test_demo import SMALL, environment

AGENT = '''
"""Plays groups of four sessions until the gateway is gone. It knows a URL and OpenAI's client, and no rollstream."""

import http.client
import json
import sys
import time
import urllib.error
import urllib.request

import openai

URL = sys.argv[1]


def rl(path, **fields):
    """The answer to a request below /rl, repeated while the gateway asks to wait; None once it is gone."""
    while True:
        request = urllib.request.Request(f"{URL}/rl/{path}", json.dumps(fields).encode())
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code != 429:
                return None
            time.sleep(float(error.headers["Retry-After"]))
        except (OSError, http.client.HTTPException):
            return None


def play(session):
    """Two turns; the reward is the share of distinct characters in the second."""
    messages = []
    with openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"]) as client:
        for question in ("20+22?", "sure?"):
            messages.append({"role": "user", "content": question})
            answer = client.chat.completions.create(model="any", messages=messages, max_tokens=8)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    return len(set(messages[-1]["content"])) / 8


ended = []
while True:
    group = rl("start_session", task_id=f"t{len(ended) % 8}", environment="outside", group_size=4)
    if group is None:
        break
    try:
        for session in group["sessions"]:
            reward = play(session)
            name = session["session_id"]
            if rl("set_reward", session_id=name, reward=reward) and rl("end_session", session_id=name):
                ended.append([name, reward])
    except openai.APIError:
        break
print(json.dumps(ended))
'''


@pytest.mark.long  # JAX compiles for a minute
def test_what_an_agent_outside_plays_at_the_gateway_of_a_run_is_trained_on(
    compiled: Path, tmp_path: Path, broker: str, run_name: str
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    port = free_port("127.0.0.1")
    settings = (
        *(f"gateway.port={port}", "supervisor.workers=0", f"data_dir={tmp_path / 'data'}"),
        *("learner.sequence_length=96", "learner.max_steps=3", "learner.rollouts_per_step=16", "topics.partitions=2"),
    )
    command = ["rollstream", "run", "--run", run_name, *SMALL, *(f"--set={setting}" for setting in settings)]
    variables = environment(compiled, KAFKA_BOOTSTRAP_SERVERS=broker)
    with subprocess.Popen(
        [sys.executable, "-P", "-m", *command], env=variables, cwd=tmp_path, text=True, stdout=-1, stderr=-1
    ) as run:
        try:
            assert run.stdout is not None
            assert "processes are ready" in run.stdout.readline()
            agent = subprocess.run(
                [sys.executable, "-P", tmp_path / "agent.py", f"http://127.0.0.1:{port}"],
                capture_output=True,
                text=True,
                timeout=400,
            )
            _output, log = run.communicate(timeout=300)
        finally:
            run.kill()
    assert run.returncode == 0, log[-3000:]
    assert agent.returncode == 0, agent.stderr[-3000:]
    rewards = dict(json.loads(agent.stdout))

    kafka = KafkaConfig(bootstrap_servers=broker)

    def records(topic: str) -> list[object]:
        return [decode(message.value) for message in read_to_end(kafka, topic_name(run_name, topic))]

    rollouts = [record for record in records("rollouts") if isinstance(record, Rollout)]
    assert len(rollouts) >= 48
    assert {rollout.environment for rollout in rollouts} == {"outside"}
    assert {r.uid: r.reward for r in rollouts if r.uid in rewards} == rewards
    calls = [record for record in records("calls") if isinstance(record, ModelCall)]
    for rollout in rollouts:
        played = [call for call in calls if call.session == rollout.extra["session"]]
        assert len(played) == 2
        sampled = [token for call in played for token in call.answers[0].tokens]
        assert rollout.tokens[rollout.loss_mask].tolist() == sampled
    steps = [record.step for record in records("steps") if isinstance(record, LearnerStep)]
    assert sorted(steps)[-3:] == [1, 2, 3]
    book = ledger(kafka, run_name)
    assert book.balanced, book.problems
    assert book.trained >= 48
    assert book.calls["in_rollouts"] == 2 * len(rollouts)
    assert verify(kafka, run_name).mismatches == []
