"""A member of a group that has no partition examines its group, and goes on polling meanwhile."""

import time
from itertools import pairwise

import pytest

from rollstream.topics.errors import BrokerUnavailable
from rollstream.topics.kafka import groups
from rollstream.topics.kafka.groups import GroupMember
from tests.support.runs import RealRun


def test_an_examination_that_no_broker_answers_delays_no_poll(
    real_run: RealRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, examined = real_run.prepare(), list[float]()

    def unanswered(*_words: object) -> None:
        examined.append(time.monotonic())
        time.sleep(25.0)
        raise BrokerUnavailable("nobody is there")

    monkeypatch.setattr(groups, "group_assignment", unanswered)
    members = [GroupMember(run.kafka, f"{run.name}.group", f"m{n}", run.topic("rollouts")) for n in range(3)]
    for member in members:
        member.join(lambda partitions: dict.fromkeys(partitions, 0), lambda _gone: None, lambda _gone: None)
    began, longest_s = time.monotonic(), 0.0
    while time.monotonic() - began < 120.0:
        for member in members:
            before = time.monotonic()
            member.poll(10, 0.1)
            longest_s = max(longest_s, time.monotonic() - before)
    for member in members:
        member.close()
    assert longest_s < 10.0
    assert len(examined) >= 2
    assert min(after - before for before, after in pairwise(examined)) >= 25.0
