"""Traces of a run: real roles send what they did with a rollout to a collector, and one trace holds its whole way."""

import signal
from collections import Counter
from collections.abc import Iterator

import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.process.bootstrap import initialise
from rollstream.consumers.weights.follower import WeightsFollower
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.topics.config import TracesConfig
from rollstream.topics.kafka import provisioning
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import TrainingBatch
from rollstream.topics.traces.spans import start, trace_of_group, trace_of_step
from rollstream.topics.wire.codec import decode_as
from tests.support.otlp_collector import OtlpCollector, ReceivedSpan
from tests.support.runs import SMALL_LEARNER, RealRun, rollout
from tests.support.waiting import eventually


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as listening:
        yield listening


def traced(collector: OtlpCollector, share: float = 1.0) -> dict[str, object]:
    return {"traces__endpoint": collector.endpoint, "traces__sample": share}


def send(run: RealRun, collector: OtlpCollector, name: str, groups: int, **changes: object) -> None:
    """Rollouts of whole groups, as a worker sends them."""
    end = start(TracesConfig(endpoint=collector.endpoint, sample=1.0), run.name, "env-0")
    with RolloutProducer(run.kafka, run.name) as producer:
        for number in range(groups):
            for member in range(4):
                producer.send(rollout(f"{name}{number}", member, **changes))
    end()


def of_trace(collector: OtlpCollector, trace: int) -> dict[str, list[ReceivedSpan]]:
    spans: dict[str, list[ReceivedSpan]] = {}
    for span in list(collector.spans):
        if span.trace == trace:
            spans.setdefault(span.name, []).append(span)
    return spans


def test_a_group_has_one_trace_and_a_kill_repeats_no_span(real_run: RealRun, collector: OtlpCollector) -> None:
    run = real_run
    run.grouping = GroupingConfig(batch_rollouts=8, max_batch_age_s=2.0)
    run.prepare()
    process = run.start("group", **traced(collector))
    send(run, collector, "a", 4)
    eventually(lambda: len(collector.named("send batches")) == 4, 60, "spans of every group's batch")
    process.send_signal(signal.SIGKILL)
    process.wait()
    run.start("group", **traced(collector))
    send(run, collector, "b", 4)
    eventually(lambda: len(collector.named("send batches")) == 8, 60, "spans after the restart")

    places = Counter((span.trace, span.span) for span in collector.spans)
    assert set(places.values()) == {1}, "no span twice"
    assert Counter(span.name for span in collector.spans) == {
        "send rollouts": 32, "group": 8, "process rollouts": 8, "send batches": 8
    }  # fmt: skip
    trace = trace_of_group(run.name, rollout("a0"))
    spans = of_trace(collector, trace)
    [group], [grouped], [batch] = (spans[name] for name in ("group", "process rollouts", "send batches"))
    sent = spans["send rollouts"]
    assert (group.parent, grouped.parent, batch.parent) == (0, group.span, grouped.span)
    assert {span.parent for span in sent} == {group.span}
    assert set(grouped.links) == {(trace, span.span) for span in sent}
    assert (sent[0].service, grouped.service) == ("rollstream-env", "rollstream-group")
    places_sent = {span.attributes["messaging.message.id"]: span.attributes["messaging.kafka.offset"] for span in sent}
    records = read_to_end(run.kafka, run.topic("rollouts"))
    on_log = {record.offset for record in records if record.key == b'["env","a0"]'}
    assert set(places_sent.values()) == on_log == set(grouped.attributes["rollstream.offsets"])
    assert grouped.attributes["messaging.system"] == "kafka"
    assert grouped.attributes["messaging.destination.name"] == run.topic("rollouts")
    assert grouped.attributes["messaging.consumer.group.name"] == f"{run.name}.grouper"
    batches = read_to_end(run.kafka, run.topic("batches"))
    written = {decode_as(TrainingBatch, message.value).batch_id: message.offset for message in batches}
    assert batch.attributes["messaging.kafka.offset"] == written[batch.attributes["rollstream.batch"]]
    assert batch.attributes["messaging.destination.name"] == run.topic("batches")
    assert all(record.headers in (None, (), []) for record in read_to_end(run.kafka, run.topic("rollouts")))
    book = ledger(run.kafka, run.name)
    assert (book.batched, book.problems) == (32, [])
    assert verify(run.kafka, run.name).mismatches == []


@pytest.mark.long  # The learner compiles.
def test_a_trace_goes_on_to_the_step_and_that_of_the_step_to_a_server(
    real_run: RealRun, collector: OtlpCollector
) -> None:
    run = real_run
    run.grouping = GroupingConfig(batch_rollouts=8, max_batch_age_s=2.0)
    provisioning.apply(run.kafka, run.topics, run.name)
    initialise(run.kafka, run.name, run.grouping, run.grouper)
    run.start("group", **traced(collector))
    small = {k: v for k, v in SMALL_LEARNER.items() if not k.startswith("grouping")} | {"learner__rollouts_per_step": 8}
    learner = run.start("learn", **small, **traced(collector), learner__max_steps=2)
    eventually(lambda: len(run.read("policies")) > 0, 300, "version 0")
    send(run, collector, "a", 8)
    assert learner.wait(600) == 0
    end = start(TracesConfig(endpoint=collector.endpoint, sample=1.0), run.name, "infer-0")
    with WeightsFollower(run.kafka, run.name) as follower:
        follower.wait_for(2, 300)
    end()
    eventually(lambda: len(collector.named("process batches")) >= 4, 60, "spans of the steps")
    [first] = [span for span in collector.named("step") if span.attributes["rollstream.step"] == 1]
    assert first.trace == trace_of_step(run.name, "default", 1)
    used = [span for span in collector.named("process batches") if span.attributes["rollstream.step"] == 1]
    assert set(first.links) == {(span.trace, span.span) for span in used}
    for span in used:
        spans = of_trace(collector, span.trace)
        assert set(spans) == {"send rollouts", "group", "process rollouts", "send batches", "process batches"}
        [batch] = spans["send batches"]
        assert span.parent == batch.span
        assert span.attributes["messaging.kafka.offset"] == batch.attributes["messaging.kafka.offset"]
        assert span.links == ((first.trace, first.span),)
    version = of_trace(collector, trace_of_step(run.name, "default", 2))
    [sent], [loaded] = version["send policies"], version["process policies"]
    assert (sent.parent, loaded.parent) == (version["step"][0].span, sent.span)
    assert loaded.service == "rollstream-infer"
