"""An archive that grows is read to its end, whenever it grows."""

from pathlib import Path

from rollstream.consumers.archive import manifest as manifests
from rollstream.consumers.archive.log_source import POLL_BYTES, ArchiveSource
from rollstream.consumers.archive.tables import ArchivedRecord
from rollstream.consumers.archive.writer import ArchiveWriter
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index import rollout_query
from rollstream.pipeline.index.indexed_run import RolloutPlace
from rollstream.pipeline.index.run_index import RunIndex
from rollstream.topics.files.stores import open_store
from tests.support.archived_run import ROWS, archive_run
from tests.support.index_logs import RUN, Chunk, MadeRun


def append(root: Path, records: Chunk) -> None:
    """Archive those of these records that are not archived yet."""
    writer = ArchiveWriter(open_store(str(root)), RUN)
    partitions: dict[str, set[int]] = {}
    for name, record in records:
        partitions.setdefault(name, set()).add(record.partition)
    position = {name: writer.begin(name, f"id of {name}", dict.fromkeys(held, 0)) for name, held in partitions.items()}
    for name, r in records:
        if r.offset >= position[name][r.partition]:
            writer.add(ArchivedRecord(name, r.partition, r.offset, r.timestamp_ms, r.key, r.value))
    writer.commit({(name, record.partition): record.offset + 1 for name, record in records})
    writer.close()


def offsets(source: ArchiveSource, *, rollouts: bool, most: int = 100) -> list[int]:
    return [record.offset for record in source.poll(rollouts, most, 0.0)]


def test_what_an_archive_gains_while_a_file_is_read_is_read_after_it(tmp_path: Path) -> None:
    run = MadeRun()
    records = [run.record("rollouts", 0, b"value") for _ in range(8)]
    append(tmp_path, records[:5])
    source = ArchiveSource(open_store(str(tmp_path)), RUN)
    source.begin({})
    assert offsets(source, rollouts=True, most=2) == [0, 1]
    append(tmp_path, records)
    source.bounds()
    assert offsets(source, rollouts=True) == [2, 3, 4]
    assert offsets(source, rollouts=True) == [5, 6, 7]
    assert source.ends() == {("rollouts", 0): 8}


def test_a_poll_of_an_archive_returns_no_more_bytes_than_its_bound_and_one_record_however_large_records_are(
    tmp_path: Path,
) -> None:
    run, size = MadeRun(), 2**20
    append(tmp_path, [run.record("batches", n % 2, bytes([n]) * size) for n in range(60)])
    source = ArchiveSource(open_store(str(tmp_path)), RUN)
    source.begin({})
    polls = []
    while polled := source.poll(False, 4000, 0.0):
        polls.append(sum(len(record.value or b"") for record in polled))
    assert sum(polls) == 60 * size
    assert max(polls) < POLL_BYTES + size
    assert source.ends() == {("batches", 0): 30, ("batches", 1): 30}


def test_an_archive_whose_files_are_merged_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    run = MadeRun()
    records = [run.record("rollouts", 0, b"value") for _ in range(6)]
    for count in range(1, 7):
        append(tmp_path, records[:count])
    source = ArchiveSource(open_store(str(tmp_path)), RUN)
    source.begin({})
    assert offsets(source, rollouts=True, most=2) == [0, 1]
    writer = ArchiveWriter(open_store(str(tmp_path)), RUN)
    assert writer.compact() > 0
    writer.close()
    shown = source.record("rollouts", 0, 5)
    assert shown is not None
    assert shown.offset == 5
    source.begin({("rollouts", 0): 2})
    assert offsets(source, rollouts=True, most=1) == [2]
    assert offsets(source, rollouts=True) == [3, 4, 5]
    assert source.ends() == {("rollouts", 0): 6}


def test_a_topic_that_an_archive_gains_is_read(tmp_path: Path) -> None:
    run = MadeRun()
    rollouts, evals = [run.record("rollouts", 0, b"value")], [run.record("evals", 0, b"value")]
    append(tmp_path, rollouts)
    source = ArchiveSource(open_store(str(tmp_path)), RUN)
    source.begin({("rollouts", 0): 1})
    append(tmp_path, [*rollouts, *evals])
    assert source.bounds() == {("rollouts", 0): (0, 1), ("evals", 0): (0, 1)}
    assert offsets(source, rollouts=True) == []
    assert offsets(source, rollouts=False) == [0]


def test_an_archive_that_was_empty_is_indexed_like_any_other(tmp_path: Path) -> None:
    """It has more rollouts than are read at once, and the journal is indexed after those that it names."""
    root, run = tmp_path / "archive", MadeRun(partitions=4, groups=64)
    manifests.take_over(open_store(str(root)), RUN)
    with RunIndex.open(RunConfig(run=RUN, data_dir=tmp_path / "early"), str(root)) as early:
        early.catch_up()
        append(root, [record for _ in range(3) for record in run.chunk()])
        early.catch_up()
        fates = rollout_query.facets(early.db)["fates"]
    with RunIndex.open(RunConfig(run=RUN, data_dir=tmp_path / "late"), str(root)) as late:
        late.catch_up()
        assert fates == rollout_query.facets(late.db)["fates"]


def test_a_rollout_that_another_process_has_indexed_meanwhile_is_shown(tmp_path: Path) -> None:
    root, config = tmp_path / "archive", RunConfig(data_dir=tmp_path)
    archive_run(root, 1)
    with RunIndex.open(config, str(root)) as index, RunIndex.open(config, str(root), fills=False) as shown:
        index.catch_up()
        archive_run(root, 2)
        index.catch_up()
        assert shown.details(RolloutPlace(0, ROWS))["tokens"]["ids"]
