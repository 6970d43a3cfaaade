"""`rollstream import`: copies chats, rollouts of the old form, or samples of a TransferQueue into a run or new files.

Every rollout read is written, already present, or reported with a reason; written rollouts are read back and counted.
A repeated import writes only what is missing, because uids and file names derive from the place in the source.
"""

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from rollstream.consumers.learner.pretrained import model_of, tokenizer_of
from rollstream.consumers.trainers.sample_rollouts import FieldNames, sample_rollouts
from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.text_tables import table
from rollstream.pipeline.config import RunConfig
from rollstream.producers.inference.chat.selection import chat_template
from rollstream.producers.inference.chat_files import chat_identity, chat_rollouts
from rollstream.producers.record_sender import limit_bytes_of
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, DeliveryError, RecordError
from rollstream.topics.files.atomic_files import replacing, write_json
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.client_calls import Stalled
from rollstream.topics.kafka.open_transactions import await_decided
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.transactions import TransactionalProducer, TransactionFailed, transactional_id
from rollstream.topics.records import Rollout, RolloutBatch
from rollstream.topics.wire.avro_files import (
    ContainerDamage,
    container_metadata,
    read_container,
    read_rollouts,
    write_rollouts,
)
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode_as, encode
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.rollout_batch_upcast import PLACE, RefusedRollout, batch_of, upcast

_RUN, _SAMPLES = "run:", "samples:"
_CHATS = ".jsonl"
_IDENTITY = "rollstream.source"
_ROLLOUTS_A_TRANSACTION = 1000
_SHOWN = 20
_UNKNOWN = "(unreadable)"
_ELSEWHERE = "it would be replaced, so import into another directory"


class SourceBatch(NamedTuple):
    """One batch of the old form, or its error."""

    place: str
    batch: RolloutBatch | None
    reason: str = ""
    records: int = 1
    """Number of batches lost by the error."""
    rollout: Rollout | None = None
    """In place of a batch, a rollout that needs no conversion."""


@dataclass(frozen=True)
class SourcePortion:
    """Batches of one file of the source, which become one file if the target is a directory."""

    name: str
    """Name of that file, relative to the target."""
    identity: str
    """Identity of the source's content; it changes when the content changes."""
    batches: Iterable[SourceBatch]


@dataclass
class ImportReport:
    """Counts of rollouts read, refused, written and found in the target."""

    batches: int = 0
    read: Counter[str] = field(default_factory=Counter)
    """Rollouts by environment, including refused ones. An unreadable batch counts as a rollout without environment."""
    refused: list[RefusedRollout] = field(default_factory=list)
    there: Counter[str] = field(default_factory=Counter)
    """Rollouts that an earlier import wrote."""
    written: Counter[str] = field(default_factory=Counter)
    in_target: Counter[str] = field(default_factory=Counter)
    """Rollouts of this source that were read back from the target; each counts once."""
    repeated: int = 0
    """Records of the target that repeat a rollout of this source."""

    @property
    def complete(self) -> bool:
        """Whether every rollout read is in the target, once."""
        return not self.refused and self.in_target == self.read and not self.repeated

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        environments = sorted({*self.read, *self.in_target})
        return {
            "batches": self.batches,
            "environments": {name: self._figures(name) for name in environments},
            "total": {name: sum(self._figures(e)[name] for e in environments) for name in self._figures("")},
            "repeated": self.repeated,
            "refused": [refused._asdict() for refused in self.refused],
            "complete": self.complete,
        }

    def _figures(self, environment: str) -> dict[str, int]:
        return {
            "read": self.read[environment],
            "refused": sum(refused.records for refused in self.refused if refused.environment == environment),
            "there_before": self.there[environment],
            "written": self.written[environment],
            "in_target": self.in_target[environment],
        }


class ImportTarget(Protocol):
    """Destination of rollouts."""

    def write(self, portion: SourcePortion, report: ImportReport, expected: dict[str, str]) -> None:
        """Write the rollouts of a portion that are not in the target; add the environment of each uid to `expected`."""

    def close(self, report: ImportReport, expected: dict[str, str]) -> None:
        """Finish, and count the `expected` rollouts in the target."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream import`."""
    set_handler(parser, import_rollouts, example="rollstream import chats.jsonl run:main", json=True)
    parser.add_argument("source", metavar="SOURCE", help="a .jsonl or .avro file, a directory of them, or samples:RUN")
    parser.add_argument("target", metavar="TARGET", help="run:NAME, or a directory for new files")
    parser.add_argument("--dry-run", action="store_true", help="read and count, and write nothing")
    parser.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="NAME=FIELD",
        help="with samples:RUN, the field that holds the reward, for instance, if it is not verl's (reward=rm_scores)",
    )


