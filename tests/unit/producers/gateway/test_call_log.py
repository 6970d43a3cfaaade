"""The log of a gateway skips records that are no calls and no events of sessions, and applies those after them."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.consumers.grouping.testing import example_rollout
from rollstream.producers.gateway import call_log
from rollstream.producers.gateway.call_log import CallLog
from rollstream.producers.gateway.sessions import group_of, partition_of_group
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.wire.codec import encode
from tests.unit.producers.gateway.test_sessions import START, call

PARTITIONS = 2


class Writer:
    """Knows the partitions of sessions, and writes nothing."""

    topic, partitions = "run.calls", PARTITIONS

    def __init__(self, *_arguments: Any) -> None:
        return

    def partition_of(self, session: str) -> int:
        return partition_of_group(group_of(session), PARTITIONS)

    async def close(self) -> None:
        return


class Follower:
    """Delivers all records at once, and then none."""

    def __init__(self, messages: Sequence[KafkaRecord]) -> None:
        self.messages = messages
        self.ends: dict[tuple[str, int], int] = {}

    def __enter__(self) -> "Follower":
        return self

    def __exit__(self, *_error: object) -> None:
        return

    def poll(self, _most: int, timeout_s: float) -> Sequence[KafkaRecord]:
        messages, self.messages = self.messages, []
        if not messages:
            threading.Event().wait(timeout_s)
        return messages


def test_records_that_are_no_calls_and_no_events_are_skipped_and_those_after_them_are_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = Writer().partition_of("g.0")
    records = [example_rollout("u"), replace(START, session="no name"), START, call(0)]
    messages = [KafkaRecord("run.calls", there, o, 0, b"key", encode(record)) for o, record in enumerate(records)]
    elsewhere = KafkaRecord("run.calls", 1 - there, 0, 0, b"key", encode(START))
    ends = {there: (0, len(records)), 1 - there: (0, 1)}
    monkeypatch.setattr(call_log, "CallWriter", Writer)
    monkeypatch.setattr(call_log, "TopicFollower", lambda *_a, **_s: Follower([elsewhere, *messages]))
    reader = SimpleNamespace(bounds=lambda _topic, wanted: {p: ends[p] for p in wanted}, close=lambda: None)
    monkeypatch.setattr(call_log, "Reader", lambda *_a, **_s: reader)

    async def scenario() -> None:
        log = CallLog(KafkaConfig(), "run", author="a", remembered_sessions=10, on_read=lambda _session: None)
        try:
            await asyncio.wait_for(log.start(), 20)
        finally:
            await log.close()
        assert log.error is None
        assert log.skipped.total == 3
        assert [skipped.error.partition(",")[0] for skipped in log.skipped.first] == [
            "a record of session g.0",
            "a Rollout instead of a call or session event",
            "no session is named 'no name'; POST /rl/start_session starts one",
        ]
        assert [*log.folds[there].sessions] == ["g.0"]
        assert log.folds[there].sessions["g.0"].counted_calls == 1
        assert log.folds[1 - there].sessions == {}

    asyncio.run(scenario())
