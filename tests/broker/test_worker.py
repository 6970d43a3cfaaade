"""The worker, asking a real HTTP server in front of a generator whose answers are known."""

import asyncio
import signal
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rollstream.producers.config import CapacityConfig, WorkerConfig
from rollstream.producers.environments.environment import Episode, Generate, Message, Prompt, Score, SingleTurn
from rollstream.producers.inference.client import CompletionsClient
from rollstream.producers.inference.errors import InferenceRefused, InferenceUnavailable
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.producers.tasks import create_task
from rollstream.producers.tasks.environment_loading import with_settings
from rollstream.producers.worker.evaluation import Evaluation, evaluate
from rollstream.producers.worker.worker import WorkerReport
from rollstream.producers.worker.worker_process import run_worker
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import (
    BatchIndexEntry,
    FateCount,
    GroupCancelled,
    JournalRecord,
    LearnerStep,
    Metrics,
    Rollout,
)
from rollstream.topics.wire import codec
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.validation import cancellation_problems, problems
from tests.support.journal_records import journal_record
from tests.support.producing import TOKENIZER, SortingGenerator, nobody_listening, serving
from tests.support.runs import RealRun
from tests.support.waiting import eventually

TASK = create_task("dsort3")


def config_for(base_url: str, **change: Any) -> WorkerConfig:
    return WorkerConfig(
        **{"worker_id": "w", "inference_urls": (base_url,), "group_size": 4, "request_timeout_s": 20.0, **change}
    )


def play(kafka: KafkaConfig, run_name: str, config: WorkerConfig, **change: Any) -> WorkerReport:
    async def run() -> WorkerReport:
        settings = {"incarnation": "1", "stop": asyncio.Event(), **change}
        environments = [with_settings(e, config) for e in settings.pop("environments", [TASK])]
        return await run_worker(environments, kafka, run_name, config, **settings)

    return asyncio.run(run())


def records(kafka: KafkaConfig, run_name: str, topic: str = "rollouts") -> list[Any]:
    collected = []
    for message in read_to_end(kafka, topic_name(run_name, topic)):
        record = codec.decode(message.value)
        assert message.key == encode_key(record.environment, record.example_id)
        collected.append(record)
    return collected


def groups_of(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    groups = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group_id].append(rollout)
    return groups


def test_whole_groups_with_consistent_fields_reach_the_log(kafka: KafkaConfig, run_name: str) -> None:
    generator = SortingGenerator(versions=(0, 1, 2, 5))
    with serving(generator, replica_id="infer-7", refresh_ms=1) as server:
        report = play(kafka, run_name, config_for(server.base_url, groups=12, temperature=0.5))
    rollouts = records(kafka, run_name)
    groups = groups_of(rollouts)
    assert set(groups) == {f"w.1.{number}" for number in range(12)}
    trained = {prompt.example_id: prompt for prompt in TASK.prompts("train")}
    for group_id, members in groups.items():
        assert [member.uid for member in members] == [f"{group_id}.{i}" for i in range(4)]
        assert len({(m.example_id, m.policy_version, m.group_size, m.environment) for m in members}) == 1
        assert members[0].example_id in trained
        for member in members:
            assert problems(member) == []
            prompt = trained[member.example_id]
            assert member.prompt_tokens.tolist() == TOKENIZER.encode(prompt.text)
            text = member.turns[1].text
            assert member.response_tokens.tolist() == [*TOKENIZER.encode(text), TOKENIZER.eos_id]
            assert member.response_logprobs.tolist() == [-0.125, -0.25, -0.375, -0.5]
            score = TASK.score(prompt, text, truncated=False)
            assert (member.reward, member.reward_components) == (score.reward, score.components)
            assert 0 <= member.policy_version <= member.lowest_version == member.highest_version <= 5
            assert (member.metadata.worker_id, member.metadata.replica_id) == ("w", "infer-7")
            assert member.metadata.timestamp > 1.7e9
            assert member.sampling.temperature == 0.5
            assert not member.truncated
    assert len(set(generator.seeds)) == 48
    assert (report.groups, report.rollouts, report.cancelled) == (12, 48, 0)
    assert report.reward == pytest.approx(np.mean([rollout.reward for rollout in rollouts]))
    assert report.components["exact"] == pytest.approx(np.mean([r.reward_components["exact"] for r in rollouts]))
    # One request for a group, never split over versions.
    assert sum(len(prompts) for _, prompts in generator.batches) == 48


