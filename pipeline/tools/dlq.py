"""`rollstream dlq`: dead letters listed, shown, and sent again, mended where a script can mend them.

Sending again is one transaction: the records go where they were, to `rollouts` or `unlabelled`, and a note of each to
`dead-letters`, all or nothing, so that no letter is sent twice however often it is asked for.
"""

import argparse
import runpy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message

from pipeline.config import RunConfig
from pipeline.ledger import REDRIVEN
from pipeline.tables import clipped, printable, table
from pipeline.tools.plain import compact, decoded, key_text, plain, tell, time_text
from topics import clients
from topics.catalogue import name_in_run, topic_name
from topics.codec import decode, encode
from topics.config import KafkaConfig
from topics.errors import ConfigurationError, DeliveryError, RecordError, TopicError
from topics.headers import header_pairs
from topics.keys import encode_key
from topics.open_transactions import await_decided
from topics.records import GroupCancelled, Rollout, TrajectoryRecord
from topics.skipped import SkippedRecords
from topics.trajectories import from_record
from topics.transactional_ids import transactional_id
from topics.validation import cancellation_problems, problems

_WIDTH = 44
SOURCES = ("rollouts", "unlabelled")
"""Topics whose records become dead letters."""
Place = tuple[int, int]
Mended = Rollout | GroupCancelled | TrajectoryRecord
Fix = Callable[[bytes | None, bytes | None, dict[str, str]], "Mended | bytes | None"]
"""A script's function `fix(value, key, headers)`: a record, its bytes, or None for a letter to be left."""


@dataclass(frozen=True)
class Letter:
    """One dead letter."""

    place: Place
    """Partition and offset in dead-letters."""
    partition: int
    """Of the topic it was in."""
    source: int
    """Offset there."""
    at_ms: int
    key: bytes | None
    value: bytes | None
    headers: dict[str, str]
    redriven: str = ""
    """When it was sent again, if it was."""

    @property
    def name(self) -> str:
        """PARTITION:OFFSET in dead-letters, by which it is asked for."""
        return f"{self.place[0]}:{self.place[1]}"

    @property
    def reason(self) -> str:
        return self.headers.get("__streams.errors.message", "")

    @property
    def topic(self) -> str:
        """Where it was: rollouts, or unlabelled."""
        return name_in_run(self.headers.get("__streams.errors.topic", "rollouts"))

    @property
    def complete(self) -> bool:
        """Whether it carries its bytes: one too large keeps their digest alone."""
        return "rollstream.value.sha256" not in self.headers and "rollstream.key.sha256" not in self.headers

    def as_dict(self) -> dict[str, Any]:
        """As programs read it."""
        return {
            "letter": self.name,
            "partition": self.partition,
            "offset": self.source,
            "time": time_text(self.at_ms),
            "key": key_text(self.key),
            "size_bytes": len(self.value or b""),
            "reason": self.reason,
            "redriven": self.redriven or None,
        }


def dlq(config: RunConfig, args: argparse.Namespace) -> int:
    """List, show or redrive; 1 when a letter asked for was not sent."""
    clients.check_broker(config.kafka)
    skipped = SkippedRecords(logged=False)
    letters = read(config.kafka, config.run, skipped)
    tell(skipped)
    if args.action == "ls":
        return _list(letters, args)
    chosen = _chosen(letters, args.letter, config.run)
    if args.action == "show":
        return _show(chosen, args)
    return _redrive(config, chosen if args.letter else [letter for letter in chosen if not letter.redriven], args)


