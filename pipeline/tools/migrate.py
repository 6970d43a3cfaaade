"""`rollstream migrate`: rollouts of the old form, from Avro files or a topic, into a run or into new files.

Every rollout read is written, was there already, or is named with the reason why not; what was written is read back and
counted. Run again it writes what is missing: names and files follow from the place a rollout was read at.
"""

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from consumers.buffers.files import replacing, write_json
from pipeline.config import RunConfig
from pipeline.tables import table
from producers.sending import RECORD_OVERHEAD_BYTES
from topics import clients
from topics.catalogue import topic_name
from topics.codec import decode_as, encode
from topics.config import KafkaConfig
from topics.containers import Damaged, container_metadata, read_container, read_rollouts, write_rollouts
from topics.errors import ConfigurationError, DeliveryError, RecordError
from topics.keys import encode_key
from topics.open_transactions import await_decided
from topics.records import Rollout, RolloutBatch
from topics.transactional_ids import transactional_id
from topics.upcast import PLACE, Refused, batch_of, upcast

_TOPIC = "topic:"
_RUN = "run:"
_IDENTITY = "rollstream.source"
_BATCHES_A_FILE = 1000
_ROLLOUTS_A_TRANSACTION = 1000
_SHOWN = 20
_UNKNOWN = "(unreadable)"


class Read(NamedTuple):
    """One batch of the old form, or what is wrong with it."""

    place: str
    batch: RolloutBatch | None
    reason: str = ""


@dataclass(frozen=True)
class Piece:
    """What becomes one file of the target, where the target is a directory."""

    name: str
    """Of that file, relative to the target."""
    identity: str
    """Changes when the source does."""
    batches: Iterable[Read]


@dataclass
class Report:
    """What was read, and what became of it."""

    batches: int = 0
    read: Counter[str] = field(default_factory=Counter)
    """Rollouts, by environment; those refused too. A batch that cannot be read counts as one of none."""
    refused: list[Refused] = field(default_factory=list)
    there: Counter[str] = field(default_factory=Counter)
    """Rollouts that an earlier migration wrote."""
    written: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    """Rollouts of this source that the target has, read back; each once."""
    repeated: int = 0
    """Records of the target that hold a rollout of this source once more."""

    @property
    def complete(self) -> bool:
        """Whether every rollout read is in the target, once."""
        return not self.refused and self.found == self.read and not self.repeated

    def as_dict(self) -> dict[str, Any]:
        """As programs read it."""
        environments = sorted({*self.read, *self.found})
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
            "refused": sum(refused.environment == environment for refused in self.refused),
            "there_before": self.there[environment],
            "written": self.written[environment],
            "in_target": self.found[environment],
        }


class Target(Protocol):
    """Where rollouts go."""

    def write(self, piece: Piece, report: Report, expected: dict[str, str]) -> None:
        """Write what the piece holds and the target lacks; `expected` gets the environment of each uid."""

    def close(self, report: Report, expected: dict[str, str]) -> None:
        """Finish, and count in the target what of `expected` is there."""


def migrate(config: RunConfig, args: argparse.Namespace) -> int:
    """Migrate, and print what became of each rollout; 1 unless every one that was read is in the target."""
    pieces = _topic_pieces(config.kafka, args.source[len(_TOPIC) :]) if args.source.startswith(_TOPIC) else None
    pieces = _file_pieces(Path(args.source)) if pieces is None else pieces
    target: Target
    if args.dry_run:
        target = _Nothing()
    elif args.target.startswith(_RUN):
        target = _Run(config.kafka, args.target[len(_RUN) :])
    elif args.target.startswith(_TOPIC):
        raise ConfigurationError(f"{args.target}: rollouts go to a run, named run:NAME, or to a directory")
    else:
        target = _Directory(Path(args.target), Path(args.source))
    report, expected = Report(), dict[str, str]()
    for piece in pieces:
        target.write(piece, report, expected)
    target.close(report, expected)
    told = {"source": args.source, "target": args.target, "dry_run": args.dry_run, **report.as_dict()}
    print(json.dumps(told) if args.json else _text(report, args))
    return 0 if report.complete or (args.dry_run and not report.refused) else 1


def _text(report: Report, args: argparse.Namespace) -> str:
    told = report.as_dict()
    header = ("environment", "read", "refused", "there before", "written", "in the target")
    rows = [(name or _UNKNOWN, *figures.values()) for name, figures in told["environments"].items()]
    rows.append(("total", *told["total"].values()))
    lines = [table(header, rows), ""]
    for refused in report.refused[:_SHOWN]:
        print(f"  refused {refused.place}: {refused.reason}", file=sys.stderr)
    if len(report.refused) > _SHOWN:
        print(f"  and {len(report.refused) - _SHOWN} more; --json lists all", file=sys.stderr)
    total = told["total"]
    if args.dry_run:
        lines.append(f"{total['read'] - total['refused']:,} of {total['read']:,} rollouts would be in {args.target}")
    elif report.complete:
        lines.append(f"every one of {total['read']:,} rollouts read is in {args.target}, once")
    else:
        lines.append(f"{total['in_target']:,} of {total['read']:,} rollouts read are in {args.target}")
    if report.repeated:
        lines.append(f"{report.repeated:,} records of it hold a rollout once more")
    return "\n".join(lines)


