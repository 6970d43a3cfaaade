"""Spans for the stages of a rollout (calls, sent, grouped, batch, step) and of a policy version (sent, loaded).

Attributes follow OpenTelemetry's semantic conventions for messaging, Kafka and generative AI; our own begin with
`rollstream.`. Every function is called once the operation is committed, and costs nothing if traces are off.
"""

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from rollstream.topics.records import (
    BatchGroup,
    BatchIndexEntry,
    LearnerStep,
    ModelCall,
    PolicyManifest,
    Rollout,
    SessionEvent,
    TrainingBatch,
)
from rollstream.topics.traces.spans import (
    SPANS,
    Attribute,
    SpanPlace,
    TraceSpan,
    span_of,
    trace_of_group,
    trace_of_step,
)
from rollstream.topics.wire.catalogue import topic_name

GROUP, SEND_ROLLOUT, PROCESS_ROLLOUTS = "group", "send rollouts", "process rollouts"
SEND_BATCH, PROCESS_BATCH = "send batches", "process batches"
CALL = "call"
STEP, SEND_POLICY, PROCESS_POLICY = "step", "send policies", "process policies"
MOST_LINKS = 128
"""Largest number of links of a span, which is OpenTelemetry's limit."""
_MOST_BATCHES = 1024


class FetchedBatch(NamedTuple):
    """A batch that a learner has fetched, for the spans of the step that uses it."""

    entry: BatchIndexEntry
    run: str
    groups: tuple[BatchGroup, ...]
    """Groups of the batch whose traces are in the sample."""


_fetched: OrderedDict[str, FetchedBatch] = OrderedDict()


def _messaging(verb: str, topic: str, partition: int, offset: int = -1) -> dict[str, Attribute]:
    """Attributes of an operation on a topic, which is given by its full name."""
    attributes: dict[str, Attribute] = {
        "messaging.system": "kafka",
        "messaging.operation.name": verb,
        "messaging.operation.type": verb,
        "messaging.destination.name": topic,
        "messaging.destination.partition.id": str(partition),
    }
    return attributes | ({"messaging.kafka.offset": offset} if offset >= 0 else {})


def _about(run: str, group: Rollout | BatchGroup | SessionEvent) -> dict[str, Attribute]:
    about: dict[str, Attribute] = {
        "rollstream.run": run,
        "rollstream.environment": group.environment,
        "rollstream.example": group.example_id,
        "rollstream.policy_version": group.policy_version,
    }
    return about | ({"rollstream.group": group.group_id} if group.group_id else {})


def call_recorded(run: str, model: str, session: SessionEvent, call: ModelCall) -> None:
    """Add the span of a model call that is on the log, of a session with this start."""
    if not SPANS.enabled:
        return
    trace = trace_of_group(run, session)
    if not SPANS.wants(trace):
        return
    operation = "chat" if call.route.startswith("chat") else "text_completion"
    asked: dict[str, Attribute] = {}
    for name in ("temperature", "top_p"):
        with suppress(KeyError, ValueError):  # an agent may send what is no number
            asked[f"gen_ai.request.{name}"] = float(call.sampling[name])
    span = TraceSpan(
        name=f"{operation} {model}",
        place=span_of(trace, CALL, call.uid),
        parent=span_of(trace, GROUP),
        kind="client",
        begin_ns=int(call.began * 1e9),
        end_ns=int(call.answered * 1e9),
        attributes={
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "rollstream",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": call.uid,
            "gen_ai.conversation.id": call.session,
            "gen_ai.request.choice.count": len(call.answers),
            "gen_ai.response.finish_reasons": [answer.finish_reason for answer in call.answers],
            "gen_ai.usage.input_tokens": call.shared + len(call.prompt),
            "gen_ai.usage.output_tokens": sum(len(answer.tokens) for answer in call.answers),
            **asked,
            **_about(run, session),
            "rollstream.replica": call.replica_id,
        },
    )
    SPANS.add(span)


def rollout_sent(topic: str, rollout: Rollout, begin_ns: int, partition: int, offset: int) -> None:
    """Add the span of a rollout that is on the log; `topic` is a full name."""
    if not SPANS.enabled:
        return
    run = topic.rpartition(".")[0]
    trace = trace_of_group(run, rollout)
    if not SPANS.wants(trace):
        return
    span = TraceSpan(
        name=SEND_ROLLOUT,
        place=span_of(trace, SEND_ROLLOUT, rollout.uid),
        parent=span_of(trace, GROUP),
        kind="producer",
        begin_ns=begin_ns,
        end_ns=time.time_ns(),
        attributes={
            **_messaging("send", topic, partition, offset),
            **_about(run, rollout),
            "messaging.message.id": rollout.uid,
            "rollstream.reward": rollout.reward,
            "rollstream.tokens": len(rollout.tokens),
        },
    )
    SPANS.add(span)