def read(kafka: KafkaConfig, run: str, skipped: SkippedRecords | None = None) -> list[Letter]:
    """Every dead letter of a run, oldest first, with whether it was sent again; `skipped` gets what is none."""
    letters: dict[Place, Letter] = {}
    skipped = SkippedRecords(logged=False) if skipped is None else skipped
    for message in clients.read_to_end(kafka, topic_name(run, "dead-letters")):
        with skipped.passing(message):
            headers = {name: (value or b"").decode(errors="replace") for name, value in header_pairs(message)}
            if REDRIVEN in headers:
                of = (message.partition() or 0, _number(headers, REDRIVEN))
                if of in letters:
                    letters[of] = replace(letters[of], redriven=time_text(message.timestamp()[1]))
                continue
            letter = Letter(
                place=(message.partition() or 0, message.offset() or 0),
                partition=_number(headers, "__streams.errors.partition"),
                source=_number(headers, "__streams.errors.offset"),
                at_ms=message.timestamp()[1],
                key=message.key(),
                value=message.value(),
                headers=headers,
            )
            if letter.topic not in SOURCES:
                raise RecordError(f"a letter of {letter.topic[:100]!r}, whose letters lie elsewhere")
            letters[letter.place] = letter
    return sorted(letters.values(), key=lambda letter: (letter.at_ms, letter.place))


def _number(headers: Mapping[str, str], name: str) -> int:
    text = headers.get(name, "")
    if not (text.isascii() and text.isdecimal()):
        raise RecordError(f"header {name} is {text[:40]!r}, and no number: nobody of ours wrote it")
    return int(text)


def _chosen(letters: Sequence[Letter], wanted: Sequence[str], run: str) -> list[Letter]:
    by_name = {letter.name: letter for letter in letters}
    for name in wanted:
        if name not in by_name:
            raise TopicError(
                f"run {run} has no dead letter {name}; `rollstream dlq ls` lists them, by PARTITION:OFFSET in "
                f"dead-letters"
            )
    return [by_name[name] for name in wanted] if wanted else list(letters)


def _list(letters: Sequence[Letter], args: argparse.Namespace) -> int:
    if args.json:
        print(compact([letter.as_dict() for letter in letters]))
        return 0
    rows = [
        (
            letter.name,
            f"{letter.partition}:{letter.source}" + ("" if letter.topic == "rollouts" else f" of {letter.topic}"),
            len(letter.value or b""),
            clipped(letter.reason, _WIDTH),
            "redriven" if letter.redriven else "",
        )
        for letter in letters
    ]
    print(table(("letter", "source", "bytes", "reason", ""), rows) if rows else "no dead letters")
    return 0


def _show(letters: Sequence[Letter], args: argparse.Namespace) -> int:
    for letter in letters:
        told = {**letter.as_dict(), "headers": letter.headers, "value": plain(decoded(letter.value), full=True)}
        if args.json:
            print(compact(told))
            continue
        print(f"letter {letter.name}, of {letter.topic}[{letter.partition}] offset {letter.source}, {told['time']}")
        print(printable(f"reason: {letter.reason}"))
        for name, value in letter.headers.items():
            print(printable(f"  {name}: {value}"))
        print(printable(f"key: {told['key']}"))
        print(_dump(letter.value or b"") if isinstance(decoded(letter.value), bytes) else compact(told["value"]))
        print()
    return 0


def _dump(data: bytes, most: int = 256) -> str:
    """Bytes as hexadecimal and text, sixteen a line."""
    lines = []
    for at in range(0, min(len(data), most), 16):
        piece = data[at : at + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in piece)
        lines.append(f"{at:06x}  {piece.hex(' '):47}  {text}")
    if len(data) > most:
        lines.append(f"... {len(data) - most} bytes more")
    return "\n".join(lines)


# ---------------------------------------------------------------------- sending again


def _redrive(config: RunConfig, letters: Sequence[Letter], args: argparse.Namespace) -> int:
    fix = _fix_of(args.fix)
    ready: list[tuple[Letter, bytes, bytes]] = []
    refused: list[tuple[Letter, str]] = []
    for letter in letters:
        why, key, value = _mended(letter, fix)
        if why:
            refused.append((letter, why))
        else:
            ready.append((letter, key, value))
    if ready and not args.dry_run:
        done = _send(config, ready)
        refused += [(letter, "was redriven meanwhile") for letter, _key, _value in ready if letter.place not in done]
        ready = [item for item in ready if item[0].place in done]
    if args.json:
        sent = [letter.name for letter, _key, _value in ready]
        print(compact({"redriven": sent, "left": {letter.name: why for letter, why in refused}}))
    else:
        verb = "would be sent" if args.dry_run else "sent"
        print(f"{len(ready)} of {len(letters)} dead letters {verb} again")
        for letter, why in refused:
            print(printable(f"  left {letter.name}: {why}"), file=sys.stderr)
    return 1 if refused else 0


