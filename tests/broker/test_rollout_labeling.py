"""Rollouts on `unlabelled` get their rewards from a judge over HTTP, exactly once, and their groups are trained on."""

import asyncio
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from rollstream.consumers.labeling.config import LabelingConfig
from rollstream.consumers.labeling.positions import recover
from rollstream.pipeline.run.observer import LabelingWatch
from rollstream.producers.config import CapacityConfig, EnvironmentConfig, WorkerConfig
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.producers.tasks import create_task
from rollstream.producers.tasks.environment_loading import with_settings
from rollstream.producers.worker.worker import WorkerReport
from rollstream.producers.worker.worker_process import run_worker
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import GroupCancelled, Rollout, TrainingBatch, Turn
from rollstream.topics.wire.codec import decode
from tests.support.producing import SortingGenerator, serving, serving_http
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled
from tests.support.untold_offsets import without_first_offsets
from tests.support.waiting import eventually

GROUPS = 12


def asked(example: int, member: int) -> Rollout:
    """A rollout that has no reward yet; member 3 of every third group is answered in a way that cannot be judged."""
    text = "unclear" if example % 3 == 0 and member == 3 else str((example + member) % 10)
    turns = (
        Turn(role="user", text=f"question {example}", start=0, stop=3),
        Turn(role="assistant", text=text, start=3, stop=6, has_logprobs=True),
    )
    return rollout(f"q{example}", member, turns=turns, reward=0.0, group_id=f"g{example}")


class JudgeServer:
    """Answers with the rollout's own text as the score; the first calls fail, and calls can be held back."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.failing = 3
        self.open = threading.Event()
        self.open.set()

    async def answer(self, request: web.Request) -> web.Response:
        if self.failing:
            self.failing -= 1
            return web.Response(status=503, headers={"Retry-After": "0"})
        while not self.open.is_set():
            await asyncio.sleep(0.01)
        body = await request.json()
        matches = re.findall(r"question (\d+)\n.*?Answer:\n(\w+)", body["messages"][0]["content"], re.DOTALL)
        self.calls["/".join(matches[0])] += 1
        content = f"Hm. Score: {matches[0][1]}"
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": content}}]})


@pytest.fixture
def judge() -> Iterator[tuple[str, JudgeServer]]:
    server = JudgeServer()
    with serving_http(server.answer) as url:
        yield url, server
        server.open.set()


def label(run: RealRun, url: str) -> subprocess.Popen[bytes]:
    return run.start(
        "label", "judge", labeling__judge__url=url, labeling__max_poll_records=8, kafka__session_timeout_s=6
    )


def send_unlabelled(run: RealRun) -> None:
    with RolloutProducer(run.kafka, run.name, topic="unlabelled") as producer:
        for example in range(GROUPS):
            for member in range(4):
                producer.send(asked(example, member))


def test_labels_whose_offsets_the_broker_does_not_tell_are_written_again_and_count_once(
    real_run: RealRun, judge: tuple[str, JudgeServer]
) -> None:
    run, (url, _server) = real_run.prepare(), judge
    send_unlabelled(run)
    process = run.start("label", "judge", script=without_first_offsets("rollouts"), labeling__judge__url=url)
    eventually(lambda: len(rewarded(run)) == 4 * GROUPS - 4, 90, "every rollout that can be judged is labeled")
    assert len({r.uid for r in rewarded(run)}) == 4 * GROUPS - 4
    log = run.log_of(process)
    assert log.count('"transaction_retried"') == log.count("without its offset") == 1, log[-3000:]


def test_the_report_of_a_run_whose_labelers_have_a_group_of_another_name_says_that_its_ledger_balances(
    real_run: RealRun,
) -> None:
    run = real_run.prepare()
    send_unlabelled(run)
    labeler = run.start("label", f"{__file__}:score_by_member", labeling__group="judges")
    eventually(lambda: len(rewarded(run)) == 4 * GROUPS, 90, "every rollout is labeled")
    labeler.terminate()
    assert labeler.wait(300) == 0
    done = run.said("report", labeling__group="judges")
    assert done.returncode == 0, done.stderr
    page = Path(done.stdout.strip()).read_text(encoding="utf-8")
    assert "The ledger balances: " in page


VERBOSE = """
from rollstream import RecordError

