"""An environment of a user's own that calls the policy through OpenAI's client, in a run as a user starts it."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import ModelCall, Rollout
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode
from tests.broker.test_demo import SMALL, environment

DOUBTS = '''
from openai import AsyncOpenAI

from rollstream import Prompt, Score


class Doubts:
    """Asks a question, then asks again."""

    name = "doubts"
    max_tokens = 8

    def prompts(self, split):
        return [Prompt(example_id=str(n), text=f"{n}?") for n in range(*((20,) if split == "train" else (20, 24)))]

    async def play(self, prompt, endpoint):
        messages = []
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            for question in (prompt.text, "sure?"):
                messages.append({"role": "user", "content": question})
                answer = await client.chat.completions.create(
                    model=endpoint.model, messages=messages, max_tokens=self.max_tokens, temperature=1.0
                )
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return Score(reward=len(set(messages[-1]["content"])) / 8)
'''


@pytest.mark.long
def test_an_agent_that_knows_an_address_alone_is_trained_on_the_tokens_it_was_given(
    compiled: Path, tmp_path: Path, broker: str, run_name: str
) -> None:
    (tmp_path / "doubts.py").write_text(DOUBTS)
    settings = (
        *(f"task={tmp_path / 'doubts.py'}:Doubts", f"data_dir={tmp_path / 'data'}"),
        *("learner.sequence_length=96", "learner.max_steps=3", "learner.rollouts_per_step=32"),
        "evaluation.every_versions=1",
    )
    run = subprocess.run(
        [sys.executable, "-P", "-m", "rollstream", "run", "--run", run_name, *SMALL, *(f"--set={s}" for s in settings)],
        env=environment(compiled, KAFKA_BOOTSTRAP_SERVERS=broker),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    kafka = KafkaConfig(bootstrap_servers=broker)
    records = [decode(message.value) for message in read_to_end(kafka, topic_name(run_name, "rollouts"))]
    rollouts = [record for record in records if isinstance(record, Rollout)]
    calls = [decode(message.value) for message in read_to_end(kafka, topic_name(run_name, "calls"))]
    by_session: dict[str, list[ModelCall]] = {}
    for call in calls:
        if isinstance(call, ModelCall):
            by_session.setdefault(call.session, []).append(call)
    assert len(rollouts) >= 96
    for rollout in rollouts:
        sampled = [token for call in by_session[rollout.extra["session"]] for token in call.answers[0].tokens]
        assert rollout.tokens[rollout.loss_mask].tolist() == sampled
        assert [turn.role for turn in rollout.turns if turn.role == "assistant"] == ["assistant"] * 2
        assert rollout.metadata.weight_step >= 0
    book = ledger(kafka, run_name)
    assert book.balanced, book.problems
    assert book.trained >= 96
    assert verify(kafka, run_name).mismatches == []
    assert {e["version"]: e["episodes"] for e in book.evaluations}[0] == 4
    assert book.evals_batched == 0
    check_pruning(kafka, run_name)


def check_pruning(kafka: KafkaConfig, run: str) -> None:
    """Calls of finished sessions can be deleted, and the ledger of the others is as it was."""
    before = ledger(kafka, run).calls
    flags = ("--keep-batches", "0", "--yes", "--run", run, "-b", kafka.bootstrap_servers)
    subprocess.run([sys.executable, "-P", "-m", "rollstream", "prune", *flags], check=True, timeout=300)
    book = ledger(kafka, run)
    assert book.balanced, book.problems
    assert book.calls["pruned_offsets"] > before["pruned_offsets"] == 0
    assert book.calls["open"] == before["open"]
    assert book.calls["recorded"] < before["recorded"]
