"""Parts of archiving and restoring that hold or send records."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.archive.archiver import archived_record
from rollstream.consumers.archive.manifest import newest
from rollstream.consumers.archive.restorer import PartitionCursor, TopicFiller, restore
from rollstream.consumers.archive.tables import ArchivedRecord
from rollstream.consumers.archive.writer import ArchiveWriter
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.config import RegistryConfig, TopicsConfig
from rollstream.topics.errors import StateRefused
from rollstream.topics.files.stores import open_store
from rollstream.topics.kafka import provisioning
from rollstream.topics.kafka.records import UNREADABLE, KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.wire.codec import encode
from tests.simulation.installation import World
from tests.support.archived_run import archive_run
from tests.support.archiving import StoppingStore
from tests.support.modelled_run import KAFKA, RUN, ModelledRun

MIB = 1024 * 1024


def in_headers(offset: int) -> ArchivedRecord:
    """A record whose key, header's name and header's value have a MiB each; it has no value."""
    return ArchivedRecord("rollouts", 0, offset, 1, b"k" * MIB, None, (("n" * MIB, b"v" * MIB),))


def test_an_archiver_counts_all_bytes_of_the_records_that_it_holds() -> None:
    writer = ArchiveWriter(StoppingStore(), "main")
    writer.begin("rollouts", "id", {0: 0})
    writer.add(in_headers(0))
    assert 3 * MIB <= writer.buffered_bytes < 3 * MIB + 1024
    writer.close()


def test_a_restore_counts_all_bytes_of_the_records_that_it_holds() -> None:
    cursor = PartitionCursor("again", "rollouts", 0, 0, 6, map(in_headers, range(6)))
    entries, gap = cursor.next_records()
    assert (len(entries), gap) == (2, 0)


def test_a_record_that_cannot_be_decompressed_is_counted_as_one_that_the_archive_lacks() -> None:
    skipped = SkippedRecords(logged=False)
    archived = archived_record(KafkaRecord("main.rollouts", 0, 7, readable=False), "rollouts", skipped)
    assert (archived.key, archived.value) == (None, None)
    assert skipped.as_dict()["main.rollouts"] | {"error": ""} == {
        "records": 1,
        "topic": "main.rollouts",
        "partition": 0,
        "offset": 7,
        "error": "",
    }
    assert skipped.first[0].error == UNREADABLE
    archived_record(KafkaRecord("main.rollouts", 0, 8, 1), "rollouts", skipped)  # A tombstone is archived as it is.
    assert skipped.total == 1


@pytest.mark.parametrize("end", [1, 2], ids=["alone", "in a transaction"])
def test_a_record_that_is_too_large_for_the_settings_is_named_with_the_setting(world: World, end: int) -> None:
    ModelledRun(world)
    kafka = replace(KAFKA, max_record_bytes=2 * MIB)

    def fill() -> None:
        filler = TopicFiller(kafka, RUN)
        try:
            filler.round([PartitionCursor(RUN, "rollouts", 0, 0, end, iter([in_headers(0)]))])
        finally:
            filler.close()

    with pytest.raises(StateRefused) as refused:
        world.result_of(fill)
    assert str(refused.value) == (
        f"the record of offset 0 of {RUN}.rollouts[0] has {3 * MIB} bytes, more than kafka.max_record_bytes "
        f"({2 * MIB}) has room for: raise it to at least what the archived run had, delete the topics and restore again"
    )


def test_values_are_restored_as_they_were_archived_although_the_settings_name_a_schema_registry(world: World) -> None:
    run = ModelledRun(world)
    kafka = replace(KAFKA, registry=RegistryConfig(url="http://127.0.0.1:9"))
    value = encode(example_rollout("a", 1.0))

    def fill() -> None:
        filler = TopicFiller(kafka, RUN)
        try:
            filler.round(
                [PartitionCursor(RUN, "evals", 0, 0, 1, iter([ArchivedRecord("evals", 0, 0, 1, None, value)]))]
            )
            filler.finish()
        finally:
            filler.close()

    with pytest.raises(StateRefused, match="stamps records"):  # The brokers of the model do, whatever the topic.
        world.result_of(fill)
    assert [entry.value for entry in run.log("evals").entries] == [value]


def test_a_record_that_is_written_into_a_run_while_it_is_restored_is_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive_run(tmp_path, steps=1)
    store, cluster, unset = open_store(str(tmp_path)), world.begin(), provisioning.unset
    manifest = newest(store, "main")
    assert manifest is not None

    def write(*arguments: Any) -> None:
        cluster.append(("again.rollouts", 0), b"key", encode(example_rollout("other")), [], (-1000, 0), 0)
        unset(*arguments)

    monkeypatch.setattr(provisioning, "unset", write)
    with pytest.raises(StateRefused, match=r"again\.rollouts\[0\] ends at offset 9 but is archived up to 8"):
        world.result_of(lambda: restore(KAFKA, TopicsConfig(), store, manifest, "again"))
