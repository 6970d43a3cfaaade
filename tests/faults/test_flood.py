"""Floods of hostile records on a real broker: no process ends or exceeds a limit of memory, every record has its place,
and groups of honest rollouts are batched whole.
"""

import os
import re
import time
from pathlib import Path

import pytest

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.topics.kafka import clients
from tests.faults.groupers import grouper
from tests.faults.promises import assert_promises, stop
from tests.support.command_line import answer_of
from tests.support.flood import GROUP_SIZE, Flood
from tests.support.runs import RealRun
from tests.support.settled import settled

SEED = int(os.environ.get("FLOOD_SEED", "1"))
RECORDS = int(os.environ.get("FLOOD_RECORDS", "100000"))
MOST_MIB = 300
"""Most memory of a grouping process, however far behind it is: one of four partitions had 184 MiB at 500,000."""


def peak_mib(pid: int) -> float:
    """The largest resident size that a process has had, in MiB."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) / 1024


def new_key(folder: Path) -> str:
    answer = answer_of(folder, "key", "new", str(folder / "grouping.pem"))
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def send(run: RealRun, flood: Flood) -> int:
    """Write the flood, each record with the key that it carries, if any; return the number of records."""
    producer = clients.producer(run.kafka)
    count = 0
    for record in flood:
        count += 1
        while True:
            try:
                producer.produce(run.topic("rollouts"), record.value, record.key)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    assert producer.flush(300) == 0
    return count


@pytest.mark.parametrize(
    "records", [pytest.param(4_000, id="4000"), pytest.param(RECORDS, marks=pytest.mark.long, id="long")]
)
@pytest.mark.long
def test_a_flood_of_hostile_records_ends_nothing_and_every_record_has_its_place(
    fault_run: RealRun, records: int
) -> None:
    run = fault_run
    run.grouping = GroupingConfig(
        batch_rollouts=16, max_batch_age_s=1.0, group_deadline_s=5.0, mark_keys=(new_key(run.directory),)
    )
    run.grouper = GrouperConfig(signing_key=f"file:{run.directory / 'grouping.pem'}")
    run.prepare()
    processes = [grouper(run, ordinal) for ordinal in range(2)]

    def all_alive() -> None:
        assert [process.poll() for process in processes] == [None, None], "a grouping process ended"

    flood = Flood(SEED, records)
    began = time.monotonic()
    count = send(run, flood)
    book = settled(run, 600.0 + records / 500, in_flight=0, meanwhile=all_alive)
    seconds = time.monotonic() - began
    peaks = [peak_mib(process.pid) for process in processes]
    print(
        f"flood: seed {SEED}, {count:,} records in {seconds:.0f} s, memory {max(peaks):.0f} MiB; "
        f"batched {book.batched:,}, dropped {book.dropped}, dead letters {book.dead_lettered:,}"
    )
    assert max(peaks) < MOST_MIB
    assert book.produced >= count, "and marks of the processes themselves"
    stop(*processes)
    assert_promises(run, modelled=False)
    batched = [uid for batch in run.read("batches") for uid in batch.uids]  # type: ignore[attr-defined]
    assert sorted(uid for uid in batched if uid.startswith("honest")) == sorted(flood.honest)
    assert len(flood.honest) % GROUP_SIZE == 0
