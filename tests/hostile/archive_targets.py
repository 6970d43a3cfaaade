"""Targets that give hostile logs to an archive, its tables and the index of the page, or damage an archive's files."""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollstream.consumers.archive import manifest as manifests
from rollstream.consumers.archive import sql
from rollstream.consumers.archive.manifest import ArchiveManifest
from rollstream.consumers.archive.tables import ArchivedRecord
from rollstream.consumers.archive.writer import ArchiveWriter, check_files, records
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index import group_query, rollout_query, series
from rollstream.pipeline.index.group_query import GroupFilter
from rollstream.pipeline.index.indexed_run import RolloutPlace
from rollstream.pipeline.index.rollout_query import RolloutFilter
from rollstream.pipeline.index.run_index import RunIndex
from rollstream.pipeline.ui.server.answers import json_text
from rollstream.topics.errors import RollstreamError, TopicError
from rollstream.topics.files.stores import LocalStore
from rollstream.topics.wire.catalogue import CATALOGUE
from tests.hostile.flood_targets import Fates, Target
from tests.hostile.store_targets import damage
from tests.support.archived_run import archive_run
from tests.support.hostile_input import HostileInput
from tests.support.index_logs import RUN, MadeRun

_COMMITTED = 20_000
_CHUNK_EVERY = 500
"""Hostile records between two chunks of a sound run."""
_SHOWN = 300
"""Rollouts of a log that are shown in full."""
_ARCHIVED = tuple(spec for spec in CATALOGUE if spec.name != "weights")


def hostile_log(hostile: HostileInput, count: int) -> Iterator[ArchivedRecord]:
    """So many hostile records of every topic that is archived, and a sound run between them."""
    made = MadeRun(partitions=1, seed=hostile.random.randrange(2**32), groups=3)
    for number in range(count):
        if number % _CHUNK_EVERY == 0:
            for name, record in made.chunk():
                yield ArchivedRecord(name, 0, record.offset, record.timestamp_ms, record.key, record.value)
        spec = hostile.random.choice(_ARCHIVED)
        name, record = made.record(spec.name, 0, hostile.value(spec.values), hostile.key("env", "x"))
        yield ArchivedRecord(name, 0, record.offset, hostile.time_ms(), record.key, record.value)


def archive(hostile: HostileInput, count: int, folder: Path) -> Fates:
    """Archive a hostile log; every record is there as it came, and tables and the page's index hold what decodes."""
    store, ends = LocalStore(folder / "archive"), Counter[str]()
    writer = ArchiveWriter(store, RUN)
    for spec in _ARCHIVED:
        writer.begin(spec.name, f"{spec.name} of {RUN}", {0: 0})
    for entry in hostile_log(hostile, count):
        writer.add(entry)
        ends[entry.topic] = entry.offset + 1
        if ends.total() % _COMMITTED == 0:
            writer.commit({(topic, 0): end for topic, end in ends.items()})
    writer.commit({(topic, 0): end for topic, end in ends.items()})
    writer.close()
    current = manifests.newest(store, RUN)
    assert current is not None
    assert check_files(store, current) == current
    for spec in _ARCHIVED:
        actual = sum(1 for _record in records(store, current, spec.name, 0))
        assert actual == ends[spec.name], f"{spec.name} has {actual} records of {ends[spec.name]}"
    for table in ("log", "turns", "fates", "latest_steps"):
        assert sql.query(store, f"select count(*) from {table}").rows
    shown = indexed(hostile, folder, ends["rollouts"])
    assert shown, "no rollout was shown"
    in_no_table = writer.skipped.total
    return Counter({"in log alone": in_no_table, "in tables": count - in_no_table})


def indexed(hostile: HostileInput, folder: Path, rollouts: int) -> int:
    """Fill the index of an archive and ask it as the page does; return how many rollouts it showed in full."""
    config = RunConfig(run=RUN, data_dir=folder / "data")
    shown = 0
    with RunIndex.open(config, str(folder / "archive")) as index:
        index.catch_up()
        progress = index.progress()
        assert progress.offset_done == progress.offset_total
        first = rollout_query.page(index.db, RolloutFilter(), limit=1000)
        json_text((first, group_query.page(index.db, GroupFilter())))
        for question in (rollout_query.facets, group_query.spread, series.drops, series.weights):
            json_text(question(index.db))
        for learner in (None, "default", "nobody"):
            json_text(series.series(index.db, learner))
        for _ in range(_SHOWN):
            offset = hostile.random.randrange(rollouts)
            place = RolloutPlace(0, offset)
            with suppress(TopicError):
                json_text((index.details(place), group_query.estimators(index.db, place)))
                shown += 1
    return shown


# ---------------------------------------------------------------------- damaged files


def damaged_archive(hostile: HostileInput, count: int, folder: Path) -> Fates:
    """Damage one file of an archive in each turn, half the time with a manifest that agrees with it."""
    fates: Fates = Counter()
    sound, copy = folder / "sound", folder / "copy"
    archive_run(sound, 2)
    files = sorted(path.relative_to(sound) for path in sound.rglob("*") if path.is_file())
    for _ in range(count):
        shutil.copytree(sound, copy)
        path = copy / hostile.random.choice(files)
        path.write_bytes(damage(hostile, path, ("path", "begin", "position", "rows", "sha256", "files")))
        if path.suffix == ".parquet" and hostile.random.random() < 0.5:
            _agree(copy, path)
        try:
            _read_all(LocalStore(copy))
        except RollstreamError as error:
            fates["refused in a line" if "\n" not in str(error) else "refused at length"] += 1
        else:
            fates["read"] += 1
        shutil.rmtree(copy)
    return fates


def _agree(root: Path, path: Path) -> None:
    """Make the newest manifest agree with the present bytes of a file."""
    [newest] = sorted((root / "run=main" / "_manifests").glob("*.json"))[-1:]
    current, data = ArchiveManifest.from_json(newest.read_bytes()), path.read_bytes()
    name = str(path.relative_to(root))
    collected: dict[str, Any] = {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
    files = [replace(file, **collected) if file.path == name else file for file in current.files]
    newest.write_bytes(replace(current, files=tuple(files)).to_json())


def _read_all(store: LocalStore) -> None:
    """Read an archive as its tools do."""
    current = manifests.newest(store, "main")
    if current is None:
        return
    check_files(store, current)
    for name, topic in current.topics.items():
        for partition in topic.position:
            for entry in records(store, current, name, partition):
                assert entry.offset >= 0
    answer = sql.query(store, "select * from fates")
    json.dumps(answer.rows, default=str)


TARGETS = (
    Target("archive, SQL and index", archive, 600, 500, piece=50_000),
    Target("files of an archive", damaged_archive, 20, 1, piece=5_000),
)
