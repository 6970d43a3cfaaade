"""The comparison under kill -9, in short: a real run loses and doubles nothing, and other loops are counted right."""

import json
from pathlib import Path

import pytest

from rollstream.pipeline.audit.ledger import ledger
from rollstream.topics.config import KafkaConfig
from tests.bench.kills import __main__ as kills
from tests.bench.kills import rollstream_run
from tests.bench.kills.peers import LOOPS, tally_of
from tests.bench.kills.tally import Tally

SEED = 7


def test_a_tally_counts_each_rollout_once() -> None:
    tally = Tally.of("loop", {"b": 1, "a": 2}, ["1", "2", "3", "4", "4"], ["1", "2", "2"], ["3", "1"])
    assert list(tally.kills) == ["a", "b"]
    assert (tally.produced, tally.trained, tally.on_record, tally.doubled, tally.lost) == (4, 2, 1, 1, 1)


@pytest.mark.long
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_nobody_kills_trains_on_each_rollout_once(name: str, tmp_path: Path) -> None:
    whole = tally_of(LOOPS[name], tmp_path / "whole", 0, SEED)
    assert whole.trained == whole.produced
    assert (whole.doubled, whole.lost) == (0, 0)


@pytest.mark.long
def test_what_the_loops_lose_and_double_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [f"--only={name}" for name in LOOPS]
    assert kills.main(["--kills=3", f"--seed={SEED}", "--json", *chosen]) == 0
    answer = json.loads(capsys.readouterr().out)
    tallies = {tally["loop"]: tally for tally in answer["tallies"]}
    assert answer["seed"] == SEED
    assert all(tally["produced"] > 600 and sum(tally["kills"].values()) == 3 for tally in tallies.values())
    assert tallies[LOOPS["streams-kept"].name]["doubled"] > 0
    # Streams are deleted, and what a step or a queue held in memory is gone, with the steps since the checkpoint.
    for name in ("streams", "steps", "queue"):
        tally = tallies[LOOPS[name].name]
        assert (tally["lost"] > 0, tally["doubled"]) == (True, 0), tally
        assert tally["trained"] + tally["lost"] == tally["produced"]


@pytest.mark.long
def test_a_run_whose_processes_are_killed_loses_and_doubles_nothing(broker: str, run_name: str, tmp_path: Path) -> None:
    tally = rollstream_run.tally_of(broker, run_name, tmp_path / "run", 4, SEED)
    assert dict(tally.kills) == {"env": 1, "group": 1, "infer": 1, "learn": 1}
    assert (tally.lost, tally.doubled) == (0, 0)
    book = ledger(KafkaConfig(bootstrap_servers=broker), run_name)
    assert book.balanced, book.problems
    assert (book.trained, book.rollouts) == (tally.trained, tally.produced)
    assert tally.trained + tally.on_record == tally.produced