def import_rollouts(config: RunConfig, args: argparse.Namespace) -> int:
    """Import, and print the counts. Return 1 unless every rollout read is in the target; with --dry-run, return 1 if a
    rollout is refused."""
    target: ImportTarget
    if args.dry_run:
        target = _DryRunTarget()
    elif args.target.startswith(_RUN):
        target = _RunTarget(config.kafka, args.target[len(_RUN) :])
    else:
        target = _DirectoryTarget(Path(args.target), Path(args.source))
    report, expected = ImportReport(), dict[str, str]()
    for portion in _portions(config, args):
        target.write(portion, report, expected)
    target.close(report, expected)
    summary = {"source": args.source, "target": args.target, "dry_run": args.dry_run, **report.as_dict()}
    print(json.dumps(summary) if args.json else _text(report, args))
    return 0 if report.complete or (args.dry_run and not report.refused) else 1


def _text(report: ImportReport, args: argparse.Namespace) -> str:
    counts = report.as_dict()
    header = ("environment", "read", "refused", "there before", "written", "in the target")
    rows = [(name or _UNKNOWN, *row.values()) for name, row in counts["environments"].items()]
    rows.append(("total", *counts["total"].values()))
    lines = [table(header, rows), ""]
    for refused in report.refused[:_SHOWN]:
        print(f"  refused {refused.place}: {refused.reason}", file=sys.stderr)
    if len(report.refused) > _SHOWN:
        print(f"  and {len(report.refused) - _SHOWN} more; --json lists all", file=sys.stderr)
    total = counts["total"]
    if args.dry_run:
        lines.append(f"{total['read'] - total['refused']:,} of {total['read']:,} rollouts would be in {args.target}")
    elif report.complete:
        lines.append(f"all {total['read']:,} rollouts read are in {args.target}, each once")
    else:
        lines.append(f"{total['in_target']:,} of {total['read']:,} rollouts read are in {args.target}")
    if report.repeated:
        lines.append(f"{report.repeated:,} of its records repeat a rollout")
    return "\n".join(lines)


def _upcast(read: SourceBatch, report: ImportReport) -> tuple[Rollout, ...]:
    """Count a batch, add its invalid rollouts to the refused rollouts, and return its valid rollouts."""
    if read.rollout is not None:
        report.read[read.rollout.environment] += 1
        return (read.rollout,)
    if read.batch is None:
        report.read[""] += read.records
        report.refused.append(RefusedRollout(read.place, "", read.reason, read.records))
        return ()
    report.batches += 1
    upcasted = upcast(read.batch, read.place)
    report.read.update(rollout.environment for rollout in upcasted.rollouts)
    report.read.update(refused.environment for refused in upcasted.refused)
    report.refused += upcasted.refused
    return upcasted.rollouts


# ---------------------------------------------------------------------- sources


def _portions(config: RunConfig, args: argparse.Namespace) -> Iterable[SourcePortion]:
    if not args.source.startswith(_SAMPLES):
        return _file_portions(config, Path(args.source))
    run, names = args.source[len(_SAMPLES) :], FieldNames.of(args.field)
    topic = topic_name(run, "samples")
    ends = "-".join(str(end) for _partition, (_begin, end) in sorted(topic_admin.bounds(config.kafka, topic).items()))
    samples = (
        SourceBatch(sample.place, None, sample.reason, rollout=sample.rollout)
        for sample in sample_rollouts(config.kafka, run, names)
    )
    return [SourcePortion(f"{topic}.avro", f"{topic}@{ends}", samples)]


def _file_portions(config: RunConfig, source: Path) -> Iterator[SourcePortion]:
    """Yield a portion for each file of a directory, or for the one file."""
    if not source.exists():
        raise ConfigurationError(f"{source} does not exist; a source is a file or a directory")
    named = (path for path in source.rglob("*") if path.suffix in (".avro", _CHATS)) if source.is_dir() else [source]
    paths = sorted(path for path in named if path.is_file())
    if not paths:
        raise ConfigurationError(f"{source} has no file whose name ends in .avro or {_CHATS}")
    for path in paths:
        name = str(path.relative_to(source)) if source.is_dir() else path.name
        try:
            if path.suffix == _CHATS:
                identity = chat_identity(path, name)
                yield SourcePortion(f"{name}.avro", identity, _chats_in(config, path, identity))
                continue
            data = path.read_bytes()
        except OSError as error:
            yield SourcePortion(name, "", [SourceBatch(name, None, f"it cannot be read: {error.strerror or error}")])
            continue
        identity = f"{name}@{hashlib.sha256(data).hexdigest()[:16]}"
        yield SourcePortion(name, identity, _batches_in(data, identity))