def judge(rollout):
    raise RecordError(f"cannot score {rollout.uid}: " + "x" * 30_000_000)
"""


def test_a_labeler_whose_error_is_longer_than_a_record_makes_dead_letters(real_run: RealRun) -> None:
    run = real_run.prepare()
    (run.directory / "verbose.py").write_text(VERBOSE)
    process = run.start("label", labeling__labeler=f"{run.directory}/verbose.py:judge")
    with RolloutProducer(run.kafka, run.name, topic="unlabelled") as producer:
        for member in range(4):
            producer.send(asked(1, member))

    def errors() -> list[str]:
        letters = read_to_end(run.kafka, run.topic("dead-letters"))
        return [str(dict(m.header_pairs())["__streams.errors.message"], "utf-8") for m in letters]

    eventually(lambda: len(errors()) == 4, 60, "a dead letter of every rollout")
    assert process.poll() is None
    assert {(error.split(":")[0], len(error)) for error in errors()} == {
        (f"cannot score {asked(1, member).uid}", 300) for member in range(4)
    }


def test_a_judge_killed_and_started_again_rewards_every_rollout_once_and_cancels_what_it_cannot_judge(
    real_run: RealRun, judge: tuple[str, JudgeServer]
) -> None:
    run, (url, server) = real_run.prepare(), judge
    send_unlabelled(run)
    run.start("group")
    for _ in range(2):
        server.open.clear()
        before = server.calls.total()
        labeler = label(run, url)
        server.open.set()
        eventually(lambda before=before: server.calls.total() > before, 60, "the judge is asked")  # type: ignore[misc]
        labeler.kill()
        labeler.wait()
    label(run, url)

    lost = {f"q{example}-3" for example in range(0, GROUPS, 3)}
    eventually(lambda: len(rewarded(run)) == 4 * GROUPS - len(lost), 90, "every other rollout is labeled")
    rewards = {r.uid: r.reward for r in rewarded(run)}
    assert rewards == {
        f"q{example}-{member}": (example + member) % 10 / 10
        for example in range(GROUPS)
        for member in range(4)
        if f"q{example}-{member}" not in lost
    }
    assert Counter(r.uid for r in rewarded(run)).most_common(1)[0][1] == 1
    cancelled = [record for record in run.read("rollouts") if isinstance(record, GroupCancelled)]
    assert sorted(uid for record in cancelled for uid in record.uids) == sorted(lost)
    assert {"has no score" in record.reason for record in cancelled} == {True}

    def batched() -> set[str]:
        return {uid for batch in run.read("batches") if isinstance(batch, TrainingBatch) for uid in batch.uids}

    eventually(lambda: batched() == set(rewards), 60, "all groups are batched, those that lost a member too")
    book = settled(run)
    assert book.balanced, book.problems
    fates = {fate: count for fate, count in book.unlabelled.items() if count}
    assert fates == {"produced": 4 * GROUPS, "labeled": 4 * GROUPS - len(lost), "dead_lettered": len(lost)}
    letters = read_to_end(run.kafka, run.topic("dead-letters"))
    assert {decode(letter.value).uid for letter in letters} == lost


def test_lost_positions_are_found_again_from_the_rollouts_that_were_labeled(
    real_run: RealRun, judge: tuple[str, JudgeServer]
) -> None:
    run, (url, server) = real_run.prepare(), judge
    send_unlabelled(run)
    labeler = label(run, url)
    eventually(lambda: len(rewarded(run)) == 44, 90, "all is labeled")
    labeler.terminate()
    assert labeler.wait(300) == 0
    asked_before = server.calls.total()
    group = LabelingConfig().group_id(run.name)
    admin = clients.admin(run.kafka)
    eventually(lambda: admin.delete_consumer_groups([group])[group].result(300) is None, 60, "the group to be deleted")
    refused = label(run, url)
    assert refused.wait(300) == 2
    assert "label recover" in run.log_of(refused)
    ends = {partition: end for partition, (_low, end) in topic_admin.bounds(run.kafka, run.topic("unlabelled")).items()}
    assert recover(run.kafka, run.name, LabelingConfig()) == ends
    again = label(run, url)
    send_one = replace(asked(1, 0), uid="later", group_id="later")
    with RolloutProducer(run.kafka, run.name, topic="unlabelled") as producer:
        producer.send(send_one)
    eventually(lambda: len(rewarded(run)) == 45, 60, "what came later is labeled")
    assert again.poll() is None
    assert server.calls.total() == asked_before + 1, "nothing is asked again"


def score_by_member(rollout: Rollout) -> float:
    """A labeler's function."""
    return float(rollout.uid[-1]) / 10


