"""A gateway writes an episode and records where its rollouts end; one that was suspended while it wrote, and that
another gateway replaced, writes nothing of it."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rollstream.producers.flow.policy_versions import PolicyVersions
from rollstream.producers.gateway import rollout_writing
from rollstream.producers.gateway.episode_rollouts import RolloutForm
from rollstream.producers.gateway.rollout_writing import RolloutWriter
from rollstream.producers.gateway.sessions import CapturedSession
from rollstream.producers.record_sender import RolloutDelivery
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError
from rollstream.topics.records import GroupCancelled, Rollout, SessionEvent
from rollstream.topics.wire.validation import cancellation_problems, problems
from tests.unit.producers.gateway.test_sessions import START, call, event


class Producer:
    """Keeps what is sent, and delivers it at the next offsets that the broker tells."""

    sent: ClassVar[list[Any]] = []
    offsets: ClassVar[list[int]] = []

    def __init__(self, *_arguments: Any, on_delivery: Callable[[RolloutDelivery], None], **_settings: Any) -> None:
        self.sent.clear()
        self.on_delivery = on_delivery

    def send(self, rollout: Rollout) -> None:
        if wrong := problems(rollout):
            raise RecordError(f"rollout {rollout.uid!r} was not sent: {wrong}")
        self.sent.append(rollout)

    def cancel(self, cancelled: GroupCancelled) -> None:
        if wrong := cancellation_problems(cancelled):
            raise RecordError(f"the cancellation was not sent: {wrong}")
        self.sent.append(cancelled)

    def flush(self, _timeout_s: float) -> None:
        for record, offset in zip(self.sent, self.offsets, strict=True):
            self.on_delivery(RolloutDelivery(record.uid, 0, offset))


class Log:
    """Applies what this gateway appends, at once."""

    def __init__(self, session: CapturedSession) -> None:
        self.session = session

    async def append(self, change: SessionEvent) -> None:
        self.session.add_event(change, 0)


class Policies:
    """Policies whose reading takes until another gateway has finished the session."""

    def __init__(self, session: CapturedSession) -> None:
        self.session = session

    def read(self, _wait_s: float) -> PolicyVersions:
        self.session.add_event(event("finished", uids=("g.0.0", "g.0.1"), author="other"), 20_000)
        return PolicyVersions()


def closed_session(start: SessionEvent = START, calls: int = 1) -> CapturedSession:
    session = CapturedSession(start, 0, start.policy_version, 0)
    for number in range(calls):
        session.add_call(call(number), 10)
    session.add_event(event("reward", scored=True, reward=1.0), 20)
    session.add_event(event("end"), 30)
    assert session.closed is not None
    return session


def writer_of(
    monkeypatch: pytest.MonkeyPatch, session: CapturedSession, policies: Any, end: int = 0, author: str = "a"
) -> RolloutWriter:
    """A writer for this session, when the partition of `rollouts` has this end."""
    monkeypatch.setattr(rollout_writing, "RolloutProducer", Producer)
    reader = SimpleNamespace(bounds=lambda _topic, partitions: {partitions[0]: (0, end)})
    monkeypatch.setattr(rollout_writing, "Reader", lambda *_a, **_s: reader)
    monkeypatch.setattr(rollout_writing.topic_admin, "partitions_of", lambda *_arguments: 1)
    return RolloutWriter(
        KafkaConfig(),
        "run",
        Log(session),  # type: ignore[arg-type]
        RolloutForm(logprobs_mode="raw", temperature=1.0, assume_version=0),
        policies,
        author=author,
        takeover_s=10.0,
    )


def test_an_episode_that_another_gateway_has_written_meanwhile_is_not_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = closed_session()
    writer = writer_of(monkeypatch, session, Policies(session), author="suspended")
    assert asyncio.run(writer.finish(session)), "it is written"
    assert Producer.sent == []


@pytest.mark.parametrize("change", [{"group_size": 0}, {"environment": ""}, {"policy_version": -1}])
def test_a_session_whose_start_is_invalid_is_finished_without_a_cancellation(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """Otherwise each gateway would try again for ever, and announce each time that it writes."""
    session = closed_session(replace(START, **change))
    policies = SimpleNamespace(read=lambda _wait_s: PolicyVersions())
    writer = writer_of(monkeypatch, session, policies)
    assert asyncio.run(writer.finish(session))
    assert Producer.sent == []
    assert session.finished is not None
    assert session.finished.uids == ()
    assert session.finished.reason.startswith("rollout 'g.0' was not sent: ")


@pytest.mark.parametrize(("offsets", "end"), [([15, 19], 20), ([19, -1], 20), ([-1, -1], 9)])
def test_the_last_event_of_a_session_names_the_end_of_its_rollouts(
    monkeypatch: pytest.MonkeyPatch, offsets: list[int], end: int
) -> None:
    """The brokers do not tell every offset; those after the end of the partition at the start are still to be read."""
    session = closed_session(calls=2)
    monkeypatch.setattr(Producer, "offsets", offsets)
    policies = SimpleNamespace(read=lambda _wait_s: PolicyVersions())
    assert asyncio.run(writer_of(monkeypatch, session, policies, end=7).finish(session))
    assert [rollout.branch for rollout in Producer.sent] == [0, 1]
    assert session.finished is not None
    assert session.finished.rollouts_end == end
