"""The archive's files and manifest, without a broker: exactly once whatever stops the writer, on every store."""

import contextlib
import hashlib
import itertools
import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.consumers.archive import manifest as manifests
from rollstream.consumers.archive.manifest import LOG, ArchivedFile, ArchivedTopic, ArchiveManifest
from rollstream.consumers.archive.tables import SCHEMAS, ArchivedRecord
from rollstream.consumers.archive.writer import OWN_FILES, ArchiveWriter, check_files, read_table, records
from rollstream.topics.errors import Fenced, StateRefused
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.files.stores import FsspecStore, LocalStore, Store, open_store
from rollstream.topics.records import BatchUse, Drop, LearnerStep, NamedArray, Rollout
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.archiving import DAY_MS, LOG_OF_TWO, Merging, Stopped, StoppingStore, archive_all, entry, held
from tests.support.journal_records import journal_record
from tests.support.runs import rollout


@st.composite
def topics(draw: st.DrawFn) -> dict[int, list[ArchivedRecord]]:
    """Two partitions with gaps, and records of several kinds and days."""
    collected = {}
    for partition in range(2):
        gaps = draw(st.lists(st.integers(1, 3), min_size=0, max_size=10))
        kinds = draw(st.lists(st.sampled_from(("rollout", "rollout", "mark", "poison", "none")), min_size=10))
        offsets = itertools.accumulate(gaps, initial=draw(st.integers(0, 4)))
        collected[partition] = [
            entry(partition, offset, kind, DAY_MS + offset // 5 * DAY_MS)
            for offset, kind in zip(offsets, kinds, strict=False)
        ]
    return collected


@settings(max_examples=15)
@given(
    log=topics(),
    at_once=st.integers(1, 8),
    compact=st.sampled_from(("never", "at once", "gradually")),
    stops=st.lists(st.tuples(st.integers(1, 25), st.booleans()), max_size=6),
)
def test_whatever_stops_the_archiver_no_record_is_missing_or_doubled(
    log: dict[int, list[ArchivedRecord]], at_once: int, compact: Merging, stops: list[tuple[int, bool]]
) -> None:
    store = StoppingStore()
    for changes, done_then in stops:
        store.stop_after(changes, done_then)
        with contextlib.suppress(Stopped):
            archive_all(store, log, at_once, compact)
        for partition, entries in held(store).items():
            assert entries == log[partition][: len(entries)], "at any moment it is a beginning of the log"
    store.stop_after(10**9, True)
    archive_all(store, log, at_once, compact)
    assert held(store) == log
    current = manifests.newest(store, "main")
    assert current is not None
    rows = [row for file in current.files_of("rollouts") for row in read_table(store, file).to_pylist()]
    expected = sorted((p, e.offset) for p, entries in log.items() for e in entries if _is_rollout(e))
    assert sorted((row["partition"], row["offset"]) for row in rows) == expected
    assert all(row["environment"] == f"env{row['offset'] % 2}" for row in rows)
    assert current.rows("turns") == len(expected)
    ArchiveWriter(store, "main")
    named = {file.path for file in current.files}
    assert {name for name in store.objects if name.endswith(".parquet")} == named, "what a crash left is gone"


def _is_rollout(e: ArchivedRecord) -> bool:
    return (e.value or b"").startswith(encode(rollout())[:10])


@pytest.fixture(params=["directory", "file-url", "memory-url", "local-by-fsspec"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "local-by-fsspec":
        # This store is used as object stores are, but leaves files to look at.
        yield FsspecStore(f"local://{tmp_path}/archive")
        return
    url = {
        "directory": str(tmp_path / "archive"),
        "file-url": f"file://{tmp_path}/archive",
        "memory-url": f"memory://{tmp_path.name}/archive",
    }[request.param]
    yield open_store(url)


def test_every_store_holds_the_archive_alike(store: Store) -> None:
    assert held(store) == {}
    archive_all(store, LOG_OF_TWO, 3, compact="never")
    assert held(store) == LOG_OF_TWO
    before = manifests.newest(store, "main")
    writer = ArchiveWriter(store, "main")
    assert writer.compact() > 0
    after = manifests.newest(store, "main")
    assert before is not None
    assert after is not None
    assert len(after.files_of(LOG)) == 2
    assert len(before.files_of(LOG)) > 2
    assert {t: after.rows(t) for t in SCHEMAS} == {t: before.rows(t) for t in SCHEMAS}
    assert held(store) == LOG_OF_TWO
    assert set(store.names("run=main/table=log")) == {file.path for file in after.files_of(LOG)}
    assert manifests.runs_of(store) == ["main"]


def test_a_name_is_created_once_on_every_store(store: Store) -> None:
    assert store.create("a/b", b"1")
    assert not store.create("a/b", b"2")
    assert store.read("a/b") == b"1"
    store.write("a/b", b"3")
    assert store.read("a/b") == b"3"
    assert store.names("a") == ["a/b"]
    store.delete("a/b")
    store.delete("a/b")
    assert store.names("a") == []
    with pytest.raises(FileNotFoundError):
        store.read("a/b")


def test_who_was_displaced_cannot_commit(store: Store) -> None:
    first = ArchiveWriter(store, "main")
    first.begin("rollouts", "id", {0: 0, 1: 0})
    first.add(entry(0, 0))
    second = ArchiveWriter(store, "main")
    second.begin("rollouts", "id", {0: 0, 1: 0})
    with pytest.raises(Fenced, match="another process is archiving run main"):
        first.commit({("rollouts", 0): 1})
    second.add(entry(0, 0))
    second.commit({("rollouts", 0): 1})
    assert held(store) == {0: [entry(0, 0)], 1: []}


def test_who_was_displaced_long_ago_can_neither_commit_nor_delete(store: Store) -> None:
    first = ArchiveWriter(store, "main")
    first.begin("rollouts", "id", {0: 0, 1: 0})
    first.add(entry(0, 0))
    second = ArchiveWriter(store, "main")
    second.begin("rollouts", "id", {0: 0, 1: 0})
    for offset in range(4):
        second.add(entry(0, offset))
        second.commit({("rollouts", 0): offset + 1})
    kept = store.names("")
    with pytest.raises(Fenced, match="another process is archiving run main"):
        manifests.sweep(store, first.manifest)
    assert store.names("") == kept
    with pytest.raises(Fenced, match="another process is archiving run main"):
        first.commit({("rollouts", 0): 1})
    assert manifests.newest(store, "main") == second.manifest
    second.add(entry(0, 4))
    second.commit({("rollouts", 0): 5})
    assert held(store) == {0: [entry(0, offset) for offset in range(5)], 1: []}


def test_who_takes_over_slowly_does_not_go_back_to_an_earlier_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    store = StoppingStore()
    create = store.create

    def late(name: str, data: bytes) -> bool:
        monkeypatch.setattr(store, "create", create)
        other = ArchiveWriter(store, "main")
        other.begin("rollouts", "id", {0: 0})
        for offset in range(4):
            other.add(entry(0, offset))
            other.commit({("rollouts", 0): offset + 1})
        return create(name, data)

    monkeypatch.setattr(store, "create", late)
    slow = ArchiveWriter(store, "main")
    assert slow.begin("rollouts", "id", {0: 0}) == {0: 4}
    assert held(store) == {0: [entry(0, offset) for offset in range(4)]}


def test_a_commit_whose_answer_was_lost_counts_when_it_is_tried_again() -> None:
    store = StoppingStore()
    mine = manifests.take_over(store, "main")
    data = replace(mine, generation=mine.generation + 1).to_json()
    store.objects[f"run=main/_manifests/{mine.generation + 1:012d}.json"] = data
    assert manifests.commit(store, mine).generation == mine.generation + 1


def test_a_failed_write_is_told_and_names_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    writer = ArchiveWriter(store, "main")
    writer.begin("rollouts", "id", {0: 0})
    writer.add(entry(0, 0))
    (tmp_path / "run=main" / "table=log").write_text("a file where a folder must be")
    with pytest.raises(StoreError, match=r"table=log.* cannot be written"):
        writer.commit({("rollouts", 0): 1})
    assert held(store) == {}


def test_a_file_that_was_changed_or_lost_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    archive_all(store, LOG_OF_TWO, 10, compact="never")
    current = manifests.newest(store, "main")
    assert current is not None
    assert check_files(store, current) == current
    path = tmp_path / current.files_of(LOG)[0].path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(StateRefused, match="SHA-256 differs"):
        check_files(store, current)
    path.unlink()
    with pytest.raises(StateRefused, match="is missing"):
        list(records(store, current, "rollouts", 0))


def test_records_of_a_file_are_decoded_a_few_at_a_time_if_they_are_large() -> None:
    values = [bytes([n]) * 2**20 for n in range(40)]
    store = archived(*(entry(0, n, "none")._replace(value=value) for n, value in enumerate(values)))
    current = manifests.newest(store, "main")
    assert current is not None
    tracemalloc.start()
    try:
        for record, value in zip(records(store, current, "rollouts", 0), values, strict=True):
            assert record.value == value
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


def test_topics_that_are_others_or_were_pruned_too_far_are_refused() -> None:
    store = StoppingStore()
    archive_all(store, LOG_OF_TWO, 10, compact="never")
    writer = ArchiveWriter(store, "main")
    assert writer.begin("rollouts", "id", {0: 10, 1: 0}) == {0: 10, 1: 10}
    with pytest.raises(StateRefused, match="created again"):
        writer.begin("rollouts", "another", {0: 3, 1: 3})
    with pytest.raises(StateRefused, match=r"rollouts\[0\] begins at offset 11, and was read up to 10"):
        writer.begin("rollouts", "id", {0: 11, 1: 3})


def file(begin: int, end: int, **changes: object) -> ArchivedFile:
    values = {"table": LOG, "topic": "rollouts", "partition": 0, "environment": "", "date": "2026-01-01"}
    values |= {"begin": begin, "end": end, "first": begin, "last": end - 1, "rows": 1, "size_bytes": 1, "sha256": ""}
    return ArchivedFile(**({"path": f"run=main/{begin}"} | values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "files",
    [
        (file(0, 5), file(6, 9)),
        (file(0, 5), file(4, 9)),
        (file(0, 5), file(5, 9), file(5, 9, path="run=main/twin")),
        (file(0, 5), file(5, 11)),
        (file(1, 9),),
        (file(0, 5), file(5, 9, path="run=main/0")),
    ],
)
def test_a_manifest_whose_files_leave_out_or_repeat_offsets_is_refused(files: tuple[ArchivedFile, ...]) -> None:
    topic = ArchivedTopic(topic_id="id", begin={0: 0}, position={0: 10})
    with pytest.raises(StateRefused):
        ArchiveManifest(run="main", topics={"rollouts": topic}, files=files).check()


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd", "../secret", "run=main/../other/1", "run=main/a/../../../b", "run=other/1", "run=main", "",
        "run=main//1", "./run=main/1", "run=main\\..\\1", "run=main/\0", "s3://bucket/1", "file:///etc/passwd",
    ],
)  # fmt: skip
def test_a_manifest_that_names_a_file_elsewhere_is_refused(path: str, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "archive")
    (tmp_path / "secret").write_bytes(b"not of this archive")
    topic = ArchivedTopic(topic_id="id", begin={0: 0}, position={0: 5})
    hostile = ArchiveManifest(run="main", topics={"rollouts": topic}, files=(file(0, 5, path=path),))
    store.write("run=main/_manifests/000000000001.json", hostile.to_json())
    with pytest.raises(StateRefused, match="which is outside run=main"):
        manifests.newest(store, "main")
    with pytest.raises(StateRefused, match="which is outside run=main"):
        ArchiveWriter(store, "main")
    assert (tmp_path / "secret").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"files": 7}, {"files": [7]}, {"files": [{}]}, {"topics": []}, {"topics": {"rollouts": {}}},
        {"generation": "x"}, {"run": 1},
        {"topics": {"rollouts": {"topic_id": "id", "begin": {"x": 0}, "position": {"0": 1}}}},
        {"topics": {"rollouts": {"topic_id": "id", "begin": {"0": 0}, "position": {"1": 1}}}}, {"writer": None},
        {"topics": {"rollouts": {"topic_id": "id", "begin": {"0": -1}, "position": {"0": 1}}}}, {"format": [1]},
    ],
)  # fmt: skip
def test_a_manifest_of_other_values_is_refused(change: dict[str, object]) -> None:
    store = StoppingStore()
    sound = json.loads(ArchiveManifest(run="main").to_json())
    store.objects["run=main/_manifests/000000000001.json"] = json.dumps(sound | change).encode()
    with pytest.raises(StateRefused):
        manifests.newest(store, "main")


