"""Evaluation while a run goes on: on a real Kafka, asking a real server in front of a generator that answers right."""

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import openai
import pytest

from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.tools.ledger import book_text
from rollstream.producers.config import EvaluationConfig, WorkerConfig
from rollstream.producers.environments.environment import (
    AgentEnvironment,
    Endpoint,
    Environment,
    Episode,
    Generate,
    Message,
    Prompt,
    Score,
    Split,
)
from rollstream.producers.flow.policy_versions import PolicyFollower
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.producers.tasks import create_task
from rollstream.producers.tasks.environment_loading import with_settings
from rollstream.producers.worker.evaluator import run_evaluator
from rollstream.topics.kafka import clients, provisioning
from rollstream.topics.records import Metrics, PolicyManifest, Rollout
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.producing import ScriptedGenerator, SortingGenerator, serving
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled
from tests.support.waiting import eventually

TASK = create_task("dsort3")
PROMPTS = 20


class Thinker:
    """An agent that asks, doubts, and then asks again in a new conversation; its reward is the length of the name."""

    name = "thinker"
    max_tokens = 8

    def __init__(self) -> None:
        self.broken = False

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [Prompt(example_id=text, text=text) for text in ("1 + 1?", "2/3")] if split == "heldout" else []

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
        question: list[Any] = [{"role": "user", "content": prompt.text}]
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:

            async def ask(messages: list[Any]) -> str:
                if self.broken:
                    raise OSError("out of order")
                answer = await client.chat.completions.create(
                    model=endpoint.model, messages=messages, max_tokens=self.max_tokens, temperature=1.0
                )
                return answer.choices[0].message.content or ""

            text = await ask(question)
            if prompt.text == "2/3":
                await ask([{"role": "user", "content": "another"}])
            last = await ask([*question, {"role": "assistant", "content": text}, {"role": "user", "content": "sure?"}])
        return Score(reward=len(prompt.text) / 6, components={"exact": float(last == "yes")})


