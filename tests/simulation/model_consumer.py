"""A consumer with the methods of confluent_kafka.Consumer that our code calls, over the model of a cluster.

As in librdkafka, a group member's callbacks run within `consume` and `close`, and a member that was expelled, replaced
or caught in a rebalance learns of it there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    TIMESTAMP_LOG_APPEND_TIME,
    KafkaError,
    KafkaException,
    TopicPartition,
)

from tests.simulation.cluster import Cluster, Link, TimedOut
from tests.simulation.group_coordinator import Committed, MemberMetadata
from tests.simulation.model_admin import Metadata, metadata_of
from tests.simulation.partition_log import Entry, Headers, Refusal
from tests.simulation.transaction_coordinator import Place

OUT, JOINING, IN = "out", "joining", "in"
Callback = Callable[[Any, list[TopicPartition]], None]


class ModelMessage:
    """A record, or an event in its place."""

    def __init__(
        self,
        place: Place,
        offset: int,
        entry: Entry | None = None,
        error: int | None = None,
        stamp: int = TIMESTAMP_LOG_APPEND_TIME,
    ) -> None:
        self._place, self._offset, self._entry, self._stamp = place, offset, entry, stamp
        self._error = None if error is None else KafkaError(error)

    def error(self) -> KafkaError | None:
        return self._error

    def topic(self) -> str:
        return self._place[0]

    def partition(self) -> int:
        return self._place[1]

    def offset(self) -> int:
        return self._offset

    def timestamp(self) -> tuple[int, int]:
        return self._stamp, self._entry.timestamp_ms if self._entry else -1

    def key(self) -> bytes | None:
        return self._entry.key if self._entry else None

    def value(self) -> bytes | None:
        return self._entry.value if self._entry else None

    def headers(self) -> Headers | None:
        if not (self._entry and self._entry.headers):
            return None
        return [(name if isinstance(name, str) else name.decode(), value) for name, value in self._entry.headers]

    def leader_epoch(self) -> int:
        return 0


class ModelConsumer:
    """A reader of assigned partitions, or a static member of a group."""

    def __init__(self, cluster: Cluster, settings: Mapping[str, Any]) -> None:
        self._cluster, self._scheduler, self._link = cluster, cluster.scheduler, Link(cluster)
        self._group_name = str(settings["group.id"])
        self._instance = str(settings.get("group.instance.id", ""))
        self._session_s = float(settings.get("session.timeout.ms", 45_000)) / 1000
        self._piece_bytes = int(settings["max.partition.fetch.bytes"])
        self._committed_only = settings["isolation.level"] == "read_committed"
        self._positions: dict[Place, int] = {}
        self._paused: set[Place] = set()
        self._told_end: dict[Place, int] = {}
        self._topic = ""
        self._callbacks: tuple[Callback, Callback, Callback] | None = None
        self._state, self._name, self._generation = OUT, "", -1
        self._seen_s = self._scheduler.now_s
        self._fatal: KafkaError | None = None
        self._closed = False

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Metadata:
        return metadata_of(self._cluster, topic)

    # ------------------------------------------------------------------ assignment

    def assign(self, places: Sequence[TopicPartition]) -> None:
        self._link.check()
        self._positions.clear()
        self.incremental_assign(places)

    def incremental_assign(self, places: Sequence[TopicPartition]) -> None:
        for place in places:
            self._positions[place.topic, place.partition] = place.offset
            self._told_end.pop((place.topic, place.partition), None)
            self._paused.discard((place.topic, place.partition))

    def incremental_unassign(self, places: Sequence[TopicPartition]) -> None:
        for place in places:
            self._positions.pop((place.topic, place.partition), None)

    def unassign(self) -> None:
        self._positions.clear()

    def assignment(self) -> list[TopicPartition]:
        return [TopicPartition(*place) for place in self._positions]

    def seek(self, place: TopicPartition) -> None:
        self._link.check()
        at = place.topic, place.partition
        # A client that has not begun to fetch a partition refuses to seek in it.
        if at not in self._positions or (self._instance and self._scheduler.rng.random() < 0.1):
            raise KafkaException(KafkaError(KafkaError._STATE))
        self._positions[at] = place.offset
        self._told_end.pop(at, None)

    def pause(self, places: Iterable[TopicPartition]) -> None:
        self._paused.update((place.topic, place.partition) for place in places)

    def resume(self, places: Iterable[TopicPartition]) -> None:
        self._paused.difference_update((place.topic, place.partition) for place in places)

    # ------------------------------------------------------------------ records

    def consume(self, most: int = 1, timeout: float = -1) -> list[ModelMessage]:
        self._link.check()
        self._take_part()
        messages = self._fetch(most)
        if not messages and timeout > 0:
            self._scheduler.wait(lambda: most == 1 and self._ready(), timeout)
            self._take_part()
            messages = self._fetch(most)
        if messages or self._instance:
            self._scheduler.pause()
        return messages

    def _ready_at_once(self) -> bool:
        """Whether a fetch would bring anything."""
        for place, at in self._positions.items():
            if at < 0 or self._told_end.get(place) != at or self._stop(place) > at:
                return True
        return False

    def _ready(self) -> bool:
        return self._link.healthy and any(
            self._stop(place) > at or self._told_end.get(place) != at
            for place, at in self._positions.items()
            if place not in self._paused and at >= 0
        )

    def _stop(self, place: Place) -> int:
        if place[0] not in self._cluster.topics:
            return 0
        log = self._cluster.log(place)
        return log.stable if self._committed_only else log.end

    def _fetch(self, most: int) -> list[ModelMessage]:
        if not self._link.healthy:
            return []
        if not self._instance and not self._ready_at_once():
            return []
        messages: list[ModelMessage] = []
        rng = self._scheduler.rng
        places = [place for place in self._positions if place not in self._paused]
        if self._instance:
            # The network decides how much one fetch brings of each partition.
            rng.shuffle(places)
        while places and len(messages) < most:
            before = len(messages)
            self._fetch_pieces(places, most, messages)
            if self._instance or len(messages) == before:
                break
        return messages

    def _fetch_pieces(self, places: list[Place], most: int, messages: list[ModelMessage]) -> None:
        """Take a piece of each partition in turn."""
        rng = self._scheduler.rng
        for place in places:
            if place not in self._positions:
                continue
            room = most - len(messages)
            if room <= 0:
                break
            if self._instance:
                room = min(room, rng.choice((1, 2, 5, room)))
            if place[0] not in self._cluster.topics:
                del self._positions[place]
                messages.append(ModelMessage(place, -1, error=KafkaError.UNKNOWN_TOPIC_OR_PART))
                continue
            if self._positions[place] < 0 and not self._resolve(place, messages):
                continue
            at, log = self._positions[place], self._cluster.log(place)
            if not log.begin <= at <= log.end:
                del self._positions[place]
                messages.append(ModelMessage(place, at, error=KafkaError._AUTO_OFFSET_RESET))
                continue
            entries, self._positions[place] = log.visible(at, room, self._committed_only, self._piece_bytes)
            stamp = self._cluster.stamp(place[0])
            messages += [ModelMessage(place, entry.offset, entry, stamp=stamp) for entry in entries]
            end = self._positions[place]
            if end >= self._stop(place) and self._told_end.get(place) != end and len(messages) < most:
                self._told_end[place] = end
                messages.append(ModelMessage(place, end, error=KafkaError._PARTITION_EOF))

    def _resolve(self, place: Place, messages: list[ModelMessage]) -> bool:
        if self._positions[place] == OFFSET_BEGINNING:
            self._positions[place] = self._cluster.log(place).begin
            return True
        if self._positions[place] == OFFSET_END:
            self._positions[place] = self._stop(place)
            return True
        assert self._positions[place] == OFFSET_INVALID
        committed = self._cluster.groups[self._group_name].fetch(place)
        if committed is None:
            return False
        if committed.offset < 0:
            del self._positions[place]
            messages.append(ModelMessage(place, -1, error=KafkaError._AUTO_OFFSET_RESET))
            return False
        self._positions[place] = committed.offset
        return True

    def get_watermark_offsets(
        self, place: TopicPartition, timeout: float = -1, cached: bool = False
    ) -> tuple[int, int]:
        self._link.check()
        at = place.topic, place.partition
        begin = self._cluster.log(at).begin
        if cached:
            return begin, self._stop(at)
        return begin, self._bounded(lambda: self._stop(at), timeout)

    # ------------------------------------------------------------------ offsets

    def offsets_for_times(self, places: Sequence[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        self._link.check()

        def offset(p: TopicPartition) -> int:
            place = p.topic, p.partition
            log = self._cluster.log(place)
            if p.offset == OFFSET_BEGINNING:
                return log.begin
            if p.offset == OFFSET_END:
                return self._stop(place)
            later = (e.offset for e in log.entries[log.begin : self._stop(place)] if e.timestamp_ms >= p.offset)
            return next(later, OFFSET_END)

        def answer() -> list[TopicPartition]:
            return [TopicPartition(p.topic, p.partition, offset(p)) for p in places]

        return self._bounded(answer, timeout)

    def committed(self, places: Sequence[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        self._link.check()
        group = self._cluster.groups[self._group_name]
        deadline_s = self._scheduler.now_s + timeout
        while True:
            answers = self._bounded(lambda: [group.fetch((p.topic, p.partition)) for p in places], timeout)
            if None not in answers:
                return [
                    TopicPartition(p.topic, p.partition, a.offset, a.metadata, leader_epoch=max(a.leader_epoch, 0))
                    for p, a in zip(places, answers, strict=True)
                ]
            if self._scheduler.now_s >= deadline_s:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
            self._scheduler.sleep(0.05)

    def commit(self, offsets: Sequence[TopicPartition], asynchronous: bool = True) -> None:
        self._link.check()
        group = self._cluster.groups[self._group_name]
        new = {(p.topic, p.partition): Committed(p.offset, p.metadata or "") for p in offsets}
        self._bounded(lambda: group.offsets.update(new), 60.0)

    def consumer_group_metadata(self) -> MemberMetadata:
        self._link.check()
        if not self._topic:
            return MemberMetadata(self._group_name)
        return MemberMetadata(self._group_name, self._generation, self._name, self._instance)

    def _bounded(self, apply: Callable[[], Any], timeout: float) -> Any:
        try:
            return self._link.request(apply, self._scheduler.now_s + timeout)
        except TimedOut:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from None

    # ------------------------------------------------------------------ membership

    def subscribe(self, topics: Sequence[str], on_assign: Callback, on_revoke: Callback, on_lost: Callback) -> None:
        [self._topic] = topics
        self._callbacks = on_assign, on_revoke, on_lost
        group = self._cluster.groups[self._group_name]
        group.topic, group.partitions = self._topic, len(self._cluster.topics[self._topic])

    def _take_part(self) -> None:
        """Do what a member's heartbeats and the group's state ask for."""
        while self._callbacks is not None:
            if self._fatal is not None:
                raise KafkaException(self._fatal)
            if not self._link.healthy:
                if self._state == IN and self._scheduler.now_s - self._seen_s > self._session_s:
                    self._lose()
                return
            self._seen_s = self._scheduler.now_s
            try:
                if not self._step():
                    return
            except Refusal as refusal:
                if refusal.code == KafkaError.FENCED_INSTANCE_ID:
                    self._fatal = KafkaError(refusal.code, "replaced", fatal=True)
                else:
                    self._lose()

    def _step(self) -> bool:
        """Go on by one step; return whether there may be another."""
        assert self._callbacks is not None
        group = self._cluster.groups[self._group_name]
        on_assign, on_revoke, _on_lost = self._callbacks
        if self._state == OUT:
            now_s = self._scheduler.now_s
            self._name = group.join(
                self._instance, self._session_s, lambda: self._link.healthy and not self._closed, now_s
            )
            self._state = JOINING
        member = group.validate(self._name, self._instance)
        if self._state == JOINING:
            if group.rebalancing:
                # Another rebalance may have begun before this member got its assignment.
                group.rejoin(self._name, self._instance)
            if group.rebalancing:
                return False
            self._state, self._generation = IN, group.generation
            on_assign(self, [TopicPartition(self._topic, number) for number in member.assignment])
            return True
        if group.rebalancing and self._name not in group.joined:
            self._revoke(on_revoke)
            self._state = JOINING
            group.rejoin(self._name, self._instance)
            return True
        if group.generation != self._generation:
            raise Refusal(KafkaError.ILLEGAL_GENERATION)
        return False

    def _lose(self) -> None:
        assert self._callbacks is not None
        state, self._state = self._state, OUT
        if state == IN:
            self._revoke(self._callbacks[2])

    def _revoke(self, callback: Callback) -> None:
        callback(self, self.assignment())
        self._positions.clear()
        self._paused.clear()

    def close(self) -> None:
        if not self._link.process.alive:
            return
        if self._callbacks is not None and self._state == IN and self._fatal is None:
            self._revoke(self._callbacks[1])
        # A static member does not leave: its session ends.
        self._closed = True
        self._callbacks = None
