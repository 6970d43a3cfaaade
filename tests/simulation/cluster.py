"""A model of a Kafka cluster: topics, coordinators, and the network between them and a process.

It is as strict as a broker about epochs, generations and visibility, and as free as a network about when a request
arrives and whether its answer does. tests/broker/test_kafka_model.py holds it to a real broker. It leaves out:
requests of a living process that arrive after a later one of it, brokers that lose what they acknowledged, quotas.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TypeVar

from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME

from tests.simulation.group_coordinator import Group
from tests.simulation.partition_log import PartitionLog, Refusal
from tests.simulation.scheduler import Crashed, Process, Scheduler
from tests.simulation.transaction_coordinator import Place, TransactionCoordinator, TransactionState

T = TypeVar("T")
_RETRY_S = 0.05
OUTSIDE = Process("outside")
"""The process of whoever is no actor, such as a test."""
_DEFAULTS = {
    "cleanup.policy": "delete",
    "file.delete.delay.ms": "60000",
    "max.message.bytes": "1048588",
    "message.timestamp.type": "CreateTime",
    "retention.bytes": "-1",
    "retention.ms": "604800000",
}
"""The broker's settings of topics, as far as they are asked for."""
_STAMPED = MappingProxyType({"message.timestamp.type": "LogAppendTime"})


class TimedOut(Exception):
    """A request got no answer; it may have taken effect."""


class Cluster:
    """Topics, groups and transactions."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.topics: dict[str, list[PartitionLog]] = {}
        self.topic_ids: dict[str, str] = {}
        self.settings: dict[str, dict[str, str]] = {}
        """Settings of topics."""
        self.groups: dict[str, Group] = defaultdict(Group)
        self.transactions = TransactionCoordinator(self._send_marker)
        self.slow_marker_s = 2.0
        """How long a marker takes that a follower delays."""
        self.producers = 0
        """Number of producers so far, for the ids of those without a transactional id."""
        self.changed_s = scheduler.now_s
        """When something was last written."""
        scheduler.timers.append(self._expire)

    def create(self, topic: str, partitions: int, settings: Mapping[str, str] = _STAMPED) -> None:
        """Create a topic."""
        self.topics[topic] = [PartitionLog() for _ in range(partitions)]
        # One that is created again has another id.
        self.topic_ids[topic] = f"{self.topic_ids[topic]}'" if topic in self.topic_ids else f"id-of-{topic}"
        self.settings[topic] = {**_DEFAULTS, **settings}

    def reset(self, topic: str, setting: str) -> None:
        """Let the broker's setting apply to a topic again."""
        del self.settings[topic][setting]
        if setting in _DEFAULTS:
            self.settings[topic][setting] = _DEFAULTS[setting]

    def stamp(self, topic: str) -> int:
        """Whose time the records of a topic have, as clients tell it."""
        stamped = self.settings[topic]["message.timestamp.type"] == "LogAppendTime"
        return TIMESTAMP_LOG_APPEND_TIME if stamped else TIMESTAMP_CREATE_TIME

    def log(self, place: Place) -> PartitionLog:
        """The log of a partition."""
        return self.topics[place[0]][place[1]]

    @property
    def now_ms(self) -> int:
        """The brokers' clock."""
        return int(self.scheduler.now_s * 1000)

    @property
    def at_rest(self) -> bool:
        """Whether no transaction is open or half visible."""
        return all(state.state.startswith(("Empty", "Complete")) for state in self.transactions.by_id.values())

    @property
    def fingerprint(self) -> str:
        """Digest over the records and markers of all topics, with their times."""
        digest = hashlib.sha256()
        for name, logs in sorted(self.topics.items()):
            for number, log in enumerate(logs):
                for entry in log.entries:
                    place = f"{name} {number} {entry.offset} {entry.timestamp_ms} {entry.producer_id} {entry.marker}"
                    digest.update(place.encode() + (entry.value or b""))
        return digest.hexdigest()

    def append(
        self,
        place: Place,
        key: bytes | None,
        value: bytes | None,
        headers: list[tuple[str, bytes | None]],
        producer: tuple[int, int],
        sequence: int,
        *,
        transactional: bool = False,
        created_ms: int = 0,
    ) -> int:
        """Produce one record, which its producer created at some time."""
        if transactional:
            self.transactions.check_open(producer, place)
        self.changed_s = self.scheduler.now_s
        stamped = self.stamp(place[0]) == TIMESTAMP_LOG_APPEND_TIME
        at_ms = self.now_ms if stamped or not created_ms else created_ms
        return self.log(place).append(at_ms, key, value, headers, producer, sequence, transactional=transactional)

    def _send_marker(self, state: TransactionState, target: Place | str, commit: bool) -> None:
        # Markers are written one by one; a slow follower delays one by seconds.
        rng = self.scheduler.rng
        self.scheduler.later(
            rng.choice((0.0, 0.0, 0.002, 0.01, 0.01, self.slow_marker_s if rng.random() < 0.1 else 0.02)),
            lambda: self._mark(state, target, commit),
        )

    def _mark(self, state: TransactionState, target: Place | str, commit: bool) -> None:
        self.changed_s = self.scheduler.now_s
        if isinstance(target, str):
            self.groups[target].mark(state.producer_id, commit)
        else:
            self.log(target).mark(self.now_ms, state.producer_id, commit)
        self.transactions.marked(state, target)

    def _expire(self, now_s: float) -> float:
        coming = self.transactions.expire(now_s)
        for group in self.groups.values():
            if group.members:
                coming = min(coming, group.expire(now_s))
        return coming


