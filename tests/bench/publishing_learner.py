"""The subject of the rows `stall`: a process that takes snapshots and puts steps on record as a learner does.

Its steps change parameters of the given size, and keep the processor busy while a version is on its way.
"""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.records.learner_position import LearnerPosition
from rollstream.consumers.learner.records.recording_thread import RecordingThread
from rollstream.consumers.learner.reproducibility import prepare_environment
from rollstream.topics import logs
from rollstream.topics.config import KafkaConfig

COLUMNS = 8192
ROWS = 1024
"""A tensor has 16 MiB in bfloat16."""
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

    from rollstream.consumers.learner.records.device_checksum import device_checksum
    from rollstream.consumers.learner.records.snapshot import snapshot
    from rollstream.consumers.learner.records.step_recorder import StepParams, StepRecorder

    count = max(1, arguments["rollouts"] * 1024 * 1024 // (2 * ROWS * COLUMNS))
    update = jax.jit(lambda tensor, factor: tensor * factor, donate_argnums=0)
    params = {f"layer.{n}": 0.02 * jax.random.normal(jax.random.key(n), (ROWS, COLUMNS)) for n in range(count)}

    def train(factor: float) -> None:
        for name in params:
            params[name] = update(params[name], factor)
        jax.block_until_ready(params)

    def stalled() -> tuple[tuple[float, float], StepParams]:
        began, cpu_began = time.perf_counter(), time.process_time()
        taken = StepParams(device_checksum(params), snapshot(params, "bfloat16"))
        return (time.perf_counter() - began, time.process_time() - cpu_began), taken

    train(CHANGE)
    size_bytes = sum(array.nbytes for array in (stalled()[1].arrays or {}).values())
    kafka = KafkaConfig(bootstrap_servers=arguments["bootstrap_servers"])
    stalls: list[tuple[float, float]] = []
    published: list[float] = []
    with StepRecorder(config, kafka, arguments["run"], "{}") as recorder, RecordingThread() as recording:
        print("ready", flush=True)
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        before = _memory("VmRSS")
        for step in range(VERSIONS):
            seconds, taken = stalled()
            stalls.append(seconds)
            done = threading.Event()

            def record(step: int = step, taken: StepParams = taken, done: threading.Event = done) -> None:
                began = time.perf_counter()
                recorder.record(step, (), 0, {}, taken, LearnerPosition())
                published.append(time.perf_counter() - began)
                done.set()

            recording.start(record)
            del taken, record
            train(CHANGE)
            while not done.is_set():
                train(1.0)
            recording.wait()
        peak = _memory("VmHWM")
    return {"size_bytes": size_bytes, "stalls": stalls, "published": published, "peak_bytes": peak - before}


def _memory(name: str) -> int:
    """Bytes of this process, by their name in its status."""
    return next(int(line.split()[1]) * 1024 for line in _STATUS.read_text().splitlines() if line.startswith(name))


if __name__ == "__main__":
    logs.setup()
    print(json.dumps(publish(json.loads(sys.argv[1]))))
