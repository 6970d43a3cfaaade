"""Roles of a run that is split: which end with it and when, and a run with all roles that goes on as another."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.grouping.process.bootstrap import initialise
from rollstream.infra.ports import free_port, free_ports
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.topics.codec import encode
from rollstream.topics.config import TopicsConfig
from rollstream.topics.kafka import clients, provisioning
from rollstream.topics.keys import encode_key
from rollstream.topics.records import LearnerStep, Rollout, TrainingBatch
from rollstream.topics.run_splits import splits_of
from tests.broker.test_demo import environment
from tests.support.producing import SortingGenerator, serving
from tests.support.runs import SMALL_LEARNER, RealRun, rollout
from tests.support.waiting import eventually


def score(waiting: Rollout) -> float:
    """A labeler's function."""
    return float(waiting.uid[-1]) / 10


LABELER = f"{__file__}:score"


def send_unlabelled(run: RealRun, example: str) -> set[str]:
    members = [replace(rollout(example, member), group_id=example) for member in range(4)]
    with RolloutProducer(run.kafka, run.name, topic="unlabelled") as producer:
        for record in members:
            producer.send(record)
    return {record.uid for record in members}


def recorded(run: RealRun) -> set[str]:
    return {record.uid for record in run.read("rollouts") if isinstance(record, Rollout)}


def batched(run: RealRun) -> set[str]:
    return {uid for batch in run.read("batches") if isinstance(batch, TrainingBatch) for uid in batch.uids}


def steps(run: RealRun) -> list[int]:
    return [record.step for record in run.read("steps") if isinstance(record, LearnerStep)]