class Link:
    """The connection of a client to the cluster. The client of a test, which has no process, has a perfect one."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._scheduler = cluster, cluster.scheduler
        self.process = cluster.scheduler.process or OUTSIDE

    def check(self) -> None:
        """Raise Crashed if the client's process is dead."""
        if not self.process.alive:
            raise Crashed

    @property
    def healthy(self) -> bool:
        """Whether the client's own threads run and reach the cluster."""
        process, now_s = self.process, self._scheduler.now_s
        return process.alive and process.stopped_until_s <= now_s and process.cut_until_s <= now_s

    def request(self, apply: Callable[[], T], deadline_s: float = float("inf")) -> T:
        """Send a request and return its answer. Raises Refusal, and TimedOut at the deadline.

        A request whose answer was lost is sent again, as clients do, so every request may be repeated.
        """
        if self._scheduler.current is None:
            return apply()
        while True:
            self._send(apply)
            if self.process.cut_until_s > self._scheduler.now_s:
                if self._scheduler.rng.random() < 0.5:
                    self._quietly(apply)
                self._scheduler.wait(lambda: self.process.cut_until_s <= self._scheduler.now_s, self._left(deadline_s))
                if self.process.cut_until_s > self._scheduler.now_s:
                    raise TimedOut
                continue
            try:
                answer = apply()
            finally:
                self._scheduler.pause()
            if not self.process.losing:
                return answer
            self.process.losing = False
            if deadline_s <= self._scheduler.now_s:
                raise TimedOut
            self._scheduler.sleep(_RETRY_S)

    def _send(self, apply: Callable[[], T]) -> None:
        self.check()
        try:
            self._scheduler.pause()
        except Crashed:
            # The request may have been on its way already.
            if self._scheduler.rng.random() < 0.5:
                self._scheduler.later(self._scheduler.rng.choice((0.0, 0.05, 1.0, 8.0)), lambda: self._quietly(apply))
            raise

    def _quietly(self, apply: Callable[[], T]) -> None:
        with suppress(Refusal):  # nobody waits for the answer
            apply()

    def _left(self, deadline_s: float) -> float:
        return min(deadline_s, self._scheduler.now_s + 1e6) - self._scheduler.now_s
