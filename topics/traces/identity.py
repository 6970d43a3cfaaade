"""Ids of traces and spans, computed from the records on the log, so that no role passes ids on to another. Pure.

A trace follows a group of rollouts on its way to a step, or a step on its way to the servers. Ids are hashes, so a span
that is written twice is the same span, and every role takes the same sample.
"""

import hashlib
import json
from typing import NamedTuple

from rollstream.topics.records import BatchGroup, Rollout, SessionEvent

_LOW = (1 << 64) - 1


class SpanPlace(NamedTuple):
    """A span: its trace and its own number."""

    trace: int
    """128 bits."""
    span: int
    """64 bits."""


def trace_of_group(run: str, group: Rollout | BatchGroup | SessionEvent) -> int:
    """Return the trace of a group, from any of its rollouts, its entry in a batch, or the start of a session."""
    return _number(16, "group", run, group.environment, group.example_id, group.policy_version, group.group_id)


def trace_of_step(run: str, learner: str, step: int) -> int:
    """Return the trace of a learner's step, and of the policy version that it publishes."""
    return _number(16, "step", run, learner, step)


def span_of(trace: int, operation: str, *which: str | int) -> SpanPlace:
    """Return the place of an operation's span in a trace; `which` distinguishes several spans of one operation."""
    return SpanPlace(trace, _number(8, trace, operation, *which))


def is_sampled(trace: int, share: float) -> bool:
    """Whether a trace is in a sample with this share of all traces, as OpenTelemetry's TraceIdRatioBased decides."""
    return trace & _LOW < round(share * (_LOW + 1))


def _number(size: int, *words: str | int) -> int:
    digest = hashlib.sha256(json.dumps(words).encode()).digest()
    return int.from_bytes(digest[:size], "big") or 1
