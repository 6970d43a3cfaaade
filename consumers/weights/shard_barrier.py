"""The barrier of a learner's processes at each policy version: all shards are stored, or no manifest is written.

The lead announces a version, each process says how many bytes it has, the lead plans, and each process sends and
reports its chunks. The key of every message contains the lead's incarnation, so that messages to an earlier incarnation
are never read.

A ShardMember, a process other than the lead, only writes chunks. The lead decides whether they become part of a
version.
"""

import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.content import Arrays
from rollstream.consumers.weights.file_publisher import FileWriter
from rollstream.consumers.weights.shards import Offer, Plan, Shard, ShardWriter, draft
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import DeadlineExceeded, DeliveryError, brief
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)

_EPOCH = "weights/epoch"
_LAST_LOOK_S = 0.05
T = TypeVar("T", Offer, Shard)


class ShardMissing(DeliveryError):
    """A process of the learner did not do its part of a policy version."""


class Channel(Protocol):
    """Messages between the processes of one learner; process 0 leads. Several threads may use it."""

    process: int
    processes: int

    def publish(self, key: str, value: bytes) -> None:
        """Publish a value to the other processes under a new key."""

    def receive(self, key: str, timeout_s: float | None = None) -> bytes:
        """Wait for the value of a key. Raises DeadlineExceeded, or another error if the other processes are gone."""

    def forget(self, key: str) -> None:
        """Delete a value that every process has read."""


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """Announcement of the lead: the next version, or that no version is published after this step."""

    version: int
    """Number of the version; -1 if nothing is published after this step."""
    base: int = -1
    """Version on which this version may be a delta; -1 if it must be full."""


class LeadBarrier:
    """The lead's side of the barrier; without a channel, the lead is the only process."""

    def __init__(self, channel: Channel | None, epoch: str, timeout_s: float) -> None:
        self._channel, self._epoch, self._timeout_s = channel, epoch, timeout_s
        self._others = () if channel is None else tuple(range(1, channel.processes))
        self._round, self._version = 0, -1
        self._told: list[str] = []
        """Keys that can be deleted once all processes have read them."""
        if channel is not None and self._others:
            channel.publish(_EPOCH, epoch.encode())

    @property
    def processes(self) -> int:
        """Number of processes, including this one."""
        return 1 + len(self._others)

    def skip(self) -> None:
        """Tell the other processes that nothing is published after this step."""
        self._begin(Beginning(version=-1))

    def begin(self, version: int, base: int) -> None:
        """Tell the other processes which version begins."""
        self._version = version
        self._begin(Beginning(version=version, base=base))

    def offers(self, own: Offer) -> list[Offer]:
        """Return the offers of all processes, in order. Raises ShardMissing."""
        return [own, *self._hear("offer", Offer)]

    def plan(self, plan: Plan) -> None:
        """Tell the other processes how to send the version."""
        self._tell("plan", plan)

    def shards(self, own: Shard) -> list[Shard]:
        """Return the shards of all processes, in order, once all are sent. Raises ShardMissing."""
        shards = [own, *self._hear("shard", Shard)]
        if self._channel is not None:
            # A process that reported its shard has read all earlier messages.
            for key in self._told:
                self._channel.forget(key)
        self._told.clear()
        return shards

    def _begin(self, beginning: Beginning) -> None:
        self._round += 1
        self._tell("begin", beginning)

    def _tell(self, what: str, message: Beginning | Plan) -> None:
        if self._channel is not None and self._others:
            key = _key(self._epoch, self._round, what)
            self._channel.publish(key, msgspec.json.encode(message))
            self._told.append(key)

    def _hear(self, what: str, kind: type[T]) -> list[T]:
        """Return the messages of all other processes. Raises ShardMissing, which names processes without a message."""
        messages: list[T] = []
        missing: list[int] = []
        deadline = time.monotonic() + self._timeout_s
        for process in self._others:
            assert self._channel is not None
            key = _key(self._epoch, self._round, what, process)
            try:
                value = self._channel.receive(key, max(_LAST_LOOK_S, deadline - time.monotonic()))
            except DeadlineExceeded:
                missing.append(process)
                continue
            self._told.append(key)
            problem, message = msgspec.json.decode(value, type=tuple[str, kind | None])  # type: ignore[valid-type]
            if message is None:
                raise ShardMissing(
                    f"policy version {self._version} is not published: process {process} of the learner failed to "
                    f"send its tensors: {problem}; fix that, then start all processes again"
                )
            messages.append(message)
        if missing:
            raise ShardMissing(
                f"policy version {self._version} is not published: {_processes(missing)} of {self.processes} of the "
                f"learner did not {_DONE[what]} within learner.weights.shards_timeout_s {self._timeout_s:g}; "
                "check its log and its connection to the brokers or the store, then start all processes again"
            )
        return messages


