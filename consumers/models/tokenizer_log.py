"""The tokenizer of a run on its topic `tokenizers`: its files, and the text of each token.

So every machine that reads the run, and an archive of it for good, shows tokens as text without the model's folder. The
records of a tokenizer are named by its digest, so two processes that write the same one write the same records. The
tokenizer that was written last is the run's. Reading needs no package for tokenizers.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from rollstream.consumers.models.huggingface import COMPANIONS
from rollstream.consumers.models.tokenizer import CharacterTokenizer
from rollstream.consumers.models.tokenizer_file import character_tokenizer_files, load_tokenizer
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.sender import Sender
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.logs import event
from rollstream.topics.records import TokenizerPart
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key

logger = logging.getLogger(__name__)
TEXTS_AT_ONCE = 4096
"""Number of tokens whose texts are in one record."""
_PIECE_BYTES = 1024 * 1024
"""Maximum number of bytes of a file in one record."""


class RunTokenizer(NamedTuple):
    """A tokenizer as it is on the log."""

    digest: str
    texts: Sequence[str]
    """Text of each token, by id."""
    files: Mapping[str, bytes]
    """Files of a checkpoint that describe it, by name."""


def put_tokenizer(kafka: KafkaConfig, run: str, pretrained: str) -> None:
    """Write the tokenizer of a checkpoint, or without `pretrained` that of small models, unless it is the run's.

    A machine that cannot read the checkpoint's tokenizer, or lacks it, leaves it to the run's other machines.
    """
    try:
        tokenizer = load_tokenizer(pretrained) if pretrained else CharacterTokenizer()
    except ConfigurationError as error:
        event(logger, "tokenizer_not_recorded", reason=str(error))
        return
    files = _files_of(pretrained)
    topic, digest = topic_name(run, "tokenizers"), digest_of(files)
    present = newest_tokenizer(read_to_end(kafka, topic))
    if present is not None and present.digest == digest:
        return
    written = RunTokenizer(digest, tokenizer.texts(), files)
    with Sender(clients.producer(kafka)) as sender:
        for part in parts_of(written, min(_PIECE_BYTES, kafka.max_record_bytes // 2)):
            key = encode_key(digest, part.part)
            sender.send(topic, encode(part), key, partition=0, name=f"part {part.part} of the tokenizer")


def digest_of(files: Mapping[str, bytes]) -> str:
    """Return the BLAKE3 over the names and bytes of a tokenizer's files, hexadecimal."""
    digest = blake3()
    for name, data in sorted(files.items()):
        digest.update(f"{name}\n{len(data)}\n".encode()).update(data)
    return digest.hexdigest()


def parts_of(tokenizer: RunTokenizer, piece_bytes: int = _PIECE_BYTES) -> list[TokenizerPart]:
    """Return the records that hold a tokenizer, with at most `piece_bytes` of a file in each."""
    held: list[dict[str, object]] = []
    for first in range(0, len(tokenizer.texts), TEXTS_AT_ONCE):
        held.append({"first_id": first, "texts": tuple(tokenizer.texts[first : first + TEXTS_AT_ONCE])})
    for name, data in sorted(tokenizer.files.items()):
        starts = range(0, max(1, len(data)), piece_bytes)
        held += [{"file": name, "data": data[start : start + piece_bytes]} for start in starts]
    return [
        TokenizerPart(digest=tokenizer.digest, part=number, parts=len(held), **fields)  # type: ignore[arg-type]
        for number, fields in enumerate(held)
    ]


def newest_tokenizer(messages: Iterable[KafkaRecord]) -> RunTokenizer | None:
    """Return the tokenizer of which a record was written last, of those that are whole; None if there is none."""
    by_digest: dict[str, dict[int, TokenizerPart]] = {}
    for _message, part in SkippedRecords(logged=False).records(TokenizerPart, messages):
        # Taken out and put in again, so that the tokenizer of the newest record is the last.
        parts = by_digest.pop(part.digest, {})
        by_digest[part.digest] = parts | {part.part: part}
    for parts in reversed(by_digest.values()):
        if (tokenizer := _joined(parts)) is not None:
            return tokenizer
    return None


def _joined(parts: Mapping[int, TokenizerPart]) -> RunTokenizer | None:
    """Return the tokenizer that its records hold; None if some are missing, or its files differ from the digest."""
    ordered = [part for _number, part in sorted(parts.items())]
    # Without a list of as many numbers as a record claims.
    if ordered[0].parts != len(parts) or sorted(parts) != list(range(len(parts))):
        return None
    files: dict[str, bytearray] = {}
    for part in ordered:
        if part.file:
            files.setdefault(part.file, bytearray()).extend(part.data)
    whole = {name: bytes(data) for name, data in files.items()}
    if digest_of(whole) != ordered[0].digest:
        return None
    return RunTokenizer(ordered[0].digest, [text for part in ordered for text in part.texts], whole)


def _files_of(pretrained: str) -> dict[str, bytes]:
    if not pretrained:
        return character_tokenizer_files(CharacterTokenizer())
    paths = {name: Path(pretrained) / name for name in COMPANIONS}
    return {name: path.read_bytes() for name, path in paths.items() if path.exists()}
