"""Reads the records between two offsets of a partition without fetching some of them, mostly compression bombs.

A client decompresses every whole batch in a fetch response, and fetches ahead of its caller. Records before an offset
to be left out are therefore fetched in small pieces, one at a time, by a client that is closed before it requests the
next piece: a bomb is then never the first batch of a response, and later batches are cut off, or smaller than a piece.
If the offsets right before a bomb are markers of transactions, no record shows that they were reached; these offsets
have to be left out, too.
"""

import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import DeadlineExceeded
from rollstream.topics.kafka import hanging_transactions, topic_admin
from rollstream.topics.kafka.reader import Polled, Reader, read_to_end
from rollstream.topics.kafka.records import BEGINNING, KafkaRecord

_AT_ONCE = 500
"""Records taken from the client at a time."""
_NEAR = 2 * _AT_ONCE
"""Distance before an offset to be left out in which a client pauses between pieces, so that it can be closed in time.
Further away, it requests the next piece once the records of the last piece are taken, at most `_AT_ONCE`."""
_PIECE: dict[str, Any] = {"max.partition.fetch.bytes": 64 * 1024, "queued.min.messages": 1}
_REST_MS = 250
_REST_S = 0.02
_SINGLY: dict[str, Any] = {**_PIECE, "fetch.queue.backoff.ms": _REST_MS}


def records_between(
    kafka: KafkaConfig,
    topic: str,
    partition: int,
    start: int,
    stop: int,
    left_out: Collection[int] = (),
    *,
    wait: bool = True,
    isolation: str = "read_committed",
    reader: Reader | None = None,
) -> Generator[KafkaRecord | None]:
    """Yield the records at offsets start to stop - 1 except those in `left_out`, and None between polls.

    Offsets of `left_out` from `stop` on are not fetched either. A transaction becomes visible on its partitions at
    different times, so the reader waits if the partition ends before `stop`. It raises DeadlineExceeded if nothing
    arrives for kafka.patience_s, within which an open transaction ends. Without `wait`, it stops at the end.

    An existing `reader` may be passed; its isolation level applies then. Ranges that end at an offset to be left out
    are read by separate clients nevertheless.
    """
    for begin, end in _runs(offset for offset in left_out if offset >= start):
        near = max(start, begin - _NEAR)
        yield from _read(kafka, topic, partition, start, min(near, stop), wait, _PIECE, isolation)
        yield from _read(kafka, topic, partition, near, min(begin, stop), wait, _SINGLY, isolation)
        start = end
    yield from _read(kafka, topic, partition, start, stop, wait, {}, isolation, reader)


def records_around(
    kafka: KafkaConfig,
    topic: str,
    left_out: Mapping[int, Collection[int]],
    start: Mapping[int, int] | None = None,
    *,
    isolation: str = "read_committed",
) -> Iterator[KafkaRecord]:
    """Yield the records of these partitions up to their present ends, except those left out.

    `left_out` has an entry for each partition to read. `start` gives first offsets; a partition without one is read
    from its beginning. Records are in offset order within each partition. Raises as `read_to_end` and
    `records_between` do.
    """
    start = start or {}
    whole = [number for number, offsets in left_out.items() if not offsets]
    begins = {number: start.get(number, BEGINNING) for number in whole}
    yield from read_to_end(kafka, topic, partitions=whole, start=begins, isolation=isolation)
    rest = [number for number, offsets in left_out.items() if offsets]
    for number, (begin, end) in topic_admin.bounds(kafka, topic, rest).items() if rest else ():
        first = start.get(number, begin)
        hopping = records_between(kafka, topic, number, first, end, left_out[number], wait=False, isolation=isolation)
        for record in hopping:
            if record is not None:
                yield record


def records_at(
    kafka: KafkaConfig, topic: str, partition: int, offsets: Collection[int], left_out: Collection[int] = ()
) -> Iterator[KafkaRecord]:
    """Yield the records at these offsets of a partition that the log still holds, without fetching those in `left_out`.

    Raises as `read_to_end` and `records_between` do.
    """
    begin, end = topic_admin.bounds(kafka, topic, [partition])[partition] if offsets else (0, 0)
    for first, stop in _runs(offset for offset in offsets if begin <= offset < end):
        for record in records_between(kafka, topic, partition, first, stop, left_out, wait=False):
            if record is not None:
                yield record


def _runs(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """Consecutive offsets as (first, one past the last)."""
    runs: list[tuple[int, int]] = []
    for offset in sorted(offsets):
        if runs and runs[-1][1] == offset:
            runs[-1] = (runs[-1][0], offset + 1)
        else:
            runs.append((offset, offset + 1))
    return runs


def _read(
    kafka: KafkaConfig,
    topic: str,
    partition: int,
    start: int,
    stop: int,
    wait: bool,
    settings: dict[str, Any],
    isolation: str,
    shared: Reader | None = None,
) -> Iterator[KafkaRecord | None]:
    """Yield the records of a range without offsets to be left out; `settings` limit how far the client reads ahead."""
    if start >= stop:
        return
    timeout_s, place = kafka.patience_s, (topic, partition)
    with ExitStack() as stack:
        if shared is None:
            reader = stack.enter_context(Reader(kafka, fetch_wait_ms=10, isolation=isolation, **settings))
        else:
            reader = shared
            stack.callback(reader.unassign)
        reader.assign({place: start})
        deadline = time.monotonic() + timeout_s
        while True:
            records, ends = _polled(reader, settings is _SINGLY)
            ended = bool(records) and records[-1].offset >= stop - 1
            if place in ends:
                ended = ended or not wait or ends[place] >= stop
            if ended:
                reader.unassign()
            for record in records:
                if record.offset < stop:
                    yield record
                    deadline = time.monotonic() + timeout_s
            if ended:
                return
            yield None
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{topic}[{partition}] did not reach offset {stop - 1} within {timeout_s:g} s; "
                    f"{hanging_transactions.open_on(kafka, topic, [partition])}"
                )


def _polled(reader: Reader, singly: bool) -> Polled:
    """Return records that the client holds. With `singly`, do not wait for records: the client decides on its next
    fetch when records arrive, and pauses before it fetches more if these are still queued then."""
    if not singly:
        return reader.poll(_AT_ONCE, 0.05)
    time.sleep(_REST_S)
    return reader.poll(_AT_ONCE, 0)
