"""A gateway that was suspended while it wrote an episode, and that another gateway replaced, writes nothing of it."""

import asyncio
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rollstream.producers.gateway import rollout_writing
from rollstream.producers.gateway.call_log import AppendedRecord
from rollstream.producers.gateway.episode_rollouts import RolloutForm
from rollstream.producers.gateway.rollout_writing import RolloutWriter
from rollstream.producers.gateway.sessions import CapturedSession
from rollstream.producers.policy_versions import PolicyVersions
from rollstream.topics.config import KafkaConfig
from rollstream.topics.records import SessionEvent
from tests.unit.producers.gateway.test_sessions import START, call, event


class Producer:
    """Keeps what is sent."""

    sent: ClassVar[list[Any]] = []

    def __init__(self, *_arguments: Any, **_settings: Any) -> None:
        self.sent.clear()
        self.cancel = self.send = self.sent.append

    def flush(self, _timeout_s: float) -> None:
        return


class Log:
    """Applies what this gateway appends, at once."""

    def __init__(self, session: CapturedSession) -> None:
        self.session = session

    async def append(self, change: SessionEvent) -> AppendedRecord:
        self.session.add_event(change, 0)
        return AppendedRecord(0, 0, 0)

    async def applied(self, _partition: int, _end: int) -> None:
        return


class Policies:
    """Policies whose reading takes until another gateway has finished the session."""

    def __init__(self, session: CapturedSession) -> None:
        self.session = session

    def read(self, _wait_s: float) -> PolicyVersions:
        self.session.add_event(event("finished", uids=("g.0.0", "g.0.1"), author="other"), 20_000)
        return PolicyVersions()


def test_an_episode_that_another_gateway_has_written_meanwhile_is_not_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = CapturedSession(START, 0, 0, 0)
    session.add_call(call(0), 10)
    session.add_event(event("reward", scored=True, reward=1.0), 20)
    session.add_event(event("end"), 30)
    assert session.closed is not None
    monkeypatch.setattr(rollout_writing, "RolloutProducer", Producer)
    monkeypatch.setattr(
        rollout_writing, "Reader", lambda *_a, **_s: SimpleNamespace(bounds=lambda _topic, parts: {parts[0]: (0, 0)})
    )
    monkeypatch.setattr(rollout_writing.topic_admin, "partitions_of", lambda *_arguments: 1)
    writer = RolloutWriter(
        KafkaConfig(),
        "run",
        Log(session),  # type: ignore[arg-type]
        RolloutForm(logprobs_mode="raw", temperature=1.0, assume_version=0),
        Policies(session),  # type: ignore[arg-type]
        author="suspended",
        takeover_s=10.0,
    )
    assert asyncio.run(writer.finish(session)), "it is written"
    assert Producer.sent == []