def test_thousands_of_environments_share_files_and_each_keeps_its_name() -> None:
    """The most frequent environments have files of their own, and the others share one in each commit."""
    names = ["common"] * 5 + [f"rare{n}" for n in range(60)]
    entries = [entry(0, n)._replace(value=encode(rollout(f"u{n}", environment=name))) for n, name in enumerate(names)]
    store = archived(*entries)
    current = manifests.newest(store, "main")
    assert current is not None
    files = current.files_of("rollouts")
    assert len(files) == OWN_FILES + 1
    assert sum(f.environment == "common" and f.rows == 5 for f in files) == 1
    [shared] = [f for f in files if not f.environment]
    assert (shared.rows, shared.first, shared.last) == (60 - OWN_FILES + 1, 5 + OWN_FILES - 1, 64)
    assert "environment=__HIVE_DEFAULT_PARTITION__" in shared.path
    assert sorted((row["offset"], row["environment"]) for row in rows(store, "rollouts")) == [*enumerate(names)]
    writer = ArchiveWriter(store, "main")
    writer.add(entry(0, 65)._replace(value=encode(rollout("more", environment="rare0"))))
    writer.commit({("rollouts", 0): 66})
    writer.compact()
    assert len(rows(store, "rollouts")) == 66


def test_a_manifest_reads_back_and_one_of_a_newer_format_is_refused() -> None:
    topic = ArchivedTopic(topic_id="id", begin={0: 0, 10: 2}, position={0: 10, 10: 5})
    one = ArchiveManifest(
        run="main", generation=3, writer="w", topics={"rollouts": topic}, files=(file(0, 5), file(5, 9))
    )
    assert ArchiveManifest.from_json(one.to_json()) == one
    newer = json.dumps({**json.loads(one.to_json()), "format": 2}).encode()
    with pytest.raises(StateRefused, match="newer release"):
        ArchiveManifest.from_json(newer)
    with pytest.raises(StateRefused, match="cannot be read"):
        ArchiveManifest.from_json(b"{}")