def test_workers_share_an_epoch_and_a_restarted_one_goes_on_in_it(kafka: KafkaConfig, run_name: str) -> None:
    """Each prompt is played once by all workers together before any is played again."""
    prompts = TASK.prompts("train")[:24]
    few = Few(prompts)
    with serving(SortingGenerator()) as server:
        for ordinal, incarnation in ((0, "1"), (1, "1"), (0, "2"), (1, "2")):
            config = config_for(server.base_url, groups=6, worker_id="ab"[ordinal])
            play(kafka, run_name, config, environments=[few], incarnation=incarnation, ordinal=ordinal, workers=2)
    groups = groups_of(records(kafka, run_name))
    played = {group_id: members[0].example_id for group_id, members in groups.items()}
    assert set(played) == {f"{worker}.{life}.{i}" for worker in "ab" for life in "12" for i in range(6)}
    assert sorted(played.values()) == sorted(prompt.example_id for prompt in prompts)


def test_a_group_whose_generation_fails_is_cancelled_by_name(kafka: KafkaConfig, run_name: str) -> None:
    async def play_without_server(base_url: str) -> WorkerReport:
        # The version is assumed, so that the worker starts groups although nobody answers.
        config = config_for(base_url, groups=2, request_timeout_s=0.3, assume_version=4)
        return await run_worker(
            [with_settings(TASK, config)], kafka, run_name, config, incarnation="1", stop=asyncio.Event()
        )

    with nobody_listening() as base_url:
        report = asyncio.run(play_without_server(base_url))
    cancelled = records(kafka, run_name)
    assert all(isinstance(record, GroupCancelled) and cancellation_problems(record) == [] for record in cancelled)
    uids = {uid for record in cancelled for uid in record.uids}
    assert uids == {f"w.1.{group}.{member}" for group in range(2) for member in range(4)}
    assert {(r.policy_version, r.group_size, r.metadata.worker_id) for r in cancelled} == {(4, 4, "w")}
    assert "is the inference server up" in cancelled[0].reason
    assert (report.groups, report.rollouts, report.cancelled) == (2, 0, 8)


class Few(SingleTurn):
    """The first prompts of a task."""

    name = "few"
    max_tokens = 8

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts

    def prompts(self, split: str) -> Sequence[Prompt]:
        return self._prompts

    def score(self, prompt: Prompt, response_text: str, truncated: bool) -> Score:
        return Score(reward=float(response_text == prompt.answer))


class Flaky:
    """The second member of each group gets a score that no record may hold."""

    name = "flaky"
    max_tokens = 8
    stop = ()

    def __init__(self) -> None:
        self.played = 0

    def prompts(self, _split: str) -> Sequence[Prompt]:
        return [Prompt(example_id="only", text="42>")]

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        member, self.played = self.played % 4, self.played + 1
        first = await generate(prompt.text)
        reward = float("nan") if member == 1 else float(member)
        return Episode(turns=(Message(role="user", text=prompt.text), first), score=Score(reward=reward))


class AsksTwice(Flaky):
    """Two turns, of which the second continues the first."""

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        turns = (Message(role="user", text="42>"), await generate("42>"), Message(role="user", text="3>"))
        return Episode(turns=(*turns, await generate("3>")), score=Score(reward=1.0))