def _chats_in(config: RunConfig, path: Path, identity: str) -> Iterator[SourceBatch]:
    """Yield the rollouts of a file of chats, rendered for the model of the run as its inference servers do."""
    template = chat_template(
        config.inference.chat_template,
        tokenizer_of(config.learner),
        config.learner.pretrained,
        config.inference.chat_template_kwargs,
    )
    for line in chat_rollouts(path, identity, template, model_of(config.learner).vocab_size):
        if line.reason:
            yield SourceBatch(line.place, None, line.reason)
        for rollout in line.rollouts:
            yield SourceBatch(line.place, None, rollout=rollout)


def _batches_in(data: bytes, identity: str) -> Iterator[SourceBatch]:
    for item in read_container(data):
        place = f"{identity}:{item.place}"
        if isinstance(item, ContainerDamage):
            yield SourceBatch(place, None, item.reason, item.records)
            continue
        try:
            yield SourceBatch(place, batch_of(item.values))
        except RecordError as error:
            yield SourceBatch(place, None, str(error))


# ---------------------------------------------------------------------- targets


class _DryRunTarget:
    """Target of --dry-run: reads and counts only."""

    def write(self, portion: SourcePortion, report: ImportReport, expected: dict[str, str]) -> None:
        for read in portion.batches:
            _upcast(read, report)

    def close(self, report: ImportReport, expected: dict[str, str]) -> None:
        pass


class _DirectoryTarget:
    """Writes a file for each portion atomically.

    A file of the same content stays unchanged. Files that no import made, such as the source itself, and files with
    rollouts that the source lacks are never replaced.
    """

    def __init__(self, directory: Path, source: Path) -> None:
        if source.is_dir() and directory.resolve().is_relative_to(source.resolve()):
            raise ConfigurationError(
                f"{directory} is inside {source}, and would be read as part of the source next time"
            )
        if directory.is_file():
            raise ConfigurationError(f"{directory} is a file; a target is a directory or run:NAME")
        self._directory = directory
        self._files: list[Path] = []

    def write(self, portion: SourcePortion, report: ImportReport, expected: dict[str, str]) -> None:
        rollouts = [rollout for read in portion.batches for rollout in _upcast(read, report)]
        if not rollouts:
            return
        path = self._directory / portion.name
        self._files.append(path)
        environments = [rollout.environment for rollout in rollouts]
        expected.update({rollout.uid: rollout.environment for rollout in rollouts})
        identity = _identity_in(path) if path.exists() else ""
        if identity == portion.identity:
            report.there.update(environments)
            return
        if identity:
            _check_contained(path, rollouts)
        with replacing(path) as file:
            write_rollouts(file, rollouts, {_IDENTITY: portion.identity})
        report.written.update(environments)

    def close(self, report: ImportReport, expected: dict[str, str]) -> None:
        uids = Counter(rollout.uid for path in self._files for rollout in _rollouts_in(path))
        _count(uids, report, expected)
        write_json(self._directory / "import.json", report.as_dict())