def rows(store: Store, table: str) -> list[dict[str, object]]:
    current = manifests.newest(store, "main")
    assert current is not None
    return [row for f in current.files_of(table) for row in read_table(store, f).to_pylist()]


def archived(*entries: ArchivedRecord, arrays: bool = False) -> StoppingStore:
    store = StoppingStore()
    writer = ArchiveWriter(store, "main", arrays=arrays)
    for topic in {e.topic for e in entries}:
        writer.begin(topic, topic, {0: 0})
    for e in entries:
        writer.add(e)
    writer.commit({(e.topic, 0): e.offset + 1 for e in entries})
    return store


def test_a_rollout_has_its_columns_and_its_arrays_where_they_are_asked_for() -> None:
    subject: Rollout = rollout(
        "x", 2, reward_components={"exact": 1.0}, token_arrays={"v": NamedArray.of(rollout().logprobs)}
    )
    sent = ArchivedRecord("rollouts", 0, 0, 2 * DAY_MS, encode_key("env", "x"), encode(subject))
    [row] = rows(archived(sent), "rollouts")
    assert (row["run"], row["environment"], row["date"], row["timestamp_ms"]) == (
        "main",
        "env",
        "1970-01-03",
        2 * DAY_MS,
    )
    assert (row["uid"], row["reward"], row["length"], row["sampled"], row["tokens"]) == ("x-2", 1.0, 6, 3, None)
    assert row["reward_components"] == [{"key": "exact", "value": 1.0}]
    [row] = rows(archived(sent, arrays=True), "rollouts")
    assert row["tokens"] == subject.tokens.tolist()
    assert row["loss_mask"] == subject.loss_mask.tolist()
    assert row["logprobs"] == subject.logprobs.tolist()


