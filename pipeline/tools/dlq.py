"""`rollstream dlq`: lists and shows dead letters, and sends them again, repaired by a script if one is given.

One transaction sends the records to their source, `rollouts` or `unlabelled`, and a note of each record to
`dead-letters`, so that no letter is sent twice, however often the command runs.
"""

import argparse
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from rollstream.pipeline.audit.ledger import REDRIVEN
from rollstream.pipeline.command_line.command_parser import add_command, set_handler
from rollstream.pipeline.command_line.plain_values import compact, decoded, key_text, plain, tell, time_text
from rollstream.pipeline.command_line.text_tables import clipped, printable, table
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.tools.exclusion_marks import newest, partition_configurations
from rollstream.producers.record_sender import limit_bytes_of
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, DeliveryError, RecordError, StateRefused, TopicError
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.client_calls import Stalled
from rollstream.topics.kafka.open_transactions import await_decided
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.kafka.transactions import TransactionalProducer, TransactionFailed, transactional_id
from rollstream.topics.records import GroupCancelled, Rollout, TrajectoryRecord
from rollstream.topics.user_code import load_file
from rollstream.topics.wire.catalogue import name_in_run, topic_name
from rollstream.topics.wire.codec import decode, encode
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.signatures import ROLLOUT, Signer, is_signed_by, signed_or_plain, signer_of
from rollstream.topics.wire.trajectory_arrays import from_record
from rollstream.topics.wire.validation import untyped_problems

_WIDTH = 44
BATCHES = "batches"
SOURCES = ("rollouts", "unlabelled", BATCHES)
"""Topics whose records become dead letters. A letter of `batches` says that an array of a row is missing."""
Place = tuple[int, int]
Mended = Rollout | GroupCancelled | TrajectoryRecord
Fix = Callable[[bytes | None, bytes | None, dict[str, str]], "Mended | bytes | None"]
"""A script's function `fix(value, key, headers)`: returns a record, its bytes, or None to leave the letter."""

PORTION_BYTES, PORTION_LETTERS = 16 * 1024 * 1024, 10_000
"""Size of a transaction that sends letters again, in bytes of values and in letters."""


@dataclass(frozen=True)
class Letter:
    """One dead letter."""

    place: Place
    """Partition and offset in dead-letters."""
    partition: int
    """Partition of its source topic."""
    source: int
    """Offset of its record in that partition."""
    at_ms: int
    key: bytes | None
    value: bytes | None
    """None also if it was read without its value."""
    size_bytes: int
    """Size of its value, also of a value that was not kept."""
    headers: dict[str, str]
    redriven: str = ""
    """Time at which the letter was sent again; "" if it was not."""

    @property
    def name(self) -> str:
        """Name of the letter on the command line: PARTITION:OFFSET in dead-letters."""
        return f"{self.place[0]}:{self.place[1]}"

    @property
    def reason(self) -> str:
        return self.headers.get("__streams.errors.message", "")

    @property
    def topic(self) -> str:
        """Topic of the record that became this letter, one of SOURCES."""
        return name_in_run(self.headers.get("__streams.errors.topic", "rollouts"))

    @property
    def complete(self) -> bool:
        """Whether the letter has the bytes of its record; a letter that was too large has only their digest."""
        return "rollstream.value.sha256" not in self.headers and "rollstream.key.sha256" not in self.headers

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return {
            "letter": self.name,
            "partition": self.partition,
            "offset": self.source,
            "time": time_text(self.at_ms),
            "key": key_text(self.key),
            "size_bytes": self.size_bytes,
            "reason": self.reason,
            "redriven": self.redriven or None,
        }


