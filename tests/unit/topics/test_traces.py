"""Ids and samples of traces, and spans that never cost more than a bounded queue."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.topics.config import TracesConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.metrics.catalogue import CATALOGUE_OF_METRICS
from rollstream.topics.metrics.values import VALUES
from rollstream.topics.records import BatchGroup, CallAnswer, ModelCall, SessionEvent
from rollstream.topics.traces.spans import (
    MOST_WAITING,
    SPANS,
    SpanPlace,
    TraceSpan,
    is_sampled,
    span_of,
    start,
    trace_of_group,
    trace_of_step,
)
from rollstream.topics.traces.stages import call_recorded
from tests.support.runs import rollout
from tests.support.waiting import eventually


def test_a_rollout_and_its_group_in_a_batch_name_one_trace_and_others_another() -> None:
    sent = rollout("x", policy_version=3, group_id="g")
    group = BatchGroup(
        environment="env", example_id="x", policy_version=3, group_id="g", size=4, opened_ms=1, sealed_ms=2
    )
    trace = trace_of_group("main", sent)
    assert trace == trace_of_group("main", group) == 0x74075843FE2D097D4616BA201D48988C
    others = [
        trace_of_group("other", sent),
        trace_of_group("main", rollout("y", policy_version=3, group_id="g")),
        trace_of_group("main", rollout("x", policy_version=4, group_id="g")),
        trace_of_step("main", "default", 3),
    ]
    assert len({trace, *others}) == 5
    assert span_of(trace, "group") == span_of(trace, "group") != span_of(trace, "group", "x")


class KeepingExporter:
    """A collector in memory."""

    def __init__(self) -> None:
        self.spans: list[TraceSpan] = []

    def export(self, spans: Sequence[TraceSpan]) -> bool:
        self.spans += spans
        return True

    def give_up(self) -> None:
        pass


def test_a_model_call_is_a_span_of_its_group_with_the_attributes_of_generative_ai() -> None:
    began = SessionEvent(
        session="g.0", kind="start", environment="env", example_id="x", policy_version=3, group_id="g", group_size=4
    )
    tokens = np.arange(5, dtype="<i4")
    answer = CallAnswer(tokens=tokens, logprobs=np.zeros(5, "<f4"), finish_reason="tool_calls")
    call = ModelCall(
        session="g.0",
        uid="chatcmpl-1",
        request="r",
        prompt=tokens[:2],
        prompt_digest="d",
        shared=7,
        answers=(answer, answer),
        sampling={"temperature": "0.5", "top_p": "much"},
        began=10.0,
        answered=12.5,
    )
    exporter = KeepingExporter()
    SPANS.start(1.0, exporter)
    call_recorded("main", "policy", began, call)
    SPANS.close()
    [span] = exporter.spans
    trace = trace_of_group("main", rollout("x", policy_version=3, group_id="g"))
    assert (span.name, span.kind, span.place.trace, span.parent) == (
        "chat policy",
        "client",
        trace,
        span_of(trace, "group"),
    )
    assert (span.begin_ns, span.end_ns) == (10_000_000_000, 12_500_000_000)
    assert {name: value for name, value in span.attributes.items() if name.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "rollstream",
        "gen_ai.request.model": "policy",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.model": "policy",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.finish_reasons": ["tool_calls", "tool_calls"],
        "gen_ai.conversation.id": "g.0",
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 10,
    }
    assert span.attributes["rollstream.group"] == "g"


@given(st.integers(1, 2**128 - 1), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_sample_holds_every_trace_of_a_smaller_one(trace: int, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert is_sampled(trace, large) or not is_sampled(trace, small)
    assert is_sampled(trace, 1.0)
    assert not is_sampled(trace, 0.0)


def test_a_sample_has_its_share_and_is_that_of_opentelemetry() -> None:
    from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

    traces = [trace_of_step("main", "default", step) for step in range(4000)]
    taken = [is_sampled(trace, 0.25) for trace in traces]
    assert 900 < sum(taken) < 1100
    sampler = TraceIdRatioBased(0.25)
    assert taken == [sampler.should_sample(None, t, "x").decision is Decision.RECORD_AND_SAMPLE for t in traces]


class StuckExporter:
    """A collector that answers nothing until it is told to."""

    def __init__(self) -> None:
        self.taken = 0
        self.stuck = True
        self.given_up = False

    def export(self, spans: Sequence[TraceSpan]) -> bool:
        while self.stuck and not self.given_up:
            time.sleep(0.01)
        self.taken += len(spans)
        return not self.given_up

    def give_up(self) -> None:
        self.given_up = True


@pytest.fixture
def stuck() -> Iterator[StuckExporter]:
    exporter = StuckExporter()
    SPANS.start(1.0, exporter)
    yield exporter
    exporter.given_up = True
    SPANS.close()


def a_span(number: int) -> TraceSpan:
    return TraceSpan(name="x", place=SpanPlace(number + 1, 1), begin_ns=1, end_ns=2)


LOST = next(spec for spec in CATALOGUE_OF_METRICS if spec.name == "rollstream_traces_lost_total")


def lost() -> float:
    return VALUES.values_of(LOST).get((), 0.0)


def test_a_collector_that_hangs_costs_spans_and_no_time(stuck: StuckExporter) -> None:
    before = lost()
    began = time.monotonic()
    for number in range(3 * MOST_WAITING):
        SPANS.add(a_span(number))
    assert time.monotonic() - began < 30, "nothing waited for the collector"
    assert lost() - before >= MOST_WAITING
    stuck.stuck = False
    kept = 3 * MOST_WAITING - (lost() - before)
    eventually(lambda: stuck.taken == kept, 60, "what was kept is sent")


def test_nothing_waits_long_for_a_collector_at_the_end(stuck: StuckExporter) -> None:
    SPANS.add(a_span(1))
    SPANS.close(0.1)
    assert stuck.given_up
    assert not SPANS.enabled


def test_without_an_endpoint_there_are_no_spans() -> None:
    end = start(TracesConfig(), "main", "group-0")
    assert not SPANS.enabled
    assert not SPANS.wants(1)
    end()


def test_a_collector_that_is_away_loses_spans_and_raises_nothing() -> None:
    before = lost()
    end = start(TracesConfig(endpoint="http://127.0.0.1:1/v1/traces", sample=1.0), "main", "group-0")
    try:
        SPANS.add(a_span(1))
        eventually(lambda: lost() > before, 60, "the span is lost")
    finally:
        end()


@pytest.mark.parametrize(("settings", "named"), [({"sample": 1.5}, "sample"), ({"endpoint": "localhost"}, "whole URL")])
def test_settings_without_sense_are_refused(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        TracesConfig(**settings)  # type: ignore[arg-type]


def test_nothing_of_opentelemetry_is_imported_where_no_traces_are_wanted() -> None:
    program = (
        "import sys\n"
        "import rollstream.consumers.batch_reader, rollstream.consumers.grouping.process.grouping_process\n"
        "import rollstream.producers.rollout_producer, rollstream.pipeline.config\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