@pytest.mark.parametrize("topic", ["unlabelled", "dead-letters"])
def test_a_rollout_that_waits_for_its_reward_or_was_refused_is_no_row_of_rollouts(topic: str) -> None:
    store = archived(ArchivedRecord(topic, 0, 0, 0, b"[]", encode(rollout())))
    assert rows(store, "rollouts") == []
    assert [row["topic"] for row in rows(store, "log")] == [topic]


def test_a_number_that_no_column_has_room_for_leaves_its_record_in_the_log_alone() -> None:
    """Sizes have 64 bits in records, and 32 in tables."""
    records = [rollout("x", 0, group_size=2**32 - 1), rollout("x", 1, branch=-(2**55)), rollout("x", 2)]
    store = archived(
        *(ArchivedRecord("rollouts", 0, offset, 0, b"[]", encode(record)) for offset, record in enumerate(records))
    )
    assert [row["uid"] for row in rows(store, "rollouts")] == ["x-2"]
    assert [row["value"] for row in rows(store, "log")] == [encode(record) for record in records]


def test_drops_steps_and_uses_are_rows() -> None:
    drop = Drop(offset=7, reason="late", uid="u", environment="env", policy_version=3, age_ms=9, tokens=4)
    journal = journal_record(drops=(drop,))
    use = BatchUse(batch_id="0-0", index_offset=0, rows=4, use="trained")
    step = LearnerStep(
        learner="main", step=1, input_run="main", uses=(use,),
        position=1, policy_version=2, params_digest="d", trained_total=4, skipped_total=0, metrics={"loss": 0.5},
    )  # fmt: skip
    store = archived(
        ArchivedRecord("journal", 0, 0, DAY_MS, b"[0]", encode(journal)),
        ArchivedRecord("steps", 0, 0, DAY_MS, b"[]", encode(step)),
    )
    [row] = rows(store, "drops")
    assert (row["rollout_offset"], row["reason"], row["environment"], row["age_ms"]) == (7, "late", "env", 9)
    [row] = rows(store, "steps")
    assert (row["step"], row["metrics"], row["environment"]) == (1, [{"key": "loss", "value": 0.5}], "")
    [row] = rows(store, "uses")
    assert (row["batch_id"], row["use"], row["rows"]) == ("0-0", "trained", 4)


