"""The page keeps rows of sessions and reads the records of one session when it is shown."""

import gc
import json
import random
import tracemalloc
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from rollstream.pipeline.ui.server.session_list import SessionList
from rollstream.topics.errors import TopicError
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import ModelCall, SessionEvent
from rollstream.topics.wire.codec import encode
from tests.unit.producers.gateway.test_sessions import START, call, event

TEXT_BYTES = 1 << 18
TEXT = random.Random(1).randbytes(TEXT_BYTES // 2).hex()
"""Compression of records makes it little smaller."""
CALLS = 64


def on_log(records: Iterable[ModelCall | SessionEvent], partition: int = 0) -> Iterator[KafkaRecord]:
    """Records as a broker delivers them, of which one is in memory at a time."""
    for offset, record in enumerate(records):
        yield KafkaRecord("x.calls", partition, offset, 1000 + offset, b"key", encode(record))


def session(name: str, calls: int, text: str = "hello") -> Iterator[ModelCall | SessionEvent]:
    yield replace(START, session=name)
    for number in range(calls):
        message = json.dumps([{"role": "user", "content": f"{text} {number}"}])
        yield call(number, session=name, messages=message)


def interleaved() -> Iterator[ModelCall | SessionEvent]:
    """Records of a finished and an open session in turn."""
    finished = [*session("g.0", 2), event("end"), event("finished", uids=("u",))]
    opened = [*session("g.1", 1), event("reward", session="g.1", scored=True, reward=0.5)]
    yield from (finished[0], opened[0], finished[1], opened[1], finished[2], *finished[3:], opened[2])


def test_rows_and_details_are_those_on_the_log_and_only_the_offsets_of_the_session_are_read() -> None:
    messages, ranges = list(on_log(interleaved(), partition=1)), []

    def read(partition: int, offsets: range) -> list[KafkaRecord]:
        ranges.append((partition, offsets))
        return [message for message in messages if message.offset in offsets]

    sessions = SessionList(iter(messages))
    assert list(sessions.rows) == ["g.1", "g.0"], "newest first"
    assert [(row["state"], row["calls"], row["rollouts"]) for row in sessions.rows.values()] == [
        ("open", 1, 0),
        ("finished", 2, 1),
    ]
    assert (sessions.rows["g.0"]["began_ms"], sessions.rows["g.0"]["ended_ms"]) == (1000, 1005)
    details = sessions.details("g.0", read)
    assert ranges == [(1, range(7))]
    assert details["session"] == sessions.rows["g.0"]
    assert [each["kind"] for each in details["events"]] == ["start", "end", "finished"]
    assert [(each["place"], each["problem"]) for each in details["calls"]] == [("1:2", None), ("1:4", None)]
    assert [each["messages"][0]["content"] for each in details["calls"]] == ["hello 0", "hello 1"]
    with pytest.raises(TopicError, match="no such session"):
        sessions.details("g.2", read)


@pytest.mark.parametrize("ending", [(), (event("end"), event("finished", uids=("u",)))])
def test_the_list_keeps_no_text_of_calls(ending: tuple[SessionEvent, ...]) -> None:
    def records() -> Iterator[ModelCall | SessionEvent]:
        yield from session("g.0", CALLS, TEXT)
        yield from ending

    tracemalloc.start()
    try:
        sessions = SessionList(on_log(records()))
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert sessions.rows["g.0"]["calls"] == CALLS
    assert kept < CALLS * TEXT_BYTES / 8, f"{kept:,} bytes are kept of {CALLS} texts of {TEXT_BYTES:,} bytes"