def test_a_second_turn_goes_on_from_the_tokens_of_the_first(kafka: KafkaConfig, run_name: str) -> None:
    with serving(SortingGenerator()) as server:
        play(kafka, run_name, config_for(server.base_url, groups=3), environments=[AsksTwice()])
    rollouts = records(kafka, run_name)
    assert len(rollouts) == 12
    end = TOKENIZER.eos_id
    for rollout in rollouts:
        assert problems(rollout) == []
        question, first, more, second = rollout.turns
        assert rollout.tokens[question.start : first.stop].tolist() == [*TOKENIZER.encode("42>" + first.text), end]
        assert rollout.tokens[more.start : more.stop].tolist() == TOKENIZER.encode("3>")
        assert rollout.tokens[second.start : second.stop].tolist() == [*TOKENIZER.encode(second.text), end]
        assert rollout.loss_mask.tolist() == [False] * 3 + [True] * 3 + [False] * 2 + [True] * (second.stop - 8)
    # In later turns, too, each member is sampled on its own.
    assert len({rollout.turns[3].text for rollout in rollouts}) > 1


def test_a_member_that_cannot_be_recorded_is_cancelled_and_the_others_are_kept(
    kafka: KafkaConfig, run_name: str
) -> None:
    with serving(SortingGenerator()) as server:
        report = play(kafka, run_name, config_for(server.base_url, groups=1), environments=[Flaky()])
    *rollouts, cancelled = records(kafka, run_name)
    assert [rollout.uid for rollout in rollouts] == ["w.1.0.0", "w.1.0.2", "w.1.0.3"]
    assert isinstance(cancelled, GroupCancelled)
    assert cancelled.uids == ("w.1.0.1",)
    assert "reward is nan" in cancelled.reason
    assert (report.rollouts, report.cancelled) == (3, 1)


def test_a_server_that_refuses_ends_the_worker_and_its_groups_are_cancelled(kafka: KafkaConfig, run_name: str) -> None:
    with serving(SortingGenerator(), max_rows=2) as server, pytest.raises(InferenceRefused, match="more than 2"):
        play(kafka, run_name, config_for(server.base_url, groups=3))
    uids = {uid for record in records(kafka, run_name) for uid in record.uids}
    assert {f"w.1.0.{member}" for member in range(4)} <= uids


def test_a_stop_lets_groups_in_flight_finish(kafka: KafkaConfig, run_name: str) -> None:
    began, go_on = threading.Event(), threading.Event()

    def wait(_prompts: list[str]) -> None:
        began.set()
        assert go_on.wait(300)

    async def play_until_stopped(base_url: str) -> WorkerReport:
        stop = asyncio.Event()
        config = config_for(base_url, concurrency=2)
        loaded = [with_settings(TASK, config)]
        working = asyncio.ensure_future(run_worker(loaded, kafka, run_name, config, incarnation="1", stop=stop))
        await asyncio.to_thread(began.wait, 60)
        stop.set()
        go_on.set()
        return await working

    with serving(SortingGenerator(before_generate=wait)) as server:
        report = asyncio.run(play_until_stopped(server.base_url))
    rollouts = records(kafka, run_name)
    assert report.groups == 2
    assert report.cancelled == 0
    assert sorted(map(len, groups_of(rollouts).values())) == [4, 4]


def test_sigterm_cancels_on_the_log_what_does_not_finish_in_time_and_exits_0(real_run: RealRun) -> None:
    run, stuck, go_on = real_run.prepare(), threading.Event(), threading.Event()

    def third_batch_hangs(_prompts: list[str]) -> None:
        if len(generator.batches) >= 3:
            stuck.set()
            go_on.wait(300)

    generator = SortingGenerator(before_generate=third_batch_hangs)
    with serving(generator) as server:
        own = {
            "inference_urls": f'["{server.base_url}"]',
            "group_size": 4,
            "concurrency": 2,
            "drain_timeout_s": 0.5,
        }
        process = run.start("env", **{f"worker__{name}": value for name, value in own.items()})
        try:
            assert stuck.wait(300)
            process.send_signal(signal.SIGTERM)
            assert process.wait(300) == 0, run.log_of(process)
        finally:
            go_on.set()
    listed = records(run.kafka, run.name)
    sent = {record.uid for record in listed if isinstance(record, Rollout)}
    gone = {uid for record in listed if isinstance(record, GroupCancelled) for uid in record.uids}
    assert gone
    assert not sent & gone
    groups = {uid.rpartition(".")[0] for uid in sent | gone}
    assert sent | gone == {f"{group}.{member}" for group in groups for member in range(4)}