@pytest.mark.parametrize("name", ["a/b c%", "ü=1", "x" * 5000, "../../up", "..", "."])
def test_an_environment_of_any_name_stays_within_the_archive(name: str, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "archive")
    writer = ArchiveWriter(store, "main")
    writer.begin("rollouts", "id", {0: 0})
    writer.add(entry(0, 0)._replace(value=encode(rollout(environment=name))))
    writer.commit({("rollouts", 0): 1})
    current = manifests.newest(store, "main")
    assert current is not None
    [files] = current.files_of("rollouts")
    assert (tmp_path / "archive" / files.path).resolve().is_relative_to(tmp_path / "archive" / "run=main")
    assert pq.read_table(tmp_path / "archive" / files.path, partitioning=None)["environment"].to_pylist() == [name]
    assert files.path.count("/") == 4


def test_a_file_that_is_no_parquet_though_its_digest_is_the_manifests_is_refused_in_a_line(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    archive_all(store, LOG_OF_TWO, 10, compact="never")
    current = manifests.newest(store, "main")
    assert current is not None
    file = current.files_of(LOG)[0]
    data = (tmp_path / file.path).read_bytes()[:-60] + bytes(52) + b"\x04\0\0\0PAR1"
    (tmp_path / file.path).write_bytes(data)
    changed = replace(file, sha256=hashlib.sha256(data).hexdigest())
    manifest = replace(current, files=tuple(changed if other == file else other for other in current.files))
    with pytest.raises(StateRefused, match="was not written by `rollstream archive`") as refused:
        check_files(store, manifest)
    assert "\n" not in str(refused.value)
    with pytest.raises(StateRefused, match="a file of the log of"):
        list(records(store, manifest, file.topic, file.partition))
