"""Replay of a run whose configuration changed while a group was open: each record falls under the one in force then."""

from dataclasses import replace

import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.pipeline.command_line.cli import main
from rollstream.pipeline.tools.replay import replay
from rollstream.topics.config import TopicsConfig
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import Mark
from rollstream.topics.wire.codec import decode
from tests.support.ledgers import in_both_forms
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled
from tests.support.waiting import eventually


def generations(run: RealRun) -> list[int]:
    """The generations of the marks on the log."""
    return [record.generation for record in run.read("rollouts") if isinstance(record, Mark)]


def group(run: RealRun, batched: int, *names: str) -> None:
    """Send whole groups to a grouping process of the run's configuration, and end it when they are batched."""
    process = run.start("group")
    generation = run.grouping.generation
    eventually(lambda: generation in {0, *generations(run)}, 60, f"the mark of generation {generation}")
    run.send(rollout(name, member) for name in names for member in range(4))
    settled(run, batched=batched)
    process.terminate()
    assert process.wait(300) == 0, run.log_of(process)


@pytest.fixture
def changed_run(real_run: RealRun) -> RealRun:
    """Two groups batched under rloo and two under grpo, with a group open since before the change."""
    run = real_run
    run.topics = TopicsConfig(partitions=1)
    run.grouping = GroupingConfig(batch_rollouts=8, group_deadline_s=3600.0)
    run.prepare()
    run.send([rollout("open")])
    group(run, 8, "a", "b")
    run.grouping = replace(run.grouping, estimator="grpo", generation=1)
    group(run, 16, "c", "d")
    return run


def test_a_replay_under_the_first_configuration_changes_what_was_cut_under_the_second(changed_run: RealRun) -> None:
    run = changed_run
    replayed = replay(run.kafka, run.name, {"estimator": "rloo"})
    assert replayed.changed == {"estimator": [["rloo", "grpo"], "rloo"]}
    assert replayed.differing == ["0-1"]
    replayed = replay(run.kafka, run.name, {"estimator": "grpo"})
    assert replayed.differing == ["0-0"]
    assert replay(run.kafka, run.name, {}).differing == []


def test_the_ledger_names_the_configuration_in_force_and_what_each_changed(
    changed_run: RealRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = changed_run
    first, second = in_both_forms(run).configurations
    assert (first["generation"], first["since"], first["in_force"]) == (0, {0: 0}, [])
    assert first["changed"]["batch_rollouts"] == [GroupingConfig().batch_rollouts, 8]
    assert (second["generation"], second["in_force"]) == (1, [0])
    marks = [raw.offset for raw in read_to_end(run.kafka, run.topic("rollouts")) if _generation(raw.value) == 1]
    assert 0 < second["since"][0] <= marks[0]
    # The group that is open since before the mark keeps the watermark, and so the settings, below it.
    assert second["changed"] is None
    run.send(rollout("open", member) for member in range(1, 4))
    group(run, 24, "e")
    assert in_both_forms(run).configurations[1]["changed"] == {"estimator": ["rloo", "grpo"]}
    assert main(run.command("ledger")[4:]) == 0
    assert '  estimator: "rloo" -> "grpo"' in capsys.readouterr().out.splitlines()


def _generation(value: bytes | None) -> int:
    record = decode(value)
    return record.generation if isinstance(record, Mark) else 0


def test_a_replay_from_a_time_on_keeps_the_configuration_in_force_then(changed_run: RealRun) -> None:
    run = changed_run
    end = max(m.timestamp_ms for m in read_to_end(run.kafka, run.topic("rollouts")))
    group(run, 24, "e", "f")
    replayed = replay(run.kafka, run.name, {"batch_rollouts": 4}, since_ms=end + 1)
    assert (replayed.recorded.batches, replayed.replayed.batches) == (1, 2)
    advantages = (side.environments["env"].as_dict()["max"] for side in (replayed.recorded, replayed.replayed))
    assert len({round(value, 6) for value in advantages}) == 1
