"""Runs that somebody may attest: one on a broker, and one whose log was made in memory and lies in an archive alone."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollstream.consumers.archive.tables import ArchivedRecord
from rollstream.consumers.archive.writer import ArchiveWriter
from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.process.bootstrap import initialise
from rollstream.consumers.grouping.testing import GroupingTestDriver
from rollstream.topics.files.stores import open_store
from rollstream.topics.kafka import provisioning
from rollstream.topics.records import BatchIndexEntry, BatchUse, LearnerStep, PolicyManifest, Rollout, TrainingBatch
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key, partition_of
from tests.support.planted import end
from tests.support.runs import SMALL_LEARNER, RealRun, rollout
from tests.support.settled import settled

GROUPS = 18
"""Groups of four that have both rewards; two more have one reward, and are dropped."""
STEPS = 2
"""Steps of 32 rollouts, so that eight rollouts are batched and not trained on."""


def trained_run(run: RealRun) -> RealRun:
    """Group rollouts and train on them with the commands of a user; all processes have ended on return."""
    provisioning.apply(run.kafka, run.topics, run.name)
    initialise(run.kafka, run.name, run.grouping, run.grouper)
    settings = {**SMALL_LEARNER, "learner__max_steps": STEPS}
    learner, grouper = run.start("learn", **settings), run.start("group")
    run.send(rollout(f"x{n}", member) for n in range(GROUPS) for member in range(4))
    run.send(rollout(f"same{n}", member, reward=1.0) for n in range(2) for member in range(4))
    run.send([rollout("open", 0), rollout("x0", 0)])
    assert learner.wait(600) == 0, run.log_of(learner)[-3000:]

    settled(run, batched=4 * GROUPS)
    end(grouper)
    return run


MADE_GROUPS = 5
"""Groups of four with both rewards in each partition of a made run; each step trains on one group of each partition."""


def made_archive(root: Path, run: str = "main", *, steps: int = STEPS) -> Path:
    """Archive a run of two partitions, each with a group of four in each batch, as roles would have written it.

    A step uses one batch of each partition.
    """
    topics: dict[tuple[str, int], list[tuple[int, int, Any]]] = {}
    batches: list[tuple[TrainingBatch, int]] = []
    for partition in range(2):
        driver = GroupingTestDriver(GroupingConfig(batch_rollouts=4), partition, 2, now_ms=1000)
        for number in range(MADE_GROUPS):
            for member in range(4):
                driver.pipe(_rollout_in(partition, f"x{number}", member), at_ms=1000 + number)
            driver.commit()
        for member in range(4):
            driver.pipe(_rollout_in(partition, "same", member, reward=1.0))
        driver.pipe(b"\xc3\x01 not a record")
        driver.pipe(_rollout_in(partition, "open", 0))
        # Ends of transactions leave gaps.
        topics["rollouts", partition] = [(r.offset, r.timestamp_ms, r) for r in driver.log]
        topics["journal", partition] = [(2 * n, 0, record) for n, record in enumerate(driver.journal)]
        topics["batches", partition] = [(2 * n, 0, batch) for n, batch in enumerate(driver.batches)]
        batches += [(batch, 2 * n) for n, batch in enumerate(driver.batches)]
    batches.sort(key=lambda placed: (placed[0].number, placed[0].partition))
    entries = [BatchIndexEntry.of(batch, offset) for batch, offset in batches]
    topics["batch-index", 0] = [(n, 0, entry) for n, entry in enumerate(entries)]
    topics["steps", 0] = [(n, 0, _made_step(run, n, entries)) for n in range(steps + 1)]
    manifests = (
        PolicyManifest(
            version=n,
            learner="default",
            step=n,
            epoch="e",
            tensors=(),
            chunks=(),
            digest=f"d{n}",
            params_digest=f"p{n}",
        )
        for n in range(steps + 1)
    )
    topics["policies", 0] = [(n, 0, manifest) for n, manifest in enumerate(manifests)]
    writer = ArchiveWriter(open_store(str(root)), run)
    for name in dict.fromkeys(name for name, _partition in topics):
        position = writer.begin(name, f"{name} of {run}", {p: 0 for topic, p in topics if topic == name})
        for (topic, partition), records in topics.items():
            for offset, time_ms, record in records if topic == name else ():
                if offset >= position[partition]:
                    plain = topic == "rollouts"
                    key, value = (record.key, record.value) if plain else (b"key", encode(record))
                    writer.add(ArchivedRecord(topic, partition, offset, time_ms, key, value))
    writer.commit({place: records[-1][0] + 1 for place, records in topics.items()})
    writer.close()
    return root


def _rollout_in(partition: int, name: str, member: int, **changes: object) -> Rollout:
    """A rollout of an example that belongs to a partition; its uid is as in `0x1-2`."""
    names = (f"{name}{suffix}" for suffix in itertools.count())
    example = next(each for each in names if partition_of(encode_key("env", each), 2) == partition)
    return rollout(example, member, uid=f"{partition}{name}-{member}", **changes)


def _made_step(run: str, number: int, entries: Sequence[BatchIndexEntry]) -> LearnerStep:
    taken = [(offset, entries[offset]) for offset in (2 * number - 2, 2 * number - 1) if number]
    uses = (BatchUse(batch_id=e.batch_id, index_offset=at, rows=e.rollouts, use="trained") for at, e in taken)
    return LearnerStep(
        learner="default",
        step=number,
        input_run=run,
        uses=tuple(uses),
        position=2 * number,
        policy_version=number,
        params_digest=f"p{number}",
        trained_total=8 * number,
        skipped_total=0,
    )