def _upcast(read: Read, report: Report) -> tuple[Rollout, ...]:
    """The sound rollouts of a batch; it is counted, and the others are named."""
    if read.batch is None:
        report.read[""] += 1
        report.refused.append(Refused(read.place, "", read.reason))
        return ()
    report.batches += 1
    made = upcast(read.batch, read.place)
    report.read.update(rollout.environment for rollout in made.rollouts)
    report.read.update(refused.environment for refused in made.refused)
    report.refused += made.refused
    return made.rollouts


# ---------------------------------------------------------------------- sources


def _file_pieces(source: Path) -> Iterator[Piece]:
    """The files of a directory, or the one file."""
    if not source.exists():
        raise ConfigurationError(f"{source} does not exist; a source is a file, a directory or topic:NAME")
    paths = sorted(source.rglob("*.avro")) if source.is_dir() else [source]
    if not paths:
        raise ConfigurationError(f"{source} holds no file that ends in .avro")
    for path in paths:
        name = str(path.relative_to(source)) if source.is_dir() else path.name
        try:
            data = path.read_bytes()
        except OSError as error:
            yield Piece(name, "", [Read(name, None, f"it cannot be read: {error.strerror or error}")])
            continue
        identity = f"{name}@{hashlib.sha256(data).hexdigest()[:16]}"
        yield Piece(name, identity, _batches_in(data, identity))


def _batches_in(data: bytes, identity: str) -> Iterator[Read]:
    for item in read_container(data):
        place = f"{identity}:{item.place}"
        if isinstance(item, Damaged):
            for number in range(item.records):
                yield Read(f"{place}+{number}", None, item.reason)
            continue
        try:
            yield Read(place, batch_of(item.values))
        except RecordError as error:
            yield Read(place, None, str(error))


