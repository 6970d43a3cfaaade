"""The flow control of a worker, with the followers of the topics that it depends on."""

import asyncio
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import replace

from rollstream.producers.config import CapacityConfig
from rollstream.producers.flow.flow_control import FlowControl, RunProgress
from rollstream.producers.flow.journal_tailer import JournalTailer
from rollstream.producers.flow.label_tailer import LabelTailer
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError


async def open_flow(
    stack: ExitStack,
    kafka: KafkaConfig,
    run: str,
    capacity: CapacityConfig | None,
    labeled: Collection[str] = (),
    labeling_group: str = "",
) -> tuple[FlowControl | None, Callable[[], RunProgress] | None]:
    """Return the flow control and a reader of the run's progress, both None without `capacity`.

    `stack` closes the clients. `labeled` are the environments whose rollouts wait for labels, and `labeling_group` is
    the full name of the labelers' consumer group. Raises ConfigurationError, TopicError, BrokerUnavailable.
    """
    if capacity is None:
        return None, None
    if labeled and not labeling_group:
        raise ConfigurationError(f"environments {', '.join(labeled)} wait for labels, but no labeling_group is given")
    tailer = JournalTailer(kafka, run)
    stack.callback(tailer.close)
    await asyncio.to_thread(tailer.start)
    if not labeled:
        return FlowControl(capacity, tailer.rollout_ends), lambda: tailer.progress
    labels = LabelTailer(kafka, run, labeling_group)
    stack.callback(labels.close)
    await asyncio.to_thread(labels.start)
    flow = FlowControl(capacity, tailer.rollout_ends, labels.waiting)
    return flow, lambda: replace(tailer.progress, labeling=labels.positions)
