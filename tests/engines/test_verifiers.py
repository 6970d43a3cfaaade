"""A taskset of verifiers in a run as a user starts it: `rollstream env serve` runs it where the library is."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import GroupCancelled, ModelCall, Rollout
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode
from rollstream.topics.wire.validation import problems
from tests.broker.test_demo import environment
from tests.support.environment_servers import ServedEnvironment
from tests.support.paths import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
PYTHON = ROOT / ".venv" / "verifiers" / "bin" / "python"
TASKSET = '''
"""Sums, and a program that asks for each, then goes on from the answer in two ways."""

import openai
import verifiers.v1 as vf
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult


class SumData(vf.TaskData):
    total: int


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def characters(self, trace) -> float:
        if self.data.total == 4:
            raise RuntimeError("nobody knows this one")
        return len(set("".join(message.content or "" for message in trace.assistant_messages))) / 16

    @vf.metric
    async def replies(self, trace) -> float:
        return float(len(trace.assistant_messages))


class DoubtedSums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for a in range(5):
            for b in range(5):
                yield SumTask(SumData(prompt=f"{a}+{b}=", total=a + b), self.config.task)


class Doubt(Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:

            async def ask(messages):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                return [*messages, {"role": "assistant", "content": answer.choices[0].message.content}]

            first = await ask([{"role": "user", "content": data.prompt}])
            for doubt in ("sure?", "really?"):
                await ask([*first, {"role": "user", "content": doubt}])
        return ProgramResult(0, "", "")


__all__ = ["DoubtedSums", "Doubt"]
'''
SERVED = """
[[environments]]
name = "sums"
use = "verifiers"

[environments.options]
max_tokens = 6
env = { taskset = { id = "doubted_sums" }, agent = { runtime = { type = "subprocess" } } }
"""
SETTINGS = """
[[environments]]
use = "{url}"
options = {{ wait_s = 300 }}

[supervisor]
ready_timeout_s = 600

[learner]
model = {{ num_hidden_layers = 1 }}
sequence_length = 96
rollouts_per_step = 16
microbatch_rows = 4
max_steps = 3

[inference]
max_rows = 64

[worker]
group_size = 4

[grouping]
batch_rollouts = 8

[topics]
partitions = 2
"""


def test_a_taskset_of_verifiers_is_trained_on_in_a_run_whose_own_python_does_not_know_the_library(
    tmp_path: Path, broker: str, run_name: str
) -> None:
    if not PYTHON.exists():
        pytest.fail("verifiers is not installed: run make .venv/verifiers/.installed", pytrace=False)
    (tmp_path / "doubted_sums.py").write_text(TASKSET)
    (tmp_path / "served.toml").write_text(SERVED)
    with ServedEnvironment(tmp_path, "sums", "--config", "served.toml", python=PYTHON) as there:
        (tmp_path / "run.toml").write_text(SETTINGS.format(url=there.url))
        run = subprocess.run(
            [sys.executable, "-P", "-m", "rollstream", "run", "run.toml", "--run", run_name, "--set=data_dir=data"],
            env=environment(tmp_path / "jax", KAFKA_BOOTSTRAP_SERVERS=broker),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=800,
        )
    assert run.returncode == 0, run.stderr[-3000:]

    kafka = KafkaConfig(bootstrap_servers=broker)

    def records(topic: str) -> list[object]:
        return [decode(message.value) for message in read_to_end(kafka, topic_name(run_name, topic))]

    calls: dict[str, list[ModelCall]] = {}
    for call in records("calls"):
        if isinstance(call, ModelCall):
            calls.setdefault(call.session, []).append(call)
    episodes: dict[str, list[Rollout]] = {}
    for record in records("rollouts"):
        if isinstance(record, Rollout):
            assert problems(record) == []
            episodes.setdefault(record.episode_uid, []).append(record)
    assert len(episodes) >= 24
    for branches in episodes.values():
        assert [(r.branch, r.branches) for r in branches] == [(0, 2), (1, 2)]
        first, *doubts = (call.answers[0].tokens.tolist() for call in calls[branches[0].extra["session"]])
        shared = branches[0].turns[1]
        for branch, doubt in zip(branches, doubts, strict=True):
            assert branch.tokens[shared.start : shared.stop].tolist() == first
            assert branch.tokens[-len(doubt) :].tolist() == doubt
            assert branch.reward_components["replies"] == 3.0
            assert branch.reward == branch.reward_components["characters"] > 0
        trained = [branch.tokens[branch.loss_mask].tolist() for branch in branches]
        assert trained == [first + doubts[0], doubts[1]], "the answer that they share is trained once"

    # The prompt is the first message of each episode.
    unknown = [uid for uid, branches in episodes.items() if total_of(branches[0]) == 4]
    assert unknown == [], "an episode that verifiers could not score is no episode of reward 0"
    cancelled = [record for record in records("rollouts") if isinstance(record, GroupCancelled)]
    failed = Counter(uid for c in cancelled if "nobody knows this one" in c.reason for uid in c.uids)
    assert failed
    assert not failed.keys() & episodes.keys()
    book = ledger(kafka, run_name)
    assert book.balanced, book.problems
    assert book.trained >= 48
    assert verify(kafka, run_name).mismatches == []


def total_of(rollout: Rollout) -> int:
    a, _plus, b, *_ = rollout.turns[0].text.strip()
    return int(a) + int(b)
