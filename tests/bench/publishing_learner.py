"""The subject of the rows `stall`: a process that takes snapshots and puts steps on record as a learner does.

Its steps compute with parameters of the given size, as many operations as the gradients of `TOKENS` tokens take, and
then change them.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from rollstream.consumers.learner.checkpoint_paths import LearnerPosition
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.records.recording_thread import RecordingThread
from rollstream.consumers.learner.reproducibility import prepare_environment
from rollstream.topics import logs
from rollstream.topics.config import KafkaConfig

COLUMNS = 8192
ROWS = 1024
"""A tensor has 16 MiB in bfloat16."""
TOKENS = 128
"""Tokens of a step: few, so that its gradients hardly take longer than a snapshot."""
STEPS = 3
"""Steps of which each kind is timed."""
VERSIONS = 4
"""The first one is full."""
CHANGE = 1.00012
"""Two values in a hundred change in bfloat16."""
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"


def publish(arguments: dict[str, Any]) -> dict[str, Any]:
    """Publish versions of as many MiB as `rollouts` says, and return what each cost."""
    config = LearnerConfig()
    prepare_environment(config)
    import jax
    import jax.numpy as jnp

    from rollstream.consumers.learner.records.step_recorder import StepParams, StepRecorder
    from rollstream.consumers.learner.training.snapshot import Snapshots, device_checksum

    count = max(1, arguments["rollouts"] * 1024 * 1024 // (2 * ROWS * COLUMNS))
    params = {f"layer.{n}": 0.02 * jax.random.normal(jax.random.key(n), (ROWS, COLUMNS)) for n in range(count)}
    # Two products of 3/2 the rows cost as much as the three of gradients.
    inputs = jax.random.normal(jax.random.key(count), (TOKENS * 3 // 2, ROWS))
    gradient = jax.jit(lambda tensor: jnp.sum(inputs @ tensor @ tensor.T))
    update = jax.jit(lambda tensor, factor: tensor * factor, donate_argnums=0)

    def train(factor: float = 1.0) -> tuple[float, float]:
        """Seconds of a step, and how many of them its update waited for the copy of the parameters."""
        began = time.perf_counter()
        for tensor in params.values():
            gradient(tensor).block_until_ready()
        waited = recording.wait_until_taken()
        for name in params:
            params[name] = update(params[name], factor)
        jax.block_until_ready(params)
        return time.perf_counter() - began, waited

    snapshots = Snapshots("bfloat16")

    def take() -> StepParams:
        return StepParams(device_checksum(params), snapshots.take(params))

    def taken_alone() -> tuple[float, float]:
        began, cpu_began = time.perf_counter(), time.process_time()
        take()
        return time.perf_counter() - began, time.process_time() - cpu_began

    def taken_beside() -> tuple[float, float]:
        recording.start(take, lambda _taken: None)
        timings = train()
        recording.wait()
        return timings

    kafka = KafkaConfig(bootstrap_servers=arguments["bootstrap_servers"])
    published: list[float] = []
    with StepRecorder(config, kafka, arguments["run"], "{}") as recorder, RecordingThread() as recording:
        train(CHANGE)
        # Compiles what a snapshot runs, with one of the tensors, which all have the same shape.
        one = dict(list(params.items())[:1])
        device_checksum(one)
        Snapshots("bfloat16").take(one)
        print("ready", flush=True)
        # A training step has its own memory peak. It is measured first, so that only what publishing adds to it is
        # counted.
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        train()
        training = _memory("VmHWM")
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        timed = [(taken_alone(), train(), taken_beside()) for _ in range(STEPS)]

        def record(step: int, taken: StepParams) -> None:
            began = time.perf_counter()
            recorder.record(step, (), 0, {}, taken, LearnerPosition())
            published.append(time.perf_counter() - began)

        for step in range(VERSIONS):
            recording.start(take, partial(record, step))
            train(CHANGE)
            while len(published) <= step:
                recording.check()
                train()
            recording.wait()
        peak = _memory("VmHWM")
    alone, steps, beside = zip(*timed, strict=True)
    return {
        "size_bytes": sum(2 * tensor.size for tensor in params.values()),
        "alone": alone,
        "steps": [seconds for seconds, _waited in steps],
        "beside": beside,
        "published": published,
        "peak_bytes": peak - training,
    }


def _memory(name: str) -> int:
    """Bytes that /proc/self/status gives under a name."""
    return next(int(line.split()[1]) * 1024 for line in _STATUS.read_text().splitlines() if line.startswith(name))


if __name__ == "__main__":
    logs.setup()
    print(json.dumps(publish(json.loads(sys.argv[1]))))
