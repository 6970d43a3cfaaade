"""Consumer groups: a member, polled like any reader, and the members and committed offsets that brokers know.

A member is static under the classic protocol, so that a restart under the same name moves no partition. It commits
nothing: transactions commit the offsets.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

from confluent_kafka import Consumer, ConsumerGroupState, KafkaError, KafkaException, Message, TopicPartition

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable, RollstreamError
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.client_calls import COORDINATOR_REQUEST_S, BoundedCalls, answer_of, is_moving, retrying
from rollstream.topics.kafka.hanging_transactions import admin_client
from rollstream.topics.kafka.reader import Poller, Reader
from rollstream.topics.kafka.records import COMMITTED, GroupPosition
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)


def _described(kafka: KafkaConfig, group: str, timeout_s: float) -> Any:
    """Return the client's description of a group; None if there is no such group. Raises BrokerUnavailable."""
    client = clients.admin(kafka)

    def description() -> Any:
        try:
            request = client.describe_consumer_groups([group], request_timeout=COORDINATOR_REQUEST_S)[group]
            return answer_of(request, timeout_s)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                return None
            raise

    return retrying(description, f"describing group {group}", timeout_s)


def members(kafka: KafkaConfig, group: str) -> int:
    """Number of members of a consumer group."""
    description = _described(kafka, group, kafka.patience_s)
    if description is None or description.state in (ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD):
        return 0
    return len(description.members)


class GroupAssignment(NamedTuple):
    """The partitions of a topic as a group has assigned them to its members."""

    unowned: frozenset[int]
    """Partitions that belong to no member."""
    idle: list[str]
    """Names of the static members without a partition, in order."""


def group_assignment(kafka: KafkaConfig, group: str, topic: str, timeout_s: float) -> GroupAssignment | None:
    """Return the assignment of a stable group; None if the group is rebalancing or has no members.

    `timeout_s` limits the description. Raises TopicError if the topic is missing, and BrokerUnavailable if no broker
    answers.
    """
    partitions = range(topic_admin.partitions_of(kafka, topic))
    description = _described(kafka, group, timeout_s)
    if description is None or description.state is not ConsumerGroupState.STABLE:
        return None
    owned, idle = set[int](), []
    for member in description.members:
        places = {place.partition for place in member.assignment.topic_partitions if place.topic == topic}
        owned |= places
        if not places and member.group_instance_id:
            idle.append(member.group_instance_id)
    return GroupAssignment(frozenset(partitions) - owned, sorted(idle))


def remove_members(kafka: KafkaConfig, group: str, names: Iterable[str]) -> list[str]:
    """Remove static members, whose partitions then need not wait for the end of a session. One that lives joins again.

    Returns the names that the group did not have. Raises BrokerUnavailable if the request fails, ConfigurationError if
    kafka.client has a TLS or SASL key that kafka-python does not support.
    """
    # Imported late: librdkafka has no such request, and few processes need it.
    from kafka.admin import MemberToRemove
    from kafka.errors import KafkaError as OtherKafkaError
    from kafka.errors import NoError

    leaving = [MemberToRemove(group_instance_id=name) for name in names]
    with admin_client(kafka) as client:
        try:
            answers = client.remove_group_members(group, leaving)
        except (OtherKafkaError, OSError, ValueError) as error:
            raise BrokerUnavailable(f"removing members of group {group}: {error}") from error
    return sorted(str(name) for name, answer in answers.items() if answer is not NoError)


def group_positions(kafka: KafkaConfig, group: str, places: Mapping[str, Iterable[int]]) -> list[GroupPosition]:
    """Positions that a group has committed in these partitions, by full name of their topic. Raises BrokerUnavailable.

    A consumer asks: if a coordinator that has just started refuses an admin client's request for offsets, librdkafka
    2.16.0 ends the process (ListConsumerGroupOffsets refused with NOT_COORDINATOR). Offsets in an open transaction are
    not waited for.
    """
    doing = f"asking for offsets of group {group}"
    with Reader(kafka, group=group, isolation="read_uncommitted", doing=doing) as reader:
        positions = (reader.committed(topic, partitions, doing) for topic, partitions in places.items())
        return [position for of_topic in positions for position in of_topic if position.offset >= 0]