def test_a_worker_sends_no_more_than_its_share_until_the_labeler_has_read_it(real_run: RealRun) -> None:
    real_run.grouping = replace(real_run.grouping, batch_rollouts=4)
    run = real_run.prepare()
    # Above the floor of 30 there is room for one group, so a second one starts once the first is labeled and read.
    capacity = CapacityConfig(max_policy_lag=2, rollouts_per_step=16, partitions=2, batch_rollouts=4, group_size=4)
    assert (capacity.share, capacity.limit) == (4, 34)

    async def play(url: str, stop: asyncio.Event) -> WorkerReport:
        config = WorkerConfig(worker_id="w", inference_urls=(url,), group_size=4, metrics_interval_s=0.1)
        entry = EnvironmentConfig(use="dsort3", rewards="labeler")
        return await run_worker(
            [with_settings(create_task("dsort3"), config, entry)],
            *(run.kafka, run.name, config),
            incarnation="1",
            capacity=capacity,
            labeling_group=LabelingConfig().group_id(run.name),
            stop=stop,
        )

    async def play_until_labeled() -> WorkerReport:
        stop = asyncio.Event()
        with serving(SortingGenerator(versions=(0,))) as server:
            playing = asyncio.create_task(play(server.base_url, stop))
            try:
                await asyncio.to_thread(eventually, held_back, 60, "the worker to wait for its labels")
                assert (len(run.read("unlabelled")), rewarded(run)) == (4, [])
                await asyncio.to_thread(eventually, lambda: watching.state == (4, 0), 60, "the watch to count them")
                run.start("group")
                run.start("label", f"{__file__}:score_by_member")
                await asyncio.to_thread(eventually, lambda: len(rewarded(run)) >= 24, 90, "the worker to go on")
                await asyncio.to_thread(eventually, lambda: watching.state.read >= 24, 60, "the watch to say so")
            finally:
                stop.set()
                report = await playing
        return report

    def held_back() -> bool:
        newest = [record.values for record in run.read("metrics") if getattr(record, "component", "") == "w"][-1:]
        return any(values["waiting_for_capacity"] and values["waiting_for_labels"] == 4 for values in newest)

    with LabelingWatch(run.kafka, run.name, LabelingConfig().group_id(run.name)) as watching:
        assert watching.state == (0, 0)
        report = asyncio.run(play_until_labeled())
    assert report.rollouts + report.cancelled <= capacity.limit
    assert (report.reward, report.components) == (0.0, {}), "the worker knows no rewards"
    assert {r.uid[-1]: r.reward for r in rewarded(run)} == {"0": 0.0, "1": 0.1, "2": 0.2, "3": 0.3}
    assert all("exact" in r.reward_components for r in rewarded(run)), "the environment's own components stay"


def rewarded(run: RealRun) -> list[Rollout]:
    return [record for record in run.read("rollouts") if isinstance(record, Rollout)]
