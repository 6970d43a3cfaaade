"""Both layers of an index say of each record of a run with faults what the ledger says, at many moments of the run."""

import os
import random
from contextlib import closing
from pathlib import Path

from rollstream.pipeline.audit.partition_journal import PartitionJournal
from rollstream.pipeline.index import fates, sqlite_files
from rollstream.pipeline.index.indexed_run import IndexedRun, RolloutPlace
from rollstream.pipeline.index.writer import IndexWriter
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import JournalRecord
from rollstream.topics.records.fates import BATCHED
from rollstream.topics.wire.validation import decode_journal
from tests.simulation.installation import World, installed
from tests.simulation.schedule import PARTITIONS, RUN, run_schedule
from tests.support.index_logs import Chunk, ListedLog, indexed

_SCHEDULES, _MOMENTS = 12, 8


def test_an_index_and_the_ledger_agree_at_many_moments_of_runs_with_faults(tmp_path: Path) -> None:
    first = 0 if os.environ.get("CI") else random.randrange(2**32)
    print(f"schedules from seed {first} on")
    world = World()
    for seed in range(first, first + _SCHEDULES):
        with installed(world):
            outcome = run_schedule(world, seed)
        records = visible(world)
        times = sorted({record.timestamp_ms for _name, record in records})
        moments = sorted(random.Random(seed).sample(times, min(_MOMENTS, len(times))))
        for number, moment in enumerate([*moments, times[-1]]):
            log = [(name, record) for name, record in records if record.timestamp_ms <= moment]
            with indexed(tmp_path / str(seed), ListedLog(log, run=RUN)) as run:
                named = says(run, log)
                assert named == by_ledger(log), f"{outcome} at {moment}"
            if number % 2:
                path = tmp_path / str(seed) / "index.sqlite"
                with IndexWriter(path, ListedLog(log, run=RUN)) as writer, closing(sqlite_files.reader(path)) as db:
                    writer.catch_up()
                    rows = db.execute("select partition, offset, fate from rollouts").fetchall()
                    assert {RolloutPlace(p, offset): fates.NAMES[fate] for p, offset, fate in rows} == named
        assert BATCHED in named.values()


def visible(world: World) -> Chunk:
    """The records of the last schedule that a reader of committed records gets."""
    return [
        (name, KafkaRecord(f"{RUN}.{name}", partition, entry.offset, entry.timestamp_ms, entry.key, entry.value))
        for name in ("rollouts", "journal", "batches", "batch-index", "policies")
        for partition, log in enumerate(world.cluster.topics[f"{RUN}.{name}"])
        for entry in log.visible(0, log.end, True)[0]
    ]


def says(run: IndexedRun, log: Chunk) -> dict[RolloutPlace, str]:
    """The fate of each record according to the index, whose batch is one that carries the record."""
    answer = {}
    for place in (RolloutPlace(record.partition, record.offset) for name, record in log if name == "rollouts"):
        fate = run.fate(place)
        answer[place] = fate.name
        if fate.name == BATCHED and all(map(run.entry, fate.batch_ids)):
            assert run.batch_of(place, fate) is not None, place
    return answer


def by_ledger(log: Chunk) -> dict[RolloutPlace, str]:
    """The fate of each record according to the ledger's reading of the journals."""
    journals = [PartitionJournal(partition) for partition in range(PARTITIONS)]
    for name, record in log:
        if name == "journal":
            journal: JournalRecord = decode_journal(record.value)
            journals[record.partition].read(journal)
    answer = {}
    for place in (RolloutPlace(record.partition, record.offset) for name, record in log if name == "rollouts"):
        known = journals[place.partition]
        answer[place] = known.fate(place.offset) or (fates.IN_FLIGHT if place.offset < known.position else fates.UNREAD)
    return answer
