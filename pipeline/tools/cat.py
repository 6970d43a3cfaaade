"""`rollstream cat`: prints the records of a topic, decoded, one per line, like kcat.

Reads committed records, or all records, from one position to another or to the end of the topic, or follows the topic.
Filters apply to the records' content.
"""

import argparse
import itertools
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rollstream.pipeline.command_line.command_parser import positive_count, set_handler
from rollstream.pipeline.command_line.plain_values import compact, decoded, key_text, plain, time_text
from rollstream.pipeline.command_line.text_tables import printable
from rollstream.pipeline.config import RunConfig
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, RecordError
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.reader import Reader, read_to_end, silence
from rollstream.topics.kafka.records import KafkaRecord, Place
from rollstream.topics.records import GroupCancelled, JournalRecord, PolicyManifest, Rollout, TrainingBatch
from rollstream.topics.wire.catalogue import CATALOGUE, topic_name

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class ReadSpan:
    """The range of records to read."""

    partition: int | None = None
    start: str = "beginning"
    """beginning, end, an offset, -N for the last N of each partition, or s@MS for the first record at that time or
    later."""
    stop: int | None = None
    """Offset at which reading of each partition stops."""
    until_ms: int | None = None
    """Skip records appended at this time or later."""
    follow: bool = False
    """Whether to wait for more records at the end."""
    isolation: str = "read_committed"
    """read_uncommitted also yields records of transactions that are open or were aborted."""

    def holds(self, record: KafkaRecord) -> bool:
        """Whether a record is before the end of the span."""
        early = self.until_ms is None or record.timestamp_ms < self.until_ms
        return early and (self.stop is None or record.offset < self.stop)


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream cat`."""
    set_handler(parser, cat, example="rollstream cat rollouts --run main -o -10 --env dsort3", json=True)
    parser.add_argument("topic", metavar="TOPIC", help="name of the topic, with or without the run's name")
    parser.add_argument("-p", dest="partition", type=int, metavar="N", help="this partition only")
    parser.add_argument(
        "-o",
        dest="offset",
        default="beginning",
        metavar="OFFSET",
        help="where to begin: beginning, end, an offset, -N for the last N of each partition, or s@MS for a time; e@MS "
        "ends at a time (default: %(default)s)",
    )
    parser.add_argument("--to", type=int, metavar="OFFSET", help="only records before this offset of each partition")
    parser.add_argument("-c", dest="count", type=positive_count, metavar="N", help="at most N records")
    parser.add_argument(
        "-f",
        dest="format",
        metavar="FORMAT",
        help="as in kcat: %%s value, %%S its size, %%k key, %%K its size, %%t topic, %%p partition, %%o offset, "
        "%%T time, %%h headers",
    )
    parser.add_argument("--follow", action="store_true", help="wait for more records at the end")
    parser.add_argument(
        "--uncommitted", action="store_true", help="also records of transactions that are open or were aborted"
    )
    parser.add_argument("--full", action="store_true", help="arrays and bytes in full, not summarized")
    parser.add_argument("--env", metavar="NAME", help="only records about this environment")
    parser.add_argument("--example", metavar="ID", help="only records about this example")
    parser.add_argument("--uid", help="only records about this rollout")
    parser.add_argument("--policy-version", type=int, metavar="V", help="only records about this policy version")
    parser.add_argument("--since", metavar="TIME", help="from this time on: ISO 8601, seconds since 1970, -SECONDS ago")
    parser.add_argument("--until", metavar="TIME", help="only records before this time")


def cat(config: RunConfig, args: argparse.Namespace) -> int:
    """Print records. Exit code 0, even if there are none."""
    topic = resolve(config.run, args.topic)
    start, until_ms = args.offset, None if args.until is None else milliseconds(args.until)
    if start.startswith("e@"):
        start, until_ms = "beginning", _number(start[2:], "-o")
    if args.since is not None:
        start = f"s@{milliseconds(args.since)}"
    span = ReadSpan(
        partition=args.partition,
        start=start,
        stop=args.to,
        until_ms=until_ms,
        follow=args.follow,
        isolation="read_uncommitted" if args.uncommitted else "read_committed",
    )
    wanted = _filter(args)
    show = _formatted(args.format, args.full) if args.format is not None else _line(args.json, args.full)
    decoding = ((message, decoded(message.value)) for message in messages(config.kafka, topic, span))
    matching = ((message, record) for message, record in decoding if wanted(record))
    for message, record in itertools.islice(matching, args.count):
        text = show(message, record)
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        if args.follow:
            sys.stdout.flush()
    return 0


def resolve(run: str, name: str) -> str:
    """Return the full name of a topic, given either its full name (in any run) or its name in the catalogue.

    Raises ConfigurationError for any other name.
    """
    whole = any(name.endswith(f".{spec.name}") for spec in CATALOGUE)
    return name if whole else topic_name(run, name)


def messages(kafka: KafkaConfig, topic: str, span: ReadSpan) -> Iterator[KafkaRecord]:
    """Yield the records of a span, in offset order within each partition.

    Without `follow`, this ends at the ends that the partitions had at their first records, even while producers go on
    writing. Raises TopicError if the topic or position is missing, ConfigurationError for an invalid start, and
    BrokerUnavailable if a partition returns neither a record nor its end for kafka.patience_s, unless it is followed.
    """
    clients.check_broker(kafka)
    with Reader(kafka, fetch_wait_ms=50, isolation=span.isolation) as reader:
        partitions = range(reader.partitions_of(topic))
        if span.partition is not None and span.partition not in partitions:
            raise ConfigurationError(f"-p {span.partition}: {topic} has partitions 0 to {len(partitions) - 1}")
        numbers = list(partitions) if span.partition is None else [span.partition]
        starts = _starts(kafka, reader, topic, numbers, span)
        reader.assign({(topic, p): starts[p] for p in numbers})
        pending = {(topic, p) for p in numbers}
        first_ends: dict[Place, int] = {}
        deadline = time.monotonic() + kafka.patience_s
        while pending:
            polled, ends = reader.poll(500, _POLL_S)
            records = [record for record in polled if (topic, record.partition) in pending]
            partitions_left = len(pending)
            for record in records:
                if span.holds(record):
                    yield record
                if span.stop is not None and record.offset >= span.stop - 1:
                    pending.discard((topic, record.partition))
            for place, end in ends.items():
                # The last offsets may hold no record: transaction markers and compaction leave gaps.
                if not span.follow or (span.stop is not None and end >= span.stop):
                    pending.discard(place)
            if not span.follow:
                pending.difference_update(reader.passed_ends(pending, first_ends, records))
                # Set after the records were yielded, because whoever prints them may pause for long.
                if records or len(pending) < partitions_left:
                    deadline = time.monotonic() + kafka.patience_s
                elif time.monotonic() > deadline:
                    raise silence(kafka, topic, pending, kafka.patience_s)


def _starts(kafka: KafkaConfig, reader: Reader, topic: str, numbers: list[int], span: ReadSpan) -> dict[int, int]:
    start, bounds = span.start, reader.bounds(topic, numbers)
    if start == "beginning":
        return {p: low for p, (low, _high) in bounds.items()}
    if start == "end":
        return {p: high for p, (_low, high) in bounds.items()}
    if start.startswith("s@"):
        offsets = reader.offsets_at(topic, numbers, _number(start[2:], "-o"))
        return {p: bounds[p][1] if offset is None else offset for p, offset in offsets.items()}
    offset = _number(start, "-o")
    if offset < 0 or start.startswith("-"):
        return _last(kafka, topic, bounds, -offset, span.isolation)
    return {p: max(low, min(offset, high)) for p, (low, high) in bounds.items()}


def _last(
    kafka: KafkaConfig,
    topic: str,
    bounds: dict[int, tuple[int, int]],
    count: int,
    isolation: str,
) -> dict[int, int]:
    """Return, for each partition, the offset of the `count`-th record from its end, or of its first record.

    Transaction markers, aborted transactions and compaction leave gaps between offsets. So reading starts further and
    further back until the partition yields `count` records.
    """
    starts = {p: high for p, (_low, high) in bounds.items()}
    waiting, back = ({p for p, (low, high) in bounds.items() if low < high} if count else set()), 2 * count
    while waiting:
        begins = {p: max(bounds[p][0], bounds[p][1] - back) for p in waiting}
        seen: dict[int, deque[int]] = {p: deque(maxlen=count) for p in waiting}
        for message in read_to_end(kafka, topic, partitions=sorted(waiting), start=begins, isolation=isolation):
            seen[message.partition].append(message.offset)
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
            f"{flag} {text!r} is not a position; give beginning, end, an offset, -N, s@MS or e@MS (MS since 1970)"
        ) from None


def milliseconds(text: str) -> int:
    """Parse a time: ISO 8601 (UTC by default), seconds since 1970, or -SECONDS, relative to now."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise ConfigurationError(
                f"{text!r} is not a time; give 2026-01-31T12:00, seconds since 1970, or -60 for a minute ago"
            ) from None
        return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
    if not math.isfinite(seconds):
        raise ConfigurationError(f"{text!r} is not a time; give a finite number of seconds")
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
    """Environments, examples, uids and policy versions that a record names."""
    names: dict[str, set[Any]] = {"environment": set(), "example_id": set(), "uid": set(), "policy_version": set()}

    def note(part: Any, *uids: str) -> None:
        for name, values in names.items():
            if hasattr(part, name):
                values.add(getattr(part, name))
        names["uid"].update(uids)

    if isinstance(record, Rollout):
        note(record)
    elif isinstance(record, GroupCancelled):
        note(record, *record.uids)
    elif isinstance(record, TrainingBatch):
        for group in record.groups:
            note(group)
        names["uid"].update(record.uids)
    elif isinstance(record, JournalRecord):
        for part in (*record.drops, *record.finished_groups):
            note(part)
    elif isinstance(record, PolicyManifest):
        names["policy_version"].add(record.version)
    elif record is not None:
        note(record)
    return names


# ---------------------------------------------------------------------- output


def _headers(message: KafkaRecord) -> dict[str, str]:
    try:
        return {name: key_text(value) for name, value in message.header_pairs()}
    except RecordError as error:
        return {"": str(error)}


def _line(as_json: bool, full: bool) -> Callable[[KafkaRecord, Any], str]:
    def show(message: KafkaRecord, record: Any) -> str:
        kind = type(record).__name__ if hasattr(record, "__dataclass_fields__") else ""
        value, at_ms = plain(record, full=full), message.timestamp_ms
        headers = _headers(message)
        if as_json:
            envelope = {
                "topic": message.topic,
                "partition": message.partition,
                "offset": message.offset,
                "timestamp_ms": at_ms,
                "key": key_text(message.key),
                **({"headers": headers} if headers else {}),
                "type": kind,
                "value": value,
            }
            return compact(envelope) + "\n"
        header_text = f" {compact(headers)}" if headers else ""
        place = f"{message.topic}[{message.partition}] {message.offset}"
        return f"{place} {time_text(at_ms)} {key_text(message.key)}{header_text} {kind} {compact(value)}\n"

    return show


def _formatted(template: str, full: bool) -> Callable[[KafkaRecord, Any], str]:
    """Return a function that formats records as kcat does; `rollstream cat --help` lists the fields."""
    fields: dict[str, Callable[[KafkaRecord, Any], object]] = {
        "s": lambda _message, record: compact(plain(record, full=full)),
        "S": lambda message, _record: len(message.value or b"") if message.value is not None else -1,
        "k": lambda message, _record: key_text(message.key),
        "K": lambda message, _record: len(message.key or b"") if message.key is not None else -1,
        "t": lambda message, _record: message.topic,
        "p": lambda message, _record: message.partition,
        "o": lambda message, _record: message.offset,
        "T": lambda message, _record: message.timestamp_ms,
        "h": lambda message, _record: ",".join(f"{name}={value}" for name, value in _headers(message).items()),
        "%": lambda _message, _record: "%",
    }
    pieces: list[str | Callable[[KafkaRecord, Any], object]] = []
    i = 0
    while i < len(template):
        sign, following = template[i], template[i + 1 : i + 2]
        if sign == "%" and following in fields and following:
            pieces.append(fields[following])
        elif sign == "%":
            raise ConfigurationError(f"-f: %{following} is not a format; formats are %{', %'.join(fields)}")
        elif sign == "\\" and following in _ESCAPES and following:
            pieces.append(_ESCAPES[following])
        else:
            pieces.append(sign)
            i -= 1
        i += 2
    return lambda message, record: "".join(p if isinstance(p, str) else str(p(message, record)) for p in pieces)