@contextmanager
def evaluating(
    run: RealRun, base_url: str, environment: Environment | AgentEnvironment = TASK, **worker: Any
) -> Iterator[None]:
    """An evaluator of every second version, in a thread of its own; told to stop, and waited for, at the end."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    work = run_evaluator(
        [with_settings(environment, WorkerConfig())],
        run.kafka,
        run.name,
        EvaluationConfig(every_versions=2, max_prompts=PROMPTS),
        WorkerConfig(inference_urls=(base_url,), request_timeout_s=20.0, **worker),
        max_calls=1_000,
        stop=stop,
    )
    failures: list[BaseException] = []

    def play() -> None:
        try:
            loop.run_until_complete(work)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=play, name="evaluator")
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(300)
        loop.close()
    assert failures == []


def evaluated(run: RealRun) -> dict[int, set[tuple[int, int]]]:
    """The versions that answered, by the version that was asked for; only complete evaluations."""
    collected: dict[int, list[tuple[int, int]]] = {}
    for record in run.read("evals"):
        assert isinstance(record, Rollout)
        collected.setdefault(record.policy_version, []).append((record.lowest_version, record.highest_version))
    return {version: set(answered) for version, answered in collected.items() if len(answered) == PROMPTS}


def test_a_version_that_is_asked_for_is_evaluated_once_although_it_is_not_due(real_run: RealRun) -> None:
    run = real_run
    provisioning.apply(run.kafka, run.topics, run.name)
    answer = run.said("evaluate")
    assert (answer.returncode, "no policy version yet" in answer.stderr) == (2, True)
    run.publish_version(0)
    generator = SortingGenerator()
    with serving(generator, refresh_ms=1) as server:
        with evaluating(run, server.base_url):
            eventually(lambda: evaluated(run) == {0: {(0, 0)}}, 60, "version 0 evaluated")
            generator.versions = [1]
            run.publish_version(1)
            answer = run.said("evaluate")
            assert (answer.returncode, "version 1 " in answer.stdout) == (0, True), answer.stderr
            eventually(lambda: 1 in evaluated(run), 60, "version 1 evaluated")
        run.publish_version(3)
        with evaluating(run, server.base_url):
            pass
    assert evaluated(run).keys() == {0, 1}, "not once more after a restart, and 3 is neither due nor asked for"
    assert len(run.read("evals")) == 2 * PROMPTS


def test_versions_that_are_due_are_evaluated_once_and_the_ledger_shows_that_none_is_trained_on(
    real_run: RealRun,
) -> None:
    run = real_run.prepare()
    run.start("group")
    run.send(rollout(f"x{example}", member) for example in range(4) for member in range(4))
    generator = SortingGenerator()
    with serving(generator, refresh_ms=1) as server:
        with evaluating(run, server.base_url):
            eventually(lambda: evaluated(run) == {0: {(0, 0)}}, 60, "version 0 evaluated")
            # The server has moved on by the time version 2 is asked for.
            generator.versions = [3]
            run.publish_version(2)
            eventually(lambda: 2 in evaluated(run), 60, "version 2 evaluated")
        generator.versions = [8]
        eventually(lambda: sum(len(batch.uids) for batch in run.read("batches")) == 16, 60, "everything in batches")  # type: ignore[attr-defined]
        for version in (4, 5, 6, 8):
            run.publish_version(version)
        with evaluating(run, server.base_url):
            pass
    assert evaluated(run) == {0: {(0, 0)}, 2: {(3, 3)}, 8: {(8, 8)}}, "4 and 6 were passed by, 0 and 2 are done"
    assert len(run.read("evals")) == 3 * PROMPTS

    metrics = [r for r in run.read("metrics") if isinstance(r, Metrics) and r.component == "eval"]
    assert [(r.step, r.values["eval/version"], r.values["eval/highest_version"]) for r in metrics] == [
        (0, 0, 0),
        (2, 2, 3),
        (8, 8, 8),
    ]
    assert {(r.values["eval/reward"], r.values["eval/success"], r.values["eval/prompts"]) for r in metrics} == {
        (1, 1, 20)
    }

    settled(run)
    book = ledger(run.kafka, run.name)
    assert book.balanced, book.problems
    assert (book.evals, book.evals_batched, book.rollouts) == (3 * PROMPTS, 0, 16)
    lines = [" ".join(line.split()) for line in book_text(json.loads(json.dumps(book.as_dict()))).splitlines()]
    assert "dsort3/heldout periodic 2 3 20 1.000 1.000" in lines
    assert "dsort3/heldout periodic 8 20 1.000 1.000" in lines
    assert "evals, not included above: 60 rollouts, none in a batch" in lines

    with RolloutProducer(run.kafka, run.name, topic="evals") as producer:
        producer.send(replace(rollout("x0", 1), extra={"split": "heldout"}))
    book = ledger(run.kafka, run.name)
    assert not book.balanced
    assert any("rollout x0-1 of evals is in batch" in problem for problem in book.problems)
    assert "61 rollouts, 1 OF THEM IN BATCHES" in book_text(book.as_dict())


@pytest.mark.long
def test_agents_are_evaluated_greedily_at_an_address_of_their_own_and_leave_no_calls(real_run: RealRun) -> None:
    run = real_run.prepare()
    agent, generator = Thinker(), ScriptedGenerator(["hm", "yes"])
    with serving(generator, refresh_ms=1) as server, evaluating(run, server.base_url, agent):
        eventually(lambda: len(run.read("evals")) == 3, 60, "version 0 evaluated")
        agent.broken, generator.versions = True, [2]
        run.publish_version(2)
        eventually(lambda: _failed(run) == 1, 60, "an evaluation that failed")
        agent.broken = False
        answer = run.said("evaluate")
        assert (answer.returncode, "version 2 " in answer.stdout) == (0, True), answer.stderr
        eventually(lambda: len(run.read("evals")) == 6, 60, "the version whose evaluation failed, asked for afterwards")
        generator.versions = [4]
        run.publish_version(4)
        eventually(lambda: len(run.read("evals")) == 9, 60, "version 4 evaluated")
    rollouts = [record for record in run.read("evals") if isinstance(record, Rollout)]
    assert {r.policy_version for r in rollouts} == {0, 2, 4}
    assert {r.sampling.temperature for r in rollouts} == {0.0}, "the evaluation's, not the agent's"
    names = {r.uid: (r.example_id, r.branch, r.branches) for r in rollouts if r.policy_version == 0}
    assert names == {
        "eval.periodic.0.1 + 1?.0": ("1 + 1?", 0, 1),
        "eval.periodic.0.2/3.0.0": ("2/3", 0, 2),
        "eval.periodic.0.2/3.0.1": ("2/3", 1, 2),
    }
    assert {tuple(r.extra.items()) for r in rollouts} == {
        (("split", "heldout"), ("phase", "periodic"), ("prompts", "2"))
    }
    [single] = [r for r in rollouts if r.uid == "eval.periodic.0.1 + 1?.0"]
    assert [turn.text for turn in single.turns if turn.role == "assistant"] == ["hm", "yes"]
    assert generator.tokenizer.decode(single.tokens[single.loss_mask].tolist()) == "hmyes"
    assert run.read("calls") == []
    book = ledger(run.kafka, run.name)
    assert book.balanced, book.problems
    first = book.evaluations[0]
    assert [each["version"] for each in book.evaluations] == [0, 2, 4]
    # The episode of two branches counts once.
    assert (first["rollouts"], first["episodes"], first["prompts"]) == (3, 2, 2)
    assert (first["reward"], first["success"]) == (0.75, 1.0)
    metrics = [r for r in run.read("metrics") if isinstance(r, Metrics) and r.component == "eval"]
    assert [(r.values["eval/version"], r.values["eval/reward"], r.values["eval/prompts"]) for r in metrics] == [
        (0, 0.75, 2),
        (2, 0.75, 2),
        (4, 0.75, 2),
    ]
    with serving(generator) as server, evaluating(run, server.base_url, agent):
        pass
    assert len(run.read("evals")) == 9, "it was done"


class Stuck:
    """A task whose verifier answers for every prompt but one."""

    name = "stuck"
    max_tokens = 8
    stop = ()

    def __init__(self) -> None:
        self.released = False

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [Prompt(example_id=text, text=text) for text in ("good", "bad")] if split == "heldout" else []

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        question = Message(role="user", text=prompt.text)
        reply = await generate(prompt.text)
        if prompt.text == "bad" and not self.released:
            await asyncio.Event().wait()
        return Episode(turns=(question, reply), score=Score(reward=1.0))


def test_an_episode_that_never_ends_ends_its_evaluation_and_no_other(real_run: RealRun) -> None:
    run = real_run.prepare()
    task, generator = Stuck(), ScriptedGenerator(["yes"])
    with serving(generator, refresh_ms=1) as server, evaluating(run, server.base_url, task, episode_timeout_s=5.0):
        eventually(lambda: _failed(run) == 1, 60, "an evaluation that failed")
        task.released, generator.versions = True, [2]
        run.publish_version(2)
        eventually(lambda: len(run.read("evals")) == 2, 60, "version 2 evaluated")


def _failed(run: RealRun) -> float:
    """The number of failed evaluations, as the evaluator reports it."""
    metrics = [r for r in run.read("metrics") if isinstance(r, Metrics) and r.component == "evaluator"]
    return max((r.values["failed_total"] for r in metrics), default=0.0)


def test_versions_published_without_a_pause_do_not_hold_it_up(real_run: RealRun) -> None:
    provisioning.apply(real_run.kafka, real_run.topics, real_run.name)
    stop, returned = threading.Event(), threading.Event()

    def publish() -> None:
        producer = clients.producer(real_run.kafka)
        for version in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
            manifest = PolicyManifest(
                version=version, learner="a", step=version, epoch="e", tensors=(), chunks=(), digest=""
            )
            producer.produce(real_run.topic("policies"), encode(manifest), encode_key(version))
            producer.flush(120)

    def read() -> None:
        with PolicyFollower(real_run.kafka, real_run.name) as policies:
            while not policies.read().steps:
                pass
        returned.set()

    threads = [threading.Thread(target=publish), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    try:
        assert returned.wait(300), "read to where the topic ended while more came"
    finally:
        stop.set()
        for thread in threads:
            thread.join(300)
