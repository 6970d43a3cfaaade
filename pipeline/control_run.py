"""`rollstream run` of a control task: collect, label and fill, until all that was collected is labelled and filled in.

A run without collecting processes has no end of its own: it goes on until it is told to stop.
"""

import time

from consumers.buffers.filling import filler_positions
from consumers.grouping.bootstrap import committed_offsets
from pipeline.config import RunConfig
from pipeline.plan import ControlPlan
from pipeline.supervisor import Supervisor
from topics import clients
from topics.catalogue import topic_name

_POLL_S = 0.25
_LOOK_S = 1.0
"""Time between looks at how far the log was read."""


def start(supervisor: Supervisor, roles: ControlPlan) -> None:
    """Start what labels and fills, and once it is ready what collects."""
    for these in (roles.consumers, roles.collectors):
        supervisor.start(*these)
        supervisor.wait_ready(spec.name for spec in these)


def watch(config: RunConfig, supervisor: Supervisor, roles: ControlPlan) -> None:
    """Watch the roles until every collecting process has finished and what they wrote is labelled and filled in."""
    while not (roles.collectors and all(supervisor.finished(spec.name) for spec in roles.collectors)):
        supervisor.poll(_POLL_S)
    # What is labelled before labelling has ended may still be filled in after it.
    for behind in (_is_labelling_behind, _is_filling_behind):
        while behind(config):
            wait_until = time.monotonic() + _LOOK_S
            while time.monotonic() < wait_until:
                supervisor.poll(_POLL_S)


def _is_labelling_behind(config: RunConfig) -> bool:
    if not config.labelling.processes:
        return False
    topic, group = topic_name(config.run, "unlabelled"), config.labelling.group_id(config.run)
    found = committed_offsets(config.kafka, group, topic, len(clients.bounds(config.kafka, topic)))
    committed = {tp.partition: tp.offset for tp in found}
    return _is_behind(config, "unlabelled", committed)


def _is_filling_behind(config: RunConfig) -> bool:
    if not config.fill.directory:
        return False
    return _is_behind(config, "trajectories", filler_positions(config.kafka, config.run).get(config.fill.name, {}))


def _is_behind(config: RunConfig, topic: str, positions: dict[int, int]) -> bool:
    """Whether a record lies beyond these positions. Ends of partitions do not tell: transactions have records, too."""
    full = topic_name(config.run, topic)
    start = {p: max(begin, positions.get(p, begin)) for p, (begin, _end) in clients.bounds(config.kafka, full).items()}
    return any(True for _record in clients.read_to_end(config.kafka, full, start=start))
