"""Episodes of killed workers: their next process finishes or cancels each, and the ledger knows its fate."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from rollstream.pipeline.audit.ledger import ledger
from rollstream.producers.config import WorkerConfig
from rollstream.producers.environment import Score
from rollstream.producers.episodes.call_sequences import token_digest
from rollstream.producers.gateway.left_episodes import LEFT, end_left_episodes
from rollstream.producers.gateway.session_names import partition_of_group
from rollstream.producers.gateway.worker_capture import EpisodeCapture, EpisodeStamp, WorkerCapture
from rollstream.producers.policy_versions import PolicyFollower
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.topics.codec import encode
from rollstream.topics.config import KafkaConfig
from rollstream.topics.keys import encode_key
from rollstream.topics.records import CallAnswer, GroupCancelled, ModelCall, SessionEvent
from tests.support.gateways import records
from tests.support.producing import ScriptedGenerator, serving
from tests.support.runs import RealRun
from tests.support.waiting import eventually

WAITS = '''
import asyncio
import pathlib

from openai import AsyncOpenAI

from rollstream import Prompt, Score


class Waits:
    """Makes a call. Fails at the first attempt; at the second it waits as long as a file is there."""

    name = "waits"
    max_tokens = 8

    def prompts(self, split):
        return [Prompt(example_id=str(n), text=f"{n}?") for n in range(20 if split == "train" else 0)]

    async def play(self, prompt, endpoint):
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            messages = [{"role": "user", "content": prompt.text}]
            await client.chat.completions.create(model=endpoint.model, messages=messages, max_tokens=8)
        if "-2/v1" not in endpoint.base_url:
            raise OSError("the judge is away")
        while (pathlib.Path(__file__).parent / "wait").exists():
            await asyncio.sleep(0.05)
        return Score(reward=0.5)
'''


@pytest.fixture
def server() -> Iterator[str]:
    with serving(ScriptedGenerator(["hm", "42"], versions=(3,)), conversation_cache_tokens=0) as running:
        eventually(lambda: running.version == 3, 60, "weights are loaded")
        yield running.base_url


def test_a_killed_worker_started_again_cancels_the_episodes_it_had_begun(
    kafka: KafkaConfig, run_name: str, server: str, tmp_path: Path
) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "wait").touch()
    settings = {
        "task": f"{tmp_path / 'waits.py'}:Waits",
        "kafka.bootstrap_servers": kafka.bootstrap_servers,
        "topics.partitions": 2,
        "worker.inference_urls": json.dumps([server]),
        "worker.group_size": 2,
        "worker.groups": 2,
    }
    pairs = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-P", "-m", "rollstream", "env", "--run", run_name, *pairs]
    errors = tmp_path / "worker.log"

    def calls() -> set[str]:
        assert worker.poll() is None, errors.read_text()[-2000:]
        return {record.session for record in records(kafka, run_name, "calls") if isinstance(record, ModelCall)}

    with errors.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as worker:
        try:
            left = eventually(lambda: len(calls()) == 8 and calls(), 120, "calls of two attempts at four episodes")
        finally:
            worker.kill()
    before = ledger(kafka, run_name).calls
    assert (before["open"], before["cancelled"]) == (4, 4)
    (tmp_path / "wait").unlink()
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr[-2000:]
    there = records(kafka, run_name)
    cancelled = [record for record in there if isinstance(record, GroupCancelled)]
    assert {record.reason for record in cancelled} == {LEFT}
    # One cancellation of each member, whichever attempt was left.
    assert sorted(uid for record in cancelled for uid in record.uids) == sorted(left - {f"{uid}-2" for uid in left})
    assert {record.group_size for record in cancelled} == {2}
    book = ledger(kafka, run_name)
    assert book.problems == []
    assert (book.calls["cancelled"], book.calls["in_rollouts"], book.calls["open_sessions"]) == (12, 4, 0)
    reasons = book.calls["reasons"]
    assert reasons.pop(LEFT) == 4
    assert sum(reasons.values()) == 8
    assert all(reason.startswith("tried again: environment waits failed on ") for reason in reasons)


@asynccontextmanager
async def episode_of(
    capture: WorkerCapture, member: int, questions: tuple[str, ...], attempt: int = 1
) -> AsyncIterator[EpisodeCapture]:
    """An attempt with a call for each question; calls do not continue each other, so each is a branch."""
    stamp = EpisodeStamp(
        environment="sums", example_id="t", group_id="w.1.0", group_size=5, member=member, policy_version=3
    )
    episode = await capture.open(stamp, attempt)
    address = {"base_url": episode.endpoint.base_url, "api_key": episode.endpoint.api_key}
    async with openai.AsyncOpenAI(**address, max_retries=0) as agent:
        for question in questions:
            messages: Any = [{"role": "user", "content": question}]
            await agent.chat.completions.create(model=episode.endpoint.model, messages=messages)
    yield episode


async def take_over(kafka: KafkaConfig, run: str, author: str) -> dict[str, tuple[str, ...]]:
    """End the episodes that a worker finds when it starts; return their sessions and the uids of their rollouts."""
    config = WorkerConfig(worker_id=author.partition(".")[0])
    with RolloutProducer(kafka, run) as producer:
        ended = await end_left_episodes(kafka, run, config, author=author, producer=producer)
    return {session.name: uids for session, uids in ended}


def test_episodes_whose_rollouts_are_all_on_the_log_are_finished(
    kafka: KafkaConfig, run_name: str, server: str
) -> None:
    worker = WorkerConfig(worker_id="w", inference_urls=(server,))

    async def leave() -> None:
        """Five episodes: written whole, written in part, ended and not written, not ended, and between two attempts.
        The first and the last are tried a second time."""
        with PolicyFollower(kafka, run_name) as policies, RolloutProducer(kafka, run_name) as producer:
            async with WorkerCapture(kafka, run_name, worker, author="w.1", policies=policies) as capture:
                async with episode_of(capture, 0, ("1?",)) as failed:
                    await failed.cancelled("tried again")
                for member, written in enumerate((2, 1, 0)):
                    async with episode_of(capture, member, ("1?", "2?"), attempt=1 if member else 2) as episode:
                        rollouts = await episode.finish(Score(reward=1.0))
                        assert len(rollouts) == 2
                        for rollout in rollouts[:written]:
                            producer.send(rollout)
                async with episode_of(capture, 3, ("1?",)), episode_of(capture, 4, ("1?",)):
                    pass
                async with episode_of(capture, 4, (), attempt=2):
                    pass

    asyncio.run(leave())
    assert asyncio.run(take_over(kafka, run_name, "other.1")) == {}, "the worker may still be playing them"
    uids = ("w.1.0.0.0", "w.1.0.0.1")
    cancelled_sessions = ("w.1.0.1", "w.1.0.2", "w.1.0.3", "w.1.0.4", "w.1.0.4-2")
    assert asyncio.run(take_over(kafka, run_name, "w.2")) == {
        "w.1.0.0-2": uids,
        **dict.fromkeys(cancelled_sessions, ()),
    }
    assert asyncio.run(take_over(kafka, run_name, "w.3")) == {}, "each is ended once"
    cancelled = [record for record in records(kafka, run_name) if isinstance(record, GroupCancelled)]
    assert sorted(uid for record in cancelled for uid in record.uids) == [*cancelled_sessions[:4]]
    book = ledger(kafka, run_name)
    assert book.problems == []
    assert (book.calls["in_rollouts"], book.calls["cancelled"], book.calls["open"]) == (2, 7, 0)


def test_malformed_sessions_on_the_log_end_no_worker(kafka: KafkaConfig, run_name: str, tmp_path: Path) -> None:
    start = SessionEvent(
        session="x.0",
        kind="start",
        author="w.1",
        owner="worker",
        environment="e",
        example_id="t",
        group_id="x",
        policy_version=3,
    )
    ids = np.array([1, 2], "<i4")
    unfit = CallAnswer(tokens=ids, logprobs=np.zeros(3, "<f4"))
    call = ModelCall(session="x.1", uid="c", request="r", prompt=ids, prompt_digest=token_digest(ids), answers=(unfit,))
    there = partition_of_group("x", 2)
    foreign = [
        (there, replace(start, group_size=0)),
        (there, replace(start, session="no name")),
        (1 - there, replace(start, session="x.2")),
        (there, replace(start, session="x.1", member=1, group_size=2)),
        (there, call),
        (there, SessionEvent(session="x.1", kind="end", author="w.1")),
    ]
    run = RealRun(kafka, run_name, tmp_path)
    for partition, record in foreign:
        run.send_bytes("calls", encode(record), encode_key(record.session), partition)
    assert asyncio.run(take_over(kafka, run_name, "w.2")) == {"x.0": (), "x.1": ()}
    assert asyncio.run(take_over(kafka, run_name, "w.3")) == {}, "each is ended once"
    (cancelled,) = records(kafka, run_name)
    assert cancelled.uids == ("x.1",)
