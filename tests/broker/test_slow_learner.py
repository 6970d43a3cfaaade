"""Four workers of two environments and a learner slower than any: hardly a rollout is stale, nothing grows for ever.

The learner makes a step only once every worker waits for capacity, so producers are always as far ahead as they may be.
"""

import time
from collections import Counter

import numpy as np
import psutil
import pytest

from rollstream.consumers.batch_reader import BatchReader, ReadBatch
from rollstream.consumers.trainers.step_writer import StepWriter
from rollstream.pipeline.audit.ledger import ledger
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import Metrics
from rollstream.topics.wire.codec import decode_as
from tests.support.producing import SortingGenerator, serving
from tests.support.runs import RealRun
from tests.support.waiting import eventually

SLOW = '''
import asyncio

from rollstream.producers.tasks.digit_sorting import DigitSorting


class Slow(DigitSorting):
    """Digit sorting whose judge takes its time."""

    def __init__(self):
        super().__init__("slow", 3)

    async def run(self, prompt, generate):
        episode = await super().run(prompt, generate)
        await asyncio.sleep(0.3)
        return episode
'''
WORKERS, STEPS, ROLLOUTS, LAG = 4, 9, 32, 4
SETTINGS = {
    "supervisor__workers": WORKERS,
    "worker__group_size": 4,
    "worker__metrics_interval_s": 0.2,
    "learner__rollouts_per_step": ROLLOUTS,
    "learner__max_policy_lag": LAG,
    "grouping__batch_rollouts": 8,
    "grouping__max_policy_lag": LAG,
    "topics__partitions": 2,
}
LIMIT = (LAG + 1) * ROLLOUTS


def newest(run: RealRun, since: float) -> dict[str, Metrics]:
    """The newest record of each worker after a wall time."""
    records = (decode_as(Metrics, message.value) for message in read_to_end(run.kafka, run.topic("metrics")))
    return {r.component: r for r in records if r.labels.get("role") == "env" and r.timestamp > since}


def all_wait(run: RealRun, since: float) -> bool:
    metrics = newest(run, since)
    return len(metrics) == WORKERS and all(record.values["waiting_for_capacity"] for record in metrics.values())


@pytest.mark.long
def test_four_workers_of_a_fast_and_a_slow_environment_leave_hardly_a_stale_rollout_and_do_not_grow(
    real_run: RealRun,
) -> None:
    run = real_run
    (run.directory / "slow.py").write_text(SLOW)
    run.grouping = run.grouping.__class__(batch_rollouts=8, max_batch_age_s=2.0, max_policy_lag=LAG)
    run.prepare()
    run.start("group")
    generator = SortingGenerator()
    with serving(generator, refresh_ms=1) as server, StepWriter(run.kafka, run.name, learner="test") as steps:
        settings = {**SETTINGS, "worker__inference_urls": f'["{server.base_url}"]'}
        settings |= {"environments__0__use": "dsort3", "environments__0__quota": 0.5}
        settings |= {"environments__1__use": f"{run.directory / 'slow.py'}:Slow"}
        workers = [run.start("env", "--ordinal", str(number), **settings) for number in range(WORKERS)]
        memory: list[int] = []
        outstanding: list[float] = []
        lags: Counter[int] = Counter()
        with BatchReader(run.kafka, run.name, start=steps.position) as reader:
            for number in range(STEPS):
                began = time.time()
                eventually(lambda began=began: all_wait(run, began), 90, "every worker waits")  # type: ignore[misc]
                outstanding.append(max(r.values["outstanding"] for r in newest(run, began).values()))
                memory.append(sum(psutil.Process(worker.pid).memory_info().rss for worker in workers))
                reads: list[ReadBatch] = []
                while sum(len(read.batch) for read in reads) < ROLLOUTS:
                    read = reader.poll(300)
                    assert read is not None, "the learner starves"
                    reads.append(read)
                for read in reads:
                    lags[steps.version - read.entry.lowest_version] += len(read.batch)
                steps.record(reads, {"w": np.full(4, number, np.float32)})
                generator.versions = [steps.version]
    for worker in workers:
        worker.terminate()
    assert [worker.wait(300) for worker in workers] == [0] * WORKERS
    stale = sum(count for lag, count in lags.items() if lag > LAG)
    book = ledger(run.kafka, run.name)
    assert book.balanced, book.problems
    stale += book.dropped.get("stale_version", 0)
    assert stale <= 0.01 * lags.total(), (lags, book.dropped)
    played = {name: counts["records"]["batched"] for name, counts in book.environments.items()}
    assert min(played["dsort3"], played["slow"]) >= 0.35 * sum(played.values()), played
    assert max(lags) >= 2, "producers were ahead all the time"
    assert max(outstanding) <= LIMIT
    assert max(memory[4:]) < 1.2 * memory[3], memory