def asked(url: str, **body: object) -> dict[str, Any]:
    """Ask a gateway, and ask again while it has no room."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def answer() -> dict[str, Any] | None:
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return {"answer": json.load(response)}
        except urllib.error.HTTPError as error:
            return None if error.code == 429 else {"refused": error.read().decode()}

    response = eventually(answer, 120, f"an answer of {url}", every_s=0.2)
    assert "answer" in response, response
    assert isinstance(response["answer"], dict)
    return response["answer"]


def play_session(gateway: str) -> set[str]:
    """Play a group of sessions, as an agent does; return the rollouts that they became."""
    uids = set()
    named = {"task_id": "t", "group_id": "outside-0", "group_size": 4, "environment": "outside"}
    for number, started in enumerate(asked(f"{gateway}/rl/start_session", **named)["sessions"]):
        session = started["session_id"]
        asked(f"{gateway}/sessions/{session}/v1/completions", model="any", prompt="429>", max_tokens=4)
        asked(f"{gateway}/rl/set_reward", session_id=session, reward=number % 2)
        uids.update(asked(f"{gateway}/rl/end_session", session_id=session)["rollouts"])
    return uids


@pytest.mark.long
def test_what_workers_had_begun_is_labelled_before_a_run_is_closed_and_then_its_roles_end(real_run: RealRun) -> None:
    run, port = real_run.prepare(), free_port("127.0.0.1")
    with serving(SortingGenerator(versions=(0,))) as server:
        group = run.start("group", kafka__session_timeout_s=30)
        labeler = run.start("label", LABELER)
        asks = {"worker__inference_urls": json.dumps([server.base_url]), "gateway__port": port}
        ending = [
            run.start("gateway", **asks),
            run.start("eval", "--every", "50", evaluation__max_prompts=2, task="dsort3", **asks),
        ]
        for process, word in ((group, "assigned"), (labeler, "assigned"), (ending[1], "evaluated")):
            eventually(lambda p=process, w=word: f'"{w}"' in run.log_of(p), 120, word)  # type: ignore[misc]
        eventually(lambda: f":{port}" in run.log_of(ending[0]), 120, "the gateway")

        # The split waits for this process, as for workers that finish what they have begun.
        os.kill(group.pid, signal.SIGSTOP)
        splitting = run.start("split", "--into", f"{run.name}-3", "--partitions", "3")
        eventually(lambda: splits_of(run.kafka, run.name).successor, 120, "the split on record")
        late = send_unlabelled(run, "late")
        eventually(lambda: recorded(run) == late, 120, "labels while the run is closing")
        assert labeler.poll() is None
        os.kill(group.pid, signal.SIGCONT)
        assert splitting.wait(300) == 0, run.log_of(splitting)
        for process in (group, labeler, *ending):
            assert process.wait(120) == 0, run.log_of(process)

        refused = [("label", LABELER), ("eval", "--every", "50"), ("infer",), ("serve-weights", "--url", "http://x")]
        for again in [run.start(*words, task="dsort3") for words in refused]:
            assert again.wait(120) == 2
            assert f"start this with --run {run.name}-3" in run.log_of(again)

    assert batched(run) == late
    old = ledger(run.kafka, run.name)
    assert old.balanced, old.problems
    assert (old.unlabelled["labeled"], old.batched) == (4, 4)


def test_the_marker_of_a_transaction_does_not_wait_for_a_label_when_a_run_is_split(real_run: RealRun) -> None:
    run = real_run.prepare()
    labeler = run.start("label", LABELER)
    # As `dlq redrive` sends them.
    producer = clients.transactional_producer(run.kafka, f"{run.name}-sender")
    producer.init_transactions(120)
    producer.begin_transaction()
    for member in range(4):
        producer.produce(run.topic("unlabelled"), encode(rollout("judged", member)), encode_key("env", "judged"))
    producer.flush(120)
    producer.commit_transaction(120)
    judged = {f"judged-{member}" for member in range(4)}
    eventually(lambda: recorded(run) == judged, 120, "labels")

    splitting = run.start("split", "--into", f"{run.name}-3", "--partitions", "3")
    assert splitting.wait(300) == 0, run.log_of(splitting)
    assert labeler.wait(120) == 0, run.log_of(labeler)
    assert batched(run) | recorded(replace(run, name=f"{run.name}-3")) == judged
    old = ledger(run.kafka, run.name)
    assert old.balanced, old.problems


SLOW = '''
"""One turn, and a verifier that takes longer than a split waits for other producers."""

import asyncio

from rollstream import Episode, Message, Prompt, Score


class Slow:
    name = "slow"
    max_tokens = 4

    def prompts(self, split):
        return [Prompt(example_id=f"{split}-{n}", text="429>") for n in range(8)]

    async def run(self, prompt, generate):
        reply = await generate(prompt.text)
        await asyncio.sleep(15)
        return Episode(turns=(Message(role="user", text=prompt.text), reply), score=Score(reward=1.0))
'''


@pytest.mark.long
def test_a_run_is_closed_when_its_workers_have_finished_their_groups(real_run: RealRun) -> None:
    run, asked_for = real_run.prepare(), threading.Event()
    (run.directory / "slow.py").write_text(SLOW)
    (run.directory / "slow.toml").write_text('[[environments]]\nuse = "slow.py:Slow"\n')
    settings = {
        **SMALL_LEARNER,
        "supervisor__workers": 1,
        "worker__concurrency": 1,
        "worker__drain_timeout_s": 60,
    }
    generator = SortingGenerator(versions=(0,), before_generate=lambda _prompts: asked_for.set())
    with serving(generator) as server:
        settings["worker__inference_urls"] = json.dumps([server.base_url])
        worker = run.start("env", "--config", "slow.toml", **settings)
        assert asked_for.wait(120), run.log_of(worker)
        splitting = run.start(
            "split", "--config", "slow.toml", "--into", f"{run.name}-3", "--partitions", "3", **settings
        )
        assert worker.wait(120) == 0, run.log_of(worker)
        assert splitting.wait(300) == 0, run.log_of(splitting)
    groups = Counter(record.group_id for record in run.read("rollouts") if isinstance(record, Rollout))
    assert groups
    assert set(groups.values()) == {4}
    old = ledger(run.kafka, run.name)
    assert old.balanced, old.problems
    assert (old.rollouts, old.unread, old.in_flight) == (groups.total(), 0, 0)


@pytest.mark.long
def test_a_run_with_workers_a_gateway_labels_and_an_evaluator_goes_on_as_another(
    real_run: RealRun, compiled: Path
) -> None:
    run, (port, serves) = real_run, free_ports("127.0.0.1", 2)
    run.grouping = replace(run.grouping, batch_rollouts=8)
    provisioning.apply(run.kafka, run.topics, run.name)
    initialise(run.kafka, run.name, run.grouping, run.grouper)
    settings = {
        **SMALL_LEARNER,
        "task": "dsort3",
        "learner__sequence_length": 64,
        "supervisor__workers": 1,
        "worker__inference_urls": json.dumps([f"http://127.0.0.1:{serves}/v1"]),
        "inference__port": serves,
        "inference__max_rows": 16,
        "gateway__port": port,
        "grouper__processes": 2,
        "labeling__labeler": LABELER,
        "evaluation__every_versions": 2,
        "evaluation__max_prompts": 2,
    }
    roles = [run.start("group", "--ordinal", str(ordinal), **settings) for ordinal in range(2)]
    for role, word in (("learn", "learner_started"), ("infer", "inference_listening"), ("label", "assigned")):
        roles.append(run.start(role, **settings))
        eventually(lambda w=word: f'"{w}"' in run.log_of(roles[-1]), 300, word)  # type: ignore[misc]
    roles += [run.start(role, **settings) for role in ("env", "gateway", "eval")]
    eventually(lambda: f":{port}" in run.log_of(roles[-2]), 300, "the gateway")
    eventually(lambda: max(steps(run), default=0) >= 2, 600, "steps of what the workers play")
    outside = play_session(f"http://127.0.0.1:{port}")
    labelled = send_unlabelled(run, "judged")
    eventually(lambda: recorded(run) >= outside | labelled, 120, "sessions and labels on record")

    done = subprocess.run(
        run.command("split", "--into", f"{run.name}-3", "--partitions", "3", "--json", **settings),
        capture_output=True,
        text=True,
        timeout=600,
        env=run.environment(),
        cwd=run.directory,
    )
    assert done.returncode == 0, done.stderr
    for process in roles:
        assert process.wait(120) == 0, run.log_of(process)[-3000:]
    assert not re.search(r"InferenceUnavailable|connection refused", run.log_of(roles[5])), "servers end last"
    split = json.loads(done.stdout)
    old = ledger(run.kafka, run.name)
    assert old.balanced, old.problems
    assert verify(run.kafka, run.name).mismatches == []

    three = replace(run, name=f"{run.name}-3", topics=TopicsConfig(partitions=3))
    last = max(steps(run)) + 3
    goes_on = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "rollstream", "run", "--config", split["configuration"]),
            *(f"--set=learner.max_steps={last}", "-b", run.kafka.bootstrap_servers),
        ],
        env=environment(compiled, PYTHONPATH=run.environment()["PYTHONPATH"]),
        cwd=run.directory,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert goes_on.returncode == 0, goes_on.stderr[-3000:]
    assert sorted(set(steps(three)) - {0})[-1] == last
    book = ledger(three.kafka, three.name)
    assert book.balanced, book.problems
    assert book.predecessor["moved"] == old.moved
    assert verify(three.kafka, three.name).mismatches == []
    every = recorded(run) | recorded(three)
    assert outside | labelled <= every
    assert batched(run).isdisjoint(batched(three))
