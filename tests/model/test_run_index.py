"""The index of a run with planted facts: it says of every rollout what the ledger and the tools say."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.consumers.grouping.core.estimators import ESTIMATORS
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index import group_query, rollout_query
from rollstream.pipeline.index.group_query import GroupFilter
from rollstream.pipeline.index.indexed_run import RolloutPlace, indexed_run
from rollstream.pipeline.index.lineage import record_lineage
from rollstream.pipeline.index.rollout_query import RolloutFilter
from rollstream.pipeline.index.run_index import RunIndex
from rollstream.pipeline.index.series import drops as drops_of
from rollstream.pipeline.index.series import series as series_of
from rollstream.pipeline.index.series import weights
from rollstream.topics.config import KafkaConfig
from rollstream.topics.records import TrainingBatch
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
    facets = rollout_query.facets(index.db)
    fates = facets["fates"]
    assert sum(fates.values()) == book.produced
    assert fates["trained"] + fates["skipped"] + fates["batched"] == book.batched
    assert fates["skipped"] == len(planted.batches[1].uids)
    assert fates["dead_lettered"] == book.dead_lettered == 1
    assert fates["control"] == book.control
    assert "in_flight" not in fates
    assert "unread" not in fates
    dropped = {
        reason: rollout_query.page(index.db, RolloutFilter(fate="dropped", reason=reason))["matching"]
        for reason in book.dropped
    }
    assert dropped == dict(book.dropped)
    # A learner skips batches for reasons with the same names, and the index adds these.
    assert facets["reasons"] == dropped | {"stale_version": dropped["stale_version"] + book.skipped}
    assert facets["environments"] == ["env"]
    assert facets["workers"] == ["w0"]


def test_a_trained_rollout_has_its_batch_step_advantage_and_lineage(planted: Planted, index: RunIndex) -> None:
    batch = planted.batches[0]
    answer = rollout_query.page(index.db, RolloutFilter(uid=batch.uids[0]))
    assert answer["matching"] == 1
    row = answer["rows"][0]
    assert (row["fate"], row["batch"], row["step"]) == ("trained", batch.batch_id, 1)
    assert row["advantage"] == pytest.approx(float(batch.advantages[batch.loss_mask][0]))
    place = RolloutPlace(*map(int, row["place"].split(":")))
    details = index.details(place)
    assert details["row"] == row
    assert sorted(member["uid"] for member in details["group"]) == sorted(
        uid for uid, group in zip(batch.uids, batch.group_index, strict=True) if group == batch.group_index[0]
    )
    assert details["tokens"]["mask"] == [0, 0, 0, 1, 1, 1]
    assert details["tokens"]["logprobs"] == [None, None, None, -0.5, -1.0, -1.5]
    assert details["tokens"]["advantages"][3:] == [row["advantage"]] * 3
    with indexed_run(config_of(planted)) as view:
        assert details["lineage"] == [record_lineage(view, place).as_dict()]


def test_pages_follow_one_another_in_every_order(index: RunIndex) -> None:
    whole = rollout_query.page(index.db, RolloutFilter(), limit=1000)
    assert whole["next"] is None
    assert whole["matching"] == len(whole["rows"])
    for order in ("newest", "oldest", "reward", "length"):
        places, after = [], None
        while True:
            page = rollout_query.page(index.db, RolloutFilter(), order=order, limit=7, after=after)
            places += [row["place"] for row in page["rows"]]
            after = page["next"]
            if after is None:
                break
        listed = [row["place"] for row in whole["rows"] if order not in row or row[order] is not None]
        assert sorted(places) == sorted(listed), order
        assert len(set(places)) == len(places)


def test_series_have_the_figures_of_steps_and_of_what_versions_produced(index: RunIndex) -> None:
    answer = series_of(index.db)
    assert answer["learners"] == ["main"]
    series = {entry["name"]: entry for entry in answer["series"]}
    assert series["reward/produced"]["y"] == pytest.approx([0.5], abs=0.1)
    assert series["success/env"]["x"] == [0]


def test_groups_spread_and_drops_say_what_grouping_did(planted: Planted, index: RunIndex) -> None:
    groups = group_query.page(index.db, GroupFilter(), limit=1000)
    by_name = {row["group"]: row for row in groups["rows"]}
    good = by_name["env/good0@0"]
    assert (good["size"], good["mean"], good["std"], good["zero_variance"]) == (4, 0.5, 0.5, False)
    assert len(good["members"]) == 4
    assert by_name["env/slow@0"]["fate"] == "dropped"
    assert group_query.page(index.db, GroupFilter(zero_variance=True))["rows"] == []
    assert group_query.page(index.db, GroupFilter(environment="no such"))["matching"] == 0
    assert group_query.page(index.db, GroupFilter(), order="spread", limit=2)["next"] is not None
    spread = group_query.spread(index.db, bins=4)
    assert sum(spread["histogram"]["counts"]) == len(by_name)
    assert spread["by_environment"]["env"] == {"groups": len(by_name), "zero_variance": 0}
    drops = drops_of(index.db, buckets=10)
    assert drops["totals"] == dict(ledger(planted.run.kafka, planted.run.name).dropped)
    assert all(len(counts) == len(drops["edges_ms"]) - 1 for counts in drops["reasons"].values())


def test_the_estimator_of_the_run_has_the_advantages_of_its_batches(planted: Planted, index: RunIndex) -> None:
    batch = planted.batches[0]
    row = rollout_query.page(index.db, RolloutFilter(uid=batch.uids[0]))["rows"][0]
    rows = group_query.estimators(index.db, RolloutPlace(*map(int, row["place"].split(":"))))["estimators"]
    by_name = {entry["name"]: entry for entry in rows}
    assert by_name["rloo"]["advantage"] == pytest.approx(row["advantage"])
    assert len(by_name["rloo"]["group"]) == row_count(batch)
    assert sum(member["advantage"] for member in by_name["grpo"]["group"]) == pytest.approx(0)
    assert set(by_name) == set(ESTIMATORS)


def row_count(batch: TrainingBatch) -> int:
    """Rows of the group of the first row."""
    return int((batch.group_index == batch.group_index[0]).sum())


def test_weights_are_the_manifests(index: RunIndex) -> None:
    versions = weights(index.db)["versions"]
    assert [version["version"] for version in versions] == [6, 5, 0]
    assert versions[-1]["learner"] == "test"