def batch_committed(run: str, consumer_group: str, batch: TrainingBatch, offset: int, took_s: float) -> None:
    """Add the spans of a batch that was committed at `offset` of `batches`; its transaction took `took_s`."""
    if not SPANS.enabled:
        return
    end_ns = time.time_ns()
    for number, group in enumerate(batch.groups):
        trace = trace_of_group(run, group)
        if not SPANS.wants(trace):
            continue
        rows = np.flatnonzero(batch.group_index == number).tolist()
        if not rows:
            continue
        uids = [batch.uids[row] for row in rows]
        ended_s = [float(batch.timestamps[row]) for row in rows]
        opened_ns = group.opened_ms * 1_000_000
        began_ns = min([opened_ns, *(int(s * 1e9) for s in ended_s if s > 0)])
        root = span_of(trace, GROUP)
        about = {**_about(run, group), "rollstream.batch": batch.batch_id}
        SPANS.add(TraceSpan(name=GROUP, place=root, begin_ns=began_ns, end_ns=end_ns, attributes=about))
        offsets = [int(batch.source_offsets[row]) for row in rows]
        process = span_of(trace, PROCESS_ROLLOUTS)
        rollouts = topic_name(run, "rollouts")
        of_group: dict[str, Attribute] = {
            "messaging.consumer.group.name": consumer_group,
            "messaging.batch.message_count": len(rows),
            "rollstream.offsets": offsets,
        }
        SPANS.add(
            TraceSpan(
                name=PROCESS_ROLLOUTS,
                place=process,
                parent=root,
                kind="consumer",
                begin_ns=opened_ns,
                end_ns=end_ns,
                attributes={**_messaging("process", rollouts, batch.partition, offsets[0]), **about, **of_group},
                links=tuple(span_of(trace, SEND_ROLLOUT, uid) for uid in uids[:MOST_LINKS]),
            )
        )
        SPANS.add(
            TraceSpan(
                name=SEND_BATCH,
                place=span_of(trace, SEND_BATCH, batch.batch_id),
                parent=process,
                kind="producer",
                begin_ns=end_ns - int(took_s * 1e9),
                end_ns=end_ns,
                attributes={
                    **_messaging("send", topic_name(run, "batches"), batch.partition, offset),
                    **about,
                    "rollstream.cut": batch.cut,
                    "rollstream.batch.digest": batch.digest,
                },
            )
        )


def batch_fetched(run: str, entry: BatchIndexEntry, batch: TrainingBatch) -> None:
    """Remember a batch of a run that a learner has fetched, for the spans of its step."""
    if not SPANS.enabled:
        return
    groups = tuple(group for group in batch.groups if SPANS.wants(trace_of_group(run, group)))
    if groups:
        _fetched[batch.batch_id] = FetchedBatch(entry, run, groups)
        _fetched.move_to_end(batch.batch_id)
        if len(_fetched) > _MOST_BATCHES:
            _fetched.popitem(last=False)


def step_recorded(run: str, record: LearnerStep, began_ns: int) -> None:
    """Add the spans of a learner's step when it is first recorded, and of the version that the step published."""
    if not SPANS.enabled:
        return
    end_ns, trace = time.time_ns(), trace_of_step(run, record.learner, record.step)
    root = span_of(trace, STEP)
    about: dict[str, Attribute] = {
        "rollstream.run": run,
        "rollstream.learner": record.learner,
        "rollstream.step": record.step,
    }
    links = list(_process_batches(record, began_ns, end_ns, root, about))
    if not SPANS.wants(trace):
        return
    SPANS.add(
        TraceSpan(
            name=STEP, place=root, begin_ns=began_ns, end_ns=end_ns, attributes=about, links=tuple(links[:MOST_LINKS])
        )
    )
    if record.policy_version >= 0:
        sent = {**_messaging("send", topic_name(run, "policies"), 0), **about}
        SPANS.add(
            TraceSpan(
                name=SEND_POLICY,
                place=span_of(trace, SEND_POLICY),
                parent=root,
                kind="producer",
                begin_ns=end_ns - int(record.metrics.get("time/broadcast_weights", 0.0) * 1e9),
                end_ns=end_ns,
                attributes={**sent, "rollstream.policy_version": record.policy_version},
            )
        )


def _process_batches(
    record: LearnerStep, began_ns: int, end_ns: int, step: SpanPlace, about: Mapping[str, Attribute]
) -> Sequence[SpanPlace]:
    """Add a span to the trace of each group that the step used; return the places of these spans."""
    places = []
    for use in record.uses:
        fetched = _fetched.get(use.batch_id)
        for group in fetched.groups if fetched is not None else ():
            assert fetched is not None
            entry, trace = fetched.entry, trace_of_group(fetched.run, group)
            place = span_of(trace, PROCESS_BATCH, record.learner, record.step, use.batch_id)
            batches = topic_name(fetched.run, "batches")
            SPANS.add(
                TraceSpan(
                    name=PROCESS_BATCH,
                    place=place,
                    parent=span_of(trace, SEND_BATCH, use.batch_id),
                    kind="consumer",
                    begin_ns=began_ns,
                    end_ns=end_ns,
                    attributes={
                        **_messaging("process", batches, entry.partition, entry.offset),
                        **about,
                        "rollstream.batch": use.batch_id,
                        "rollstream.use": use.use,
                    },
                    links=(step,),
                )
            )
            places.append(place)
    return places


def version_loaded(run: str, manifest: PolicyManifest, begin_ns: int) -> None:
    """Add the span of a policy version of a run that a process has loaded completely."""
    if not SPANS.enabled:
        return
    trace = trace_of_step(run, manifest.learner, manifest.step)
    if not SPANS.wants(trace):
        return
    SPANS.add(
        TraceSpan(
            name=PROCESS_POLICY,
            place=span_of(trace, PROCESS_POLICY, begin_ns),
            parent=span_of(trace, SEND_POLICY),
            kind="consumer",
            begin_ns=begin_ns,
            end_ns=time.time_ns(),
            attributes={
                **_messaging("process", topic_name(run, "policies"), 0),
                "rollstream.run": run,
                "rollstream.policy_version": manifest.version,
            },
        )
    )