def register(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `rollstream dlq`."""
    actions = parser.add_subparsers(dest="action", metavar="COMMAND", required=True)
    listing = add_command(actions, "ls", "list dead letters, with their reasons")
    set_handler(listing, dlq, example="rollstream dlq ls", json=True)
    show = add_command(actions, "show", "show dead letters in full: headers, key, bytes")
    set_handler(show, dlq, example="rollstream dlq show 0:3", json=True)
    redrive = add_command(
        actions, "redrive", "send dead letters to their source again, each once, repaired by a script if one is given"
    )
    set_handler(redrive, dlq, example="rollstream dlq redrive --fix mend.py", json=True)
    redrive.add_argument("--fix", type=Path, metavar="SCRIPT", help="a file that defines fix(value, key, headers)")
    redrive.add_argument("--dry-run", action="store_true", help="print what would be sent, and send nothing")
    for action in (show, redrive):
        action.add_argument(
            "letter", nargs="*", metavar="LETTER", help="PARTITION:OFFSET in dead-letters, as listed (default: all)"
        )


def dlq(config: RunConfig, args: argparse.Namespace) -> int:
    """List, show or redrive; return 1 if a requested letter was not sent."""
    clients.check_broker(config.kafka)
    skipped = SkippedRecords(logged=False)
    with_value = frozenset() if args.action == "ls" else frozenset(args.letter) or None
    # Letters that were sent again are sent no more, so their values are not needed.
    redrives = args.action == "redrive"
    letters = read(config.kafka, config.run, skipped, with_value=with_value, values_of_redriven=not redrives)
    tell(skipped)
    if args.action == "ls":
        return _list(letters, args)
    selected = chosen(letters, args.letter, config.run)
    if args.action == "show":
        return _show(selected, args)
    return _redrive(config, selected if args.letter else [letter for letter in selected if not letter.redriven], args)


def read(
    kafka: KafkaConfig,
    run: str,
    skipped: SkippedRecords | None = None,
    *,
    with_value: Container[str] | None = None,
    values_of_redriven: bool = True,
    each: Callable[[Letter], None] = lambda _letter: None,
) -> list[Letter]:
    """Read every dead letter of a run, oldest first; invalid letters are added to `skipped`.

    Letters keep their values only if their names are in `with_value`, or if it is None: a value may have a megabyte.
    Without `values_of_redriven`, letters that were redriven keep none.
    Before its value is dropped, each letter is passed to `each`.
    """
    letters: dict[Place, Letter] = {}
    skipped = SkippedRecords(logged=False) if skipped is None else skipped
    for message in read_to_end(kafka, topic_name(run, "dead-letters")):
        with skipped.passing(message):
            headers = {name: (value or b"").decode(errors="replace") for name, value in message.header_pairs()}
            if REDRIVEN in headers:
                letter_place = (message.partition, _number(headers, REDRIVEN))
                if letter_place in letters:
                    letter = letters[letter_place]
                    value = letter.value if values_of_redriven else None
                    letters[letter_place] = replace(letter, value=value, redriven=time_text(message.timestamp_ms))
                continue
            letter = Letter(
                place=(message.partition, message.offset),
                partition=_number(headers, "__streams.errors.partition"),
                source=_number(headers, "__streams.errors.offset"),
                at_ms=message.timestamp_ms,
                key=message.key,
                value=message.value,
                size_bytes=len(message.value or b""),
                headers=headers,
            )
            if letter.topic not in SOURCES:
                raise RecordError(f"its source topic is {letter.topic[:100]!r}, not {', '.join(SOURCES)}")
            each(letter)
            kept = with_value is None or letter.name in with_value
            letters[letter.place] = letter if kept else replace(letter, value=None)
    return sorted(letters.values(), key=lambda letter: (letter.at_ms, letter.place))


def _number(headers: Mapping[str, str], name: str) -> int:
    text = headers.get(name, "")
    if not (text.isascii() and text.isdecimal()):
        raise RecordError(f"header {name} is {text[:40]!r}, not a number: rollstream did not write it")
    return int(text)


def chosen(letters: Sequence[Letter], wanted: Sequence[str], run: str) -> list[Letter]:
    """Return the letters with these names, each once, or all letters if `wanted` is empty.

    Raises TopicError if a letter is missing.
    """
    by_name = {letter.name: letter for letter in letters}
    for name in wanted:
        if name not in by_name:
            raise TopicError(
                f"run {run} has no dead letter {name}; `rollstream dlq ls` lists them, by PARTITION:OFFSET in "
                f"dead-letters"
            )
    return [by_name[name] for name in dict.fromkeys(wanted)] if wanted else list(letters)


def _list(letters: Sequence[Letter], args: argparse.Namespace) -> int:
    if args.json:
        print(compact([letter.as_dict() for letter in letters]))
        return 0
    rows = [
        (
            letter.name,
            f"{letter.partition}:{letter.source}" + ("" if letter.topic == "rollouts" else f" of {letter.topic}"),
            letter.size_bytes,
            clipped(letter.reason, _WIDTH),
            "redriven" if letter.redriven else "",
        )
        for letter in letters
    ]
    print(table(("letter", "source", "bytes", "reason", ""), rows) if rows else "no dead letters")
    return 0


def _show(letters: Sequence[Letter], args: argparse.Namespace) -> int:
    for letter in letters:
        details = {**letter.as_dict(), "headers": letter.headers, "value": plain(decoded(letter.value), full=True)}
        if args.json:
            print(compact(details))
            continue
        print(f"letter {letter.name}, of {letter.topic}[{letter.partition}] offset {letter.source}, {details['time']}")
        print(printable(f"reason: {letter.reason}"))
        for name, value in letter.headers.items():
            print(printable(f"  {name}: {value}"))
        print(printable(f"key: {details['key']}"))
        print(_dump(letter.value or b"") if isinstance(decoded(letter.value), bytes) else compact(details["value"]))
        print()
    return 0


def _dump(data: bytes, most: int = 256) -> str:
    """Dump bytes as hexadecimal and text, sixteen per line."""
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
    sent, refused = resend(config, letters, _fix_of(args.fix), dry_run=args.dry_run)
    if args.json:
        names = [letter.name for letter in sent]
        print(compact({"redriven": names, "left": {letter.name: why for letter, why in refused}}))
    else:
        verb = "would be sent" if args.dry_run else "sent"
        print(f"{len(sent)} of {len(letters)} dead letters {verb} again")
        for letter, why in refused:
            print(printable(f"  left {letter.name}: {why}"), file=sys.stderr)
    return 1 if refused else 0


def resend(
    config: RunConfig, letters: Sequence[Letter], fix: Fix | None = None, *, dry_run: bool = False
) -> tuple[list[Letter], list[tuple[Letter, str]]]:
    """Send letters to their source again, each once; return the letters sent, and each other letter with its reason.

    With `dry_run`, nothing is sent. Raises DeliveryError if a transaction fails; it names how many letters were sent.
    """
    ready: list[tuple[Letter, bytes, bytes]] = []
    refused: list[tuple[Letter, str]] = []
    # Unchanged letters are not signed, so that the page, which does not have the key, can send them.
    signer = None if fix is None else signer_of(config.kafka.signing_key, "kafka.signing_key")
    limit = limit_bytes_of(config.kafka)
    for letter in letters:
        why, key, value = _mended(letter, fix, signer)
        if not why and len(key) + len(value) > limit:
            # The client would refuse it, and with it all other letters of its transaction, each time.
            why = (
                f"the record has {len(key) + len(value)} bytes and the limit is {limit}; let a script (--fix) shorten "
                "it, or raise kafka.max_record_bytes and run `rollstream topics apply`"
            )
        if why:
            refused.append((letter, why))
        else:
            ready.append((letter, key, value))
    unsigned = _unsigned(config, ready)
    refused += [(letter, unsigned[letter.place]) for letter, _key, _value in ready if letter.place in unsigned]
    ready = [item for item in ready if item[0].place not in unsigned]
    if ready and not dry_run:
        done = _send(config, ready)
        refused += [
            (letter, "was redriven by another process") for letter, _key, _value in ready if letter.place not in done
        ]
        ready = [item for item in ready if item[0].place in done]
    return [letter for letter, _key, _value in ready], refused


def _fix_of(path: Path | None) -> Fix | None:
    if path is None:
        return None
    if not path.is_file():
        raise ConfigurationError(f"--fix {path}: there is no such file")
    fix = getattr(load_file(path, f"--fix {path}"), "fix", None)
    if not callable(fix):
        raise ConfigurationError(f"--fix {path} does not define a function fix(value, key, headers)")
    return cast(Fix, fix)


def _mended(letter: Letter, fix: Fix | None, signer: Signer | None) -> tuple[str, bytes, bytes]:
    """Return why a letter cannot be sent, or "" with the key and value to send.

    A record that `fix` returns is signed. Bytes are sent as they are, so that no letter gets a signature unexamined.
    """
    if letter.redriven:
        return f"was redriven at {letter.redriven}", b"", b""
    if letter.topic == BATCHES:
        return "an array of its batch is missing: put the object back into kafka.arrays.url; nothing is sent", b"", b""
    if not letter.complete and fix is None:
        return "it was too large, so its bytes were not kept; a script (--fix) can create the record again", b"", b""
    if letter.value is None and fix is None:
        return "its record had no value, or its bytes were not kept; a script (--fix) can create the record", b"", b""
    try:
        fixed: Any = letter.value if fix is None else fix(letter.value, letter.key, letter.headers)
    except Exception as error:  # a user's script may raise any error; the letter stays, with the reason
        return f"fix raised {type(error).__name__}: {error}", b"", b""
    if fixed is None:
        return "fix returned None", b"", b""
    try:
        if isinstance(fixed, bytes):
            record, value = decode(fixed), fixed
        elif isinstance(fixed, TrajectoryRecord):
            record, value = fixed, encode(fixed)
        else:
            record, value = fixed, signed_or_plain(fixed, signer, ROLLOUT)
    except RecordError as error:
        return str(error), b"", b""
    if not isinstance(record, TrajectoryRecord | Rollout if letter.topic == "unlabelled" else Rollout | GroupCancelled):
        return f"a {type(record).__name__} does not belong in {letter.topic}", b"", b""
    if isinstance(record, TrajectoryRecord):
        return _unsound(record), encode_key(record.environment, record.metadata.worker_id), value
    errors = untyped_problems(record)
    return "; ".join(errors), encode_key(record.environment, record.example_id), value


def _unsigned(config: RunConfig, ready: Sequence[tuple[Letter, bytes, bytes]]) -> dict[Place, str]:
    """Return, by place, why grouping would drop records for `rollouts` that lack the signature of their environment."""
    values = {letter.place: value for letter, _key, value in ready if letter.topic == "rollouts"}
    if not values:
        return {}
    try:
        keys = newest(partition_configurations(config.kafka, config.run, config.grouper)).keys_by_environment
    except (StateRefused, ConfigurationError):
        # Grouping has no state, or its makers cannot be imported here: the settings of this command decide.
        keys = config.grouping.keys_by_environment
    unsigned: dict[Place, str] = {}
    for place, value in values.items():
        environment = decode(value).environment
        if environment in keys and not is_signed_by(value, ROLLOUT, keys[environment]):
            unsigned[place] = (
                f"no key of environment {environment} in grouping.environment_keys signed it; name its private key in "
                f"kafka.signing_key, and let a script return the record"
            )
    return unsigned


def _unsound(record: TrajectoryRecord) -> str:
    """Return the error of an invalid trajectory, or ""."""
    try:
        from_record(record)
    except RecordError as error:
        return str(error)
    return ""


def _send(config: RunConfig, ready: Sequence[tuple[Letter, bytes, bytes]]) -> set[Place]:
    """Send each record and its note in one transaction, which holds several; return the letters sent, which excludes
    letters that another process sent first."""
    kafka, run = config.kafka, config.run
    sent = set[Place]()
    try:
        with closing(TransactionalProducer(kafka, transactional_id(run, "redrive"))) as producer:
            # From here on no other redrive of the run can commit, so the letters read now stay as they are.
            producer.start()
            # An open transaction of another writer hides the notes that were written after it began.
            partitions = {letter.place[0] for letter, _key, _value in ready}
            await_decided(kafka, topic_name(run, "dead-letters"), "nothing was sent again", among=partitions)
            taken = {letter.place for letter in read(kafka, run, with_value=()) if letter.redriven}
            for portion in portions([item for item in ready if item[0].place not in taken]):
                with producer.transaction() as transaction:
                    for letter, key, value in portion:
                        source = {"rollstream.redriven.from": letter.name}
                        transaction.send(topic_name(run, letter.topic), value, key, headers=source)
                        partition, offset = letter.place
                        note = {REDRIVEN: str(offset), "rollstream.redriven.time": str(time.time())}
                        notes = topic_name(run, "dead-letters")
                        transaction.send(notes, None, letter.key, partition=partition, headers=note)
                sent.update(letter.place for letter, _key, _value in portion)
    except (TransactionFailed, Stalled) as error:
        raise DeliveryError(
            f"{len(sent)} letters were sent again, and the others were not ({error}); no record of the transaction "
            "that failed is visible; run it again"
        ) from error
    return sent


def portions(items: Sequence[tuple[Letter, bytes, bytes]]) -> Iterator[list[tuple[Letter, bytes, bytes]]]:
    """Yield consecutive items whose values have about PORTION_BYTES, so that no transaction outlives its timeout."""
    portion: list[tuple[Letter, bytes, bytes]] = []
    size_bytes = 0
    for item in items:
        portion.append(item)
        size_bytes += len(item[2])
        if size_bytes >= PORTION_BYTES or len(portion) >= PORTION_LETTERS:
            yield portion
            portion, size_bytes = [], 0
    if portion:
        yield portion
