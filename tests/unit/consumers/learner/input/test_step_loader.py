"""Loading of steps: a process that does not lead waits for the lead's plans, but not once it has to end; rows that are
left out; and the end of the index, over a model of Kafka."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from rollstream.consumers.batch_reader import IndexedBatch
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.input.batch_selection import StepPlan
from rollstream.consumers.learner.input.step_loader import IndexEnd, LoadedStep, StepLoader, packed_step
from rollstream.consumers.learner.objective import LossConfig
from rollstream.consumers.models.config import DecoderConfig
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import DeadlineExceeded, StateRefused
from rollstream.topics.records import BatchIndexEntry, BatchTokenArray, BatchUse, NamedArray
from rollstream.topics.records.fates import MISSING_ARRAY
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.rl_examples import ROUTED_EXPERTS, SAMPLING_MASK, SAMPLING_MASK_COUNTS
from tests.simulation.installation import World, installed
from tests.support.batches import index_entry, random_batch
from tests.support.waiting import eventually


class SilentLead:
    """The second process of a team whose lead plans no step."""

    process, processes = 1, 2

    def __init__(self) -> None:
        self.waiting, self.over = threading.Event(), threading.Event()

    def publish(self, key: str, value: bytes) -> None:
        raise AssertionError("only the lead publishes plans")

    def receive(self, key: str, timeout_s: float | None = None) -> bytes:
        self.waiting.set()
        if self.over.wait(timeout_s):
            return b"null"
        raise DeadlineExceeded(key)

    def forget(self, key: str) -> None:
        raise AssertionError("only the lead deletes plans")


class NoSource:
    """A source that is not used, because there is no plan."""

    skips: tuple[int, tuple[BatchUse, ...]] | None = None

    def plan(self, step: int, stop: threading.Event) -> StepPlan | None:
        raise AssertionError("only the lead plans steps")

    def load(self, plan: StepPlan) -> LoadedStep:
        raise AssertionError("there is no plan")

    def close(self) -> None:
        raise AssertionError("the source stays open")


def test_a_process_that_ends_alone_does_not_wait_for_the_next_plan() -> None:
    lead = SilentLead()
    loader = StepLoader(NoSource(), lead, 1, 9, threading.Event())
    closing = threading.Thread(target=loader.close, daemon=True)
    try:
        eventually(lead.waiting.is_set, 60, "the wait for a plan")
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
    finally:
        lead.over.set()


def test_a_process_that_is_told_that_no_step_follows_ends() -> None:
    lead = SilentLead()
    with StepLoader(NoSource(), lead, 1, 9, threading.Event()) as loader:
        assert loader.next(0) is None
        assert not loader.ended
        lead.over.set()
        assert loader.next(60) is None
        assert loader.ended


def test_a_row_that_is_left_out_moves_no_other_row_to_another_minibatch() -> None:
    config = LearnerConfig(minibatches=2)
    batches = [random_batch(number) for number in range(2)]
    trained = tuple(IndexedBatch(BatchIndexEntry.of(batch, at), at) for at, batch in enumerate(batches))
    plan = StepPlan(uses=(), trained=trained, lags=(0, 0), position=2, wait_s=0.0)
    whole, _totals = packed_step(config, plan, dict(enumerate(batches)))
    batches[1].logprobs.setflags(write=True)
    batches[1].logprobs[batches[1].splits[4] - 1] = np.nan
    packed, totals = packed_step(config, plan, dict(enumerate(batches)))
    assert [(use.index_offset, use.row_numbers) for use in totals.left_out] == [(1, (3,))]
    first, second = (update.tokens for update in packed.updates)
    assert first == whole.updates[0].tokens
    assert second == whole.updates[1].tokens - int(np.diff(batches[1].splits)[3])


def test_a_record_that_is_no_entry_does_not_keep_the_index_of_a_drained_run_from_ending() -> None:
    entry = index_entry(0)
    world = World()
    with installed(world):
        topic = topic_name("main", "batch-index")
        cluster = world.begin()
        cluster.create(topic, 1)
        log = cluster.topics[topic][0]
        for value in (encode(entry), b"foreign", None):
            log.append(0, b"key", value, [], (7, log.end), 0, transactional=False)
        drained = [False]
        end = IndexEnd(KafkaConfig(bootstrap_servers="model:1"), "main", lambda: drained[0])
        assert not world.result_of(lambda: end(1)), "not drained"
        drained[0] = True
        assert world.result_of(lambda: end(1))
        assert not world.result_of(lambda: end(0))


@pytest.mark.parametrize("loss", ["ce", "ppo_clip"])
def test_a_row_without_its_stored_mask_is_left_out_unless_the_loss_needs_none(loss: str) -> None:
    whole = random_batch(0)
    start, stop = whole.splits[2:4].tolist()
    mask = NamedArray(dtype="<i4", shape=(stop - start,), stored=f"20261130/{'ab' * 32}")
    named = {SAMPLING_MASK: mask, SAMPLING_MASK_COUNTS: NamedArray.of(np.ones(stop - start, "<i4"))}
    entries = tuple(BatchTokenArray(name=n, array=array, rows=np.array([2], "<i4")) for n, array in named.items())
    batch = replace(whole, token_arrays=entries)
    plan = StepPlan(
        uses=(), trained=(IndexedBatch(BatchIndexEntry.of(batch, 0), 0),), lags=(0,), position=1, wait_s=0.0
    )
    _packed, totals = packed_step(LearnerConfig(loss=LossConfig(name=loss)), plan, {0: batch})
    left_out = [(use.code, use.row_numbers) for use in totals.left_out]
    assert left_out == ([] if loss == "ce" else [(MISSING_ARRAY, (2,))])


def test_a_row_without_its_stored_experts_is_left_out_and_never_trained_again_without_them() -> None:
    model = DecoderConfig(num_hidden_layers=3, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    config = LearnerConfig(model=model)
    whole = random_batch(0)
    length = int(whole.splits[3] - whole.splits[2])
    stored = NamedArray(dtype="|u1", shape=(length, 3, 2), stored=f"20261130/{'ab' * 32}")
    entry = BatchTokenArray(name=ROUTED_EXPERTS, array=stored, rows=np.array([2], "<i4"))
    batch = replace(whole, token_arrays=(entry,))
    read = IndexedBatch(BatchIndexEntry.of(batch, 0), 0)
    plan = StepPlan(uses=(), trained=(read,), lags=(0,), position=1, wait_s=0.0)
    _packed, totals = packed_step(config, plan, {0: batch})
    assert [(use.code, use.row_numbers) for use in totals.left_out] == [(MISSING_ARRAY, (2,))]
    again = replace(plan, checked=True)
    with pytest.raises(StateRefused, match=f"a stored array of uid {batch.uids[2]} is missing or damaged"):
        packed_step(config, again, {0: batch})
    # Fetched arrays, and arrays that this model does not need, leave nothing out.
    fetched = replace(entry, array=NamedArray.of(np.ones((length, 3, 2), "|u1")))
    assert packed_step(config, plan, {0: replace(batch, token_arrays=(fetched,))})[1].left_out == ()
    assert packed_step(LearnerConfig(), again, {0: batch})[1].left_out == ()
