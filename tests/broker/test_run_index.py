"""The index of a run with planted facts: it says of every rollout what the ledger and the tools say."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.tools.lineage import record_lineage
from rollstream.pipeline.tools.run_view import RolloutPlace, RunView
from rollstream.pipeline.ui.index.run_index import RolloutFilter, RunIndex
from rollstream.topics.config import KafkaConfig
from tests.support.planted import Planted, plant
from tests.support.runs import RealRun


@pytest.fixture(scope="module")
def planted(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    run = RealRun(KafkaConfig(bootstrap_servers=broker), "indexed", tmp_path_factory.mktemp("run"))
    try:
        yield plant(run)
    finally:
        run.stop()


@pytest.fixture(scope="module")
def index(planted: Planted) -> Iterator[RunIndex]:
    with RunIndex.open(config_of(planted)) as index:
        index.catch_up()
        yield index


def config_of(planted: Planted) -> RunConfig:
    run = planted.run
    return RunConfig(run=run.name, kafka=run.kafka, data_dir=Path(run.directory))


def test_fates_are_those_of_the_ledger(planted: Planted, index: RunIndex) -> None:
    book = ledger(planted.run.kafka, planted.run.name)
    facets = index.facets()
    fates = facets["fates"]
    assert sum(fates.values()) == book.produced
    assert fates["trained"] + fates["skipped"] + fates["batched"] == book.batched
    assert fates["skipped"] == len(planted.batches[1].uids)
    assert fates["dead_lettered"] == book.dead_lettered == 1
    assert fates["control"] == book.control
    assert "in_flight" not in fates
    assert "unread" not in fates
    dropped = {
        reason: index.rollouts(RolloutFilter(fate="dropped", reason=reason))["matching"] for reason in book.dropped
    }
    assert dropped == dict(book.dropped)
    # A learner skips batches for reasons of the same names.
    assert facets["reasons"] == dropped | {"stale_version": dropped["stale_version"] + book.skipped}
    assert facets["environments"] == ["env"]
    assert facets["workers"] == ["w0"]


def test_a_trained_rollout_has_its_batch_step_advantage_and_lineage(planted: Planted, index: RunIndex) -> None:
    batch = planted.batches[0]
    answer = index.rollouts(RolloutFilter(uid=batch.uids[0]))
    assert answer["matching"] == 1
    row = answer["rows"][0]
    assert (row["fate"], row["batch"], row["step"]) == ("trained", batch.batch_id, 1)
    assert row["advantage"] == pytest.approx(float(batch.advantages[batch.loss_mask][0]))
    place = RolloutPlace(*map(int, row["place"].split(":")))
    details = index.details(*place)
    assert details["row"] == row
    assert sorted(member["uid"] for member in details["group"]) == sorted(
        uid for uid, group in zip(batch.uids, batch.group_index, strict=True) if group == batch.group_index[0]
    )
    assert details["tokens"]["mask"] == [0, 0, 0, 1, 1, 1]
    assert details["tokens"]["logprobs"] == [None, None, None, -0.5, -1.0, -1.5]
    assert details["tokens"]["advantages"][3:] == [row["advantage"]] * 3
    with RunView(planted.run.kafka, planted.run.name) as view:
        assert details["lineage"] == [record_lineage(view, place).as_dict()]


def test_pages_follow_one_another_in_every_order(index: RunIndex) -> None:
    whole = index.rollouts(limit=1000)
    assert whole["next"] is None
    assert whole["matching"] == len(whole["rows"])
    for order in ("newest", "oldest", "reward", "length"):
        places, after = [], None
        while True:
            page = index.rollouts(order=order, limit=7, after=after)
            places += [row["place"] for row in page["rows"]]
            after = page["next"]
            if after is None:
                break
        assert sorted(places) == sorted(row["place"] for row in whole["rows"]), order
        assert len(set(places)) == len(places)


def test_series_have_the_figures_of_steps_and_of_what_versions_produced(index: RunIndex) -> None:
    answer = index.series()
    assert answer["learners"] == ["main"]
    series = {entry["name"]: entry for entry in answer["series"]}
    assert series["reward/produced"]["y"] == pytest.approx([0.5], abs=0.1)
    assert series["success/env"]["x"] == [0]
