"""Scores the rollouts of a run again and writes the rewards to `rescores`, each exactly once.

The rewards of a partition are written in the order of its rollouts, in transactions, so that the last record of a
rescoring shows where to continue after a crash. Only one rescoring of a run writes at a time: a second fences the
first.

The id of a rescoring follows from the verifier's code and version and from the environments, so an interrupted
rescoring can continue, and changed code makes a new rescoring.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from rollstream.pipeline.command_line.progress_bar import ProgressCallback
from rollstream.producers.environments.environment import Score
from rollstream.producers.environments.verifier_pool import VerifierFailed, VerifierPool
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, DeliveryError, RecordError
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.client_calls import Stalled
from rollstream.topics.kafka.open_transactions import await_decided
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.kafka.transactions import TransactionalProducer, TransactionFailed, transactional_id
from rollstream.topics.records import RescoredRollout, Rollout
from rollstream.topics.user_code import load_object, source_digest
from rollstream.topics.wire import codec
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key


@dataclass(frozen=True)
class Rescoring:
    """A verifier and the environments whose rollouts it scores."""

    verifier: str
    """Name by which it is imported: package.module:Class or path/to/file.py:Class."""
    digest: str
    """Digest of its source; "" if it has no source file."""
    version: str = ""
    """Version stated by the verifier, for changes outside its source, such as a new model behind its URL."""
    environments: tuple[str, ...] = ()
    """Environments whose rollouts are scored again; empty for all."""

    @cached_property
    def id(self) -> str:
        """Name of the rescoring on the log: twelve hexadecimal digits."""
        parts = (Path(self.verifier).name, self.digest, self.version, sorted(self.environments))
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=6).hexdigest()

    def includes(self, environment: str) -> bool:
        """Whether rollouts of an environment are scored again."""
        return not self.environments or environment in self.environments


def rescoring_of(verifier: str, environments: tuple[str, ...] = ()) -> Rescoring:
    """Import a verifier, and return its rescoring.

    The rescoring has the version in the verifier's attribute `version`, if there is one. Raises ConfigurationError if
    the verifier cannot be imported or called.
    """
    named = load_object(verifier, "--verifier names", "a verifier is named package.module:Class")
    if not callable(named):
        raise ConfigurationError(
            f"--verifier names {verifier!r}, which cannot be called; a verifier is a function of a rollout, or a class "
            f"with __call__(self, rollout)"
        )
    return Rescoring(verifier, source_digest(named), str(getattr(named, "version", "")), environments)


_AT_ONCE = 64
"""Rollouts given to the verifier at a time."""
_COMMIT_ROLLOUTS = 1000
_COMMIT_AFTER_S = 1.0


class ScoredRun(NamedTuple):
    """Result of `rescore`."""

    rollouts: int
    """Number of rollouts that this call scored."""
    ends: Mapping[int, int]
    """Offset up to which the rescoring has scored each partition."""


class _Placed(NamedTuple):
    message: KafkaRecord
    rollout: Rollout


def rescore(
    kafka: KafkaConfig,
    run: str,
    rescoring: Rescoring,
    pool: VerifierPool,
    progress: ProgressCallback = lambda _done, _all: None,
) -> ScoredRun:
    """Score every rollout, up to the present end of the log, that the rescoring has not scored.

    All rewards are visible when this returns. Raises ConfigurationError if the verifier cannot be imported,
    DeliveryError if rewards could not be written, and DeadlineExceeded if another transaction hides them for
    kafka.patience_s. Records already written stay, and another call continues after them.
    """
    clients.check_broker(kafka)
    topic = topic_name(run, "rollouts")
    bounds = topic_admin.bounds(kafka, topic)
    ends = sum(end for _begin, end in bounds.values())
    scored = passed = 0
    try:
        with closing(TransactionalProducer(kafka, transactional_id(run, "rescore"))) as producer:
            # From here on, no other rescoring has an open transaction, which would hide our own last records.
            producer.start()
            for partition, (begin, end) in bounds.items():
                start = max(begin, next_offset(kafka, run, rescoring.id, partition))
                progress(passed + start, ends)
                messages = read_to_end(kafka, topic, partitions=[partition], start=start)
                for records in _scored(messages, rescoring, pool):
                    _write(producer, topic_name(run, "rescores"), records)
                    scored += len(records)
                    progress(passed + records[-1].offset + 1, ends)
                passed += end
    except (TransactionFailed, Stalled) as error:
        raise DeliveryError(
            f"rewards of rescoring {rescoring.id} were not written ({error}); if no other rescoring of run {run} has "
            f"started, run it again: it goes on after the last reward on record"
        ) from error
    # Markers of the last transaction may come late; until then its rewards would count as missing.
    await_decided(kafka, topic_name(run, "rescores"), f"rewards of rescoring {rescoring.id} were written, but not used")
    progress(ends, ends)
    return ScoredRun(scored, {partition: end for partition, (_begin, end) in bounds.items()})


def rescored(
    kafka: KafkaConfig, run: str, rescoring_id: str, partition: int, skipped: SkippedRecords
) -> Iterator[RescoredRollout]:
    """Yield the records of a rescoring of one partition, in the order of its rollouts."""
    messages = read_to_end(kafka, topic_name(run, "rescores"), partitions=[partition])
    for _message, record in skipped.records(RescoredRollout, messages):
        if record.rescoring == rescoring_id:
            yield record


def next_offset(kafka: KafkaConfig, run: str, rescoring_id: str, partition: int) -> int:
    """Return the offset after the last rollout of a partition that a rescoring has scored."""
    records = rescored(kafka, run, rescoring_id, partition, SkippedRecords("rescore"))
    return max((record.offset + 1 for record in records), default=0)


def _scored(
    messages: Iterator[KafkaRecord], rescoring: Rescoring, pool: VerifierPool
) -> Iterator[list[RescoredRollout]]:
    """Yield lists of records, each of which is committed in one transaction."""
    records: list[RescoredRollout] = []
    since = time.monotonic()
    rollouts = _rollouts(messages, rescoring)
    while some := list(islice(rollouts, _AT_ONCE)):
        scores = asyncio.run(_scores(pool, [placed.rollout for placed in some]))
        records += [_record(rescoring, placed, score) for placed, score in zip(some, scores, strict=True)]
        if len(records) >= _COMMIT_ROLLOUTS or time.monotonic() - since > _COMMIT_AFTER_S:
            yield records
            records, since = [], time.monotonic()
    if records:
        yield records


def _rollouts(messages: Iterator[KafkaRecord], rescoring: Rescoring) -> Iterator[_Placed]:
    """Yield the rollouts to be scored. Skips other records, and damaged ones, which the ledger reports."""
    for message in messages:
        if codec.kind_of(message.value) != "Rollout":
            continue
        try:
            rollout = codec.decode_as(Rollout, message.value)
        except RecordError:
            continue
        if rescoring.includes(rollout.environment):
            yield _Placed(message, rollout)


async def _scores(pool: VerifierPool, rollouts: Sequence[Rollout]) -> list[Score | VerifierFailed]:
    async def score(rollout: Rollout) -> Score | VerifierFailed:
        try:
            return await pool(rollout)
        except VerifierFailed as failed:
            return failed

    return await asyncio.gather(*map(score, rollouts))


def _record(rescoring: Rescoring, placed: _Placed, score: Score | VerifierFailed) -> RescoredRollout:
    message, rollout = placed
    judged = (
        {"failure": str(score)}
        if isinstance(score, VerifierFailed)
        else {"reward": score.reward, "components": score.components}
    )
    return RescoredRollout(
        rescoring=rescoring.id,
        verifier=rescoring.verifier,
        verifier_digest=rescoring.digest,
        verifier_version=rescoring.version,
        partition=message.partition,
        offset=message.offset,
        uid=rollout.uid,
        environment=rollout.environment,
        reward_before=rollout.reward,
        wall_time=time.time(),
        **judged,
    )


def _write(producer: TransactionalProducer, topic: str, records: Sequence[RescoredRollout]) -> None:
    with producer.transaction() as transaction:
        for record in records:
            key = encode_key(record.rescoring, record.partition, record.offset)
            transaction.send(topic, encode(record), key, partition=record.partition)