def test_a_worker_without_a_policy_says_what_is_missing(kafka: KafkaConfig, run_name: str) -> None:
    with serving(SortingGenerator(versions=(-1,))) as server:
        config = config_for(server.base_url, request_timeout_s=0.5)
        with pytest.raises(InferenceUnavailable, match="check that the learner publishes"):
            play(kafka, run_name, config)


def journal(partition: int, position: int, produced: int, dropped: int = 0) -> JournalRecord:
    return journal_record(
        partition=partition,
        position=position,
        watermark=position,
        counts=(FateCount(environment="dsort3", fate="dropped:zero_variance", rollouts=dropped, tokens=0),),
        produced=(FateCount(environment="dsort3", fate="read", rollouts=produced, tokens=0),),
    )


class Downstream:
    """Stands in for grouping and the learner: writes journal and steps records as they do, in transactions."""

    def __init__(self, kafka: KafkaConfig, run_name: str) -> None:
        self._run = run_name
        self._producer = clients.transactional_producer(kafka, f"{run_name}.downstream")
        self._producer.init_transactions(120)

    def _write(self, topic: str, key: bytes, record: object, partition: int) -> None:
        self._producer.begin_transaction()
        self._producer.produce(topic_name(self._run, topic), codec.encode(record), key, partition)
        self._producer.commit_transaction(120)

    def group(self, partition: int, position: int, produced: int, dropped: int = 0) -> None:
        key = encode_key(partition)
        self._write("journal", key, journal(partition, position, produced, dropped), partition)

    def batch(self, number: int, rollouts: int) -> None:
        entry = BatchIndexEntry(
            batch_id=f"0-{number}",
            partition=0,
            offset=number,
            rollouts=rollouts,
            tokens=0,
            trained_tokens=0,
            lowest_version=0,
            highest_version=0,
            size_bytes=0,
            digest="",
        )
        self._write("batch-index", encode_key(entry.batch_id), entry, 0)

    def learn(self, step: int, trained: int, skipped: int = 0) -> None:
        record = LearnerStep(
            learner="main",
            step=step,
            input_run=self._run,
            uses=(),
            position=100,
            policy_version=step,
            params_digest="",
            trained_total=trained,
            skipped_total=skipped,
        )
        self._write("steps", encode_key("main", step), record, 0)


# Resting 2 * (5 - 1 + 4) = 16, limit 4 * 16 - 16 = 48, floor 16 + 16 = 32, share 16: four groups of 4 unseen, 44
# outstanding in all.
CAPACITY = CapacityConfig(
    max_policy_lag=3, rollouts_per_step=16, partitions=2, batch_rollouts=5, group_size=4, workers=1
)


def ends(kafka: KafkaConfig, run_name: str) -> list[int]:
    collected = [0, 0]
    for message in read_to_end(kafka, topic_name(run_name, "rollouts")):
        collected[message.partition] = message.offset + 1
    return collected