_IDLE_S = 15.0
"""How long a member is assigned no partition before it examines its group, and between two examinations."""
_EXAMINATION_S = 5.0
"""Timeout of the description of a group."""
_END_S = 2.0
"""Timeout of the request for a partition's end; a rebalance waits for it."""
Numbers = list[int]
"""Partitions of the group's topic."""


class MembershipLost(RollstreamError):
    """This member cannot read any more."""

    def __init__(self, text: str, *, fenced: bool) -> None:
        super().__init__(text)
        self.fenced = fenced
        """Whether another consumer joined under the same name."""


class NotFetching(RollstreamError):
    """The client has not begun to fetch a partition, or has lost it."""


class GroupMember(Poller):
    """Reads the partitions of one topic that its group assigns to it."""

    def __init__(
        self,
        kafka: KafkaConfig,
        group: str,
        instance: str,
        topic: str,
        *,
        gather_s: float = 0.0,
        longest_poll_s: float = 0.0,
        **overrides: Any,
    ) -> None:
        """`instance` is the member's name, `topic` a full name. A poll waits for further records for `gather_s` after
        its first record. The group expels a member that does not poll for `longest_poll_s`, at least five minutes,
        unless kafka.client sets max.poll.interval.ms."""
        consumer = clients.group_member(kafka, group, instance, longest_poll_s=longest_poll_s, **overrides)
        super().__init__(kafka, consumer, "reading")
        self._topic, self._gather_s = topic, gather_s
        self._group, self._instance = group, instance
        self._owned: set[int] = set()
        """Partitions assigned to this member; a client that is being closed does not tell them."""
        self._idle_s: float | None = None
        """When this member was assigned no partition, or last examined its group since; None if it owns a partition, or
        has no assignment."""
        self._examination: Future[Any] | None = None

    def join(
        self,
        on_assign: Callable[[Numbers], Mapping[int, int]],
        on_revoke: Callable[[Numbers], None],
        on_lost: Callable[[Numbers], None],
    ) -> None:
        """Join the group. `on_assign` returns the offset that each assigned partition is read from.

        All three callbacks are called within `poll` and `close`, which raise the callbacks' exceptions.
        """

        def assign(_consumer: Consumer, partitions: list[TopicPartition]) -> None:
            numbers = self._forget(partitions)
            self._owned.update(numbers)
            self._idle_s = None if self._owned else time.monotonic()
            self._begin(on_assign(numbers))

        def revoke(_consumer: Consumer, partitions: list[TopicPartition]) -> None:
            on_revoke(self._forget(partitions))

        def lose(_consumer: Consumer, partitions: list[TopicPartition]) -> None:
            on_lost(self._forget(partitions))

        self._consumer.subscribe([self._topic], on_assign=assign, on_revoke=revoke, on_lost=lose)

    def _forget(self, partitions: list[TopicPartition]) -> Numbers:
        self._idle_s = None
        self._reassigned.update((place.topic, place.partition) for place in partitions)
        for place in partitions:
            self.positions.pop((place.topic, place.partition), None)
            self._owned.discard(place.partition)
        return [place.partition for place in partitions]

    def _begin(self, offsets: Mapping[int, int]) -> None:
        places = self._places(offsets)
        cooperative = "cooperative" in str(self._kafka.client.get("partition.assignment.strategy", ""))
        if cooperative or self._kafka.group_protocol == "consumer":
            self._consumer.incremental_assign(places)
        else:
            self._consumer.assign(places)

    def _places(self, offsets: Mapping[int, int]) -> list[TopicPartition]:
        self.positions.update({(self._topic, p): offset for p, offset in offsets.items() if offset >= 0})
        return [TopicPartition(self._topic, p, offset) for p, offset in offsets.items()]

    def _listen(self, messages: list[Message]) -> None:
        super()._listen(messages)
        if self._examination is not None:
            if self._examination.done():
                examined, self._examination = self._examination, None
                examined.result()
            return
        idle = self._idle_s is not None and time.monotonic() - self._idle_s > _IDLE_S
        if idle and self._kafka.group_protocol == "classic":
            # On a thread of its own, because its requests may wait for brokers, and this member must go on polling.
            calls = BoundedCalls()
            self._examination = calls.submit(self._have_unowned_assigned)
            calls.close()
            self._idle_s = time.monotonic()

    def _have_unowned_assigned(self) -> None:
        """Have the group assign its partitions anew if it left some to nobody and this idle member is to act.

        A coordinator that cannot store the new id of a static member that rejoined, because its replicas are out of
        reach, returns to the old id. If the group was assigned in between, the member gets an empty assignment, and the
        same after each restart, because a static member that rejoins a stable group keeps its assignment (KIP-345). The
        removal of a member begins a rebalance, and the removed one joins again by itself.
        """
        try:
            assignment = group_assignment(self._kafka, self._group, self._topic, _EXAMINATION_S)
            if assignment is None or not assignment.unowned or assignment.idle[:1] != [self._instance]:
                return
            if self._idle_s is None:
                return  # It has partitions by now.
            event(
                logger,
                "partitions_unowned",
                level=logging.WARNING,
                group=self._group,
                partitions=sorted(assignment.unowned),
                remedy="this member leaves and joins again, so that the group assigns them",
            )
            remove_members(self._kafka, self._group, [self._instance])
        except RollstreamError as error:
            event(logger, "group_not_examined", level=logging.WARNING, group=self._group, error=str(error))

    def _consume_once(self, most: int, wait_s: float) -> list[Message]:
        try:
            return super()._consume_once(most, wait_s)
        except SystemError as lost:
            # After a fatal error the client may lose its own exception; Python then raises SystemError instead.
            raise MembershipLost(str(lost), fenced=False) from lost

    def _raise_for(self, error: KafkaError, doing: str) -> None:
        if _fenced(error):
            raise MembershipLost(error.str(), fenced=True)
        if error.code() == KafkaError._MAX_POLL_EXCEEDED:
            event(logger, "max_poll_exceeded", level=logging.WARNING, error=error.str())
        elif is_moving(error) and any((self._topic, number) not in self.positions for number in self._owned):
            # The client asked the coordinator for a committed position, and does not ask again after such an error.
            raise MembershipLost(f"an assigned partition has no position: {error.str()}", fenced=False)
        else:
            super()._raise_for(error, doing)

    def _topics(self) -> str:
        return self._topic

    def _any_topic(self) -> str:
        return self._topic

    def _replace(self) -> None:
        raise MembershipLost("the client of this member does not find the brokers any more", fenced=False)

    # ------------------------------------------------------------------ partitions

    @property
    def assignment(self) -> set[int]:
        """Partitions that are assigned to this member."""
        return {place.partition for place in self._consumer.assignment()}

    def go_back(self, offsets: Mapping[int, int]) -> None:
        """Continue at these offsets of assigned partitions. Raises NotFetching if a partition was taken away."""
        for partition, offset in offsets.items():
            # A partition that is at its offset may not be fetched yet, and the client refuses to seek in it.
            if self.positions.get((self._topic, partition)) != offset:
                self.seek(partition, offset)

    def seek(self, partition: int, offset: int) -> None:
        """Continue at another offset. Raises NotFetching if the partition is not being fetched yet."""
        try:
            self._consumer.seek(TopicPartition(self._topic, partition, offset))
        except KafkaException as error:
            raise NotFetching(str(error)) from error
        self.positions[self._topic, partition] = offset

    def pause(self, partitions: Iterable[int]) -> None:
        """Fetch nothing of these partitions until `resume`."""
        self._consumer.pause([TopicPartition(self._topic, partition) for partition in partitions])

    def resume(self, partitions: Iterable[int]) -> None:
        """Fetch these partitions again."""
        self._consumer.resume([TopicPartition(self._topic, partition) for partition in partitions])

    def ends(self, partitions: Iterable[int]) -> dict[int, int]:
        """Ends of partitions, for use as positions until `seek`; COMMITTED if no broker answers for a partition.

        The ends are numeric offsets, because the client resolves a symbolic end in the background, and an answer that
        arrives after a seek would override the seek.
        """
        ends = dict.fromkeys(partitions, COMMITTED)
        with suppress(KafkaException):
            for partition in ends:
                _, ends[partition] = self._consumer.get_watermark_offsets(
                    TopicPartition(self._topic, partition), _END_S
                )
        return ends

    def known_end(self, partition: int) -> int | None:
        """End of a partition at the last fetch; None if nothing was fetched."""
        return self._fetched_end((self._topic, partition))


def _fenced(error: KafkaError) -> bool:
    """Whether another consumer joined under our name. A fatal error names the cause in its text, not in its code."""
    return bool(
        error.code() == KafkaError.FENCED_INSTANCE_ID or (error.code() == KafkaError._FATAL and "fenced" in error.str())
    )
