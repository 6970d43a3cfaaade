"""Single records that would end grouping for good, on a real broker: refused, or skipped by an operator."""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.configuration_marks import CORE_STEP
from rollstream.consumers.grouping.core.effects import CORE_VERSION
from rollstream.pipeline.audit.verification import verify
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.records import Mark, NamedArray, SamplingParams
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled


@pytest.fixture
def run(broker: str, run_name: str, tmp_path: Path) -> Iterator[RealRun]:
    made = RealRun(KafkaConfig(bootstrap_servers=broker), run_name, tmp_path, TopicsConfig(partitions=1))
    made.grouping = GroupingConfig(batch_rollouts=4, max_batch_age_s=2.0)
    yield made.prepare()
    made.stop()


def configured(core_version: int = CORE_VERSION, **settings: Any) -> Mark:
    values = json.loads(GroupingConfig(**{"generation": 1, **settings}).to_json())
    text = json.dumps({**values, "core_version": core_version})
    return Mark(kind="configuration", generation=values["generation"], configuration=text)


def mark(run: RealRun, wanted: Mark) -> None:
    run.send_bytes("rollouts", encode(wanted), encode_key("mark", wanted.kind), 0)


def group(run: RealRun, example: str, members: int = 4) -> None:
    run.send(rollout(example, member) for member in range(members))


def test_records_that_ended_every_grouping_process_are_invalid_and_the_run_goes_on(run: RealRun) -> None:
    arrays = {
        "deep": NamedArray(dtype="<f4", shape=(6, *(1,) * 64), data=bytes(24)),
        "hollow": NamedArray(dtype="<f4", shape=(6, 2**62, 0), data=b""),
        "reference_log_probs": NamedArray(dtype="<f4", shape=(6, *(1,) * 64), data=bytes(24)),
    }
    run.send(rollout(name, token_arrays={name: array}) for name, array in arrays.items())
    run.send([rollout("cold", sampling=SamplingParams(temperature=1e-40)), rollout("dear", reward=1e10)])
    mark(run, Mark(kind="policy_version", policy_version=2**40))
    mark(run, configured(CORE_VERSION + CORE_STEP + 1))
    mark(run, configured(generation=2**63 - 1))
    mark(run, configured(batch_bytes=2**40))
    group(run, "good")
    run.start("group")
    book = settled(run, batched=4)
    assert book.dropped == {"invalid": 9}
    assert book.problems == []
    assert verify(run.kafka, run.name).mismatches == []


MAKER = """
from rollstream.consumers.grouping.makers.batch_maker import FifoBatchMaker

class Mine(FifoBatchMaker):
    def add_rollout(self, rollout, group):
        if group.example_id == "divided":
            raise ZeroDivisionError
        super().add_rollout(rollout, group)
"""
MINE = "my_maker:Mine"


def test_records_that_end_grouping_at_every_start_are_skipped_on_the_record(
    run: RealRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mark of a newer release, and a rollout whose group a user's batch maker cannot take."""
    (run.directory / "my_maker.py").write_text(MAKER)
    monkeypatch.syspath_prepend(run.directory)
    monkeypatch.delitem(sys.modules, "my_maker", raising=False)
    run.python_path = (run.directory,)
    makers = {"grouper__makers": f'["{MINE}"]'}
    mark(run, Mark(kind="policy_version", policy_version=0))
    group(run, "before", 2)
    mark(run, configured(maker=MINE, batch_rollouts=4))
    mark(run, configured(CORE_VERSION + 1, generation=2))
    group(run, "divided")
    group(run, "behind")
    places = []
    for _ in range(2):
        for _ in range(2):
            stopped = run.start("group", **makers)
            assert stopped.wait(60) == (1 if places else 2), "an error of the maker has a traceback"
        places.append(run.log_of(stopped).rpartition("skip the record: `rollstream role group skip ")[2].split()[0])
        assert run.said("group", "skip", places[-1]).returncode == 2, "a reason is asked for"
        assert "there is no record 900 yet" in run.said("group", "skip", "0:900", "--reason", "x").stderr
        skipped = run.said("group", "skip", places[-1], "--reason", f"reason {len(places)}")
        assert skipped.returncode == 0, skipped.stderr
    assert places == ["0:4", "0:8"]

    going = run.start("group", **makers)
    settled(run, batched=4, dead_lettered=2, in_flight=5)
    going.send_signal(signal.SIGKILL)
    going.wait()
    run.start("group", **makers)
    run.send(rollout("before", member) for member in (2, 3))
    book = settled(run, batched=8, dead_lettered=2, in_flight=3)
    assert (book.dropped, book.problems) == ({}, [])
    verification = verify(run.kafka, run.name, [MINE])
    assert (verification.mismatches, verification.batches, verification.drops) == ([], 2, 0)
    settings = ("--set", f'grouper.makers=["{MINE}"]', "--set", "grouping.batch_rollouts=8")
    replayed = json.loads(run.said("replay", *settings, "--json").stdout)["replayed"]
    assert [replayed[name] for name in ("rollouts", "in_flight", "dropped")] == [8, 3, {}]
    letters = json.loads(run.said("dlq", "ls", "--json").stdout)
    assert [(letter["offset"], letter["reason"]) for letter in letters] == [
        (4, "skipped: reason 1"),
        (8, "skipped: reason 2"),
    ]
    late = run.said("group", "skip", places[0], "--reason", "again")
    assert (late.returncode, "was read up to" in late.stderr) == (2, True)