def _topic_pieces(kafka: KafkaConfig, topic: str) -> Iterator[Piece]:
    """The records of a topic up to where it ends now, by partition, so many a piece."""
    clients.check_broker(kafka)
    for partition in range(clients.partitions_of(kafka, topic)):
        messages = clients.read_to_end(kafka, topic, partitions=[partition])
        numbered = groupby(messages, key=lambda message: (message.offset() or 0) // _BATCHES_A_FILE)
        for number, together in numbered:
            batches = [_batch_of_message(message, f"{topic}:{partition}:{message.offset()}") for message in together]
            name = f"{topic}/{partition}-{number * _BATCHES_A_FILE}.avro"
            yield Piece(name, f"{name}@{batches[0].place}-{batches[-1].place}", batches)


def _batch_of_message(message: Message, place: str) -> Read:
    try:
        return Read(place, decode_as(RolloutBatch, message.value()))
    except RecordError as error:
        return Read(place, None, str(error))


# ---------------------------------------------------------------------- targets


class _Nothing:
    """For --dry-run: reads and counts."""

    def write(self, piece: Piece, report: Report, expected: dict[str, str]) -> None:
        for read in piece.batches:
            _upcast(read, report)

    def close(self, report: Report, expected: dict[str, str]) -> None:
        pass


class _Directory:
    """A file for each piece, whole or not there; one that was made from the same source is left as it is."""

    def __init__(self, directory: Path, source: Path) -> None:
        if source.is_dir() and directory.resolve().is_relative_to(source.resolve()):
            raise ConfigurationError(f"{directory} lies in {source}, and would be read as a part of it next time")
        if directory.is_file():
            raise ConfigurationError(f"{directory} is a file; a target is a directory or run:NAME")
        self._directory = directory
        self._files: list[Path] = []

    def write(self, piece: Piece, report: Report, expected: dict[str, str]) -> None:
        rollouts = [rollout for read in piece.batches for rollout in _upcast(read, report)]
        if not rollouts:
            return
        expected.update((rollout.uid, rollout.environment) for rollout in rollouts)
        path = self._directory / piece.name
        self._files.append(path)
        environments = Counter(rollout.environment for rollout in rollouts)
        if path.exists() and _identity(path) == piece.identity:
            report.there.update(environments)
            return
        with replacing(path) as file:
            write_rollouts(file, rollouts, {_IDENTITY: piece.identity})
        report.written.update(environments)

    def close(self, report: Report, expected: dict[str, str]) -> None:
        uids = Counter(rollout.uid for path in self._files for rollout in read_rollouts(path.read_bytes()))
        _count(uids, report, expected)
        write_json(self._directory / "migration.json", report.as_dict())


def _identity(path: Path) -> str:
    try:
        return container_metadata(path.read_bytes()).get(_IDENTITY, b"").decode()
    except RecordError:
        return ""


class _Run:
    """`rollouts` of a run. Uids that are there are not sent again; one migration into a run at a time."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        clients.check_broker(kafka)
        self._kafka = kafka
        self._topic = topic_name(run, "rollouts")
        clients.partitions_of(kafka, self._topic)
        self._limit_bytes = kafka.max_record_bytes - RECORD_OVERHEAD_BYTES
        self._producer: Producer = clients.transactional_producer(kafka, transactional_id(run, "migrate"))
        self._failed: list[KafkaError] = []
        self._waiting: list[tuple[bytes, bytes, str]] = []
        try:
            # From here on no other migration into the run can commit, so what is read now stays true.
            self._producer.init_transactions(kafka.patience_s)
        except KafkaException as exception:
            raise _undelivered(exception.args[0]) from exception
        # An open transaction of whoever else writes here hides what was migrated since it began.
        await_decided(kafka, self._topic, "nothing was migrated")
        self._there = _migrated(kafka, self._topic)

    def write(self, piece: Piece, report: Report, expected: dict[str, str]) -> None:
        for read in piece.batches:
            for rollout, key, value in self._fitting(_upcast(read, report), report):
                expected[rollout.uid] = rollout.environment
                if rollout.uid in self._there:
                    report.there[rollout.environment] += 1
                else:
                    self._waiting.append((key, value, rollout.environment))
            if len(self._waiting) >= _ROLLOUTS_A_TRANSACTION:
                self._commit(report)

    def _fitting(self, rollouts: Sequence[Rollout], report: Report) -> list[tuple[Rollout, bytes, bytes]]:
        """Those that a record of the run may hold; their groups are smaller by the others."""
        encoded = [
            (rollout, encode_key(rollout.environment, rollout.example_id), encode(rollout)) for rollout in rollouts
        ]
        large = [item for item in encoded if len(item[1]) + len(item[2]) > self._limit_bytes]
        if not large:
            return encoded
        for rollout, key, value in large:
            size = len(key) + len(value)
            why = f"it has {size} bytes and the run takes {self._limit_bytes}; raise kafka.max_record_bytes"
            report.refused.append(Refused(f"{rollout.extra[PLACE]}, {rollout.uid}", rollout.environment, why))
        gone = Counter((r.group_id, r.environment, r.example_id) for r, _key, _value in large)
        rest = [item for item in encoded if item not in large]
        made = [
            replace(r, group_size=r.group_size - gone[r.group_id, r.environment, r.example_id])
            for r, _key, _value in rest
        ]
        return [(r, key, encode(r)) for r, (_r, key, _value) in zip(made, rest, strict=True)]

    def _commit(self, report: Report) -> None:
        """Send what waits, in one transaction. Raises DeliveryError, and then none of it is visible."""
        if not self._waiting:
            return
        try:
            self._producer.begin_transaction()
            for key, value, _environment in self._waiting:
                self._produce(key, value)
            self._producer.commit_transaction(self._kafka.patience_s)
        except KafkaException as exception:
            raise _undelivered(exception.args[0]) from exception
        if self._failed:
            raise _undelivered(self._failed[0])
        report.written.update(environment for _key, _value, environment in self._waiting)
        self._waiting = []

    def _produce(self, key: bytes, value: bytes) -> None:
        clients.produce(self._producer, self._topic, value, key, on_delivery=self._delivered)

    def _delivered(self, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            self._failed.append(error)

    def close(self, report: Report, expected: dict[str, str]) -> None:
        self._commit(report)
        _count(_migrated(self._kafka, self._topic), report, expected)


def _migrated(kafka: KafkaConfig, topic: str) -> Counter[str]:
    """How often each rollout that was migrated is in `rollouts` of a run, by uid."""
    found: Counter[str] = Counter()
    for message in clients.read_to_end(kafka, topic):
        try:
            rollout = decode_as(Rollout, message.value())
        except RecordError:
            continue
        if PLACE in rollout.extra:
            found[rollout.uid] += 1
    return found


def _count(uids: Counter[str], report: Report, expected: dict[str, str]) -> None:
    report.found.update(environment for uid, environment in expected.items() if uids[uid])
    report.repeated += sum(uids[uid] - 1 for uid in expected if uids[uid] > 1)


def _undelivered(error: KafkaError) -> DeliveryError:
    return DeliveryError(
        f"rollouts were not written ({error.name()}: {error.str()}); what was committed before stays, and run again "
        "it goes on from there"
    )
