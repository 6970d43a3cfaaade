"""Processes of a team that publish a version together, as threads: what was sent in vain is nobody's, and is named."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.publisher import WeightsPublisher
from rollstream.consumers.weights.shard_barrier import LeadBarrier, ShardMember, ShardMissing
from rollstream.consumers.weights.shards import Offer, Plan
from rollstream.consumers.weights.step_log import StepLog
from rollstream.topics.errors import DeliveryError
from rollstream.topics.wire.params_digest import params_digest
from tests.broker.test_weights_shards import LONG_S, followed, live, named
from tests.support.channels import memory_channels
from tests.support.runs import RealRun


def test_a_process_of_an_earlier_lead_adds_nothing_to_a_version(run: RealRun) -> None:
    """The earlier process sends its chunks, and reports them, while its successor sends those of the same version."""
    config = WeightsConfig(chunk_bytes=1000, shards_timeout_s=LONG_S)
    of_lead, of_member = memory_channels(2)
    mine, theirs = ({name: np.full(1000, value, "<f4")} for name, value in (("a", 1), ("b", 2)))
    with ThreadPoolExecutor(2) as pool, closing(StepLog(run.kafka, run.name, "default")) as log:
        with closing(ShardMember(run.kafka, run.name, config, of_member)) as stale:
            before = LeadBarrier(of_lead, "before", LONG_S)
            before.begin(0, -1)
            late = pool.submit(stale.contribute, {"b": np.full(1000, 9, "<f4")})
            assert before.offers(Offer(full_bytes=0))[1].full_bytes == 4000
            publisher = WeightsPublisher(run.kafka, run.name, "default", "{}", config, channel=of_lead)
            before.plan(Plan(delta=False, files=False, first_chunks=(0, 4)))
            assert late.result(600) == 0
        with closing(ShardMember(run.kafka, run.name, config, of_member)) as member:
            sent = pool.submit(member.contribute, theirs)
            manifest = publisher.stage(0, mine)
            assert sent.result(600) == 0
        log.commit([publisher.record(manifest)])
        publisher.committed(manifest)
        publisher.close()
    assert followed(run, 0) == (0, params_digest(mine | theirs))
    assert {epoch for _version, epoch, _index in live(run)} == {"before", manifest.epoch}  # type: ignore[misc]
    with closing(WeightsPublisher(run.kafka, run.name, "default", "{}", config)):
        assert live(run) == named(run, range(1)), "the next publisher removes what it left"


def test_the_wait_for_a_late_process_is_told_as_such(run: RealRun) -> None:
    config = WeightsConfig(chunk_bytes=1000, shards_timeout_s=LONG_S)
    of_lead, of_member = memory_channels(2)
    with (
        closing(StepLog(run.kafka, run.name, "default")),
        closing(ShardMember(run.kafka, run.name, config, of_member)) as member,
        closing(WeightsPublisher(run.kafka, run.name, "default", "{}", config, channel=of_lead)) as publisher,
    ):
        late = threading.Thread(target=lambda: (time.sleep(3.0), member.contribute({"b": np.ones(1000, "<f4")})))
        late.start()
        figures = publisher.stage(0, {"a": np.ones(1000, "<f4")}).figures
        late.join(600)
    assert figures["barrier_s"] > 1.0
    assert max(figures["compare_s"], figures["send_s"]) < figures["barrier_s"]


def test_the_lead_hears_at_once_that_a_process_cannot_send(run: RealRun) -> None:
    config = WeightsConfig(chunk_bytes=1000, shards_timeout_s=LONG_S)
    of_lead, of_member = memory_channels(2)
    arrays = {"b": np.zeros(1000, "<f4")}
    with (
        ThreadPoolExecutor(1) as pool,
        closing(StepLog(run.kafka, run.name, "default")),
        closing(ShardMember(run.kafka, run.name, config, of_member)) as member,
        closing(WeightsPublisher(run.kafka, run.name, "default", "{}", config, channel=of_lead)) as publisher,
    ):
        failing = pool.submit(member.contribute, {"b": np.array([object()])})
        with pytest.raises(ShardMissing, match=r"version 0 .* process 1 of the learner failed to send its tensors: "):
            publisher.stage(0, arrays)
        assert failing.exception(600) is not None
        assert not isinstance(failing.exception(), DeliveryError)
        # The team may go on: the version was begun, and does not exist.
        again = pool.submit(member.contribute, {"b": np.ones(1000, "<f4")})
        assert publisher.stage(0, {"a": arrays["b"]}).version == 0
        assert again.result(600) == 0
