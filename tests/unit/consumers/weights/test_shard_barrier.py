"""The barrier: the lead has every shard or names the missing processes, and ignores other incarnations."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from rollstream.consumers.weights.shard_barrier import LeadBarrier, MemberBarrier, ShardMissing
from rollstream.consumers.weights.shards import Offer, Plan, Shard
from tests.support.channels import MemoryChannel, memory_channels

LONG_S, SHORT_S = 300.0, 0.1
PLAN = Plan(delta=False, files=False, first_chunks=(0, 1, 2))


def shard(size: int) -> Shard:
    return Shard(tensors=(), chunks=(), full_bytes=size)


def take_part(channel: MemoryChannel, versions: int) -> list[int]:
    """Take part in so many versions as one process; return the versions that it heard of."""
    barrier = MemberBarrier(channel, LONG_S)
    heard = []
    for _ in range(versions):
        heard.append(barrier.begin().version)
        if heard[-1] >= 0:
            assert barrier.plan(Offer(full_bytes=channel.process)) == PLAN
            barrier.report(shard(channel.process))
    return heard


def test_every_process_hears_of_every_version_and_nothing_is_left_behind() -> None:
    channels = memory_channels(3)
    with ThreadPoolExecutor(2) as pool:
        members = [pool.submit(take_part, channel, 4) for channel in channels[1:]]
        lead = LeadBarrier(channels[0], "e", LONG_S)
        for version in (0, -1, 1, 2):
            if version < 0:
                lead.skip()
                continue
            lead.begin(version, version - 1)
            assert [offer.full_bytes for offer in lead.offers(Offer(full_bytes=0))] == [0, 1, 2]
            lead.plan(PLAN)
            assert [each.full_bytes for each in lead.shards(shard(0))] == [0, 1, 2]
        assert [member.result(300) for member in members] == [[0, -1, 1, 2]] * 2
    assert list(channels[0].values) == ["weights/epoch"]


def test_a_process_alone_waits_for_nobody() -> None:
    for channel in (None, memory_channels(1)[0]):
        lead = LeadBarrier(channel, "e", SHORT_S)
        lead.begin(0, -1)
        assert lead.offers(Offer(full_bytes=1)) == [Offer(full_bytes=1)]
        lead.plan(PLAN)
        assert lead.shards(shard(1)) == [shard(1)]
        assert channel is None or not channel.values


def test_the_lead_names_every_process_that_is_missing_and_what_it_did_not_do() -> None:
    channels = memory_channels(4)
    lead = LeadBarrier(channels[0], "e", SHORT_S)
    lead.begin(7, -1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(MemberBarrier(channels[2], LONG_S).begin)
        assert waiting.result(300).version == 7
    with pytest.raises(ShardMissing, match=r"version 7 .* process 1, process 2, process 3 of 4 .* say how much"):
        lead.offers(Offer(full_bytes=1))


def test_the_lead_hears_at_once_why_a_process_failed() -> None:
    channels = memory_channels(2)
    lead, member = LeadBarrier(channels[0], "e", LONG_S), MemberBarrier(channels[1], LONG_S)
    lead.begin(3, -1)
    member.begin()
    member.fail("the disk is full")
    member.fail("once is enough")
    with pytest.raises(ShardMissing, match=r"version 3 .* process 1 .* the disk is full"):
        lead.offers(Offer(full_bytes=1))


def test_a_process_names_the_lead_that_says_nothing() -> None:
    with pytest.raises(ShardMissing, match=r"process 1 of the learner got no message .* from its lead, process 0"):
        MemberBarrier(memory_channels(2)[1], SHORT_S).begin()


def test_what_a_process_of_an_earlier_lead_reports_is_not_heard() -> None:
    channels = memory_channels(2)
    before, old = LeadBarrier(channels[0], "before", LONG_S), MemberBarrier(channels[1], LONG_S)
    before.begin(5, -1)
    old.begin()
    before.plan(PLAN)
    now = LeadBarrier(channels[0], "now", SHORT_S)
    now.begin(5, -1)
    old.plan(Offer(full_bytes=1))
    old.report(shard(1))
    with pytest.raises(ShardMissing, match="process 1 of 2"):
        now.offers(Offer(full_bytes=1))
    with pytest.raises(ShardMissing, match="process 1 of 2"):
        now.shards(shard(1))