def _fix_of(path: Path | None) -> Fix | None:
    if path is None:
        return None
    if not path.is_file():
        raise ConfigurationError(f"--fix {path}: there is no such file")
    fix = runpy.run_path(str(path)).get("fix")
    if not callable(fix):
        raise ConfigurationError(f"--fix {path} defines no function fix(value, key, headers)")
    return fix  # type: ignore[no-any-return]


def _mended(letter: Letter, fix: Fix | None) -> tuple[str, bytes, bytes]:
    """Why a letter cannot be sent, or "" with the key and value to send."""
    if letter.redriven:
        return f"was redriven at {letter.redriven}", b"", b""
    if not letter.complete and fix is None:
        return "it was too large to keep its bytes; a script may make it anew", b"", b""
    try:
        made: Any = letter.value if fix is None else fix(letter.value, letter.key, letter.headers)
    except Exception as error:  # a user's script may raise anything; the letter stays, with the reason
        return f"fix raised {type(error).__name__}: {error}", b"", b""
    if made is None:
        return "fix left it", b"", b""
    try:
        record = decode(made) if isinstance(made, bytes) else made
        value = made if isinstance(made, bytes) else encode(made)
    except RecordError as error:
        return str(error), b"", b""
    if not isinstance(record, TrajectoryRecord if letter.topic == "unlabelled" else Rollout | GroupCancelled):
        return f"a {type(record).__name__} does not belong in {letter.topic}", b"", b""
    if isinstance(record, TrajectoryRecord):
        return _unsound(record), encode_key(record.environment, record.metadata.worker_id), value
    found = problems(record) if isinstance(record, Rollout) else cancellation_problems(record)
    return "; ".join(found), encode_key(record.environment, record.example_id), value


def _unsound(record: TrajectoryRecord) -> str:
    """What is wrong with a trajectory, if something is."""
    try:
        from_record(record)
    except RecordError as error:
        return str(error)
    return ""


def _send(config: RunConfig, ready: Sequence[tuple[Letter, bytes, bytes]]) -> set[Place]:
    """Send records and notes in one transaction; returns the letters sent, less those another has sent meanwhile."""
    kafka, run = config.kafka, config.run
    producer = clients.transactional_producer(kafka, transactional_id(run, "redrive"))
    try:
        # From here on no other redrive of the run can commit, so what is read now stays true.
        producer.init_transactions(kafka.patience_s)
        # An open transaction of whoever else writes here hides the notes that were written since it began.
        partitions = {letter.place[0] for letter, _key, _value in ready}
        await_decided(kafka, topic_name(run, "dead-letters"), "nothing was sent again", among=partitions)
        taken = {letter.place for letter in read(kafka, run) if letter.redriven}
        mine = [item for item in ready if item[0].place not in taken]
        if not mine:
            return set()
        failed: list[KafkaError] = []

        def delivered(error: KafkaError | None, _message: Message) -> None:
            if error is not None:
                failed.append(error)

        producer.begin_transaction()
        for letter, key, value in mine:
            source = {"rollstream.redriven.from": letter.name}
            clients.produce(producer, topic_name(run, letter.topic), value, key, headers=source, on_delivery=delivered)
            partition, offset = letter.place
            note = {REDRIVEN: str(offset), "rollstream.redriven.time": str(time.time())}
            clients.produce(
                producer,
                topic_name(run, "dead-letters"),
                None,
                letter.key,
                partition=partition,
                headers=note,
                on_delivery=delivered,
            )
        producer.commit_transaction(kafka.patience_s)
    except KafkaException as exception:
        error: KafkaError = exception.args[0]
        raise DeliveryError(
            f"the letters were not sent again ({error.name()}: {error.str()}); nothing of it is visible, run it again"
        ) from exception
    if failed:
        raise DeliveryError(f"the letters were not sent again ({failed[0].str()}); run it again")
    return {letter.place for letter, _key, _value in mine}