class MemberBarrier:
    """The side of the barrier for a process that is not the lead."""

    def __init__(self, channel: Channel, timeout_s: float) -> None:
        self._channel, self._timeout_s = channel, timeout_s
        self._round, self._epoch = 0, ""
        self._due = ""
        """The message that the lead waits for."""

    @property
    def process(self) -> int:
        """Number of this process."""
        return self._channel.process

    @property
    def epoch(self) -> str:
        """The lead's incarnation, known once a version has begun."""
        return self._epoch

    def begin(self) -> Beginning:
        """Wait until the lead begins or skips a version. Raises ShardMissing."""
        self._epoch = self._epoch or self._receive(_EPOCH).decode()
        self._round += 1
        beginning = msgspec.json.decode(self._hear("begin"), type=Beginning)
        self._due = "" if beginning.version < 0 else "offer"
        return beginning

    def plan(self, own: Offer) -> Plan:
        """Report what this process can send, and wait for the plan. Raises ShardMissing."""
        self._tell(own)
        self._due = "shard"
        return msgspec.json.decode(self._hear("plan"), type=Plan)

    def report(self, shard: Shard) -> None:
        """Report what was sent, which the lead may commit from now on."""
        self._tell(shard)
        self._due = ""

    def fail(self, problem: str) -> None:
        """Report that this process cannot do its part, if the lead is waiting for it."""
        if self._due:
            self._tell(None, problem)
            self._due = ""

    def _tell(self, message: Offer | Shard | None, problem: str = "") -> None:
        key = _key(self._epoch, self._round, self._due, self.process)
        self._channel.publish(key, msgspec.json.encode((problem, message)))

    def _hear(self, what: str) -> bytes:
        return self._receive(_key(self._epoch, self._round, what))

    def _receive(self, key: str) -> bytes:
        try:
            return self._channel.receive(key, self._timeout_s)
        except DeadlineExceeded as late:
            raise ShardMissing(
                f"process {self.process} of the learner got no message about the next policy version from its lead, "
                f"process 0, within learner.weights.shards_timeout_s {self._timeout_s:g}; check the lead's log, then "
                "start all processes again"
            ) from late


_DONE = {"offer": "say how much there is to send", "shard": "report the chunks as stored"}


def _key(epoch: str, number: int, what: str, process: int | None = None) -> str:
    return f"weights/{epoch}/{number}/{what}" + ("" if process is None else f"/{process}")


def _processes(numbers: Iterable[int]) -> str:
    return ", ".join(f"process {number}" for number in numbers)


class ShardMember(Closing):
    """A process that sends its tensors of each version; the lead's WeightsPublisher has the other end of `channel`."""

    def __init__(self, kafka: KafkaConfig, run: str, config: WeightsConfig, channel: Channel) -> None:
        """The settings must equal the lead's settings."""
        self._config = config
        self._writer = ShardWriter(kafka, run, config, FileWriter(run, config) if config.url else None)
        self._barrier = MemberBarrier(channel, config.shards_timeout_s)
        self._sent: tuple[int, Arrays] = (-1, {})
        """The last version that was sent and the arrays of this process; the lead says whether it was committed."""

    def contribute(self, arrays: Arrays) -> int:
        """Send the arrays of this process as its share of the version that the lead begins; return the version.

        If the lead publishes nothing after this step, sends nothing and returns -1. The arrays must not change
        afterwards. Raises ShardMissing if the lead sends no message in time, and DeliveryError if broker or store does
        not accept chunks. Errors are also reported to the lead.
        """
        beginning = self._barrier.begin()
        if beginning.version < 0:
            return -1
        try:
            self._send(beginning, arrays)
        except Exception as error:
            # Raise the error that stopped this process, not an error from reporting it to the lead.
            with contextlib.suppress(Exception):
                self._barrier.fail(brief(error))
            raise
        return beginning.version

    def close(self) -> None:
        """Wait until the broker has received everything that was sent."""
        self._writer.close()

    def _send(self, beginning: Beginning, arrays: Arrays) -> None:
        began = time.monotonic()
        before = self._sent[1] if self._sent[0] == beginning.base >= 0 else None
        self._sent = (-1, {})
        share = draft(arrays, before, alone=False)
        plan = self._barrier.plan(share.offer)
        shard = self._writer.send(share, plan, self._barrier.process, beginning.version, self._barrier.epoch)
        self._barrier.report(shard)
        if self._config.anchor_every > 1:
            self._sent = beginning.version, arrays
        event(
            logger,
            "shard_sent",
            version=beginning.version,
            process=self._barrier.process,
            tensors=len(shard.tensors),
            chunks=len(shard.chunks),
            full_bytes=shard.full_bytes,
            content_bytes=shard.content_bytes,
            seconds=round(time.monotonic() - began, 4),
        )
