"""Lineage by the index of a run goes on with what is new, whatever happened to the index or the log."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index.indexed_run import Fate, RolloutPlace, indexed_run
from rollstream.pipeline.index.lineage import record_lineage
from rollstream.pipeline.index.writer import index_file
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import provisioning, topic_admin
from tests.support.command_line import answer_of
from tests.support.planted import Planted, plant
from tests.support.runs import RealRun, rollout


@pytest.fixture(scope="module")
def planted(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    run = RealRun(KafkaConfig(bootstrap_servers=broker), "looked-up", tmp_path_factory.mktemp("run"))
    try:
        yield plant(run)
    finally:
        run.stop()


def config_of(run: RealRun) -> RunConfig:
    return RunConfig(run=run.name, kafka=run.kafka, data_dir=run.directory)


@pytest.mark.kafka
@pytest.mark.long
def test_an_index_goes_on_with_what_is_new(real_run: RealRun) -> None:
    run, other = real_run, plant(real_run)
    uid = other.batches[0].uids[0]
    with indexed_run(config_of(run)) as view:
        [place] = view.places_of(uid)
        tree = record_lineage(view, place)
        assert view.places_of("later-1") == []
    run.send(rollout("later", member) for member in range(3))
    with indexed_run(config_of(run)) as view:
        assert len(view.places_of("later-1")) == 1
        assert record_lineage(view, place).as_dict() == tree.as_dict()

    # Delete from the beginning, as prune does.
    low = {
        (run.topic(name), p): begin + (end - begin) // 2
        for name in ("rollouts", "journal", "batch-index", "batches")
        for p, (begin, end) in topic_admin.bounds(run.kafka, run.topic(name)).items()
    }
    topic_admin.delete_records(run.kafka, low)
    for _ in range(2):
        with indexed_run(config_of(run)) as view:
            assert view.places_of(uid) == []
            assert view.fate(place) == Fate("settled")
            assert len(view.places_of("later-1")) == 1
            assert view.fate(RolloutPlace(*view.places_of("later-1")[0])) == Fate("unread")
        index_file(config_of(run)).unlink()

    # A topic that was created again is another one, whatever it holds.
    assert topic_admin.delete_topics(run.kafka, [run.topic("steps")]) == {}
    provisioning.apply(run.kafka, run.topics, run.name)
    with indexed_run(config_of(run)) as view:
        assert view.steps() == []


def test_an_index_that_cannot_be_written_names_what_can_be_done(planted: Planted, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = ("lineage", "--offset", "0:0", "--set", f"data_dir={tmp_path / 'file'}")
    answer = answer_of(tmp_path, *words, "--run", planted.run.name, "-b", planted.run.kafka.bootstrap_servers)
    assert answer.returncode == 2
    assert "give a writable directory with --set data_dir=DIRECTORY" in answer.stderr
