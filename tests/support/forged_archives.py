"""Archives in which somebody changed records and made the manifest and its digests agree with the change."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rollstream.consumers.archive import manifest as manifests
from rollstream.consumers.archive.tables import ArchivedRecord
from rollstream.consumers.archive.writer import ArchiveWriter, records
from rollstream.topics.errors import RecordError
from rollstream.topics.files.stores import open_store
from rollstream.topics.records import LearnerStep, Rollout, TrainingBatch
from rollstream.topics.wire.codec import decode, encode
from rollstream.topics.wire.rl_examples import batch_digest

Forge = Callable[[ArchivedRecord], Iterable[ArchivedRecord]]


class Forgery(NamedTuple):
    """A change of the records of a run, and a part of what a check says of it."""

    forge: Forge
    problem: str
    contradicts: bool = True
    """Whether the archive contradicts itself, so that nobody can attest it."""


def forged(archive: Path, run: str, into: Path, forge: Forge) -> Path:
    """Write an archive with the records of another as `forge` returns them."""
    source = open_store(str(archive))
    current = manifests.newest(source, run)
    assert current is not None
    writer = ArchiveWriter(open_store(str(into)), run)
    for name, topic in current.topics.items():
        writer.begin(name, topic.topic_id, topic.begin)
        for partition in sorted(topic.position):
            for entry in records(source, current, name, partition):
                for changed in forge(entry):
                    writer.add(changed)
    writer.commit({(name, p): end for name, topic in current.topics.items() for p, end in topic.position.items()})
    writer.close()
    return into


def with_another_token(uid: str) -> Forge:
    """Change one token of a rollout."""

    def forge(entry: ArchivedRecord) -> list[ArchivedRecord]:
        record = _record(entry, "rollouts")
        if isinstance(record, Rollout) and record.uid == uid:
            tokens = np.where(np.arange(len(record.tokens)) == len(record.tokens) - 1, 9, record.tokens).astype("<i4")
            return [entry._replace(value=encode(replace(record, tokens=tokens)))]
        return [entry]

    return forge


def without_rollout(uid: str) -> Forge:
    """Leave a rollout out."""

    def forge(entry: ArchivedRecord) -> list[ArchivedRecord]:
        record = _record(entry, "rollouts")
        return [] if isinstance(record, Rollout) and record.uid == uid else [entry]

    return forge


def without_first_batch(entry: ArchivedRecord) -> list[ArchivedRecord]:
    """Leave batch 0-0 out."""
    return [] if _is_first_batch(entry) else [entry]


def with_first_batch_twice(entry: ArchivedRecord) -> list[ArchivedRecord]:
    """Add batch 0-0 a second time, in the gap that the end of its transaction left."""
    return [entry, entry._replace(offset=entry.offset + 1)] if _is_first_batch(entry) else [entry]


def with_other_advantages(entry: ArchivedRecord) -> list[ArchivedRecord]:
    """Double the advantages of batch 0-0, with a digest that agrees."""
    if not _is_first_batch(entry):
        return [entry]
    batch = _record(entry, "batches")
    assert isinstance(batch, TrainingBatch)
    changed = replace(batch, advantages=batch.advantages * np.float32(2))
    return [entry._replace(value=encode(replace(changed, digest=batch_digest(changed))))]


def with_advantages_apart_from_the_digest(entry: ArchivedRecord) -> list[ArchivedRecord]:
    """Double the advantages of batch 0-0, and leave its digest as it was."""
    if not _is_first_batch(entry):
        return [entry]
    batch = _record(entry, "batches")
    assert isinstance(batch, TrainingBatch)
    return [entry._replace(value=encode(replace(batch, advantages=batch.advantages * np.float32(2))))]


def without_step(step: int) -> Forge:
    """Leave a step out."""

    def forge(entry: ArchivedRecord) -> list[ArchivedRecord]:
        record = _record(entry, "steps")
        return [] if isinstance(record, LearnerStep) and record.step == step else [entry]

    return forge


def without_first_steps(entry: ArchivedRecord) -> list[ArchivedRecord]:
    """Leave the initial parameters and step 1 out."""
    record = _record(entry, "steps")
    return [] if isinstance(record, LearnerStep) and record.step <= 1 else [entry]


def with_uses_of_first_step(step: int) -> Forge:
    """Make a step use what step 1 used."""
    uses = []

    def forge(entry: ArchivedRecord) -> list[ArchivedRecord]:
        record = _record(entry, "steps")
        if isinstance(record, LearnerStep) and record.step == 1:
            uses.append(record.uses)
        if isinstance(record, LearnerStep) and record.step == step:
            return [entry._replace(value=encode(replace(record, uses=uses[-1])))]
        return [entry]

    return forge


def forgeries(trained: str, dropped: str) -> Mapping[str, Forgery]:
    """Changes of a run with two steps, in which `trained` is a rollout that was trained on and `dropped` one of a group
    without variance."""
    return {
        "token": Forgery(with_another_token(trained), f"tokens differ from rollout {trained} at"),
        "dropped": Forgery(with_another_token(dropped), "rollouts: the archive has", contradicts=False),
        "lost": Forgery(without_rollout(trained), "is batched but holds no record"),
        "batch": Forgery(without_first_batch, "batch 0-0 is in the journal but not in batches"),
        "batch twice": Forgery(with_first_batch_twice, "batch 0-0 is in batches twice"),
        "advantages": Forgery(with_other_advantages, "batch 0-0 row 0: advantages differ from rollout "),
        "digest": Forgery(
            with_advantages_apart_from_the_digest, "batch 0-0: its content does not match the digest it carries"
        ),
        "step": Forgery(without_step(1), "step 1 of learner default is missing"),
        "first steps": Forgery(without_first_steps, "step 1 of learner default is missing before step 2"),
        "step twice": Forgery(with_uses_of_first_step(2), "step 2 of learner default uses batch"),
    }


def _record(entry: ArchivedRecord, topic: str) -> object:
    """The record of an entry of a topic; None for entries of other topics and for bytes that are no record."""
    with contextlib.suppress(RecordError):
        return decode(entry.value) if entry.topic == topic else None
    return None


def _is_first_batch(entry: ArchivedRecord) -> bool:
    record = _record(entry, "batches")
    return isinstance(record, TrainingBatch) and record.batch_id == "0-0"