def _check_contained(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Raise ConfigurationError if a file has rollouts that its new content lacks, as one of another source has."""
    contents = {_content(rollout) for rollout in rollouts}
    if lost := sum(_content(rollout) not in contents for rollout in _rollouts_in(path)):
        raise ConfigurationError(
            f"{path} has {lost} rollouts that this source lacks, so it was made from another source, or this one has "
            f"lost them; {_ELSEWHERE}"
        )


def _identity_in(path: Path) -> str:
    """Return the identity that an import wrote into a file.

    Raises ConfigurationError if it has none, so that the file would be lost if it were replaced.
    """
    try:
        identity = container_metadata(path.read_bytes()).get(_IDENTITY, b"").decode()
    except (OSError, RecordError) as error:
        raise ConfigurationError(f"{path} is not a file of an earlier import ({error}); {_ELSEWHERE}") from error
    if not identity:
        raise ConfigurationError(f"{path} is not a file of an earlier import; {_ELSEWHERE}")
    return identity


def _rollouts_in(path: Path) -> list[Rollout]:
    """Return the rollouts that an import wrote. Raises RecordError if the file is damaged."""
    try:
        return read_rollouts(path.read_bytes())
    except RecordError as error:
        raise RecordError(f"{path}: {error}; restore it, or import into another directory") from error


class _RunTarget:
    """Writes rollouts to a run, except uids that are already there. Only one import writes into a run at a time."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        clients.check_broker(kafka)
        self._kafka = kafka
        self._topic = topic_name(run, "rollouts")
        topic_admin.partitions_of(kafka, self._topic)
        self._limit_bytes = limit_bytes_of(kafka)
        self._producer = TransactionalProducer(kafka, transactional_id(run, "import"))
        self._waiting: list[tuple[bytes, bytes, str]] = []
        try:
            # From here on no other import into the run can commit, so the uids read now stay complete.
            self._producer.start()
        except (TransactionFailed, Stalled) as error:
            raise _undelivered(error) from error
        # An open transaction of another writer hides rollouts that were imported after it began.
        await_decided(kafka, self._topic, "nothing was imported")
        self._there = {rollout.uid for rollout in _imported(kafka, self._topic)}

    def write(self, portion: SourcePortion, report: ImportReport, expected: dict[str, str]) -> None:
        for read in portion.batches:
            for rollout, key, value in self._fitting(_upcast(read, report), report):
                expected[rollout.uid] = rollout.environment
                if rollout.uid in self._there:
                    report.there[rollout.environment] += 1
                else:
                    self._waiting.append((key, value, rollout.environment))
            if len(self._waiting) >= _ROLLOUTS_A_TRANSACTION:
                self._commit(report)

    def _fitting(self, rollouts: Sequence[Rollout], report: ImportReport) -> list[tuple[Rollout, bytes, bytes]]:
        """Return the rollouts that fit into a record of the run; refuse larger rollouts, and lower the group sizes."""
        encoded = [
            (rollout, encode_key(rollout.environment, rollout.example_id), encode(rollout)) for rollout in rollouts
        ]
        large = [item for item in encoded if len(item[1]) + len(item[2]) > self._limit_bytes]
        if not large:
            return encoded
        for rollout, key, value in large:
            size = len(key) + len(value)
            why = f"it has {size} bytes and the run's limit is {self._limit_bytes}; raise kafka.max_record_bytes"
            report.refused.append(RefusedRollout(f"{rollout.extra[PLACE]}, {rollout.uid}", rollout.environment, why))
        gone = Counter((r.group_id, r.environment, r.example_id) for r, _key, _value in large)
        rest = [item for item in encoded if item not in large]
        made = [
            replace(r, group_size=r.group_size - gone[r.group_id, r.environment, r.example_id])
            for r, _key, _value in rest
        ]
        return [(r, key, encode(r)) for r, (_r, key, _value) in zip(made, rest, strict=True)]

    def _commit(self, report: ImportReport) -> None:
        """Send the waiting rollouts in one transaction. If it raises DeliveryError, none of them is visible."""
        if not self._waiting:
            return
        try:
            with self._producer.transaction() as transaction:
                for key, value, _environment in self._waiting:
                    transaction.send(self._topic, value, key)
        except (TransactionFailed, Stalled) as error:
            raise _undelivered(error) from error
        report.written.update(environment for _key, _value, environment in self._waiting)
        self._waiting = []

    def close(self, report: ImportReport, expected: dict[str, str]) -> None:
        self._commit(report)
        self._producer.close()
        # Markers of the last transaction may come late, and an open transaction of another writer hides our rollouts.
        await_decided(self._kafka, self._topic, "the rollouts were written, but not counted")
        uids = Counter(rollout.uid for rollout in _imported(self._kafka, self._topic))
        _count(uids, report, expected)


def _imported(kafka: KafkaConfig, topic: str) -> Iterator[Rollout]:
    """Yield the imported rollouts in `rollouts` of a run."""
    for message in read_to_end(kafka, topic):
        try:
            rollout = decode_as(Rollout, message.value)
        except RecordError:
            continue
        if PLACE in rollout.extra:
            yield rollout


def _content(rollout: Rollout) -> bytes:
    """Return a digest of what a rollout holds, without its names, which derive from its place."""
    digest = hashlib.sha256(encode_key(rollout.environment, rollout.example_id) + np.float32(rollout.reward).tobytes())
    for array in (rollout.tokens, rollout.loss_mask, rollout.logprobs, rollout.token_rewards):
        digest.update(array.tobytes())
    return digest.digest()


def _count(uids: Counter[str], report: ImportReport, expected: dict[str, str]) -> None:
    report.in_target.update(environment for uid, environment in expected.items() if uids[uid])
    report.repeated += sum(uids[uid] - 1 for uid in expected if uids[uid] > 1)


def _undelivered(error: TransactionFailed | Stalled) -> DeliveryError:
    return DeliveryError(
        f"rollouts were not written ({error}); what was committed before stays: run this again to go on from there"
    )
