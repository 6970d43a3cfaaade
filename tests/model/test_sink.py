"""`rollstream sink --follow` on a live run: what is appended reaches a tracker of the user's own, each step once."""

import json
import signal
from pathlib import Path

from rollstream.topics.records import BatchUse, LearnerStep, TrainingBatch
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support import planted
from tests.support.runs import RealRun
from tests.support.waiting import eventually

OWN = """
import json


class Lines:
    def __init__(self, tracked):
        self.path = tracked.directory / "lines.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.last = -1

    def write(self, step):
        with self.path.open("a") as file:
            metadata = [trace.metadata for trace in step.traces]
            file.write(json.dumps({"step": step.step, "metrics": dict(step.metrics), "traces": metadata}) + chr(10))

    def close(self):
        self.path.with_name("closed").touch()
"""


def train(run: RealRun, number: int, batch: TrainingBatch, index_offset: int) -> None:
    use = BatchUse(batch_id=batch.batch_id, index_offset=index_offset, rows=len(batch), use="trained")
    step = LearnerStep(
        learner="default", step=number, input_run=run.name, uses=(use,), position=index_offset + 1,
        policy_version=number, params_digest="", trained_total=len(batch), skipped_total=0,
        metrics={"loss": number / 2},
    )  # fmt: skip
    run.send_bytes("steps", encode(step), encode_key("default", number))


def test_steps_of_a_live_run_reach_a_tracker_with_rollouts_as_they_are_on_the_log(
    real_run: RealRun, tmp_path: Path
) -> None:
    facts = planted.plant(real_run)
    (tmp_path / "own_tracker.py").write_text(OWN)
    path = tmp_path / "own" / "lines.jsonl"
    words = ("--to", f"{tmp_path}/own_tracker.py:Lines", "--into", str(tmp_path / "own"), "--follow", "--every", "0.2")
    process = real_run.start("sink", *words, tracker__traces=64)
    for number, (batch, offset) in enumerate(zip(facts.batches[:2], facts.index_offsets[:2], strict=True)):
        train(real_run, number, batch, offset)
        eventually(lambda n=number: path.exists() and len(path.read_text().splitlines()) == n + 1, 120, "a step")
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    assert (tmp_path / "own" / "closed").exists()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["metrics"]["loss"]) for line in lines] == [(0, 0.0), (1, 0.5)]
    for line, batch in zip(lines, facts.batches, strict=False):
        assert sorted(trace["uid"] for trace in line["traces"]) == sorted(batch.uids)
        advantages = dict(zip(batch.uids, batch.advantages[batch.splits[1:] - 1].tolist(), strict=True))
        assert {trace["uid"]: trace["advantage"] for trace in line["traces"]} == advantages
        assert {trace["fate"] for trace in line["traces"]} == {"trained"}
