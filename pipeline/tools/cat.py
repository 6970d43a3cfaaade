"""`rollstream cat`: the records of a topic, decoded, one a line, in the manner of kcat.

Reads committed records from a position to where the topic ends, or on and on; filters go by what the records say.
"""

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from confluent_kafka import OFFSET_END, Consumer, KafkaError, Message, TopicPartition

from pipeline.config import RunConfig
from pipeline.tables import printable
from pipeline.tools.plain import compact, decoded, key_text, plain, time_text
from topics import clients
from topics.catalogue import CATALOGUE, topic_name
from topics.config import KafkaConfig
from topics.errors import ConfigurationError, RecordError
from topics.headers import header_pairs
from topics.records import GroupCancelled, JournalRecord, PolicyManifest, Rollout, TrainingBatch

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Span:
    """Where to read."""

    partition: int | None = None
    start: str = "beginning"
    """beginning, end, an offset, -N for the last N of each partition, or s@MS for the first at that time or later."""
    until_ms: int | None = None
    """Records of this time or later are left out."""
    follow: bool = False
    """Whether to wait for more at the end."""


def cat(config: RunConfig, args: argparse.Namespace) -> int:
    """Print records. Exit code 0, whether or not there were any."""
    topic = resolve(config.run, args.topic)
    start, until_ms = args.offset, None if args.until is None else milliseconds(args.until)
    if start.startswith("e@"):
        start, until_ms = "beginning", _number(start[2:], "-o")
    if args.since is not None:
        start = f"s@{milliseconds(args.since)}"
    span = Span(partition=args.partition, start=start, until_ms=until_ms, follow=args.follow)
    wanted = _filter(args)
    show = _formatted(args.format, args.full) if args.format is not None else _line(args.json, args.full)
    left = args.count
    for message in messages(config.kafka, topic, span):
        if left == 0:
            break
        record = decoded(message.value())
        if not wanted(record):
            continue
        text = show(message, record)
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        if args.follow:
            sys.stdout.flush()
        left = None if left is None else left - 1
    return 0


def resolve(run: str, name: str) -> str:
    """Full name of a topic given as that, of any run, or as its name in the catalogue.

    Raises ConfigurationError for neither.
    """
    whole = any(name.endswith(f".{spec.name}") for spec in CATALOGUE)
    return name if whole else topic_name(run, name)


def messages(kafka: KafkaConfig, topic: str, span: Span) -> Iterator[Message]:
    """Committed records of a span, in offset order within each partition.

    Raises TopicError when the topic or position is missing, ConfigurationError for a senseless start.
    """
    clients.check_broker(kafka)
    consumer = clients.reader(kafka, fetch_wait_ms=50)
    try:
        partitions = range(clients.partitions_of(kafka, topic, consumer))
        if span.partition is not None and span.partition not in partitions:
            raise ConfigurationError(f"-p {span.partition}: {topic} has partitions 0 to {len(partitions) - 1}")
        numbers = list(partitions) if span.partition is None else [span.partition]
        starts = _starts(kafka, consumer, topic, numbers, span.start)
        clients.follow(consumer, kafka, [TopicPartition(topic, p, starts[p]) for p in numbers])
        pending, position = set(numbers), dict(starts)
        while pending or span.follow:
            for message in clients.with_unreadable(consumer, clients.at_hand(consumer, 500, _POLL_S), position):
                error, partition = message.error(), message.partition()
                if error is None:
                    if span.until_ms is not None and message.timestamp()[1] >= span.until_ms:
                        continue
                    yield message
                elif error.code() == KafkaError._PARTITION_EOF:
                    pending.discard(partition or 0)
                else:
                    clients.raise_for(error, f"reading {topic}")
    finally:
        consumer.close()


def _starts(kafka: KafkaConfig, consumer: Consumer, topic: str, numbers: list[int], start: str) -> dict[int, int]:
    bounds = {p: at for p, at in clients.bounds(kafka, topic).items() if p in numbers}
    if start == "beginning":
        return {p: low for p, (low, _high) in bounds.items()}
    if start == "end":
        return {p: high for p, (_low, high) in bounds.items()}
    if start.startswith("s@"):
        at = _number(start[2:], "-o")
        found = consumer.offsets_for_times([TopicPartition(topic, p, at) for p in numbers], 10.0)
        return {tp.partition: bounds[tp.partition][1] if tp.offset in (OFFSET_END, -1) else tp.offset for tp in found}
    offset = _number(start, "-o")
    if offset < 0 or start.startswith("-"):
        return _last(kafka, topic, bounds, -offset)
    return {p: max(low, min(offset, high)) for p, (low, high) in bounds.items()}