def test_the_worker_waits_for_grouping_and_the_learner_as_the_journal_tells(kafka: KafkaConfig, run_name: str) -> None:
    downstream = Downstream(kafka, run_name)
    stops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def run(base_url: str) -> WorkerReport:
        stop = asyncio.Event()
        stops.append((asyncio.get_running_loop(), stop))
        config = config_for(base_url, concurrency=8)
        return await run_worker(
            [with_settings(TASK, config)], kafka, run_name, config, incarnation="1", capacity=CAPACITY, stop=stop
        )

    def written(rollouts: int) -> None:
        eventually(lambda: sum(ends(kafka, run_name)) == rollouts, 60, f"{rollouts} rollouts are written")

    def group_all(dropped: int = 0) -> None:
        for partition, end in enumerate(ends(kafka, run_name)):
            downstream.group(partition, position=end, produced=end, dropped=dropped if partition == 0 else 0)

    with serving(SortingGenerator()) as server:
        worker = threading.Thread(target=lambda: reports.append(asyncio.run(run(server.base_url))))
        reports: list[WorkerReport] = []
        worker.start()
        try:
            # Nothing is read yet: four groups, within the share of 16.
            written(16)
            group_all()
            written(32)
            # 32 outstanding leave room for four more groups, up to the limit.
            group_all()
            written(48)
            group_all()
            read = ends(kafka, run_name)
            assert sum(read) == 48
            # A step takes 16: there is room for four groups, and for four rollouts more that the share does not allow.
            for number in range(4):
                downstream.batch(number, 4)
            downstream.learn(1, trained=12, skipped=4)
            downstream.group(0, position=read[0], produced=read[0], dropped=4)
            written(64)
            # 64 - 16 - 4 outstanding leave room for one more group.
            group_all(dropped=4)
            written(68)
        finally:
            loop, stop = stops[0]
            loop.call_soon_threadsafe(stop.set)
            worker.join(300)
    assert reports[0].rollouts == 68


def test_a_greedy_evaluation_of_the_held_out_split_goes_to_evals(kafka: KafkaConfig, run_name: str) -> None:
    async def run(base_url: str, version: int) -> Evaluation:
        with RolloutProducer(kafka, run_name, topic="evals") as producer:
            async with CompletionsClient([base_url], timeout_s=20) as client:
                return await evaluate(
                    with_settings(TASK, WorkerConfig()), client, producer, version=version, phase="end", max_prompts=30
                )

    with serving(SortingGenerator(versions=(-1, -1, 2, 3))) as server:
        result = asyncio.run(run(server.base_url, 3))
        with pytest.raises(InferenceRefused, match="version 3 answered an evaluation of version 2"):
            asyncio.run(run(server.base_url, 2))
    assert (result.version, result.prompts, result.reward, result.success) == (3, 30, 1.0, 1.0)
    rollouts = records(kafka, run_name, "evals")
    assert {rollout.example_id for rollout in rollouts} == {p.example_id for p in TASK.prompts("heldout")[:30]}
    assert {(r.extra["split"], r.extra["phase"], r.policy_version, r.group_size) for r in rollouts} == {
        ("heldout", "end", 3, 1)
    }
    assert {rollout.sampling.temperature for rollout in rollouts} == {0.0}
    assert records(kafka, run_name) == []


def test_a_worker_writes_its_metrics_and_the_record_of_its_end_holds_all(kafka: KafkaConfig, run_name: str) -> None:
    with serving(SortingGenerator()) as server:
        config = config_for(server.base_url, groups=6, metrics_interval_s=0.05)
        play(kafka, run_name, config, environments=[Flaky()])
    metrics = [codec.decode_as(Metrics, m.value) for m in read_to_end(kafka, topic_name(run_name, "metrics"))]
    assert {(record.component, record.labels["role"]) for record in metrics} == {("w", "env")}
    last = metrics[-1].values
    totals = {name: last[f"{name}_total"] for name in ("groups", "rollouts", "cancelled", "failed", "tokens")}
    rollouts = [record for record in records(kafka, run_name) if isinstance(record, Rollout)]
    tokens = sum(int(rollout.loss_mask.sum()) for rollout in rollouts)
    assert totals == {"groups": 6, "rollouts": 18, "cancelled": 6, "failed": 6, "tokens": tokens}
    assert [record.values["running"] for record in metrics] == [1] * (len(metrics) - 1) + [0]
