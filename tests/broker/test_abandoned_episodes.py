"""Episodes of killed workers: the next process writes or cancels each, and the ledger knows its fate."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from rollstream.pipeline.audit.ledger import ledger
from rollstream.producers.config import WorkerConfig
from rollstream.producers.episodes.call_sequences import token_digest
from rollstream.producers.flow.policy_versions import PolicyFollower, PolicyVersions
from rollstream.producers.gateway.config import GatewayConfig
from rollstream.producers.gateway.episode_rollouts import RolloutForm, rollouts_of
from rollstream.producers.gateway.service import EpisodeStamp
from rollstream.producers.gateway.sessions import CapturedSession, group_of, partition_of_group
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.producers.worker.local_gateway import ABANDONED, LocalGateway
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import topic_admin
from rollstream.topics.records import CallAnswer, GroupCancelled, ModelCall, Rollout, SessionEvent
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
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
    command = [sys.executable, "-P", "-m", "rollstream", "role", "env", "--run", run_name, *pairs]
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
    assert {record.reason for record in cancelled} == {ABANDONED}
    # One cancellation of each member, whichever attempt was left.
    assert sorted(uid for record in cancelled for uid in record.uids) == sorted(left - {f"{uid}-2" for uid in left})
    assert {record.group_size for record in cancelled} == {2}
    book = ledger(kafka, run_name)
    assert book.problems == []
    assert (book.calls["cancelled"], book.calls["in_rollouts"], book.calls["open_sessions"]) == (12, 4, 0)
    reasons = book.calls["reasons"]
    assert reasons.pop(ABANDONED) == 4
    assert sum(reasons.values()) == 8
    assert all(reason.startswith("tried again: environment waits failed on ") for reason in reasons)


def local_gateway(kafka: KafkaConfig, run: str, policies: PolicyFollower, name: str, url: str) -> LocalGateway:
    worker = WorkerConfig(worker_id=name, inference_urls=(url,))
    return LocalGateway(kafka, run, worker, GatewayConfig(), name=name, policies=policies, temperatures={})


async def begun(gateway: LocalGateway, member: int, questions: tuple[str, ...], attempt: int = 1) -> CapturedSession:
    """An attempt with a call for each question; calls do not continue each other, so each is a branch."""
    stamp = EpisodeStamp(
        environment="sums", example_id="t", group_id="w.1.0", group_size=5, member=member, policy_version=3
    )
    session = await gateway.open(stamp, attempt)
    endpoint = gateway.endpoint_of(session)
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as agent:
        for question in questions:
            messages: Any = [{"role": "user", "content": question}]
            await agent.chat.completions.create(model=endpoint.model, messages=messages)
    return session


async def started_again(kafka: KafkaConfig, run: str, name: str, url: str) -> None:
    """Start a worker's gateway, which ends what it finds, and stop it."""
    with PolicyFollower(kafka, run) as policies:
        async with local_gateway(kafka, run, policies, name, url):
            pass


def finished(kafka: KafkaConfig, run: str) -> dict[str, tuple[str, ...]]:
    """The finished sessions, with the uids of their rollouts."""
    events = records(kafka, run, "calls")
    return {event.session: event.uids for event in events if getattr(event, "kind", "") == "finished"}


def test_episodes_that_have_their_score_are_written_and_the_others_cancelled(
    kafka: KafkaConfig, run_name: str, server: str, tmp_path: Path
) -> None:
    run = RealRun(kafka, run_name, tmp_path)

    async def leave() -> None:
        """Five episodes: scored, scored and written in part, not scored, tried again, and between two attempts."""
        with PolicyFollower(kafka, run_name) as policies:
            async with local_gateway(kafka, run_name, policies, "w", server) as gateway:
                sessions = [await begun(gateway, member, ("1?", "2?")) for member in range(5)]
                await begun(gateway, 3, ("1?",), attempt=2)
                await gateway.try_again(sessions[3], "tried again")
                await begun(gateway, 4, (), attempt=2)
                for session in sessions[:2]:
                    reward = SessionEvent(session=session.name, kind="reward", author="w", scored=True, reward=1.0)
                    append(run, reward)
                await gateway.end(sessions[0])  # its rollouts are written
        scored = sessions[1]
        append(run, SessionEvent(session=scored.name, kind="end", author="w"))
        (end,) = {end for end in (topic_admin.bounds(kafka, f"{run_name}.rollouts")[p][1] for p in (0, 1)) if end}
        append(run, SessionEvent(session=scored.name, kind="finishing", author="w", rollouts_end=end))
        written = copy(scored)
        written.reward = 1.0
        form = RolloutForm(logprobs_mode="processed", temperature=1.0)
        first, _second = rollouts_of(written, form, PolicyVersions())
        with RolloutProducer(kafka, run_name) as producer:
            producer.send(first)

    asyncio.run(leave())
    before = finished(kafka, run_name)
    asyncio.run(started_again(kafka, run_name, "other", server))
    assert finished(kafka, run_name) == before, "the worker may still be playing them"
    asyncio.run(started_again(kafka, run_name, "w", server))
    both = {f"w.1.0.{member}": (f"w.1.0.{member}.0", f"w.1.0.{member}.1") for member in (0, 1)}
    cancelled_sessions = ("w.1.0.2", "w.1.0.3", "w.1.0.3-2", "w.1.0.4", "w.1.0.4-2")
    ended = finished(kafka, run_name)
    assert ended == {**both, **dict.fromkeys(cancelled_sessions, ())}
    events = len(records(kafka, run_name, "calls"))
    asyncio.run(started_again(kafka, run_name, "w", server))
    assert len(records(kafka, run_name, "calls")) == events, "each is ended once"
    there = records(kafka, run_name)
    rollouts = [record.uid for record in there if isinstance(record, Rollout)]
    assert sorted(rollouts) == sorted(uid for uids in both.values() for uid in uids), "each is written once"
    cancelled = [record for record in there if isinstance(record, GroupCancelled)]
    assert sorted(uid for record in cancelled for uid in record.uids) == ["w.1.0.2", "w.1.0.3", "w.1.0.4"]
    book = ledger(kafka, run_name)
    assert book.problems == []
    assert (book.calls["in_rollouts"], book.calls["cancelled"], book.calls["open"]) == (4, 7, 0)


def append(run: RealRun, event: SessionEvent) -> None:
    partition = partition_of_group(group_of(event.session), 2)
    run.send_bytes("calls", encode(event), encode_key(event.session), partition)


def test_malformed_sessions_on_the_log_end_no_worker(
    kafka: KafkaConfig, run_name: str, server: str, tmp_path: Path
) -> None:
    start = SessionEvent(
        session="x.0",
        kind="start",
        author="w",
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
        (there, SessionEvent(session="x.1", kind="end", author="w")),
    ]
    run = RealRun(kafka, run_name, tmp_path)
    for partition, record in foreign:
        run.send_bytes("calls", encode(record), encode_key(record.session), partition)
    asyncio.run(started_again(kafka, run_name, "w", server))
    assert finished(kafka, run_name) == {"x.0": (), "x.1": ()}
    events = len(records(kafka, run_name, "calls"))
    asyncio.run(started_again(kafka, run_name, "w", server))
    assert len(records(kafka, run_name, "calls")) == events, "each is ended once"
    (cancelled,) = records(kafka, run_name)
    assert cancelled.uids == ("x.1",)