def _last(kafka: KafkaConfig, topic: str, bounds: dict[int, tuple[int, int]], count: int) -> dict[int, int]:
    """Offset of the last record but `count - 1` of each partition, or of its first.

    Offsets are not records: ends of transactions, aborted ones and compaction leave gaps. So a partition is read from
    further and further back until that many were seen.
    """
    starts = {p: high for p, (_low, high) in bounds.items()}
    waiting, back = ({p for p, (low, high) in bounds.items() if low < high} if count else set()), 2 * count
    while waiting:
        begins = {p: max(bounds[p][0], bounds[p][1] - back) for p in waiting}
        seen: dict[int, deque[int]] = {p: deque(maxlen=count) for p in waiting}
        for message in clients.read_to_end(kafka, topic, partitions=sorted(waiting), start=begins):
            seen[message.partition() or 0].append(message.offset() or 0)
        for p, offsets in seen.items():
            starts[p] = offsets[0] if len(offsets) == count else begins[p]
            if len(offsets) == count or begins[p] == bounds[p][0]:
                waiting.remove(p)
        back *= 8
    return starts


def _number(text: str, flag: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(
            f"{flag} {text!r} is no position; give beginning, end, an offset, -N, s@MS or e@MS (MS since 1970)"
        ) from None


def milliseconds(text: str) -> int:
    """A point in time: ISO 8601 (UTC unless it says otherwise), seconds since 1970, or -SECONDS for so long ago."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise ConfigurationError(
                f"{text!r} is no time; give one like 2026-01-31T12:00, seconds since 1970, or -60 for a minute ago"
            ) from None
        return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
    return int((seconds if seconds >= 0 else time.time() + seconds) * 1000)


# ---------------------------------------------------------------------- filters


def _filter(args: argparse.Namespace) -> Callable[[Any], bool]:
    wanted = {
        "environment": args.env,
        "example_id": args.example,
        "uid": args.uid,
        "policy_version": args.policy_version,
    }
    wanted = {name: value for name, value in wanted.items() if value is not None}
    return lambda record: all(value in facts(record)[name] for name, value in wanted.items())


def facts(record: Any) -> dict[str, set[Any]]:
    """What a record is about: environments, examples, uids and policy versions it names."""
    found: dict[str, set[Any]] = {"environment": set(), "example_id": set(), "uid": set(), "policy_version": set()}

    def note(part: Any, *uids: str) -> None:
        for name in found:
            if hasattr(part, name):
                found[name].add(getattr(part, name))
        found["uid"].update(uids)

    if isinstance(record, Rollout):
        note(record)
    elif isinstance(record, GroupCancelled):
        note(record, *record.uids)
    elif isinstance(record, TrainingBatch):
        for group in record.groups:
            note(group)
        found["uid"].update(record.uids)
    elif isinstance(record, JournalRecord):
        for part in (*record.drops, *record.finished_groups):
            note(part)
    elif isinstance(record, PolicyManifest):
        found["policy_version"].add(record.version)
    elif record is not None:
        note(record)
    return found


# ---------------------------------------------------------------------- output


def _headers(message: Message) -> dict[str, str]:
    try:
        return {name: key_text(value) for name, value in header_pairs(message)}
    except RecordError as error:
        return {"": str(error)}


def _line(as_json: bool, full: bool) -> Callable[[Message, Any], str]:
    def show(message: Message, record: Any) -> str:
        kind = type(record).__name__ if hasattr(record, "__dataclass_fields__") else ""
        value, at_ms = plain(record, full=full), message.timestamp()[1]
        headers = _headers(message)
        if as_json:
            envelope = {
                "topic": message.topic(),
                "partition": message.partition(),
                "offset": message.offset(),
                "timestamp_ms": at_ms,
                "key": key_text(message.key()),
                **({"headers": headers} if headers else {}),
                "type": kind,
                "value": value,
            }
            return compact(envelope) + "\n"
        told = f" {compact(headers)}" if headers else ""
        place = f"{message.topic()}[{message.partition()}] {message.offset()}"
        return f"{place} {time_text(at_ms)} {key_text(message.key())}{told} {kind} {compact(value)}\n"

    return show


def _formatted(template: str, full: bool) -> Callable[[Message, Any], str]:
    """As kcat: %s value, %S its size, %k key, %K its size, %t topic, %p partition, %o offset, %T time, %h headers."""
    fields: dict[str, Callable[[Message, Any], object]] = {
        "s": lambda _message, record: compact(plain(record, full=full)),
        "S": lambda message, _record: len(message.value() or b"") if message.value() is not None else -1,
        "k": lambda message, _record: key_text(message.key()),
        "K": lambda message, _record: len(message.key() or b"") if message.key() is not None else -1,
        "t": lambda message, _record: message.topic(),
        "p": lambda message, _record: message.partition(),
        "o": lambda message, _record: message.offset(),
        "T": lambda message, _record: message.timestamp()[1],
        "h": lambda message, _record: ",".join(f"{name}={value}" for name, value in _headers(message).items()),
        "%": lambda _message, _record: "%",
    }
    pieces: list[str | Callable[[Message, Any], object]] = []
    i = 0
    while i < len(template):
        sign, following = template[i], template[i + 1 : i + 2]
        if sign == "%" and following in fields and following:
            pieces.append(fields[following])
        elif sign == "%":
            raise ConfigurationError(f"-f: %{following} means nothing; formats are %{', %'.join(fields)}")
        elif sign == "\\" and following in _ESCAPES and following:
            pieces.append(_ESCAPES[following])
        else:
            pieces.append(sign)
            i -= 1
        i += 2
    return lambda message, record: "".join(p if isinstance(p, str) else str(p(message, record)) for p in pieces)
