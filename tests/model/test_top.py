"""Tools that watch a run with a history say how much of it is still to be read."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rollstream.pipeline.command_line.cli import main
from rollstream.pipeline.run.display import Display
from rollstream.pipeline.run.observer import RunObserver
from rollstream.pipeline.tools import top
from rollstream.pipeline.tools.top import NEWEST, frame, line
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.sender import Sender
from rollstream.topics.records import BatchUse, LearnerStep
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.batches import index_entry
from tests.support.runs import RealRun, rollout

ROLLOUTS = 2500
"""More than an observer takes at once."""
READING = re.compile(r"reading history, (\d+) %")


@pytest.fixture(scope="module", name="run")
def watched_run(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRun]:
    real = RealRun(KafkaConfig(bootstrap_servers=broker), "watched", tmp_path_factory.mktemp("watched"))
    real.prepare().send(rollout(f"g{n}", 0) for n in range(ROLLOUTS))
    yield real
    real.stop()


def test_what_is_left_of_the_history_falls_to_nothing_and_what_comes_later_is_none_of_it(run: RealRun) -> None:
    with closing(RunObserver(run.kafka, run.name)) as observer:
        left = [observer.history_left]
        assert left[0] == observer.snapshot(NEWEST).history >= ROLLOUTS
        run.send([rollout("later", 0)])
        observer.catch_up(lambda: left.append(observer.history_left))
        assert left == sorted(left, reverse=True)
        assert any(0 < offsets < left[0] for offsets in left), "it is told while it goes on"
        seen = observer.snapshot(NEWEST)
        assert (left[-1], seen.history_left, seen.history) == (0, 0, left[0])
        assert len(observer.scored) > ROLLOUTS


def test_no_batch_of_a_long_run_waits_if_a_step_used_it(broker: str, tmp_path: Path) -> None:
    """Whichever topic a broker sends first: the run has more batches than an observer keeps."""
    run, steps, batches = RealRun(KafkaConfig(bootstrap_servers=broker), "long-watched", tmp_path).prepare(), 12, 1000
    with Sender(clients.producer(run.kafka)) as sender:
        for step in range(1, steps + 1):
            last = step * batches
            step_made = LearnerStep(
                learner="test",
                step=step,
                input_run=run.name,
                uses=tuple(
                    BatchUse(batch_id=f"0-{number}", index_offset=number, rows=1, use="trained")
                    for number in range(last - batches, last)
                ),
                position=last,
                policy_version=0,
                params_digest="digest",
                trained_total=last,
                skipped_total=0,
            )
            sender.send(run.topic("steps"), encode(step_made), encode_key("test", step))
        for number in range(steps * batches + 1):
            entry = index_entry(number)
            sender.send(run.topic("batch-index"), encode(entry), encode_key(entry.batch_id))
    with closing(RunObserver(run.kafka, run.name)) as observer:
        observer.catch_up()
        seen = observer.snapshot(NEWEST)
    assert (seen.step, seen.batches, seen.waiting) == (steps, steps * batches + 1, 1)


def test_programs_are_told_on_stderr_and_in_figures(
    run: RealRun, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "LINE_S", 0.0)
    assert main(["top", "--json", "--run", run.name, "-b", run.kafka.bootstrap_servers]) == 0
    out, err = capfd.readouterr()
    answer = json.loads(out)
    assert answer["history"] >= ROLLOUTS
    assert answer["history_left"] == 0
    percents = [int(percent) for percent in READING.findall(err)]
    assert percents[0] == 0
    assert percents == sorted(percents)
    assert len(set(percents)) > 1


def test_rollouts_that_wait_for_labels_are_counted(run: RealRun, capfd: pytest.CaptureFixture[str]) -> None:
    with RolloutProducer(run.kafka, run.name, topic="unlabelled") as producer:
        for member in range(3):
            producer.send(rollout("unlabelled", member))
    flags = ["--run", run.name, "-b", run.kafka.bootstrap_servers]
    assert main(["top", "--json", *flags]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert (answer["waiting_for_labels"], answer["read_by_labelers"]) == (3, 0)
    assert main(["top", "--once", *flags]) == 0
    assert "3 wait for labels" in capfd.readouterr().out


def test_the_display_of_a_run_says_it_too(run: RealRun, capfd: pytest.CaptureFixture[str]) -> None:
    display: Display[RunObserver] = Display(
        json=False,
        began=time.monotonic(),
        line=lambda seen: line(seen.snapshot(NEWEST)),
        frame=lambda seen, width: frame(seen.snapshot(NEWEST), width),
        every_s=0.0,
    )
    with closing(RunObserver(run.kafka, run.name)) as observer, display.live():
        display.show(observer)
        observer.catch_up()
        display.show(observer)
    first, last = capfd.readouterr().out.splitlines()
    assert "s  reading history, 0 %  step" in first
    assert "s  step 0" in last
