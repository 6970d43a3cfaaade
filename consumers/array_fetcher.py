"""ArrayFetcher: reads the stored arrays of batches for trainers, and writes a dead letter for each that is not there.

A letter names the record of `batches`, the rollout and the object. It is written at once and in no transaction: a batch
that is read again writes it again, and nothing counts letters of `batches`.
"""

import logging
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from rollstream.consumers.transactions import error_headers
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RollstreamError
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.files.parallel import in_parallel
from rollstream.topics.files.stored_arrays import ArrayMissing, StoredArrays
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.sender import Sender
from rollstream.topics.logs import event
from rollstream.topics.records import BatchIndexEntry, BatchTokenArray, TrainingBatch
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.media import MEDIA, is_medium
from rollstream.topics.wire.rl_examples import SAMPLING_MASK

logger = logging.getLogger(__name__)
_AT_ONCE = 8
_RETRY_S = 0.2


class FetchedArrays(NamedTuple):
    """A batch with its stored arrays."""

    batch: TrainingBatch
    missing: Mapping[int, str]
    """Rows that lack an array, with the reason."""


class ArrayFetcher:
    """Fetches the stored arrays of a run's batches."""

    def __init__(self, kafka: KafkaConfig, run: str, names: Collection[str], *, wait_s: float = 60.0) -> None:
        """`names` are the arrays to fetch, "media" for all images; a store that cannot be read is tried again for
        `wait_s`."""
        self._kafka, self._run, self._names, self._wait_s = kafka, run, frozenset(names), wait_s
        self._arrays: StoredArrays | None = None

    def fetch(self, entry: BatchIndexEntry, batch: TrainingBatch) -> FetchedArrays:
        """Return the batch with the bytes of its stored arrays that were asked for.

        A row whose array is missing or damaged is named, and a dead letter is written. Raises ConfigurationError if
        kafka.arrays.url is empty, and StoreError if the store cannot be read in time.
        """
        wanted = {i: e for i, e in enumerate(batch.token_arrays) if e.array.stored and self._is_asked_for(e.name)}
        if not wanted:
            return FetchedArrays(batch, {})
        self._arrays = self._arrays or StoredArrays.of(self._run, self._kafka.arrays)
        deadline, ended = time.monotonic() + self._wait_s, threading.Event()

        def check() -> None:
            # A read that began before the deadline may take as long again.
            if time.monotonic() > deadline + self._wait_s:
                raise StoreError(f"{arrays.url} did not answer within {2 * self._wait_s:g} s; check the store")

        arrays = self._arrays

        def load(number: int) -> tuple[int, BatchTokenArray | ArrayMissing]:
            item = wanted[number]
            while True:
                try:
                    array = arrays.load(item.array)
                    if item.name == SAMPLING_MASK and array.array().min(initial=0) < 0:
                        raise ArrayMissing(f"{item.array.stored} holds a negative id")
                    return number, replace(item, array=array)
                except ArrayMissing as error:
                    return number, error
                except (StoreError, OSError):
                    if time.monotonic() > deadline or ended.is_set():
                        raise
                ended.wait(_RETRY_S)

        entries, faults = list(batch.token_arrays), dict[int, ArrayMissing]()
        for number, loaded in in_parallel(wanted, load, min(_AT_ONCE, len(wanted)), check=check, ended=ended):
            if isinstance(loaded, BatchTokenArray):
                entries[number] = loaded
            else:
                faults[number] = loaded
        missing: dict[int, str] = {}
        for number, fault in sorted(faults.items()):
            row = int(wanted[number].rows[0])
            source = f"rollouts[{batch.partition}] offset {batch.source_offsets[row]}, uid {batch.uids[row]}"
            reason = f"array {wanted[number].name} of row {row}, {source}: {fault}"
            missing[row] = f"{missing[row]}; {reason}" if row in missing else reason
        if missing:
            self._send_letters(entry, missing)
        return FetchedArrays(replace(batch, token_arrays=tuple(entries)), missing)

    def _is_asked_for(self, name: str) -> bool:
        return name in self._names or (MEDIA in self._names and is_medium(name))

    def _send_letters(self, entry: BatchIndexEntry, missing: Mapping[int, str]) -> None:
        batches, letters = topic_name(self._run, "batches"), topic_name(self._run, "dead-letters")
        for _row, reason in sorted(missing.items()):
            event(logger, "array_missing", level=logging.WARNING, topic=batches, offset=entry.offset, reason=reason)
        try:
            with Sender(clients.producer(self._kafka)) as sender:
                for _row, reason in sorted(missing.items()):
                    headers = error_headers(batches, entry.partition, entry.offset, reason)
                    sender.send(letters, None, encode_key(entry.batch_id), partition=entry.partition, headers=headers)
                sender.flush(self._wait_s)
        except RollstreamError as error:
            # A trainer does not end for a letter: the step on record names the row and the reason, too.
            event(logger, "dead_letter_not_written", level=logging.WARNING, error=str(error))
