"""A group that leaves partitions to nobody, as one does whose coordinator loses the new ids of static members."""

import json
import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from kafka import KafkaConsumer
from kafka.coordinator.assignors.abstract import ConsumerProtocolAssignment
from kafka.coordinator.assignors.range import RangePartitionAssignor

from rollstream.topics.config import TopicsConfig
from rollstream.topics.kafka import provisioning
from rollstream.topics.kafka.groups import GroupAssignment, GroupMember, group_assignment
from tests.support.runs import RealRun
from tests.support.waiting import eventually


class ForgetfulAssignor(RangePartitionAssignor):  # type: ignore[misc]
    """Assigns no partition to anybody for some seconds after the group has got a second member, because on a busy
    machine the group rebalanced again, by itself, after 1.5 s."""

    forgets_s = 10.0
    began = math.inf

    @classmethod
    def assign(cls, cluster: Any, members: Any) -> Any:
        if len(members) > 1:
            now = time.monotonic()
            cls.began = min(cls.began, now)
            if now < cls.began + cls.forgets_s:
                return {member.member_id: ConsumerProtocolAssignment(cls.version, [], b"") for member in members}
        return super().assign(cluster, members)


@contextmanager
def forgetful_leader(run: RealRun) -> Iterator[None]:
    """The first member of the group of groupers, which assigns the partitions; it reads nothing."""
    over, assigned = threading.Event(), threading.Event()
    ForgetfulAssignor.began = math.inf
    consumer = KafkaConsumer(
        run.topic("rollouts"),
        bootstrap_servers=run.kafka.bootstrap_servers,
        group_id=run.grouper.group_id(run.name),
        partition_assignment_strategy=[ForgetfulAssignor],
        enable_auto_commit=False,
        max_poll_records=1,
    )

    def lead() -> None:
        while not over.is_set():
            consumer.poll(timeout_ms=100)
            if consumer.assignment():
                assigned.set()
        consumer.close()

    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(lead)
        try:
            assert assigned.wait(60), "the leader has joined"
            yield
        finally:
            over.set()
            leading.result(60)


def assignments(log: str) -> list[list[int]]:
    """The partitions of each assignment that a grouper logged."""
    return [json.loads(line)["partitions"] for line in log.splitlines() if '"event": "assigned"' in line]


@pytest.mark.kafka  # not tried over the model yet
@pytest.mark.long
def test_a_grouper_without_partitions_has_the_group_assign_those_that_belong_to_nobody(real_run: RealRun) -> None:
    real_run.prepare()
    with forgetful_leader(real_run):
        grouper = real_run.start("group")
        eventually(lambda: assignments(real_run.log_of(grouper)), 60, "the grouper has an assignment")
        assert assignments(real_run.log_of(grouper))[0] == []
        eventually(lambda: any(assignments(real_run.log_of(grouper))), 60, "the grouper owns a partition")
    eventually(lambda: assignments(real_run.log_of(grouper))[-1] == [0, 1], 60, "the grouper owns every partition")
    warnings = [line for line in real_run.log_of(grouper).splitlines() if "partitions_unowned" in line]
    assert [json.loads(line)["partitions"] for line in warnings] == [[0, 1]]


def test_a_member_without_a_partition_is_idle_while_others_own_all(real_run: RealRun) -> None:
    real_run.topics = TopicsConfig(partitions=1)
    provisioning.apply(real_run.kafka, real_run.topics, real_run.name)
    group, topic = f"{real_run.name}.readers", real_run.topic("rollouts")
    owned = defaultdict[str, list[list[int]]](list)
    members = {name: GroupMember(real_run.kafka, group, name, topic) for name in ("first", "second")}

    def joined() -> bool:
        for member in members.values():
            member.poll(1, 0.05)
        return sorted(numbers[-1] for numbers in owned.values()) == [[], [0]]

    def note(name: str, numbers: list[int]) -> dict[int, int]:
        owned[name].append(numbers)
        return dict.fromkeys(numbers, 0)

    try:
        for name, member in members.items():
            member.join(partial(note, name), lambda _numbers: None, lambda _numbers: None)
        eventually(joined, 60, "one of two members owns the partition")
        [idle] = [name for name, numbers in owned.items() if not numbers[-1]]
        assert group_assignment(real_run.kafka, group, topic, 10.0) == GroupAssignment(frozenset(), [idle])
    finally:
        for member in members.values():
            member.close()
