"""Row `worker`: single-turn episodes of one worker from prompt to acknowledged rollout, against its client alone.

Both ask an engine that answers at once, with as many groups in flight; the client alone asks, parses and forgets.
"""

import asyncio
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from rollstream.producers.config import EnvironmentConfig, WorkerConfig
from rollstream.producers.inference.client import client_of
from rollstream.producers.inference.requests import SampleRequest
from rollstream.producers.tasks.environment_loading import load_environments
from rollstream.producers.worker.worker_process import run_worker
from tests.bench.measure import Row, Settings, Stopwatch, Timing, interleaved
from tests.bench.runs import prepared
from tests.support.paths import ROOT

GROUP_SIZE = 16
CONCURRENCY = 16


@contextmanager
def instant_engine() -> Iterator[str]:
    """Base URL of the engine while it runs."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.bench.instant_engine"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        _ready, port = process.stdout.readline().split()
        yield f"http://127.0.0.1:{port}/v1"
        assert process.stdin is not None
        process.stdin.close()


def measure(settings: Settings) -> Row:
    """Episodes a second; starting the worker is included."""
    groups = max(1, settings.rollouts // GROUP_SIZE)
    environments = load_environments([EnvironmentConfig(name="dsort3", use="dsort3")], WorkerConfig())
    with prepared(settings, "worker") as run, instant_engine() as url:
        config = WorkerConfig(
            inference_urls=(url,), group_size=GROUP_SIZE, concurrency=CONCURRENCY, groups=groups, metrics_interval_s=0
        )

        def ours() -> Timing:
            watch = Stopwatch()
            playing = run_worker(
                environments, settings.kafka, run, config, incarnation=uuid.uuid4().hex[:8], stop=asyncio.Event()
            )
            report = asyncio.run(playing)
            assert report.rollouts == groups * GROUP_SIZE, report
            return watch.timing(report.rollouts)

        def raw() -> Timing:
            watch = Stopwatch()
            asyncio.run(_ask(config, groups))
            return watch.timing(groups * GROUP_SIZE)

        rates, bare = interleaved(settings.repetitions, ours, raw)
    return Row(
        name="worker",
        what="one worker: prompt, request, score, rollout, acknowledged",
        baseline="its client alone, the same requests",
        ours=rates,
        raw=bare,
        size_bytes=0,
    )


async def _ask(config: WorkerConfig, groups: int) -> None:
    slots = asyncio.Semaphore(config.concurrency)
    async with client_of(config) as client:

        async def ask(seed: int) -> None:
            async with slots:
                await client.complete(
                    SampleRequest(prompt="312>", n=config.group_size, max_tokens=8, temperature=1.0, seed=seed)
                )

        await asyncio.gather(*map(ask, range(groups)))
