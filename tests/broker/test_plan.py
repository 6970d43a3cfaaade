"""Real grouping processes on a real broker bear the load that they were planned for, and lag behind with one fewer."""

import json
import time
from pathlib import Path

import pytest

from rollstream.consumers.grouping.process.bootstrap import committed_offsets
from rollstream.pipeline.config import ScaleDemoConfig
from rollstream.pipeline.run.synthetic_load import SyntheticWorkers
from rollstream.topics.codec import encode
from rollstream.topics.config import TopicsConfig
from rollstream.topics.kafka import groups, topic_admin
from tests.support.command_line import answer_of
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually

HELD_TO = 20.0
"""Rollouts a second to which each process is held, so that a machine of two cores bears several beside other work."""
TIMES = 2.4
"""The load, in rates of one process."""
TOKENS = 64
LOADED_S = 40.0


def lag(run: RealRun) -> int:
    """Records that grouping has not committed."""
    bounds = topic_admin.bounds(run.kafka, run.topic("rollouts"))
    positions = committed_offsets(run.kafka, run.grouper.group_id(run.name), run.topic("rollouts"), len(bounds))
    return sum(end - positions[partition].offset for partition, (_low, end) in bounds.items())


def started(run: RealRun, processes: int) -> RealRun:
    """Start the run with so many processes, each with its share of the partitions."""
    run.prepare()
    for ordinal in range(processes):
        run.start("group", "--ordinal", str(ordinal), grouper__records_per_s=HELD_TO, grouper__commit_interval_s=1.0)

    def ready() -> bool:
        assert all(process.poll() is None for process in run.processes)
        bounds = topic_admin.bounds(run.kafka, run.topic("rollouts"))
        return (
            groups.members(run.kafka, run.grouper.group_id(run.name)) == processes
            and all(end > 0 for _low, end in bounds.values())
            and lag(run) == 0
        )

    eventually(ready, 120, f"{processes} processes at work")
    return run


def measured_rate(run: RealRun) -> float:
    """Rollouts a second that one process groups out of a backlog."""
    run.send(rollout(f"x{group}", member) for group in range(60) for member in range(4))
    behind, began = lag(run), time.monotonic()
    eventually(lambda: lag(run) < behind / 4, 120, "three quarters of the backlog grouped", every_s=0.1)
    return (behind - lag(run)) / (time.monotonic() - began)


def lag_under_load(run: RealRun, load_per_s: float) -> tuple[int, int]:
    """Lag in the middle of the load, and at its end."""
    load = ScaleDemoConfig(low_per_s=load_per_s, high_per_s=load_per_s, tokens=TOKENS)
    with SyntheticWorkers(run.kafka, run.name, load, seed=0) as workers:
        eventually(lambda: workers.written >= load_per_s * LOADED_S / 2, 60, "half of the load")
        middle = lag(run)
        eventually(lambda: workers.written >= load_per_s * LOADED_S, 60, "the load")
        end = lag(run)
        workers.stop()
    assert all(process.poll() is None for process in run.processes)
    return middle, end


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_is_planned_bears_the_load_and_one_process_fewer_does_not(real_run: RealRun, tmp_path: Path) -> None:
    real_run.topics = TopicsConfig(partitions=4)
    rate = measured_rate(started(real_run, 1))
    load_per_s = TIMES * rate
    real_run.stop()
    size = len(encode(rollout()))
    rows = [
        {"name": name, "rollouts_per_s": rate, "baseline_rollouts_per_s": 10 * rate, "size_bytes": 10 * size}
        for name in ("produce", "group-and-batch", "restore", "feed", "weights-1024", "weights-files-1024")
    ]
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"machine": {"cores": 2, "load_before": 0.0}, "rows": rows}))
    words = ("--parameters", "1M", "--environments", "8", "--tokens", str(TOKENS), "--rollouts-per-s", str(load_per_s))
    answer = answer_of(tmp_path, "plan", *words, "--utilisation", "0.9", "--measured", str(own), "--json")
    assert answer.returncode == 0, answer.stderr
    plan = json.loads(answer.stdout)
    processes = plan["grouping_processes"]
    assert plan["limits"][0]["resource"] in ("grouping processes", "learner processes", "producers")
    assert processes == 3

    planned = real_run.beside("planned")
    planned.topics = TopicsConfig(partitions=plan["partitions"])
    fewer = real_run.beside("fewer")
    fewer.topics = planned.topics
    try:
        _middle, end = lag_under_load(started(planned, processes), load_per_s)
        assert end < 4 * load_per_s, "rollouts of four seconds"
        planned.stop()
        middle, end = lag_under_load(started(fewer, processes - 1), load_per_s)
        grows_by = (load_per_s - (processes - 1) * rate) * LOADED_S / 2
        assert end - middle > grows_by / 2
    finally:
        planned.stop()
        fewer.stop()
